# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent's user left in the state directory, when it owned that, is no record of what root has installed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

TASKS = ROOT / "roles" / "agent" / "tasks"
OTHER = 65534


def run(file: str, name: str, record: Path) -> str:
    """Run the shell command of a task with this record, and return its output."""
    tasks = {task["name"]: task for task in yaml.safe_load((TASKS / file).read_text(encoding="utf-8"))}
    argv = tasks[name]["ansible.builtin.command"]["argv"]
    for variable, value in (("record", str(record)), ("listing", "echo listing"), ("wanted", "digest")):
        argv = [word.replace(f"{{{{ __agent_{variable} }}}}", value) for word in argv]
    argv = [re.sub("{{.*?}}", "/nonexistent", word) for word in argv]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_record_of_another_user_is_neither_believed_nor_kept(tmp_path: Path, kind: str) -> None:
    record, victim = tmp_path / "installed", tmp_path / "victim"
    victim.write_text("as it was")
    os.chown(victim, OTHER, OTHER)
    if kind == "link":
        record.symlink_to(victim)
    elif kind == "file":
        record.write_text("digest\nlisting\n")
    else:
        record.mkdir()
    os.chown(record, OTHER, OTHER, follow_symlinks=False)
    compared = ("recorded.yml", "List what is installed, with the record of the last run")
    assert run(*compared, record) == "found:\nunread:\n\nlisting\n"
    run("present.yml", "Record what is installed", record)
    assert victim.read_text() == "as it was" and record.lstat().st_uid == 0
    assert run(*compared, record) == "found:\nunread:\ndigest\nlisting\n\nlisting\n"
