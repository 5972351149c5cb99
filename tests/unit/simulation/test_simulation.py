# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent in simulated worlds: in the end the kernel is as desired, and between no packet fares as in no state."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .faults import FAULTS

ROOT = Path(__file__).resolve().parents[3]
#: Of the schedules of `make test-full`, those of one test.
PART = 500


def simulated(*arguments: object) -> str:
    """Return the output of schedules that run in a process of their own, with a clock of its own."""
    command = [sys.executable, "-m", "tests.unit.simulation", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    return done.stdout


def test_some_schedules() -> None:
    assert "25 seeds, 0 failed" in simulated(0, 25)


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_schedules(part: int) -> None:
    assert f"{PART} seeds, 0 failed" in simulated(part * PART, PART)


def test_a_seed_replays_exactly() -> None:
    first, second = (re.sub(r"/dev/shm/\w+", "", simulated(4)) for _time in range(2))
    assert first == second and "the agent starts" in first


def test_faults_that_are_seeded_into_the_agent_are_found() -> None:
    assert simulated("--faults").count("found by seed") == len(FAULTS)
