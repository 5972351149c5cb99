# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of external changes to legacy tables around the agent's own changes, on a real kernel."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift.notifications import XTABLES_TABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift.polls import LegacyWatch
from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import legacy_tables
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.legacy_tables import (
    TableReader,
    number_of_entries,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.kernel.agent_node import AgentNode, endpoint_ip, endpoint_slice, service
from tests.unit.rendering.iptables.routes import by_key, endpoint, route
from tests.waiting import wait_for

ADDRESSES = {
    "IPv4": ("10.180.0.{}", "172.30.0.{}", "10.0.0.0/8", "198.51.100.1", "203.0.113.0/24"),
    "IPv6": ("fd00:10::{}", "fd00:30::{}", "fd00:10::/64", "fd00:bb::1", "fd00:aa::/64"),
}
ALTERED = ("-t", "nat", "-R", "KUBE-MARK-MASQ", "1", "-j", "MARK", "--or-mark", "0x1000")


@pytest.fixture(autouse=True)
def lock_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a lock file of the test's own, which no other program of the host uses."""
    path = tmp_path / "xtables.lock"
    path.touch()
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))


def tables(family: str, *numbers: int) -> dict[Any, Any]:
    """Return the desired chains of Services with these numbers; each has as many endpoints as its number."""
    pod, cluster_ip, pods, vip, source = ADDRESSES[family]
    routes = [
        route(
            f"svc{number}",
            [endpoint(pod.format(index), 8080) for index in range(1, number + 1)],
            cluster_ip=cluster_ip.format(number),
            **({"load_balancer_ips": (vip,), "source_ranges": (source,), "node_port": 30080} if number == 3 else {}),
        )
        for number in numbers
    ]
    facts = DataplaneSettings(family=family, node_ip=pod.format(9), local_traffic=LocalTraffic("cidr", pods))
    return RENDERING.desired_tables(by_key(*routes), facts)["chains"]


def chains_of(family: str) -> ChainsResource:
    pods = LocalTraffic("cidr", ADDRESSES[family][2])
    return ChainsResource(detect_variant(family, "legacy"), ownership(DataplaneSettings(family, local_traffic=pods)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_entries_follows_from_the_change(family: str) -> None:
    chains = chains_of(family)
    reader = TableReader(family)
    desired: dict[Any, Any] = {}
    try:
        for numbers in ((), (1, 2), (2, 3, 0), (0, 2), (4,), ()):
            before = [number_of_entries(reader.info(table)) for table in XTABLES_TABLES]
            desired, old = tables(family, *numbers), desired
            chains.apply(difference(old, desired))
            after = [number_of_entries(reader.info(table)) for table in XTABLES_TABLES]
            written = chains.pop_written()
            assert written is not None and chains.pop_written() is None
            assert [was + written.get(table, 0) for was, table in zip(before, XTABLES_TABLES)] == after
    finally:
        reader.close()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ChainsResource, LegacyWatch]]:
    """Yield chains of two Services and a watch, which takes their tables for large ones."""
    monkeypatch.setattr(legacy_tables, "_AT_ONCE_SECONDS", -1.0)
    monkeypatch.setattr(legacy_tables, "_QUIET_FACTOR", 1e9)
    chains = chains_of("IPv4")
    chains.apply(difference({}, tables("IPv4", 1, 2)))
    watch = LegacyWatch([chains])
    watch.synced(True, True)
    chains.apply(difference(tables("IPv4", 1, 2), tables("IPv4", 1, 4)))
    watch.synced(True, False)
    yield chains, watch
    watch.close()


def suspects(watch: LegacyWatch) -> dict[str, str]:
    found: dict[str, str] = {}
    watch.poll(found)
    return found


def iptables(*arguments: str) -> None:
    subprocess.run(["iptables-legacy", *arguments], check=True)


def test_own_changes_are_not_suspect(watched: tuple[ChainsResource, LegacyWatch]) -> None:
    chains, watch = watched
    assert not suspects(watch)
    chains.apply(difference(tables("IPv4", 1, 4), tables("IPv4", 3)))
    watch.synced(True, False)
    assert not suspects(watch)


def test_a_rule_of_equal_size_is_found_after_an_own_change(watched: tuple[ChainsResource, LegacyWatch]) -> None:
    chains, watch = watched
    iptables(*ALTERED)
    assert suspects(watch) == {"IPv4": "contents of the iptables tables"}
    assert difference(tables("IPv4", 1, 4), chains.observe()).replaced
    watch.synced(False, False)
    assert not suspects(watch)


def test_a_rule_deleted_during_an_own_change_is_found(watched: tuple[ChainsResource, LegacyWatch]) -> None:
    chains, watch = watched
    iptables("-t", "nat", "-D", "PREROUTING", "1")
    chains.apply(difference(tables("IPv4", 1, 4), tables("IPv4", 3)))
    watch.synced(True, False)
    assert suspects(watch)


def test_the_agent_repairs_what_was_deleted_while_it_waited_for_the_lock(tmp_path: Path) -> None:
    node = AgentNode(tmp_path, "iptables", "legacy")
    node.store.put(service(1))
    node.store.put(endpoint_slice(1))
    program = ["iptables-legacy", "-t", "nat"]
    jump = [*program, "-C", "PREROUTING", "-m", "comment", "--comment", "kubernetes service portals"]
    lock = os.open(os.environ["XTABLES_LOCKFILE"], os.O_RDWR)
    alone = {**os.environ, "XTABLES_LOCKFILE": str(tmp_path / "another.lock")}

    def jumps() -> bool:
        return (
            subprocess.run([*jump, "-j", "KUBE-SERVICES"], env=alone, capture_output=True, check=False).returncode == 0
        )

    try:
        node.start()
        # The leftovers of other modes have been removed, and the first poll has passed.
        time.sleep(2.0)
        assert jumps()
        # The file stays open until the end, since closing it shows as a use of the lock.
        fcntl.flock(lock, fcntl.LOCK_EX)
        node.store.put(service(2))
        node.store.put(endpoint_slice(2))
        wait_for(lambda: "restore" in _programs_of(node), 20.0)
        subprocess.run([*program, "-D", "PREROUTING", "1"], env=alone, check=True)
        fcntl.flock(lock, fcntl.LOCK_UN)
        wait_for(lambda: endpoint_ip(2, 1) in node.kernel_text("legacy"), 20.0)
        wait_for(jumps, 20.0, 0.1)
        assert node.metric("kubenode_proxy_drift_repaired_total") == 1
    finally:
        node.close()
        os.close(lock)


def _programs_of(node: AgentNode) -> str:
    assert node.process is not None
    command = ["ps", "-ww", "-o", "args=", "--ppid", str(node.process.pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
