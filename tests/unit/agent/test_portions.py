# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Services with very many entries are programmed in portions, after the others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.agent import INBOX_SECONDS
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import portions, stale_flows, syncer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.portions import (
    PORTION_PAUSE_SECONDS,
    Portions,
    Size,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.hashing import JHASH
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import RESOURCE
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import service_ports_of
from tests.lab import manifests
from tests.unit.agent.sync_bench import SyncBench

MOST = 5_000
SLOW = 10 * portions.MOST_SECONDS


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "MOST_ENTRIES", MOST)
    # The load of the machine does not make them smaller.
    monkeypatch.setattr(syncer, "monotonic", lambda: 0.0)


def sized(entries: dict[NamespacedName, int], ports: int = 1) -> portions.SizeOf:
    """Return the sizes of Services that make these entries; others make few."""
    return lambda service: Size(entries.get(service, 0), ports)


def key(name: str, namespace: str = "d") -> NamespacedName:
    return NamespacedName(namespace, name)


def large(name: str, number: int, **metadata: Any) -> list[dict[str, Any]]:
    """Return a Service of some 4,000 entries: 5 ports at 16 addresses with 48 endpoints, or with slots."""
    ports = [manifests.port(80 + each, name=f"p{each}") for each in range(1 if metadata else 5)]
    addresses = [f"198.18.{number}.{each}" for each in range(6 if metadata else 15)]
    endpoints = [manifests.endpoint(f"10.244.{number}.{each}", "n2") for each in range(1, 49)]
    return [
        manifests.service(name, f"10.97.0.{number}", ports, namespace="d", metadata=metadata, externalIPs=addresses),
        manifests.endpoint_slice(
            name, endpoints, [manifests.port(8080, name=port["name"]) for port in ports], namespace="d"
        ),
    ]


def served(bench: SyncBench) -> set[str]:
    """Return the cluster IPs that have a frontend in the table."""
    rows = bench.mode.resource.table
    found = {each.key[:4] for each in rows if each[:2] == ("element", "service-frontends")}
    return {".".join(map(str, ip)) for ip in found}


def small(number: int) -> list[dict[str, Any]]:
    return [
        manifests.service(f"s{number}", f"10.96.0.{number}", [manifests.port(80)], namespace="d"),
        manifests.endpoint_slice(f"s{number}", [manifests.endpoint("10.244.9.9")], [manifests.port(80)], namespace="d"),
    ]


@pytest.mark.parametrize("metadata", [{}, {"annotations": {"kubenode.proxy/scheduler": "mh"}}], ids=["lists", "slots"])
def test_others_are_programmed_before_large_services_which_follow_in_portions(
    monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any]
) -> None:
    bench = SyncBench(monkeypatch, schedulers=(JHASH,))
    bench.sync.sync(first=True)
    for number in range(1, 5):
        for raw in large(f"large{number}", number, **metadata):
            bench.put(raw)
    for raw in small(1):
        bench.put(raw)
    bench.sync.sync()
    assert served(bench) & {"10.96.0.1", "10.97.0.1", "10.97.0.2"} == {"10.96.0.1"}
    assert bench.view.pending_services == bench.view.pending_slices == 4 and bench.sync.syncer.is_waiting
    seen = []
    for _portion in range(8):
        bench.now += PORTION_PAUSE_SECONDS
        bench.timers.run()
        seen.append(sum(ip.startswith("10.97.") for ip in served(bench)))
        # A change meanwhile does not wait.
        for raw in small(2 + len(seen)):
            bench.put(raw)
        bench.sync.sync()
        assert f"10.96.0.{2 + len(seen)}" in served(bench)
    assert seen[:4] == [1, 2, 3, 4] and not bench.sync.syncer.is_waiting
    assert not bench.view.pending_services and not bench.view.pending_slices
    (proxier,) = bench.sync.proxiers.families
    assert bench.mode.resource.table == dict(proxier.tables.desired[RESOURCE])


def test_portions_let_the_loop_process_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is behind processes changes between two portions: most of its time, however long a portion takes."""
    bench = SyncBench(monkeypatch)
    bench.sync.sync(first=True)
    for number in range(1, 5):
        for raw in large(f"large{number}", number):
            bench.put(raw)
    bench.sync.sync()
    apply = bench.mode.resource.apply

    def slowly(change: Any) -> None:
        bench.now += SLOW
        apply(change)

    monkeypatch.setattr(bench.mode.resource, "apply", slowly)
    bench.behind = True
    began, rounds = bench.now, 0
    while bench.sync.syncer.is_waiting:
        bench.now += INBOX_SECONDS
        rounds += 1
        bench.timers.run()
    assert rounds * INBOX_SECONDS > 0.7 * (bench.now - began)


def test_portions_become_smaller_while_they_take_long() -> None:
    chosen = Portions()
    entries = {key(f"s{number}"): MOST // 10 for number in range(100)}
    assert not chosen.urgent(set(entries), sized(entries))
    sizes = []
    for _portion in range(9):
        sizes.append(len(chosen.take(sized(entries))))
        # Each Service takes as long as a portion may.
        chosen.took(sizes[-1] * portions.MOST_SECONDS)
    assert sizes[0] == 10 and max(sizes[1:]) <= 2
    for _portion in range(4):
        chosen.take(sized(entries))
        chosen.took(0.0)
    assert len(chosen.take(sized(entries))) == 10


def test_a_few_large_services_are_programmed_at_once_and_a_first_sync_has_all() -> None:
    chosen = Portions()
    entries = {key("a"): MOST - 1}
    assert chosen.urgent({key("a"), key("b")}, sized(entries)) == {key("a"), key("b")}
    assert not chosen.waiting
    entries = {key(name): MOST for name in "abc"}
    assert chosen.urgent({*entries, key("z")}, sized(entries)) == {key("z")}
    chosen.clear()
    assert not chosen.waiting


def test_endpoints_that_arrive_while_services_wait_count() -> None:
    chosen = Portions()
    few = {key(name): MOST // 3 for name in "abcd"}
    assert not chosen.urgent(set(few), sized(few))
    assert len(chosen.take(lambda service: Size(MOST))) == 1 and len(chosen.waiting) == 3


def test_what_a_service_removes_counts_as_what_it_made() -> None:
    chosen = Portions()
    entries = {key(name): MOST // 2 for name in "ab"}
    assert chosen.urgent(set(entries), sized(entries)) == set(entries)
    assert chosen.urgent({*entries, key("c")}, sized({key("c"): 1})) == {key("c")} - {key("c")}
    assert chosen.waiting == {*entries, key("c")}


def test_the_one_that_waits_longest_comes_next_and_then_those_of_the_namespaces_with_fewest_entries() -> None:
    chosen = Portions()
    entries = {key(f"g{number}", "greedy"): MOST // 4 for number in range(20)}
    entries[key("m", "modest")] = MOST // 4
    assert not chosen.urgent(set(entries), sized(entries))
    first = chosen.take(sized(entries))
    assert key("m", "modest") in first and key("g0", "greedy") in first and len(first) == 4
    rest: set[NamespacedName] = set()
    while chosen.waiting:
        portion = chosen.take(sized(entries))
        assert portion and len(portion) <= 4
        rest |= portion.keys()
    assert first.keys() | rest == set(entries)


def giant(number: int, endpoint: int, ports: int = 40, protocol: str = "TCP", names: str = "p") -> list[dict[str, Any]]:
    """Return a Service of some 20,000 entries with one endpoint that may change; 8 times as many as a portion has."""
    listed = [manifests.port(80 + each, name=f"{names}{each}", protocol=protocol) for each in range(ports)]
    addresses = [f"198.18.{number}.{each}" for each in range(20)]
    endpoints = [manifests.endpoint(f"10.244.{number}.{each}", "n2") for each in (endpoint, *range(100, 120))]
    return [
        manifests.service("giant", f"10.97.0.{number}", listed, namespace="d", externalIPs=addresses),
        manifests.endpoint_slice(
            "giant",
            endpoints,
            [manifests.port(8080, name=port["name"], protocol=protocol) for port in listed],
            namespace="d",
        ),
    ]


def put(bench: SyncBench, objects: list[dict[str, Any]]) -> None:
    for raw in objects:
        bench.put(raw)


def desired(bench: SyncBench) -> dict[Any, Any]:
    """Return the table of a node that begins with the objects of a bench."""
    (proxier,) = bench.sync.proxiers.families
    fresh = DesiredTables(proxier.mode.rendering, proxier.settings)
    state = bench.view.state
    fresh.apply(
        {name: service_ports_of(state, name, proxier.context.node) for name in state.services}, lambda _name: ()
    )
    return dict(fresh.desired[RESOURCE])


def portion(bench: SyncBench) -> None:
    bench.now += PORTION_PAUSE_SECONDS
    bench.timers.run()


def test_a_service_that_is_larger_than_a_portion_is_programmed_some_ports_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = SyncBench(monkeypatch)
    bench.sync.sync(first=True)
    put(bench, giant(1, 1))
    bench.sync.sync()
    seen = []
    while bench.sync.syncer.is_waiting:
        before = len(bench.table)
        portion(bench)
        seen.append(len(bench.table) - before)
        put(bench, small(len(seen)))
        bench.sync.sync()
        assert f"10.96.0.{len(seen)}" in served(bench)
    assert len(seen) >= 4 and max(seen) < 2 * min(seen)
    assert bench.table == desired(bench) and not bench.view.pending_services


def test_every_port_follows_however_often_a_service_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SyncBench(monkeypatch)

    def uses_the_first_endpoint() -> bool:
        lists = [value for each, value in bench.table.items() if each.kind == "list"]
        return any(item.startswith(bytes([10, 244, 1, 1])) for value in lists for item in value)

    put(bench, giant(1, 1))
    bench.sync.sync(first=True)
    assert uses_the_first_endpoint()
    for other in range(2, 12):
        put(bench, giant(1, other))
        bench.sync.sync()
        assert bench.sync.syncer.is_waiting
        portion(bench)
    assert not uses_the_first_endpoint()
    while bench.sync.syncer.is_waiting:
        portion(bench)
    assert bench.table == desired(bench)


@pytest.mark.parametrize("change", ["deleted", "other numbers", "one port"])
def test_what_concerns_several_ports_of_a_service_is_one_step(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Where a port takes over the number of another one, no step leaves that number to both or to none."""
    bench = SyncBench(monkeypatch)
    put(bench, giant(1, 1))
    bench.sync.sync(first=True)
    numbers = len(served_ports(bench))
    if change == "deleted":
        bench.delete(giant(1, 1)[0])
    elif change == "one port":
        put(bench, giant(1, 2, ports=1))
    else:
        put(bench, giant(1, 2, names="q"))
    bench.sync.sync()
    expected = {"deleted": {0}, "other numbers": {numbers}, "one port": {1}}[change]
    while bench.sync.syncer.is_waiting:
        portion(bench)
        assert len(served_ports(bench)) in expected
    assert bench.table == desired(bench)


def served_ports(bench: SyncBench) -> set[bytes]:
    """Return the ports of the giant's cluster IP that have a frontend in the table."""
    address = bytes([10, 97, 0, 1])
    rows = bench.mode.resource.table
    return {each.key[4:] for each in rows if each[:2] == ("element", "service-frontends") and each.key[:4] == address}


def test_connections_are_examined_again_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile flows may have begun to the former endpoint of a port that had not been replaced."""
    examined: list[bool] = []
    monkeypatch.setattr(stale_flows, "ConntrackSocket", lambda _progress: contextlib.nullcontext())
    bench = SyncBench(monkeypatch)

    def examine(*_arguments: Any) -> int:
        examined.append(bench.sync.syncer.is_waiting)
        return 0

    monkeypatch.setattr(stale_flows, "delete_stale", examine)
    put(bench, giant(1, 1, protocol="UDP"))
    bench.sync.sync(first=True)
    put(bench, giant(1, 2, protocol="UDP"))
    bench.sync.sync()
    examined.clear()
    while bench.sync.syncer.is_waiting:
        portion(bench)
    assert len(examined) == 2 and bench.table == desired(bench)


def test_a_node_that_is_set_up_again_keeps_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables are new and must have every Service before the kernel is made equal to them."""
    bench = SyncBench(monkeypatch)
    for number in range(1, 5):
        put(bench, large(f"large{number}", number))
    bench.sync.sync(first=True)
    before = served(bench)
    bench.sync.rebuild(bench.request())
    bench.sync.sync()
    assert served(bench) == before and len(before) > 4
