# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every module reports in one line that the node's Python is too old, on each version that Ansible supports."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

GUARD = "ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python"
# Modules with an action run on the controller only.
ACTIONS = {path.stem for path in (ROOT / "plugins" / "action").glob("*.py")}
MODULES = sorted(path for path in (ROOT / "plugins" / "modules").glob("*.py") if path.stem not in ACTIONS)
GUARD_FILE = ROOT / "plugins" / "module_utils" / "module_support" / "supported_python.py"
OLD = (3, 6)
# Run the module as Ansible does, on a Python that claims to be older.
RUN = """
import runpy, sys
sys.version_info = (3, 8, 10, "final", 0)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=OLD)
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_the_check_precedes_all_imports_that_an_old_python_lacks(path):
    names = imports(path)
    assert "__future__" not in names, "Python 3.6 does not know annotations there"
    assert next(name for name in names if name.startswith("ansible_collections")) == GUARD


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_an_old_python_gets_one_line(path):
    command = [sys.executable, "-c", RUN, str(path)]
    environment = {"PYTHONPATH": str(ROOT / "collections"), "PATH": ""}
    done = subprocess.run(command, env=environment, input="{}", capture_output=True, text=True, check=False)
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["failed"] and done.stderr == ""
    if result["msg"].startswith("Ansible requires Python"):
        # ansible-core 2.20 and later refuses the same versions, before it runs the module.
        assert "3.9 or newer" in result["msg"]
        return
    assert result["error_kind"] == "python"
    assert result["msg"].startswith("Python 3.8.10 (") and "ansible_python_interpreter" in result["msg"]


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8"])
def test_the_check_itself_runs_on_old_pythons(version):
    """Run it if such a Python is installed; otherwise check its grammar."""
    assert imports(GUARD_FILE) == ["json", "sys", "typing"]
    installed = sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    python = next(iter(installed), shutil.which(f"python{version}"))
    if python is None:
        return
    done = subprocess.run([python, "-I", str(GUARD_FILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"Python {version}." in json.loads(done.stdout)["msg"]


def test_a_supported_python_passes():
    done = subprocess.run([sys.executable, "-I", str(GUARD_FILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
