# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure the agent's memory: after the start, and at its peak while it starts, repairs, lists again, changes its mode.

    unshare -n python -m tests.benchmarks.agent_memory --mode nftables --sizes 5000x5 44000x1
    unshare -n python -m tests.benchmarks.agent_memory --mode iptables --variant legacy --to nftables

The agent is the zip application as the role installs it, with the bytecode of this Python, in a control group of its
own where the machine has the memory controller. For each size (Services x endpoints of each) one line of JSON with, for
each moment, in MiB: ``rss``, the resident memory when it has ended; ``peak``, the largest of
the agent's process in it; ``group``, the largest of the control group, which is what ``MemoryMax=`` limits: with the
programs that the agent runs, the kernel's memory for the rules, and cached files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from tests.benchmarks.agent_start import InstalledNode, fill
from tests.lab.memory_group import MemoryGroup
from tests.waiting import wait_for

PATIENCE, SETTLE_SECONDS = 900.0, 3.0
#: As in the unit.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
FLUSH = {"nftables": ["nft", "flush", "ruleset"]}


class Moments:
    """The memory of a node's agent at each moment, by name."""

    def __init__(self, node: InstalledNode, group: MemoryGroup | None) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self._node = node
        self._group = group

    def _memory(self, field: str) -> float:
        assert self._node.process is not None
        text = Path(f"/proc/{self._node.process.pid}/status").read_text(encoding="ascii")
        found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return round(int(found.group(1)) / 1024, 1)

    @contextlib.contextmanager
    def moment(self, name: str) -> Iterator[None]:
        """Note the memory during what the caller does, and some seconds after it."""
        if self._node.process is not None:
            # Sets the peak to the present size.
            Path(f"/proc/{self._node.process.pid}/clear_refs").write_text("5", encoding="ascii")
        if self._group is not None:
            self._group.reset_peak()
        yield
        time.sleep(SETTLE_SECONDS)
        self.found[name] = {"rss": self._memory("VmRSS"), "peak": self._memory("VmHWM")}
        if self._group is not None:
            self.found[name]["group"] = round(self._group.peak() / 2**20, 1)


def synced(node: InstalledNode, **expected: Any) -> Callable[[], bool]:
    """Return a function that reports whether the agent has ended a sync since now, and its status has these values."""
    before = float(node.status().get("lastSync", 0.0))

    def done() -> bool:
        status = node.status()
        return status.get("lastSync", 0.0) > before and all(
            status.get(name) == value for name, value in expected.items()
        )

    return done


def serves_everything(node: InstalledNode, services: int) -> Callable[[], bool]:
    """Return a function that reports whether the agent serves a number of Services, the first ones and all others."""
    return lambda: any(family["services"] >= services for family in node.status().get("families", {}).values())


def change_mode(node: InstalledNode, mode: str) -> None:
    """Have the agent change its mode, and wait until the new one is served and the old one removed."""
    node.write_configuration(mode=mode)
    assert node.process is not None
    done = synced(node, mode=mode, lastError="")
    node.process.send_signal(1)
    wait_for(done, PATIENCE, 0.2)


def list_again(node: InstalledNode) -> None:
    """Have the API server forget all versions while it is away, so that the agent lists everything again."""
    node.stop_api()
    service = dict(node.store.list("/api/v1/services")[0][0])
    service["spec"] = {**service["spec"], "sessionAffinity": "ClientIP"}
    done = synced(node)
    node.store.put(service)
    node.store.compact()
    node.start_api()
    wait_for(done, PATIENCE, 0.2)


def repair(node: InstalledNode) -> None:
    """Remove everything that the agent has programmed, and wait until it is repaired."""
    known = node.status()["driftRepaired"]
    flush = FLUSH.get(node.mode, [f"iptables-{node.kernel_variant}", "-t", "nat", "-F"])
    subprocess.run(flush, check=True)
    wait_for(lambda: node.status().get("driftRepaired", 0) > known, PATIENCE, 0.2)


def measure(node: InstalledNode, group: MemoryGroup | None, services: int, other: str) -> dict[str, dict[str, float]]:
    """Return the memory of the agent at each moment of a life."""
    moments = Moments(node, group)
    mode = node.mode
    with moments.moment("start"):
        node.start(wait=False)
        wait_for(serves_everything(node, services), PATIENCE, 0.2)
    with moments.moment("state written to disk"):
        wait_for((node.scratch / "cache.gz").exists, PATIENCE, 0.5)
    with moments.moment("repair"):
        repair(node)
    with moments.moment("lists again"):
        list_again(node)
    if other:
        with moments.moment(f"{mode} to {other}"):
            change_mode(node, other)
        with moments.moment(f"{other} to {mode}"):
            change_mode(node, mode)
    node.stop()
    with moments.moment("start on a programmed node"):
        node.start(wait=False)
        wait_for(serves_everything(node, services), PATIENCE, 0.2)
    return moments.found


def main() -> int:
    """Print one line of JSON for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="nftables", choices=["iptables", "nftables"])
    parser.add_argument("--to", default="", choices=["iptables", "nftables"], help="a mode to change to and back")
    parser.add_argument("--variant", default="nft", choices=["nft", "legacy"], help="which iptables")
    parser.add_argument("--sizes", nargs="+", default=["5000x5"], metavar="SERVICESxENDPOINTS")
    arguments = parser.parse_args()
    system.ip_batch(["link set lo up"])
    for size in arguments.sizes:
        services, endpoints = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as directory, MemoryGroup.made() as group:
            node = InstalledNode(Path(directory), arguments.mode, arguments.variant)
            try:
                node.install(Path(directory))
                node.environment.update(ALLOCATOR)
                fill(node, services, endpoints)
                if group is not None:
                    node.before_exec = group.enter
                found = measure(node, group, services, arguments.to)
            finally:
                node.close()
            subprocess.run(["nft", "flush", "ruleset"], check=True)
            line = {"mode": arguments.mode, "variant": arguments.variant, "services": services, "endpoints": endpoints}
            sys.stdout.write(json.dumps({**line, "memory_mib": found}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
