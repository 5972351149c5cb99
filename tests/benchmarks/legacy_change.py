# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what a change of one Service costs the agent with iptables-legacy, beside iptables-restore alone.

    unshare -n python -m tests.benchmarks.legacy_change --services 5000

The floor is one ``iptables-legacy-restore --noflush`` of the lines that the agent wrote for a change of the same kind,
in a second network namespace with a copy of the table. The agent's changes and those of the floor alternate. For each
number of Services one line of JSON: milliseconds from the start of the change until the kernel shows it, milliseconds
of processor time of the agent and its programs; what the agent takes in the first 140 seconds after all changes, and
later, while nothing happens. Both have lock files of their own, which no other program uses.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.legacy_tables import TableReader
from tests.benchmarks import agent_runs
from tests.kernel.agent_node import AgentNode, endpoint_slice
from tests.lab import system
from tests.waiting import wait_for

LOCK = "XTABLES_LOCKFILE"
RESTORE = "/usr/sbin/iptables-legacy-restore"
GIVE_UP_SECONDS, SETTLE_SECONDS, IDLE_SECONDS = 120.0, 10.0, 60.0
# After two minutes the agent observes everything.
AFTER_SECONDS = 140.0
_POLL_SECONDS = 0.002


def until_changed(reader: TableReader, change: Callable[[], None]) -> float:
    """Make a change and return the seconds until the table nat has another number or size of entries."""
    before = reader.info("nat")
    started = time.monotonic()
    change()
    while reader.info("nat") == before:
        if time.monotonic() - started > GIVE_UP_SECONDS:
            raise RuntimeError("the change has not arrived")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - started


class Floor:
    """A network namespace with a copy of the table nat of this one, and the program that changes it.

    ``clock`` and ``processor``: the seconds of each change.
    """

    def __init__(self, scratch: Path) -> None:
        # Only this table: rules of the table filter name nfacct objects, which the copy has not.
        saved = subprocess.run(["iptables-legacy-save", "-t", "nat"], check=True, capture_output=True).stdout
        self._environment = {**os.environ, LOCK: str(scratch / "floor.lock")}
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        self._path = f"/proc/{self._holder.pid}/ns/net"
        try:
            wait_for(lambda: os.readlink(self._path) != os.readlink("/proc/self/ns/net"), 10.0)
            with system.inside(self._path):
                subprocess.run([RESTORE], input=saved, check=True, env=self._environment)
                self._reader = TableReader("IPv4")
        except BaseException:
            self._holder.kill()
            raise
        self.clock: list[float] = []
        self.processor: list[float] = []

    def change(self, text: Path) -> None:
        """Restore a text."""
        command = [RESTORE, "--noflush", "--counters", "-w", "5"]
        children: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            with open(text, "rb") as file, system.inside(self._path):
                children.append(subprocess.Popen(command, stdin=file, env=self._environment))

        self.clock.append(until_changed(self._reader, start))
        _process, status, usage = os.wait4(children[0].pid, 0)
        children[0].returncode = status
        if status:
            raise RuntimeError(f"{RESTORE} has failed with status {status}")
        self.processor.append(usage.ru_utime + usage.ru_stime)

    def close(self) -> None:
        """Remove the namespace."""
        self._reader.close()
        self._holder.kill()
        self._holder.wait()


class Recorder:
    """Has the agent's restore program keep its inputs, until :meth:`stop`."""

    def __init__(self, scratch: Path) -> None:
        self._program = scratch / "bin" / "iptables-restore"
        self._folder = scratch / "inputs"
        self._folder.mkdir()
        self._program.unlink()
        keep = f'file=$(mktemp {self._folder}/XXXXXXXX)\ncat >"$file"\nexec {RESTORE} "$@" <"$file"\n'
        self._program.write_text(f"#!/bin/sh\n{keep}")
        self._program.chmod(0o755)

    def stop(self) -> list[Path]:
        """Return the files with the inputs, in the order in which they were written."""
        self._program.unlink()
        self._program.symlink_to(RESTORE)
        return sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def change_endpoints(node: AgentNode, number: int, endpoints: int) -> Callable[[], None]:
    """Return a function that replaces the endpoints of a Service by one fewer, on another port."""
    return lambda: node.store.put(endpoint_slice(number, count=endpoints - 1, target=9000 + number))


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Return median, 90th percentile and longest, in milliseconds."""
    ordered = sorted(seconds)
    found = {"p50": statistics.median(ordered), "p90": ordered[int(len(ordered) * 0.9)], "longest": ordered[-1]}
    return {name: round(value * 1000, 1) for name, value in found.items()}


def measure(node: AgentNode, services: int, endpoints: int, changes: int, pause: float) -> dict[str, Any]:
    """Start the agent, record changes, and alternate changes of the agent and of the floor."""
    node.environment[LOCK] = str(node.scratch / "agent.lock")
    node.start()
    time.sleep(SETTLE_SECONDS)
    reader = TableReader("IPv4")
    floor = Floor(node.scratch)
    try:
        recorder = Recorder(node.scratch)
        for number in range(1, changes + 1):
            until_changed(reader, change_endpoints(node, number, endpoints))
            time.sleep(_POLL_SECONDS)
        time.sleep(SETTLE_SECONDS)
        texts = recorder.stop()
        clock = []
        loads = [os.getloadavg()[0]]
        used = node.processor_seconds()
        for number, text in enumerate(texts, changes + 1):
            clock.append(until_changed(reader, change_endpoints(node, number, endpoints)))
            time.sleep(pause)
            floor.change(text)
            time.sleep(pause)
        processor = (node.processor_seconds() - used) / len(texts)
        loads.append(os.getloadavg()[0])
        before = node.processor_seconds()
        time.sleep(AFTER_SECONDS)
        after = node.processor_seconds() - before
        before = node.processor_seconds()
        time.sleep(IDLE_SECONDS)
        idle = (node.processor_seconds() - before) / IDLE_SECONDS
    finally:
        floor.close()
        reader.close()
    return {
        "services": services,
        "endpoints": services * endpoints,
        "changes": len(texts),
        "pause_s": pause,
        "floor_ms": milliseconds(floor.clock),
        "agent_ms": milliseconds(clock),
        "floor_processor_ms": round(statistics.mean(floor.processor) * 1000, 1),
        "agent_processor_ms": round(processor * 1000, 1),
        "processor_ratio": round(processor / statistics.mean(floor.processor), 2),
        "after_changes_processor_ms": round(after * 1000, 1),
        "idle_processor_percent": round(idle * 100, 2),
        "rss_mib": round(node.resident_mebibytes(), 1),
        "foreign_repairs": node.status()["driftRepaired"],
        "load": [round(load, 1) for load in loads],
    }


def main() -> int:
    """Measure as the arguments say."""
    parser = agent_runs.parser(__doc__, "iptables")
    parser.add_argument("--changes", type=int, default=30)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two changes")
    parser.set_defaults(services="1000,5000")
    arguments = parser.parse_args()
    if arguments.mode != "iptables" or arguments.variant == "nft":
        parser.error("only iptables mode with the legacy variant has such a floor")
    with tempfile.TemporaryDirectory() as scratch:
        # Not the lock of the host, whose other programs would make the tables suspect.
        os.environ[LOCK] = str(Path(scratch) / "lock")
        return agent_runs.run(
            arguments,
            "legacy",
            lambda node, services: measure(node, services, arguments.endpoints, arguments.changes, arguments.pause),
        )


if __name__ == "__main__":
    sys.exit(main())
