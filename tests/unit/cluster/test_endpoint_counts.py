# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many endpoints Services have is kept up to date at the cost of each change, however many EndpointSlices exist."""

from __future__ import annotations

import random
from typing import Any, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster import service_limit
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api_addresses import claims_at
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import (
    EndpointSlice,
    NamespacedName,
    SliceEndpoint,
    SlicePort,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.owned_slices import EndpointCounts, OwnedSlices
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from tests.lab import manifests
from tests.unit.cluster.counted_work import instructions

FEW, MANY = 60, 180
VIPS = ["192.0.2.100", "192.0.2.101"]
OWNERS = [NamespacedName("default", name) for name in "ab"]


def service(name: str, ports: int, addresses: int = 0, ingress: Sequence[str] = ()) -> dict[str, Any]:
    return manifests.service(
        name,
        "10.96.0.1",
        [manifests.port(80 + number, name=f"p{number}") for number in range(ports)],
        type="LoadBalancer",
        externalIPs=[f"198.18.0.{number}" for number in range(addresses)],
        ingress=ingress,
    )


def endpoint_slice(number: int, ports: int, address: str = "10.1.0.1", owner: str = "web") -> dict[str, Any]:
    listed = [manifests.port(8080 + each, name=f"p{each}") for each in range(ports)]
    return manifests.endpoint_slice(owner, [manifests.endpoint(address)], listed, name=f"slice-{number}")


SERVICES = {
    "light": service("web", 3),
    "with a limit": service("web", 5),
    "refused in part": service("web", 20, 40),
    "with load balancers of the API servers": service("web", 5, 3, VIPS),
}
CHANGES = {
    "added": lambda state, ports: state.upsert(endpoint_slice(1000, ports)),
    "changed": lambda state, ports: state.upsert(endpoint_slice(1, ports, "10.1.0.2")),
    "with a port less": lambda state, ports: state.upsert(endpoint_slice(1, ports - 1)),
    "removed": lambda state, ports: state.delete(endpoint_slice(1, ports)),
    "moved": lambda state, ports: state.upsert(endpoint_slice(1, ports, owner="other")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("raw", SERVICES.values(), ids=list(SERVICES))
def test_a_change_of_one_slice_costs_the_same_however_many_there_are(
    raw: dict[str, Any], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_limit, "MOST_ENTRIES", 2_500)
    monkeypatch.setattr(service_limit, "ENTRIES_OF_ENDPOINT", 1)
    ports = min(5, len(raw["spec"]["ports"]))
    counts: list[int] = []
    for others in (FEW, MANY):
        state = ClusterState.from_objects([raw, *(endpoint_slice(number, ports) for number in range(others))])
        state.set_api_servers(claims_at((vip, 80) for vip in VIPS))
        counts.append(instructions(lambda state=state: CHANGES[change](state, ports)))
    assert counts[1] < 1.1 * counts[0]


def test_the_addresses_and_ports_of_load_balancers_are_not_multiplied() -> None:
    """Each change of an EndpointSlice decides whether the Service leads to the API servers."""
    counts: list[int] = []
    for number in (30, 60):
        balancers = [f"203.0.113.{each}" for each in range(number)]
        state = ClusterState.from_objects([service("web", number, 0, balancers), endpoint_slice(1, 1)])
        state.set_api_servers(claims_at((vip, 80) for vip in VIPS))
        counts.append(instructions(lambda state=state: state.upsert(endpoint_slice(1, 1, "10.1.0.2"))))
    assert counts[1] < 2.2 * counts[0]


# ---- the counts compared with those from scratch


def random_slice(chosen: random.Random) -> EndpointSlice:
    """Return a slice with any number of endpoints; ports may be listed twice."""
    names = [chosen.choice(["", "http", "dns"]) for _each in range(chosen.randrange(4))]
    return EndpointSlice(
        "default",
        chosen.choice("wxyz"),
        "",
        chosen.choice(["IPv4", "IPv6"]),
        tuple(SlicePort(name, chosen.choice(["TCP", "UDP"]), 80) for name in names),
        tuple(SliceEndpoint(f"10.1.0.{number}", "", True, True, False) for number in range(chosen.randrange(4))),
    )


@pytest.mark.parametrize("seed", range(50))
def test_the_counts_equal_those_of_the_slices_after_any_changes(seed: int) -> None:
    chosen = random.Random(seed)
    slices = OwnedSlices()
    for _step in range(200):
        owner, item = chosen.choice(OWNERS), random_slice(chosen)
        action = chosen.random()
        if action < 0.6:
            slices.put(owner, item)
        elif action < 0.9:
            if slices.get(owner, item.name) is not None:
                slices.drop(owner, item.name)
        elif action < 0.95:
            slices.pop(owner)
        else:
            given = [random_slice(chosen) for _each in range(chosen.randrange(4))]
            slices.replace(owner, {each.name: each for each in given})
        if chosen.random() < 0.7:
            checked = chosen.choice(OWNERS)
            found = slices.of(checked)
            assert vars(slices.counts_of(checked)) == vars(EndpointCounts(found.values()))
            assert slices.counts_of(checked).endpoints == sum(len(each.endpoints) for each in found.values())
    for owner in OWNERS:
        slices.pop(owner)
    assert not slices._counts


def test_what_is_served_is_the_same_in_any_order_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_limit, "MOST_ENTRIES", 60)
    monkeypatch.setattr(service_limit, "ENTRIES_OF_ENDPOINT", 3)
    monkeypatch.setattr(service_limit, "_OBJECT_BYTES", 50)
    served = set()
    for seed in range(30):
        chosen = random.Random(seed)
        state, kept = ClusterState(), {}
        for _step in range(30):
            if chosen.random() < 0.2:
                raw = service("web", chosen.randint(1, 6), chosen.randint(0, 4))
            else:
                raw = endpoint_slice(chosen.randint(1, 4), chosen.randint(1, 6), owner=chosen.choice(["web", "other"]))
            key = raw["kind"], raw["metadata"]["name"]
            if chosen.random() < 0.3:
                kept.pop(key, None)
                state.delete(raw)
            else:
                kept[key] = raw
                state.upsert(raw)
            whole = ClusterState.from_objects(kept.values())
            assert (state.services, state.skipped, state.excess) == (whole.services, whole.skipped, whole.excess)
            served.update(whole.skipped)
    assert len(served) > 10, "the limit is reached"
