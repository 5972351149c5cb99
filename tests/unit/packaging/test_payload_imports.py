# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Imports from the archive that Ansible sends with a module."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import payload_imports, supported_python

# Import modules from the first argument, and print how often each source was compiled and what the modules say.
PROGRAM = """
import collections, json, sys
archive, payload = sys.argv[1:]
compiled = collections.Counter()
def audit(event, arguments):
    if event == "compile" and str(arguments[1]).startswith(archive):
        compiled[str(arguments[1])[len(archive) + 1:]] += 1
sys.addaudithook(audit)
sys.path[0] = archive
import support.early
if payload == "yes":
    import support.supported_python
import support.late.inner, other, outside
try:
    import support.missing
except ImportError as error:
    missing = str(error)
files = {name: module.__file__ for name, module in sys.modules.items() if name.startswith(("support", "other"))}
try:
    support.late.inner.fail()
except ValueError as error:
    import traceback
    said = traceback.format_exc()
print(json.dumps([compiled, files, support.late.__path__, missing, said, support.late.inner.NAME]))
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "payload.zip"
    inner = "from .. import early\nNAME = early.NAME + 1\n\ndef fail():\n    raise ValueError('raised')\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for module in (payload_imports, supported_python):
            source = Path(str(module.__file__))
            packed.writestr(f"support/{source.name}", source.read_text(encoding="utf-8"))
        packed.writestr("support/__init__.py", "")
        packed.writestr("support/early.py", "NAME = 1\n")
        packed.writestr("support/late/__init__.py", "")
        packed.writestr("support/late/inner.py", inner)
        packed.writestr("other.py", "")
    (tmp_path / "outside.py").write_text("", encoding="utf-8")
    return path


def imported(archive: Path, payload: bool = True) -> Any:
    command = [sys.executable, "-c", PROGRAM, str(archive), "yes" if payload else "no"]
    environment = {"PYTHONPATH": str(archive.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_source_is_compiled_once(archive: Path) -> None:
    compiled: dict[str, int] = imported(archive)[0]
    names = ("support/late/__init__.py", "support/late/inner.py", "other.py")
    assert [compiled[name] for name in names] == [1, 1, 1]


def test_modules_are_the_same_as_without(archive: Path) -> None:
    with_it, without = imported(archive), imported(archive, payload=False)
    assert with_it[2:] == without[2:]
    files = with_it[1]
    for name in ("supported_python", "payload_imports"):
        assert files.pop(f"support.{name}") == str(archive / "support" / f"{name}.py")
    assert files == without[1]
    assert "raise ValueError('raised')" in with_it[4]


def test_nothing_changes_where_modules_are_files() -> None:
    hooks, cached = list(sys.path_hooks), dict(sys.path_importer_cache)
    payload_imports.main()
    assert sys.path_hooks == hooks
    assert sys.path_importer_cache == cached
