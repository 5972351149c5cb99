# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The account of cost compared with the entries that the modes really make, for Services with every feature."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES, family_of
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster import model
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import (
    RATES,
    SLOTS,
    NodeFactors,
    Parts,
    Products,
    Rates,
    Shape,
    most_entries,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.owned_slices import EndpointCounts
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.health_check import CHECK
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.service_policy import (
    CILIUM_ALGORITHM,
    KUBE_ROUTER_FLAGS,
    KUBE_ROUTER_SCHEDULER,
    MODE,
    SERVICE_ANNOTATIONS,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.weight import CILIUM_WEIGHT, WEIGHT
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.service_limit import _bound
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import BEHAVIOURS, Behaviour
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import ServicePolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING as IPTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import OVER_NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import RENDERING as IPVS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables import hashing
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.firewall import NODE_PORT_CHECK
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING as NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.slot_limit import SlotLimit
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.mode import RENDERING as USERSPACE
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, service_ports_of
from tests.lab import manifests

NO_SETTINGS = ServicePolicySettings()
WEB = NamespacedName("shop", "web")
NODE_IPS = {
    "IPv4": ["192.0.2.1", "192.0.2.2", "192.0.2.3"],
    "IPv6": ["fd00:c::1", "fd00:c::2", "fd00:c::3"],
}
MODES = {
    "nftables": NFTABLES,
    "iptables": IPTABLES,
    "ipvs": IPVS,
    "ipvs over nftables": OVER_NFTABLES,
    "userspace": USERSPACE,
}
SOURCES = ["192.0.2.0/24", "10.0.0.0/8", "172.16.1.0/28", "172.16.9.1/32", "fd00::/16", "fd00:9::/64", "fd00:9::7/128"]


def some(chance: random.Random, values: list[str]) -> list[str]:
    return chance.sample(values, chance.randint(1, len(values)))


#: How a Service with each annotation is made. An annotation that is missing here fails the test.
ANNOTATIONS = {
    "kubenode.proxy/allowed-sources": lambda chance: ",".join(some(chance, SOURCES)),
    "kubenode.proxy/scheduler": lambda chance: chance.choice(["mh", "sh", "wrr", "random"]),
    "kubenode.proxy/scheduler-flags": lambda chance: chance.choice(["mh-port", "sh-port,sh-fallback"]),
    "kubenode.proxy/persistence-netmask": lambda chance: "24,64",
    "kubenode.proxy/slow-start": lambda chance: "1m",
    "kubenode.proxy/removed-endpoints": lambda chance: chance.choice(["reset", "reset-after=30s"]),
    MODE: lambda chance: "userspace",
    KUBE_ROUTER_SCHEDULER: lambda chance: chance.choice(["mh", "sh"]),
    KUBE_ROUTER_FLAGS: lambda chance: "flag-1",
    CILIUM_ALGORITHM: lambda chance: "maglev",
}
#: The fields of objects that the generator below sets, and those that make no entries.
MADE = {
    model.Service: {
        *("type", "cluster_ip_v4", "cluster_ip_v6", "ports", "external_ips", "has_external_ips", "load_balancer_ips"),
        *("source_ranges", "affinity_seconds", "external_traffic_policy_local", "internal_traffic_policy_local"),
        *("health_check_node_port", "policy", "aliases"),
    },
    model.ServicePolicy: {
        *("allowed_sources", "scheduler", "scheduler_flags", "persistence_v4", "persistence_v6", "slow_start"),
        *("userspace", "reset_after"),
    },
    model.EndpointSlice: {"family", "ports", "endpoints", "weight", "alias_weight"},
    model.SliceEndpoint: {"address", "node_name", "ready", "serving", "terminating"},
    model.Node: {"weight"},
}
MAKES_NONE = {
    model.Service: {"namespace", "name", "created", "static", "check", "for_outside_hosts", "node_local"},
    model.ServicePolicy: {"problems"},
    model.EndpointSlice: {"namespace", "name", "service_name", "trigger_time"},
    # They choose some of the endpoints.
    model.SliceEndpoint: {"zone_hints", "node_hints"},
    model.Node: set(model.Node._fields) - {"weight"},
}


def addresses(family: str, block: int, count: int) -> list[str]:
    form = "198.18.{}.{}" if family == "IPv4" else "2001:db8:{:x}::{:x}"
    return [form.format(block, number) for number in range(1, count + 1)]


class Sample:
    """A random Service with its EndpointSlices and Nodes; ``annotated``: with some of all annotations."""

    def __init__(self, seed: int, annotated: bool) -> None:
        chance = self.chance = random.Random(seed)
        self.families = chance.choice([["IPv4"], ["IPv6"], list(FAMILIES), list(FAMILIES)])
        # Large numbers of one thing at a time show a factor that is missing.
        numbers = [(1, 8, 3), (5, 2, 2), (1, 60, 1), (12, 1, 0), (3, 3, 1), (2, 5, 4)]
        self.ports, self.endpoints, self.addresses = chance.choice(
            [*numbers, (2, 1, 9), (1, 2, 14)] if annotated else numbers
        )
        self.annotations: dict[str, str] = {}
        if annotated:
            for name in some(chance, list(ANNOTATIONS)):
                self.annotations[name] = ANNOTATIONS[name](chance)
        service = self._service()
        self.objects = [service, *self._slices(annotated, service["spec"]["ports"])]
        if annotated:
            node = manifests.node(
                "n1", "192.0.2.1", "10.244.1.0/24", metadata={"annotations": {WEIGHT: str(chance.choice([1, 2, 7]))}}
            )
            self.objects.append(node)

    def _service(self) -> dict[str, Any]:
        chance = self.chance
        own = {"IPv4": "10.96.0.1", "IPv6": "fd00:96::1"}
        external, balancers = (
            [ip for family in self.families for ip in addresses(family, block, self.addresses * factor)]
            for block, factor in enumerate(chance.choice([(0, 0), (1, 0), (0, 1), (2, 1)]), 1)
        )
        spec: dict[str, Any] = {}
        if chance.random() < 0.4:
            # Without any of a family, that is closed.
            both = [] if self.annotations else ["10.9.0.0/16", "fd00:9:9::/64"]
            spec["loadBalancerSourceRanges"] = both + some(chance, SOURCES)
        if chance.random() < 0.3:
            spec["sessionAffinity"] = "ClientIP"
        node_ports = chance.random() < 0.5
        return manifests.service(
            "web",
            [own[family] for family in self.families],
            [
                manifests.port(
                    80 + number,
                    name=f"p{number}",
                    protocol=chance.choice(["TCP", "UDP"]),
                    **({"nodePort": 30000 + number} if node_ports else {}),
                )
                for number in range(self.ports)
            ],
            namespace="shop",
            metadata={"annotations": self.annotations},
            type="LoadBalancer",
            externalIPs=external,
            ingress=balancers,
            externalTrafficPolicy=chance.choice(["Local", "Cluster"]),
            internalTrafficPolicy=chance.choice(["Local", "Cluster", "Cluster"]),
            healthCheckNodePort=32000,
            **spec,
        )

    def _slices(self, annotated: bool, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        chance = self.chance
        ports = [
            manifests.port(8080 + index, name=port["name"], protocol=port["protocol"])
            for index, port in enumerate(listed)
        ]
        found = []
        for family in self.families:
            for number in range(chance.choice([1, 2, 3])):
                metadata: dict[str, Any] = {}
                if annotated:
                    kinds = some(chance, [WEIGHT, CILIUM_WEIGHT, "none"])
                    weights = {kind: str(chance.choice([0, 1, 2, 100, 255])) for kind in kinds if kind != "none"}
                    metadata = {"annotations": weights}
                node = chance.choice(["n1", "n1", "n2"]) if annotated else "n1"
                endpoints = [
                    manifests.endpoint(address, node, ready=not annotated or chance.random() < 0.9)
                    for address in addresses(family, 20 + number, self.endpoints)
                ]
                found.append(
                    manifests.endpoint_slice(
                        "web",
                        endpoints,
                        ports,
                        name=f"web-{family.lower()}-{number}",
                        namespace="shop",
                        metadata=metadata,
                    )
                )
        return found


def shapes_of(state: ClusterState) -> list[Shape]:
    """Return the shapes of a state's Service as it is served."""
    service = state.services[WEB]
    counts = EndpointCounts(state.slices_of(WEB).values())
    weight = max(state.node_weights.values(), default=1)
    return Products(service, counts, weight).shapes(Parts.of(service))


def is_shared(key: Any) -> bool:
    """Return whether a chain or map of nftables mode is one that Services share; their number is bounded."""
    if getattr(key, "kind", "") not in ("chain", "set", "table"):
        return False
    if key.name == NODE_PORT_CHECK:
        return True
    return "/" not in key.name and "firewall-" not in key.name and "source-ranges" not in key.name


def entries_in(mode: str, rows: dict[Any, Any]) -> tuple[int, int]:
    """Return the entries of a table, and the elements of slots."""
    entries = slots = 0
    for key, value in rows.items():
        parts = getattr(value, "rules", getattr(value, "endpoints", value))
        count = len(parts) if parts.__class__ is tuple else 0
        count += len(getattr(value, "sources", None) or ())
        if is_shared(key):
            continue
        if isinstance(key, ChainKey) and mode == "ipvs":
            # The others exist while a set has any element, whatever Services there are.
            entries += sum(" -d " in f" {rule}" for rule in value)
        elif getattr(key, "kind", "") == "list":
            slots += count if "slots" in key.name else 0
            entries += 0 if "slots" in key.name else count
        else:
            entries += 1 + count
    return entries, slots


def node_ip(service: model.Service, family: str) -> str:
    """Return an address of the node in one of the allowed sources."""
    texts = (*service.source_ranges, *(service.policy.allowed_sources or ()))
    found = [text.rpartition("/")[0] for text in texts if family_of(text) == family]
    return found[0] if found else NODE_IPS[family][0]


def made(
    state: ClusterState,
    mode: str,
    behaviour: Behaviour,
    policy: ServicePolicySettings = NO_SETTINGS,
    counted: bool = False,
) -> tuple[int, int]:
    """Return the entries that a mode makes of the Service in both families, and the lists of slots.

    The node is one of those that may use the Service, if there are any.
    """
    entries = lists = 0
    for family in FAMILIES:
        ips = NODE_IPS[family]
        node = DataplaneSettings(
            family,
            "n1",
            node_ip(state.services[WEB], family),
            node_port_addresses=tuple(ips),
            node_addresses=tuple(("eth0", ip) for ip in ips),
            behaviour=behaviour,
            schedulers=frozenset(("mh", "sh", "wrr", "wlc", hashing.JHASH)),
            localhost_rejected=("tcp", "udp", "sctp"),
            count_bytes=counted and mode == "nftables",
        )
        tables = DesiredTables(MODES[mode], node)
        before = sum(entries_in(mode, rows)[0] for rows in tables.desired.values())
        context = NodeContext(family, "n1", behaviour=behaviour, policy=policy)
        infos = service_ports_of(state, WEB, context)
        limit = SlotLimit(MODES[mode])
        limit.count({WEB: infos})
        tables.apply({WEB: tuple(map(limit.applied, infos))}, lambda key: ())
        tables.pop_changes()
        found = [entries_in(mode, rows) for rows in tables.desired.values()]
        entries += sum(each[0] for each in found) - before
        slots = sum(each[1] for each in found)
        assert slots <= limit.slot_lists(WEB) * SLOTS <= hashing.MOST_LISTS_OF_SERVICE * SLOTS
        lists += slots // SLOTS
    return entries, lists


def rates(mode: str, policy: ServicePolicySettings, counted: bool) -> Rates:
    name = mode.partition(" ")[0]
    counters = 2 if counted and name == "nftables" else 0
    return RATES[name]._replace(node=NodeFactors(len(NODE_IPS["IPv4"]), counters, len(policy.node_port_sources)))


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_every_field_of_an_object_is_made_here_or_makes_no_entries(kind: Any) -> None:
    """A new field must be made by the generator, so that its entries are compared with the account."""
    assert MADE[kind] | MAKES_NONE[kind] == set(kind._fields)


def test_every_annotation_is_made_here() -> None:
    assert set(ANNOTATIONS) == set(SERVICE_ANNOTATIONS) and CHECK not in ANNOTATIONS


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_no_mode_makes_more_entries_than_the_account(first: int) -> None:
    hashed = weighted = 0
    for seed in range(first, first + 40):
        sample = Sample(seed, annotated=True)
        state = ClusterState.from_objects(sample.objects)
        assert state.slices_of(WEB) and not state._cut and not state.refusals
        chance = sample.chance
        if chance.random() < 0.5:
            found = [ip for item in state.slices_of(WEB).values() for ip in (each.address for each in item.endpoints)]
            rising = {(ip, port): chance.randint(1, 7) for ip in found for port in range(8080, 8100)}
            state.set_rising(WEB, rising if state.services[WEB].policy.slow_start else {})
        policy = ServicePolicySettings(
            aliases=chance.random() < 0.5,
            node_weights=True,
            node_port_sources=tuple(some(chance, SOURCES)) if chance.random() < 0.3 else (),
        )
        behaviour, counted = chance.choice(list(BEHAVIOURS.values())), chance.random() < 0.3
        shapes = shapes_of(state)
        assert most_entries(shapes) <= sum(map(_bound, shapes)), seed
        for mode in MODES:
            entries, lists = made(state, mode, behaviour, policy, counted)
            account = rates(mode, policy, counted).of(shapes).total
            assert entries <= account, (seed, mode, behaviour.name, entries, account, shapes, sample.annotations)
            hashed += lists
        weighted += any(shape.places > shape.endpoints for shape in shapes)
    assert hashed and weighted


@pytest.mark.parametrize("first", range(1000, 1080, 40))
def test_the_account_of_an_ordinary_service_is_at_most_half_as_much_again_as_its_entries(first: int) -> None:
    """On the node that has most of them."""
    for seed in range(first, first + 40):
        state = ClusterState.from_objects(Sample(seed, annotated=False).objects)
        shapes = shapes_of(state)
        for mode in MODES:
            entries = max(made(state, mode, behaviour)[0] for behaviour in BEHAVIOURS.values())
            account = rates(mode, NO_SETTINGS, False).of(shapes).total
            assert entries <= account <= 1.5 * entries, (seed, mode, entries, account, shapes)
