# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The limit of stable hashing on a node: which Services are hashed, in the agent's sync and in a full rendering."""

from __future__ import annotations

import random
from typing import Any, Iterable

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import SLOTS
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import ServicePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.report import ignored_annotations
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.explain import desired_family, explain
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.target import parse_target
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables import hashing
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING, NftablesRendering
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import RESOURCE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.slot_limit import SlotLimit, within_limit
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import all_service_ports
from tests.lab import manifests
from tests.unit.agent.sync_bench import SyncBench
from tests.unit.rendering.nftables.samples import MAGLEV, sample_route

#: A namespace has at most half of it if no other has any.
MOST, LIMIT, OF_SERVICE = 10, 5, 4
VIP = "203.0.113.1"
REFUSED = (
    "scheduler mh is not used: older Services have too many of the 10 addresses and node ports that can be hashed; a "
    "namespace has at most as many as are left"
)


@pytest.fixture(autouse=True)
def few_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NftablesRendering, "most_lists", MOST)
    monkeypatch.setattr(NftablesRendering, "most_lists_of_service", OF_SERVICE)


def requesting(number: int, minute: int, **changes: Any) -> ServicePortInfo:
    """Return a ServicePort of a Service that is created in a minute and requests hashing."""
    created = f"2026-01-31T12:{minute:02}:00Z"
    return sample_route("IPv4", number, 3, **{"policy": MAGLEV, "created": created, **changes})


def count(limit: SlotLimit, *ports: ServicePortInfo) -> set[str]:
    """Have a limit count Services with one port; return the names of those whose admission changed."""
    return {service.name for service in limit.count({port.key.service: [port] for port in ports})}


def admitted(limit: SlotLimit, ports: Iterable[ServicePortInfo]) -> set[str]:
    return {port.key.name for port in ports if limit.admits(port.key.service)}


def test_the_oldest_services_are_admitted_and_a_new_one_moves_no_other() -> None:
    limit = SlotLimit(RENDERING)
    ports = [requesting(number, 9 - number) for number in range(7)]
    count(limit, *ports)
    assert admitted(limit, ports) == {"svc2", "svc3", "svc4", "svc5", "svc6"}
    # Whatever its name. A Service without a time is the youngest.
    for newest in (requesting(0, 59), requesting(99, 59), requesting(50, 0, created="")):
        assert count(limit, newest) <= {newest.key.name}
        assert admitted(limit, ports[2:]) == {"svc2", "svc3", "svc4", "svc5", "svc6"}
        assert not limit.admits(newest.key.service)


def test_a_removed_service_admits_the_next_one_only() -> None:
    limit = SlotLimit(RENDERING)
    ports = [requesting(number, number) for number in range(9)]
    count(limit, *ports)
    assert {service.name for service in limit.count({ports[1].key.service: []})} == {"svc5"}
    assert count(limit, requesting(2, 2, policy=ServicePolicy())) == {"svc6"}
    assert count(limit, ports[3]._replace(cluster=(), reachable=(), endpoints=())) == set()


def test_services_are_admitted_up_to_the_first_that_does_not_fit() -> None:
    """Otherwise a smaller one would lose its slots as soon as an older, larger one fits."""
    limit = SlotLimit(RENDERING)
    large = requesting(1, 1, load_balancer_ips=("198.51.100.1", "198.51.100.2"), node_port=30001)
    ports = [requesting(0, 0), requesting(3, 0), large, requesting(2, 2)]
    count(limit, *ports)
    assert admitted(limit, ports) == {"svc0", "svc3"}
    assert count(limit, large._replace(node_port=0)) == {"svc1"}


def test_a_service_with_too_many_lists_is_refused_alone() -> None:
    limit = SlotLimit(RENDERING)
    large = requesting(1, 1, load_balancer_ips=tuple(f"198.51.100.{number}" for number in range(OF_SERVICE)))
    count(limit, large, requesting(2, 2))
    assert admitted(limit, [large, requesting(2, 2)]) == {"svc2"} and limit.admitted == 1
    (problem,) = limit.applied(large).policy.problems
    assert "its ports have 5 addresses and node ports, but at most 4 of a Service can be hashed" in problem


def of_namespace(name: str, number: int, minute: int) -> ServicePortInfo:
    info = requesting(number, minute)
    return info._replace(key=info.key._replace(namespace=name))


def test_the_namespace_that_takes_most_is_refused_first_and_creating_a_service_affects_no_older_one() -> None:
    limit = SlotLimit(RENDERING)
    greedy = [of_namespace("greedy", number, number) for number in range(9)]
    count(limit, *greedy)
    assert admitted(limit, greedy) == {f"svc{number}" for number in range(LIMIT)}
    others = [of_namespace("other", 10 + number, 30 + number) for number in range(5)]
    for other in others:
        count(limit, other)
        assert admitted(limit, greedy) == {f"svc{number}" for number in range(LIMIT)}
    # As many as are left then.
    assert admitted(limit, others) == {"svc10", "svc11"} and limit.admitted == 7


@pytest.mark.parametrize("seed", range(20))
def test_all_nodes_agree_and_only_younger_services_are_affected(seed: int) -> None:
    """Whatever changes each node has seen, and in which order."""
    chance = random.Random(seed)
    limit, known = SlotLimit(RENDERING), {}
    for step in range(60):
        info = of_namespace(chance.choice("abc"), chance.randrange(20), step if chance.random() < 0.7 else 59 - step)
        before = {each for each in known if limit.admits(each)}
        if chance.random() < 0.3 and known:
            gone = chance.choice(list(known))
            del known[gone]
            limit.count({gone: []})
            continue
        is_new = info.key.service not in known
        known[info.key.service] = info
        limit.count({info.key.service: [info]})
        fresh = SlotLimit(RENDERING)
        shuffled = chance.sample(list(known.values()), len(known))
        fresh.count({each.key.service: [each] for each in shuffled})
        now = {each for each in known if limit.admits(each)}
        assert now == {each for each in known if fresh.admits(each)}
        assert sum(limit.slot_lists(each) for each in now) == limit.admitted <= MOST
        if is_new:
            assert all(known[each].created >= info.created for each in before - now)


@pytest.mark.parametrize(
    ("changes", "lists"),
    [
        ({}, 1),
        ({"node_port": 30001, "external_ips": (VIP,), "load_balancer_ips": (VIP, "203.0.113.2")}, 4),
        ({"node_port": 30001, "external_local": True, "internal_local": True}, 3),
        ({"affinity_seconds": 60}, 0),
        ({"policy": ServicePolicy(scheduler="lc")}, 0),
        ({"load_balancer_ips": tuple(f"198.51.100.{number}" for number in range(16))}, 0),
    ],
)  # fmt: skip
def test_a_service_never_has_more_lists_than_it_is_counted_for(changes: dict[str, Any], lists: int) -> None:
    info = requesting(1, 1, externally_accessible=True, **changes)
    assert hashing.slot_lists(info) == lists
    settings = SyncBench.SETTINGS._replace(schedulers=frozenset((hashing.JHASH,)))
    made = [key for _table, key, _value in RENDERING.entries(info, settings) if key[0] == "list" and "slots" in key[1]]
    assert len(made) == lists


def service(number: int, minute: int, **spec: Any) -> dict[str, Any]:
    """Return a Service that requests hashing, unless ``minute`` is 0."""
    metadata: dict[str, Any] = {"creationTimestamp": f"2026-01-31T12:{minute:02}:00Z"}
    if minute:
        metadata["annotations"] = {"kubenode.proxy/scheduler": "mh"}
    ports = [manifests.port(80 + each, name=f"p{each}") for each in range(1 + number % 2)]
    return manifests.service(f"s{number}", f"10.96.0.{number + 1}", ports, namespace="d", metadata=metadata, **spec)


def endpoints(number: int, addresses: Iterable[int]) -> dict[str, Any]:
    ports = [manifests.port(8080 + each, name=f"p{each}") for each in range(2)]
    found = [manifests.endpoint(f"10.244.0.{each}", "n1") for each in addresses]
    return manifests.endpoint_slice(f"s{number}", found, ports, namespace="d")


def expected_ignored(bench: SyncBench, state: ClusterState) -> list[str]:
    ports = within_limit(RENDERING, all_service_ports(state, bench.context.node))
    return sorted(ignored_annotations(RENDERING, ports.values(), bench.context.settings))


@pytest.mark.parametrize("seed", range(3))
def test_the_agent_programs_what_a_whole_rendering_does(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    bench = SyncBench(monkeypatch, schedulers=(hashing.JHASH,))
    bench.sync.sync(first=True)
    refused = admitted_again = 0
    before: list[str] = []
    for _round in range(40):
        number = chance.randrange(10)
        raw: dict[str, Any] = service(number, chance.randrange(5))
        if chance.random() < 0.4:
            raw = endpoints(number, chance.sample(range(1, 200), chance.randrange(4)))
        deliver = bench.delete if chance.random() < 0.2 else bench.put
        deliver(raw)
        bench.sync.sync()
        state = bench.view.state
        ports = within_limit(RENDERING, all_service_ports(state, bench.context.node))
        assert bench.table == RENDERING.desired_tables(ports, bench.context.settings)[RESOURCE]
        assert sum(key[0] == "list" and "slots" in key[1] for key in bench.table) <= LIMIT
        (proxier,) = bench.sync.proxiers.families
        lines = sorted(line for found in proxier.ignored.values() for line in found)
        assert lines == expected_ignored(bench, state)
        refused += len(set(lines) - set(before))
        admitted_again += len(set(before) - set(lines))
        before = lines
    assert refused and admitted_again


def test_refused_services_are_named_in_the_log_an_event_the_metrics_and_explain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = SyncBench(monkeypatch, schedulers=(hashing.JHASH,))
    for number in range(0, 2 * (LIMIT + 2), 2):
        bench.put(service(number, 1 + number))
        bench.put(endpoints(number, (1, 2)))
    bench.sync.sync(first=True)
    lines = [f"Service d/s{number}:p0 (80/TCP): {REFUSED}" for number in (10, 12)]
    assert all(f'reason="{line}"' in bench.text.getvalue() for line in lines)
    assert sorted(event[-1] for event in bench.events if event[2] == "AnnotationIgnored") == lines
    assert b'kubenode_proxy_service_annotations_ignored{ip_family="IPv4"} 2.0' in bench.metrics.text()
    assert sum(len(value) for key, value in bench.table.items() if "slots" in key[1] and key[0] == "list") == (
        LIMIT * SLOTS
    )
    family = desired_family(bench.view.state, RENDERING, bench.context)
    outcomes = [
        explain(bench.view.state, [family], "nftables", parse_target(f"d/s{number}")).found[0].outcome
        for number in (8, 10)
    ]
    assert outcomes == ["sent to one of 2 endpoints, by the client's address", "sent to one of 2 endpoints"]


def test_other_modes_have_no_limit() -> None:
    ports = {info.key: info for info in (requesting(number, number) for number in range(20))}
    for mode in ("iptables", "ipvs", "userspace"):
        assert within_limit(mode_named(mode).rendering, ports) == ports
