# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ServicePorts that are hashed: which are, what they contribute to the table, and what a change of endpoints costs."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import SLOTS
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import ServicePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import Encoder
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Planner
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables import hashing
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import (
    RENDERING,
    service_port_entries,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.own_names import is_own
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.slots import MOST_ENDPOINTS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.text import describe
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo

from .samples import MAGLEV, sample_route, sample_settings

PORTS = ServicePolicy(scheduler="mh", scheduler_flags=("mh-port",))


def hashed(number: int = 1, endpoints: int = 10, family: str = "IPv4", **changes: Any) -> ServicePortInfo:
    return sample_route(family, number, endpoints, **{"policy": MAGLEV, **changes})


def own_table(info: ServicePortInfo, **settings: Any) -> dict[Any, Any]:
    return {key: value for _table, key, value in service_port_entries(info, sample_settings(info.family, **settings))}


def chains(made: dict[Any, Any], family: str = "IPv4") -> list[str]:
    """Return the rules of all chains, each after the name of its chain."""
    return [
        f"{key[1]}: {line.strip()}"
        for key, value in made.items()
        if key[0] == "chain"
        for line in describe(family, key, value)[1:-1]
    ]


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({}, ["cluster-hash-42: dnat ip to ip daddr . meta l4proto . th dport . jhash ip saddr mod 600 seed 0x6b6e7078"
              " map @service-slots-42"]),
        ({"policy": PORTS},
         ["cluster-hash-port-42: dnat ip to ip daddr . meta l4proto . th dport . jhash ip saddr . th sport mod 600"
          " seed 0x6b6e7078 map @service-slots-42"]),
        ({"internal_local": True},
         ["local-hash-42: dnat ip to ip daddr . meta l4proto . th dport . jhash ip saddr mod 600 seed 0x6b6e7078"
          " map @service-local-slots-42"]),
        ({"family": "IPv6"},
         ["cluster-hash-af: dnat ip6 to ip6 daddr . meta l4proto . th dport . jhash ip6 saddr mod 600 seed 0x6b6e7078"
          " map @service-slots-af"]),
    ],
)  # fmt: skip
def test_the_rule_of_a_cluster_ip(changes: dict[str, Any], rules: list[str]) -> None:
    info = hashed(**changes)
    assert chains(own_table(info), info.family) == rules


def test_external_traffic_has_chains_of_its_own() -> None:
    made = own_table(hashed(external_local=True, externally_accessible=True, node_port=30001))
    lists = sorted(key[1] for key in made if key[0] == "list")
    assert lists == ["nodeport-local-slots-42", "nodeport-slots-42", "service-slots-42"]
    assert [line for line in chains(made) if line.startswith("nodeport-external-")][-1] == (
        "nodeport-external-hash-42-hash-42: goto nodeport-local-hash-42"
    )
    cluster = own_table(hashed(externally_accessible=True, external_ips=("203.0.113.1",)))
    assert "masquerade-hash-42: goto cluster-hash-42" in chains(cluster)


def test_no_rule_depends_on_the_number_of_services() -> None:
    """The maps of slots, and their chains, are shared by all ServicePorts that are hashed."""
    infos = [hashed(number, 2) for number in range(1, 3000)]
    table = RENDERING.desired_tables({info.key: info for info in infos}, sample_settings("IPv4"))["table objects"]
    slots = {key[1] for key in table if key[0] == "set" and "-slots-" in key[1]}
    assert len(slots) <= 256 and all(is_own("set", name) for name in slots)
    per_map = [sum(key[0] == "list" and key[1] == name for key in table) for name in slots]
    assert max(per_map) < 4 * len(infos) / 256


def test_names_are_known_as_this_projects() -> None:
    made = own_table(hashed(external_local=True, externally_accessible=True, node_port=30001, policy=PORTS))
    named = [key for key in made if key[0] in ("set", "chain")]
    assert len(named) == 7 and all(is_own(*key) for key in named)


def test_every_frontend_has_the_same_slots() -> None:
    made = own_table(hashed(externally_accessible=True, external_ips=("203.0.113.1",), node_port=30001))
    values = [value for key, value in made.items() if key[0] == "list"]
    assert len(values) == 3 and len(set(values)) == 1 and len(values[0]) == SLOTS


def test_removing_an_endpoint_replaces_only_its_slots() -> None:
    ten = hashed()
    nine = ten._replace(cluster=ten.cluster[:4] + ten.cluster[5:])
    change = difference(own_table(ten), own_table(nine))
    assert not change.added and not change.removed and len(change.replaced) == 1
    (transaction,) = Planner(Encoder("IPv4")).transactions(change)
    assert {each.label for each in transaction.messages} == {
        "elements of service-slots-42 to be removed",
        "elements of service-slots-42",
    }
    ((before, after),) = change.replaced.values()
    assert sum(one != other for one, other in zip(before, after)) <= 0.12 * SLOTS


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_the_endpoint_of_a_client_is_the_one_in_its_slot(family: str) -> None:
    """Another node sees the same endpoints in another order, or knows that others are local."""
    info = hashed(family=family)
    other = tuple(endpoint._replace(is_local=False) for endpoint in reversed(info.cluster))
    source = "192.0.2.{}" if family == "IPv4" else "2001:db8::{}"
    for number in range(1, 100):
        here = hashing.endpoint_of(info, info.cluster, source.format(number))
        assert hashing.endpoint_of(info, other, source.format(number)).text == here.text


def test_slots_follow_weights() -> None:
    info = hashed(endpoints=3)
    heavy = (info.cluster[0]._replace(weight=4), *info.cluster[1:])
    (slots,) = (value for key, value in own_table(info._replace(cluster=heavy)).items() if key[0] == "list")
    counts = sorted(slots.count(data) for data in set(slots))
    assert len(counts) == 3 and 300 <= counts[-1] <= 460


@pytest.mark.parametrize(
    ("changes", "settings", "clause"),
    [
        ({"affinity_seconds": 60}, {}, "scheduler mh is not used: sessionAffinity ClientIP has precedence"),
        ({"endpoints": MOST_ENDPOINTS + 1}, {},
         "scheduler mh is not used: there are 151 endpoints, but at most 150 can be hashed"),
        ({"load_balancer_ips": tuple(f"198.51.100.{number}" for number in range(16)), "node_port": 30001}, {},
         "scheduler mh is not used: there are 18 addresses and node ports, but at most 16 can be hashed"),
        ({}, {"schedulers": frozenset()},
         "scheduler mh is not used: this kernel has no jhash of nf_tables (CONFIG_NFT_HASH)"),
    ],
)  # fmt: skip
def test_what_cannot_be_hashed_is_drawn_at_random_and_named(
    changes: dict[str, Any], settings: dict[str, Any], clause: str
) -> None:
    info = hashed(**changes)
    assert list(RENDERING.ignored_annotation(info, sample_settings("IPv4", **settings))) == [clause]
    made = own_table(info, **settings)
    assert not any(key[0] == "set" and "slots" in key[1] for key in made)
    assert any(key[0] == "chain" for key in made)


@pytest.mark.parametrize(
    ("policy", "clauses"),
    [
        (MAGLEV, []),
        (ServicePolicy(scheduler="sh", scheduler_flags=("sh-fallback", "sh-port")), []),
        (ServicePolicy(scheduler="mh", scheduler_flags=("flag-1", "flag-2")), []),
        (ServicePolicy(scheduler="mh", scheduler_flags=("sh-port",)), ["scheduler mh has no flag sh-port"]),
        (ServicePolicy(scheduler="mh", persistence_v4=24),
         ["nftables mode has no persistence netmask; affinity distinguishes every client"]),
        (ServicePolicy(scheduler="lc"), ["nftables mode has no scheduler lc; its own (random) is used"]),
    ],
)  # fmt: skip
def test_parts_of_policies_that_have_no_effect(policy: ServicePolicy, clauses: list[str]) -> None:
    assert list(RENDERING.ignored_annotation(hashed(policy=policy), sample_settings("IPv4"))) == clauses


@pytest.mark.parametrize("flag", ["mh-port", "flag-2"])
def test_flags_that_include_the_port(flag: str) -> None:
    info = hashed(policy=ServicePolicy(scheduler="mh", scheduler_flags=(flag,)))
    found = {hashing.endpoint_of(info, info.cluster, "192.0.2.1", port).text for port in range(1024, 1200)}
    assert len(found) == 10
