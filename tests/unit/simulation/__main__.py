# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run schedules: ``python -m tests.unit.simulation [FIRST [COUNT]]``. Failing seeds are printed.

With one seed, all that has happened is printed as well. The seed decides everything: sets of Python are in the same
order in each process. The environment variable SEED is the default of FIRST. ``--faults`` seeds faults into the agent,
each of which its schedule must show; with a number, the first of this many schedules that does is looked for.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock


def world_of(seed: int) -> Any:
    """Return a world after its schedule, and what went wrong."""
    from .world import World

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        world = World(seed, Path(directory))
        return world, world.run()


def run(first: int, count: int) -> int:
    """Run schedules; return how many failed."""
    failed = steps = judged = excepted = 0
    for seed in range(first, first + count):
        world, faults = world_of(seed)
        steps += world.kernel.steps
        judged += world.judge.judged + world.policy_judge.judged
        excepted += world.judge.excepted + world.policy_judge.excepted
        if faults:
            failed += 1
            print(f"SEED={seed} {world.plane} {world.node}", *faults[:5], sep="\n  ")
        if count == 1:
            print(*world.trace, *world.logs, sep="\n")
    print(f"{count} seeds, {failed} failed, {steps} steps, {judged} packets judged, {excepted} excepted")
    return failed


def find_faults(search: int) -> int:
    """Return how many seeded faults do not show. ``search``: in this many schedules, 0 for the known one."""
    from .faults import FAULTS

    missed = 0
    for name, (known, owner, method, replacement) in FAULTS.items():
        with mock.patch.object(owner, method, replacement):
            found = next((seed for seed in (range(search) if search else [known]) if world_of(seed)[1]), None)
        print(f"{name}: " + ("NOT FOUND" if found is None else f"found by seed {found}"), flush=True)
        missed += found is None
    return missed


def main() -> int:
    if sys.argv[1:2] == ["--faults"]:
        return find_faults(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    first = int(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SEED", "0"))
    return run(first, int(sys.argv[2]) if len(sys.argv) > 2 else 1)


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[3]
    WANTED = {"PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'collections'}"}
    if not WANTED.items() <= os.environ.items():
        command = [sys.executable, "-m", "tests.unit.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **WANTED})
    sys.exit(min(main(), 1))
