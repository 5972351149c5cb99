# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Power cuts of a node at random moments of its convergences, changes of mode and rollbacks.

The disk loses what was not synchronised. The next boot must restore exactly the state before or after the change.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import uml
from tests.lab.guest_command import DATAPLANE_MODULES
from tests.lab.node import Specification

pytestmark = pytest.mark.full
# User-mode Linux has no nf_tables. The files are the same in all modes.
MODES = ["iptables", "ipvs"]
CUTS = int(os.environ.get("POWER_CUTS", "100"))
_MOST_SECONDS = 300.0
# Of complete changes before a cut, and of seconds after the last of them.
_MOST_CHANGES, _LONGEST = 3, 1.5
_DONE = re.compile(r"^(?:BOOTED|DONE) \d+(?=\r?\n)", re.MULTILINE)


class Machine:
    """A guest with a disk, which is started and loses its power again and again."""

    def __init__(self, scratch: Path, memory: str = "512M") -> None:
        self.scratch = scratch
        self.disk = scratch / "disk.img"
        self.memory = memory
        self.number = 0
        with open(self.disk, "wb") as file:
            file.truncate(256 << 20)
        subprocess.run(["mke2fs", "-q", "-t", "ext4", str(self.disk)], check=True)

    def run(self, changes: int, seconds: float) -> list[str]:
        """Boot, cut the power that many seconds after this number of changes, and return the lines of the console."""
        self.number += 1
        place = self.scratch / f"boot-{self.number}"
        place.mkdir()
        environment = {"LANG": "C.UTF-8", "PATH": os.environ["PATH"], "PYTHONPATH": str(uml.ROOT)}
        command = [sys.executable, "-m", "tests.systemd.power_cut_guest", str(self.number * 1000), *MODES]
        specification = Specification(
            "worker",
            str(place),
            modules=list(DATAPLANE_MODULES),
            environment=environment,
            directory=str(uml.ROOT),
            command=command,
        )
        guest = uml.start(specification, self.memory, disk=str(self.disk))
        try:
            end = time.monotonic() + _MOST_SECONDS
            while len(_DONE.findall(text := self._console(place))) <= changes:
                assert "WRONG" not in text and guest.poll() is None and time.monotonic() < end, text
                time.sleep(0.02)
            time.sleep(seconds)
        finally:
            os.killpg(guest.pid, signal.SIGKILL)
            guest.wait()
        text = self._console(place)
        assert "WRONG" not in text, text
        return re.findall(r"^(?:BOOTED|BEGIN|DONE) \d+(?=\r?\n)", text, re.MULTILINE)

    @staticmethod
    def _console(place: Path) -> str:
        return (place / "console").read_text(encoding="utf-8", errors="replace")


def allowed_after(lines: list[str]) -> set[int]:
    """Return the states that the next boot may restore: of an unfinished change, that before and that after it."""
    last = [int(line.split()[1]) for line in lines]
    return set(last[-2:]) if lines[-1].startswith("BEGIN") else {last[-1]}


# Otherwise it fails where user-mode Linux is missing, and says what to install.
@pytest.mark.skipif(os.environ.get("GUESTS") == "", reason="GUESTS is empty: no tests in user-mode Linux")
def test_each_power_cut_boots_into_the_old_or_the_new_state(tmp_path: Path) -> None:
    seed = int(os.environ.get("POWER_CUTS_SEED", "0")) or random.randrange(1, 1 << 30)
    chance = random.Random(seed)
    machine = Machine(tmp_path)
    allowed, history = {0}, []
    for cut in range(CUTS + 1):
        lines = machine.run(chance.randrange(_MOST_CHANGES + 1), chance.uniform(0.0, _LONGEST))
        booted = int(lines[0].split()[1])
        history.append((cut, booted, lines[1:]))
        assert booted in allowed, (seed, sorted(allowed), history[-3:])
        allowed = allowed_after(lines)
    within = sum(lines[-1:] != [] and lines[-1].startswith("BEGIN") for _cut, _booted, lines in history)
    assert within > CUTS // 2, "most cuts must fall into changes"
    changes = sum(len(lines) for _cut, _booted, lines in history) // 2
    print(f"{CUTS} power cuts, {within} within one of {changes} changes, seed {seed}")
