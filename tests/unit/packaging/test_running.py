# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The running engine packed as a program: from a source tree, an archive, and a module's payload."""

from __future__ import annotations

import subprocess
import sys
import types
import zipfile

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging import running
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import revert


def test_the_program_runs_on_its_own(tmp_path):
    program = tmp_path / "revert.pyz"
    program.write_bytes(running.pack_running(revert.__name__))
    command = [sys.executable, "-I", "-S", "-B", str(program), "--to", "1", "--history", str(tmp_path / "none")]
    done = subprocess.run([*command, "--state-directory", "x", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    # Without the privileges for it, that is its first error.
    assert "state 1: there is no such saved state" in done.stderr or "lacks CAP_NET_ADMIN" in done.stderr


def test_the_same_source_gives_the_same_bytes():
    assert running.pack_running(revert.__name__) == running.pack_running(revert.__name__)


def test_code_that_needs_ansible_is_excluded():
    files = running.running_files()
    assert "rollback/revert.py" in files
    assert not any(path.startswith("module_support/") for path in files)


def test_a_module_payload_is_an_archive_like_any_other(tmp_path, monkeypatch):
    payload = tmp_path / "payload.zip"
    inside = "ansible_collections/kubenode/proxy/plugins/module_utils"
    with zipfile.ZipFile(payload, "w") as packed:
        packed.writestr(f"{inside}/errors.py", "A = 1\n")
        packed.writestr(f"{inside}/kernel/ipvs.py", "B = 2\n")
        packed.writestr(f"{inside}/module_support/results.py", "C = 3\n")
        packed.writestr("ansible/module_utils/basic.py", "D = 4\n")
    package = types.ModuleType("payload_top")
    package.__path__ = [f"{payload}/{inside}"]
    monkeypatch.setitem(sys.modules, "payload_top", package)
    assert running.running_files("payload_top") == {"errors.py": b"A = 1\n", "kernel/ipvs.py": b"B = 2\n"}


def test_a_missing_source_is_reported(monkeypatch):
    package = types.ModuleType("payload_top")
    package.__path__ = ["/nowhere/at/all"]
    monkeypatch.setitem(sys.modules, "payload_top", package)
    for name in ("payload_top", "not_there"):
        with pytest.raises(ConfigurationError, match="the source of the running engine cannot be found"):
            running.running_files(name)
    with pytest.raises(ConfigurationError, match=r"json\.tool: is not a part of"):
        running.pack_running("json.tool")
