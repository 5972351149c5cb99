# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What it costs, and what it leads to, that many Services make the same claims."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster import claims as module
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.claims import Claim, Claims, Conflict
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName, Service, ServicePort
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from tests.lab import manifests
from tests.unit.cluster.counted_work import instructions

FEW, MANY = 40, 160


def contender(number: int, day: int = 2, addresses: int = 3, ports: int = 3) -> dict[str, Any]:
    """Return a Service with the external addresses and ports that all of these have, and a cluster IP of its own."""
    return manifests.service(
        f"s{number}",
        f"10.96.{number >> 8}.{number & 255}",
        [manifests.port(1000 + each, name=f"p{each}") for each in range(ports)],
        namespace="tenant",
        metadata={"creationTimestamp": f"2026-01-{day:02}T00:00:00Z"},
        externalIPs=[f"203.0.113.{each}" for each in range(addresses)],
    )


class Counted(module._Claimant):
    """A claimant whose comparisons are executed in Python, so that they are counted."""

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return tuple.__ne__(self, other)

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return tuple.__lt__(self, other)

    __hash__ = tuple.__hash__


CHANGES = {
    "a new loser": lambda state: state.upsert(contender(201)),
    "a new winner": lambda state: state.upsert(contender(202, day=1)),
    "another cluster IP": lambda state: state.upsert(
        {**contender(203), "spec": {**contender(203)["spec"], "clusterIP": "10.96.9.9", "clusterIPs": ["10.96.9.9"]}}
    ),
    "the winner is deleted": lambda state: state.delete(contender(200)),
    "a loser is deleted": lambda state: state.delete(contender(204)),
    "a loser becomes older": lambda state: state.upsert(contender(205, day=1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_costs_the_same_however_many_others_make_the_claims(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_Claimant", Counted)
    counts = []
    for others in (FEW, MANY):
        objects = [contender(200, day=1), *(contender(number) for number in (203, 204, 205, *range(others)))]
        state = ClusterState.from_objects(objects)
        counts.append(instructions(lambda state=state: CHANGES[change](state)))
    # The sorted claimants are searched in a number of steps that grows with its logarithm.
    assert counts[1] < 1.2 * counts[0]


def test_the_texts_of_conflicts_are_made_when_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(module._Claimant, "__str__", lambda claimant: made.append(claimant.name) or "")
    state = ClusterState.from_objects([contender(number) for number in range(FEW)])
    before = state.conflicts
    assert len(before) == 9 * (FEW - 1)
    state.upsert(contender(FEW))
    assert len(state.conflicts.since(before)) == 9 and not made
    assert len(state.conflicts.first(4)) == 4 and len(made) == 8


def test_the_conflicts_are_the_same_object_until_one_changes() -> None:
    state = ClusterState.from_objects([contender(1), contender(2), contender(3, addresses=0)])
    before = state.conflicts
    state.upsert(contender(4, addresses=0))
    state.delete(contender(3))
    assert state.conflicts is before
    state.delete(contender(2))
    assert not state.conflicts and len(before) == 9


def test_each_object_of_a_batch_is_reported_as_progress() -> None:
    """Otherwise a watchdog would end an agent that applies a long list, again after each restart."""
    calls: list[int] = []
    view = ClusterView(progress=lambda: calls.append(len(view.state.services)))
    view.apply(Batch("Service", [contender(number) for number in range(10)], [], True))
    assert calls == list(range(10))
    view.apply(Batch("Service", [], [contender(number) for number in range(10)]))
    assert calls[10:] == list(range(10, 0, -1))


def test_building_the_state_again_is_reported_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    view = ClusterView(progress=lambda: calls.append(""))
    view.apply(Batch("Service", [contender(number) for number in range(10)], []))
    replace = Claims.replace

    def failing(self: Claims, name: NamespacedName, *versions: Any) -> set[NamespacedName]:
        if name.name == "s10":
            raise KeyError(name)
        return replace(self, name, *versions)

    monkeypatch.setattr(Claims, "replace", failing)
    calls.clear()
    view.apply(Batch("Service", [contender(10)], []))
    assert len(calls) == 11 and len(view.failures) == 1


# ---- the claims compared with those determined from scratch

NAMES = [NamespacedName("n", name) for name in "abcd"]
ADDRESSES = ["192.0.2.1", "192.0.2.2", "10.96.0.1"]
VERSIONS = st.builds(
    lambda name, ip, external, balancers, ports, node_port, created, static: Service(
        *name,
        "LoadBalancer",
        ip,
        "",
        tuple(ServicePort(str(port), "TCP", port, node_port * port) for port in sorted(ports)),
        external_ips=tuple(external),
        load_balancer_ips=tuple(balancers),
        created=created,
        static=static,
    ),
    st.sampled_from(NAMES),
    st.sampled_from(["10.96.0.1", "10.96.0.2"]),
    st.lists(st.sampled_from(ADDRESSES), max_size=2, unique=True),
    st.lists(st.sampled_from(ADDRESSES), max_size=2, unique=True),
    st.sets(st.sampled_from([80, 443]), min_size=1),
    st.sampled_from([0, 1]),
    st.sampled_from(["", "2024-01-01T00:00:00Z", "2026-01-01T00:00:00Z"]),
    st.sampled_from(["", "", "", "f.yaml"]),
)
SERVERS = st.frozensets(st.builds(Claim, st.sampled_from(ADDRESSES), st.sampled_from([80, 443]), st.just("TCP")))
STEPS = st.lists(st.tuples(st.integers(0, 5), VERSIONS, SERVERS, st.booleans(), st.booleans()), max_size=25)

Kept = dict[NamespacedName, tuple[Service, frozenset[Claim]]]


def from_scratch(kept: Kept, servers: frozenset[Claim]) -> list[Conflict]:
    """Return every conflict, with its text."""
    claimants: dict[Claim, list[Any]] = {claim: [module._API_SERVERS] for claim in servers}
    for name, (service, leading) in kept.items():
        for claim, claimant in module._claims_of(name, service, leading).items():
            claimants.setdefault(claim, []).append(claimant)
    found = []
    for claim, each in claimants.items():
        winner, *losers = sorted(each)
        for loser in losers:
            if winner is module._API_SERVERS:
                text = f"{claim} is claimed by {loser}, but is the address of an API server and remains that"
            else:
                text = f"{claim} is claimed by {winner} and {loser}; {winner.name} gets it"
            if loser is not module._API_SERVERS:
                found.append(Conflict(claim, winner.name, loser.name, text))
    return sorted(found)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_changes_one_by_one_equal_the_claims_determined_from_scratch(steps: list[tuple[Any, ...]]) -> None:
    claims, kept, servers = Claims(), {}, frozenset()
    seen, known = claims.conflicts, []
    for action, service, given_servers, leads, reported in steps:
        before = {(item.loser, item.claim) for item in from_scratch(kept, servers)}
        if action == 0:
            servers = given_servers
            affected = claims.set_servers(servers) | set(NAMES)
        else:
            earlier = kept.pop(service.key, (None, None))[0]
            now = service if action > 1 else None
            leading = servers if now is not None and leads and not service.static else frozenset()
            affected = claims.replace(service.key, earlier, now, leading) | {service.key}
            if now is not None:
                kept[service.key] = now, leading
        conflicts = from_scratch(kept, servers)
        after = {(item.loser, item.claim) for item in conflicts}
        assert {name for name, _claim in before ^ after} <= affected
        for name in NAMES:
            lost = {claim for loser, claim in after if loser == name}
            assert len(claims.lost_by(name)) == len(lost)
            own = module._claims_of(name, *kept.get(name, (None, frozenset())))
            assert {claim for claim in own if claim in claims.lost_by(name)} == lost
        if reported:
            # Some changes are seen together.
            assert list(claims.conflicts) == conflicts and len(claims.conflicts) == len(conflicts)
            assert claims.conflicts.first(3) == conflicts[:3]
            assert list(claims.conflicts.since(seen)) == [item for item in conflicts if item not in known]
            seen, known = claims.conflicts, conflicts
