# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run Makefile targets, concurrently where two processors are enough for both, and print how long each took.

    python -m tests.steps TARGET...

All targets run even if one fails; the exit status is then 1. A target's output is printed when it has ended, followed
at the end by a table of the targets and one of the slowest tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from typing import IO, Iterable, NamedTuple, Sequence

PROCESSORS = 2
# How much of a processor each target uses on average, in percent: its processor seconds by its seconds in the table at
# the end. Tests wait for nodes and conditions half of the time; another target uses what they leave idle.
BUSY = {
    "kernel": 110,
    "uml": 170,
    "modules": 150,
    "systemd": 140,
    "conformance": 110,
    "unit": 130,
    "pythons": 110,
    "molecule": 80,
    "played": 40,
    "integration": 90,
    "browser": 20,
}
# The most that targets which run together use: more than there is, since each waits at times while the other does not.
MOST_BUSY = 180 * PROCESSORS
# Purely computing targets with one processor: at the lowest priority they use what the tests beside them leave idle
# while waiting.
FILLERS = {"lint", "monitoring", "sanity", "build", "importer", "cores", "docsite", "environment"}
# An emulated node needs all processors: beside it run only fillers, at the lowest priority.
ALONE = {"load"}
# These depend on the output of an earlier target.
AFTER = {"importer": {"build"}, "cores": {"build"}, "played": {"build"}, "environment": {"build"}}
# A line of pytest's --durations: seconds, phase (setup, call or teardown), test.
DURATION = re.compile(rb"^ *([0-9]+\.[0-9]+)s (?:setup|call|teardown) +(\S.*?) *$", re.MULTILINE)
# A line of pytest's short summary.
FAILURE = re.compile(rb"^(?:FAILED|ERROR) tests/.*$", re.MULTILINE)
SLOWEST = 30


class Running(NamedTuple):
    """A target that is running."""

    target: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float


class Ended(NamedTuple):
    """The result of a finished target.

    ``processor`` is the processor time in seconds of the target and its children, ``tests`` maps its slow tests to
    seconds, ``failures`` are the lines in which pytest names tests that failed.
    """

    target: str
    status: int
    seconds: float
    processor: float
    tests: dict[str, float]
    failures: list[str]


def calibration() -> float:
    """Return how many seconds this machine needs for 100 times fork and exec."""
    started = time.monotonic()
    for _ in range(100):
        subprocess.run(["true"], check=True)
    return time.monotonic() - started


def start(target: str) -> Running:
    """Start a target."""
    output = tempfile.TemporaryFile()  # noqa: SIM115 # must outlive the process
    argv = [*(["nice", "-n", "19"] if target in FILLERS else []), "make", "--no-print-directory", target]
    print(f"== {target} begins", flush=True)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    return Running(target, process, output, time.monotonic())


def finish(running: dict[int, Running]) -> Ended:
    """Wait until one of these targets ends, and print its output."""
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid in running:
            break
    item = running.pop(pid)
    code = item.process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - item.started
    item.output.seek(0)
    printed = item.output.read()
    item.output.close()
    sys.stdout.flush()
    sys.stdout.buffer.write(f"== {item.target}\n".encode() + printed)
    print(f"== {item.target} took {seconds:.0f} s" + (f", status {code}" if code else ""), flush=True)
    return Ended(item.target, code, seconds, usage.ru_utime + usage.ru_stime, durations(printed), failures(printed))


def durations(printed: bytes) -> dict[str, float]:
    """Return the seconds of each test that pytest lists by --durations, including its fixtures."""
    found: dict[str, float] = {}
    for seconds, name in DURATION.findall(printed):
        test = name.decode(errors="replace")
        found[test] = found.get(test, 0.0) + float(seconds)
    return found


def failures(printed: bytes) -> list[str]:
    """Return the lines in which pytest names tests that failed."""
    return [line.decode(errors="replace") for line in FAILURE.findall(printed)]


def slowest(ended: Iterable[Ended]) -> list[str]:
    """Return the lines of the table of the slowest tests."""
    found = [(seconds, item.target, name) for item in ended for name, seconds in item.tests.items()]
    return [f"{seconds:>8.1f} {target:<12} {name}" for seconds, target, name in sorted(found, reverse=True)[:SLOWEST]]


def busy(targets: Iterable[str]) -> int:
    """Return how much of a processor these targets use together, in percent; one that is not listed needs all."""
    return sum(BUSY.get(target, MOST_BUSY) for target in targets)


def has_room(target: str, running: Sequence[str], waiting: Sequence[str]) -> bool:
    """Return whether a target may start beside the running ones. ``waiting``: those not started, itself among them."""
    others = [name for name in running if name not in FILLERS]
    if target in ALONE or (ALONE.intersection(running) and target not in FILLERS):
        return not others
    if target in FILLERS:
        more = set(waiting) - FILLERS - ALONE
        return len(running) - len(others) < (1 if others or more else PROCESSORS)
    return busy([target, *others]) <= MOST_BUSY


def run(targets: list[str]) -> list[Ended]:
    """Run all targets; whenever there is room, start the first one that may run."""
    waiting = list(targets)
    running: dict[int, Running] = {}
    ended: list[Ended] = []
    while waiting or running:
        names = [item.target for item in running.values()]
        for target in waiting:
            if has_room(target, names, waiting) and not AFTER.get(target, set()).intersection([*waiting, *names]):
                waiting.remove(target)
                item = start(target)
                running[item.process.pid] = item
                break
        else:
            ended.append(finish(running))
    return ended


def main(targets: list[str]) -> int:
    """Run the targets of the command line and print the table of times."""
    load = os.getloadavg()[0]
    print(f"== this machine: 100 times fork and exec in {calibration():.2f} s, load average {load:.1f}", flush=True)
    started = time.monotonic()
    ended = run(targets)
    total = time.monotonic() - started
    print(f"== {'step':<16}{'seconds':>8}{'processor seconds':>19}")
    for item in sorted(ended, key=lambda item: item.seconds, reverse=True):
        failed = "  failed" if item.status else ""
        print(f"== {item.target:<16}{item.seconds:>8.0f}{item.processor:>19.0f}{failed}")
    print(f"== {'all':<16}{total:>8.0f}")
    print(f"== the {SLOWEST} slowest tests, in seconds")
    for line in slowest(ended):
        print(f"== {line}")
    # At the very end, since of a long output often only that is kept.
    for item in ended:
        for line in item.failures:
            print(f"== {item.target}: {line}")
    names = [item.target for item in ended if item.status]
    if names:
        print(f"error: failed: {' '.join(names)}", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
