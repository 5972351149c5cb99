# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shell of a user who types the documentation's commands, and the clone of the repository that it works in."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Sequence

from tests.conftest import ROOT


class Shell:
    """A bash that runs one block after another and keeps its variables, like a user's shell.

    ``enter`` is the beginning of a command line that runs it elsewhere, in a network namespace for example.
    """

    def __init__(self, directory: Path, environment: dict[str, str], enter: Sequence[str] = ()) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [*enter, "bash", "--norc", "--noprofile"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, text: str, before: str = "") -> tuple[int, str]:
        """Run the lines up to the first that fails; return its status (0 if none failed) and the output."""
        mark = f"== {uuid.uuid4()}"
        # Run in the shell itself, since a later block uses what an earlier one has exported.
        begin = f"unset -f ansible-playbook make kubenode-proxy kubectl reboot systemctl; {before}"
        script = f"{begin}\nrun() {{\n{_stopping(text)}\n}}\nrun </dev/null"
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{script}\nprintf '\\n%s %s\\n' '{mark}' $?\n")
        self.process.stdin.flush()
        printed: list[str] = []
        for line in self.process.stdout:
            if line.startswith(mark):
                return int(line.split()[-1]), "".join(printed)
            printed.append(line)
        raise AssertionError("the shell has ended: " + "".join(printed))

    def close(self) -> None:
        """End the shell."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def _stopping(text: str) -> str:
    """Return the lines, each followed by a return from the function if the command failed."""
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if line and not line.startswith("#") and not line.endswith("\\"):
            lines.append("status=$?; [ $status = 0 ] || return $status")
    return "\n".join(lines)


def copy_clone(target: Path) -> None:
    """Copy the files tracked by git, without those that only the tests need."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and not name.startswith("tests/") and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
