# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent over hours of changes, and with a million endpoints; run by ``make soak`` only.

SOAK_MINUTES is how long each mode sees changes, SOAK_SERVICES how many Services change, SOAK_ENDPOINTS the size of the
large cluster. A seed makes the changes the same in each run; how many fit into the time depends on the machine.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

import pytest

from tests.apiserver.store import Store
from tests.benchmarks.large_cluster import large_cluster
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_ip, endpoint_slice, service
from tests.waiting import seconds_until, wait_for

MINUTES = float(os.environ.get("SOAK_MINUTES") or 60)
SERVICES = int(os.environ.get("SOAK_SERVICES") or 1000)
ENDPOINTS = int(os.environ.get("SOAK_ENDPOINTS") or 1_000_000)
PER_SERVICE = 10
CHANGES = 500
#: The number of rounds needed to compare the last ones with the first ones.
LEAST_ROUNDS = 12
PATIENCE = 300.0
LARGE_PATIENCE = 3600.0
#: Counters, and comments with the time.
VARYING = re.compile(r"\[\d+:\d+\]|counter packets \d+ bytes \d+|^#.*", re.MULTILINE)
#: By how much the agent's usage may differ between the first rounds and the last ones.
MORE_MEBIBYTES, MORE_DESCRIPTORS, MORE_THREADS = 16.0, 4, 2


class Usage(NamedTuple):
    """What the agent's process uses."""

    mebibytes: float
    descriptors: int
    threads: int


def usage(node: AgentNode) -> Usage:
    """Return the agent's usage. Raises AssertionError if it has ended."""
    assert node.process is not None and node.process.poll() is None, node.log[-3000:]
    process = Path(f"/proc/{node.process.pid}")
    return Usage(node.resident_mebibytes(), len(os.listdir(process / "fd")), len(os.listdir(process / "task")))


def assert_level(rounds: Sequence[Usage]) -> None:
    """Compare the last tenth of the rounds with the tenth after the first, in which caches and pools fill."""
    share = max(3, len(rounds) // 10)
    first, last = rounds[share : 2 * share], rounds[-share:]
    assert len(rounds) >= 3 * share
    for name, more in zip(Usage._fields, (MORE_MEBIBYTES, MORE_DESCRIPTORS, MORE_THREADS)):
        before, after = ([getattr(item, name) for item in part] for part in (first, last))
        assert statistics.median(after) <= max(before) + more, f"{name}: first {before}, last {after}"


class Churn:
    """Random changes of numbered Services and their EndpointSlices."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._random = random.Random(1)
        self._deleted: set[int] = set()

    def fill(self) -> None:
        """Write all Services and slices in their first form."""
        for number in range(1, SERVICES + 1):
            self._put(number, 80, 2, 0)

    def _put(self, number: int, port: int, count: int, first: int) -> None:
        self._deleted.discard(number)
        self._store.put(service(number, (port,)))
        self._store.put(endpoint_slice(number, count, (port,), first=first))

    def change(self) -> None:
        """Delete one Service of ten; give the others another port, or other endpoints, perhaps none."""
        number = self._random.randint(1, SERVICES)
        if self._random.random() < 0.1 and number not in self._deleted:
            self._deleted.add(number)
            self._store.delete("Service", "default", f"svc-{number}")
            self._store.delete("EndpointSlice", "default", f"svc-{number}-a")
        else:
            port = 443 if self._random.random() < 0.1 else 80
            self._put(number, port, self._random.randint(0, 5), self._random.randint(0, 2))


def disturbances(node: AgentNode) -> tuple[Callable[[], None], ...]:
    """Return what happens besides the changes, in turns: nothing, another program's change, and faults of the API."""

    def change_rules() -> None:
        flush = (
            ["nft", "flush", "chain", "ip", "kube-proxy", "services"]
            if node.mode == "nftables"
            else ["iptables-nft", "-t", "nat", "-F", "KUBE-SERVICES"]
        )
        subprocess.run(flush, check=True)

    def restart_api() -> None:
        node.stop_api()
        node.start_api()

    return lambda: None, change_rules, node.store.compact, restart_api


def content(node: AgentNode) -> list[str]:
    """Return all rules and elements without counters and order."""
    return sorted(part.strip(" \t}") for part in re.split(r"[\n,{]", VARYING.sub("", node.kernel_text("nft"))))


def wait_until_equal(node: AgentNode, seconds: float = PATIENCE) -> None:
    """Wait until a check against the API server finds no difference."""
    wait_for(lambda: node.differences(seconds)["changed"] is False, seconds, 0.2)


@pytest.fixture(params=["nftables", "iptables"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentNode]:
    made = AgentNode(tmp_path, request.param, "" if request.param == "nftables" else "nft", min_sync="100ms")
    try:
        yield made
    finally:
        made.close()


def test_hours_of_changes(node: AgentNode) -> None:
    churn, number = Churn(node.store), SERVICES + 1
    rounds: list[Usage] = []
    churn.fill()
    node.store.put(service(number))
    node.store.put(endpoint_slice(number, 1))
    node.start()
    wait_until_equal(node)
    before = content(node)
    also = disturbances(node)
    end = time.monotonic() + MINUTES * 60
    while time.monotonic() < end or len(rounds) < LEAST_ROUNDS:
        for _change in range(CHANGES):
            churn.change()
        also[len(rounds) % len(also)]()
        # The last change of a round is waited for by itself; then all the others must have arrived as well.
        target = len(rounds) % 2 + 1
        node.store.put(endpoint_slice(number, 1, first=target))
        took = seconds_until(
            lambda target=target: endpoint_ip(number, target) in node.kernel_text("nft"), PATIENCE, 0.05
        )
        wait_until_equal(node)
        rounds.append(usage(node))
        print(f"{node.mode} {len(rounds) * CHANGES} changes, the last one after {took:.2f} s: {rounds[-1]}", flush=True)
    assert_level(rounds)
    churn.fill()
    node.store.put(endpoint_slice(number, 1))
    wait_until_equal(node)
    assert content(node) == before
    assert "Traceback" not in node.log
    assert node.stop() == 0


@pytest.mark.parametrize("node", ["nftables"], indirect=True)
def test_a_million_endpoints(node: AgentNode) -> None:
    """Fill an empty node, follow a change, and find no difference."""
    for item in large_cluster(ENDPOINTS // PER_SERVICE, PER_SERVICE):
        node.store.put(item)
    node.start(wait=False)
    filled = seconds_until(lambda: node.status().get("syncs", 0) > 0, LARGE_PATIENCE, 0.5)
    print(f"{ENDPOINTS} endpoints: served after {filled:.0f} s, {usage(node)}", flush=True)
    node.store.put(service(1))
    node.store.put(endpoint_slice(1))
    words = ["nft", "get", "element", "ip", "kube-proxy", "service-frontends", f"{{ {cluster_ip(1)} . tcp . 80 }}"]
    changed = seconds_until(
        lambda: not subprocess.run(words, capture_output=True, check=False).returncode, LARGE_PATIENCE
    )
    wait_until_equal(node, LARGE_PATIENCE)
    print(f"a change was served after {changed:.2f} s, {usage(node)}", flush=True)
    assert "Traceback" not in node.log
    assert node.stop() == 0
