# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""States of a few Services on one node, and the packets that tell them apart."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Generic, Iterable, NamedTuple, Optional, Sequence, TypeVar

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import BEHAVIOURS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo, ServicePortName
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.unit.rendering.nftables.samples import sample_settings


class Net(NamedTuple):
    """Addresses of a family. ``pods``: the endpoints, of which the second is on another node. ``clients``: another
    pod, clients inside both source ranges, inside the wide one only, and outside.
    """

    node: str
    pods: tuple[str, ...]
    clients: tuple[str, ...]
    narrow: str
    wide: str
    cluster: str
    external: str
    balancer: str


NETS = {
    "IPv4": Net(
        "172.18.0.2", ("10.244.1.1", "10.244.2.1", "10.244.1.2"),
        ("10.244.1.9", "198.51.100.7", "198.51.7.7", "192.0.2.9"), "198.51.100.0/24", "198.51.0.0/16",
        "10.96.0.{}", "203.0.113.{}", "198.18.0.{}",
    ),
    "IPv6": Net(
        "fd00:172:18::2", ("fd00:10:244:1::1", "fd00:10:245::1", "fd00:10:244:1::2"),
        ("fd00:10:244:1::9", "2001:db8:51:100::7", "2001:db8:51:7::7", "2001:db8:9::9"), "2001:db8:51:100::/64",
        "2001:db8:51::/48", "fd00:10:96::{}", "2001:db8:52::{}", "2001:db8:53::{}",
    ),
}  # fmt: skip
_NODES = ("node1", "node2", "node1")
NODES = tuple(net.node for net in NETS.values())


class Trait(NamedTuple):
    """What distinguishes a Service. ``kind``: its type; ``weights``: those of its endpoints differ."""

    spec: dict[str, Any] = {}
    kind: str = "ClusterIP"
    external: bool = False
    port: int = 80
    protocol: str = "TCP"
    metadata: dict[str, Any] = {}
    weights: bool = False
    terminating: bool = False


_LOCAL = {"externalTrafficPolicy": "Local"}
_AFFINITY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}
_NODE_LOCAL = {"labels": {"kubenode.proxy/node-local": "true"}}
TRAITS: dict[str, Trait] = {
    "cluster": Trait(),
    "node port": Trait(kind="NodePort"),
    "external IP": Trait(external=True),
    "open": Trait(kind="LoadBalancer"),
    "narrow": Trait({"loadBalancerSourceRanges": ["narrow"]}, "LoadBalancer"),
    "wide": Trait({"loadBalancerSourceRanges": ["wide"]}, "LoadBalancer"),
    "internal local": Trait({"internalTrafficPolicy": "Local"}),
    "external local": Trait(_LOCAL, "LoadBalancer"),
    "affinity": Trait(_AFFINITY, "NodePort"),
    "allowed": Trait(kind="NodePort", metadata={"annotations": {"kubenode.proxy/allowed-sources": "narrow"}}),
    "hashed": Trait(kind="NodePort", metadata={"annotations": {"kubenode.proxy/scheduler": "mh"}}),
    "weights": Trait(kind="NodePort", weights=True),
    "terminating": Trait(kind="NodePort", terminating=True),
    "node-local": Trait(metadata=_NODE_LOCAL),
    "other port": Trait(port=81),
    "UDP": Trait(protocol="UDP"),
}
_KINDS = ("ClusterIP", "NodePort", "LoadBalancer")


@cache
def _combined(traits: str) -> Trait:
    """Return what the traits, separated by ``+``, are together."""
    found = [TRAITS[name] for name in traits.split("+")]
    return Trait(
        {key: value for each in found for key, value in each.spec.items()},
        max((each.kind for each in found), key=_KINDS.index),
        any(each.external for each in found),
        max(each.port for each in found),
        max(each.protocol for each in found),
        {key: value for each in found for key, value in each.metadata.items()},
        any(each.weights for each in found),
        any(each.terminating for each in found),
    )


#: The traits with source ranges.
RANGES = ("narrow", "wide", "allowed")


def ranges_of(one: Any) -> frozenset[str]:
    """Return the source ranges of a state of one Service."""
    return frozenset(trait for trait in RANGES if one and trait in one[0])


PAIRS = ["+".join(pair) for pair in itertools.combinations(list(TRAITS)[1:], 2)]

#: The traits of a Service and its endpoints as a bit mask; None without the Service.
One = Optional[tuple[str, int]]
State = tuple[One, ...]


class Node(NamedTuple):
    """What decides beside Services what a node does. ``changes``: of settings, as pairs."""

    family: str = "IPv4"
    behaviour: str = "kube-proxy"
    changes: tuple[tuple[str, Any], ...] = ()

    def settings(self, **changes: Any) -> DataplaneSettings:
        behaviour = BEHAVIOURS[self.behaviour]
        return sample_settings(self.family, behaviour=behaviour, **{**changes, **dict(self.changes)})


NODE = Node()
VARIETIES = [Node(family, behaviour) for family in NETS for behaviour in BEHAVIOURS]


def ones(masks: Sequence[int] = (0, 1, 2, 3, 5), traits: Sequence[str] = tuple(TRAITS)) -> list[One]:
    """Return the states of one Service with these endpoints."""
    return [None, *itertools.product(traits, masks)]


Change = tuple[State, State]
AnyState = TypeVar("AnyState")


def all_changes() -> list[Change]:
    """Return every change of one Service with one trait."""
    return [((old,), (new,)) for old, new in itertools.permutations(ones(), 2)]


def sample(count: int) -> list[Change]:
    """Return some changes of one Service, always the same."""
    return random.Random(count).sample(all_changes(), count)


def pair_changes(seed: int, count: int) -> list[Change]:
    """Return changes of one Service with two traits: the first for each pair of traits, then others."""
    chosen, others = random.Random(seed), ones(traits=PAIRS)
    first = [((one, chosen.choice((0, 1, 2, 3, 5))),) for one in PAIRS]
    olds = first + [(chosen.choice(others),) for _each in range(max(0, count - len(first)))]
    return [(old, (chosen.choice(others),)) for old in chosen.sample(olds, min(count, len(olds)))]


def random_changes(seed: int, count: int, services: int) -> list[Change]:
    """Return changes of several Services at once, among them changes of endpoints alone."""
    chosen, few = random.Random(seed), [None, *ones(traits=[*TRAITS, *PAIRS])]
    olds = [tuple(chosen.choices(few, k=services)) for _each in range(count)]
    return [(old, tuple(_other(chosen, few, one) for one in old)) for old in olds]


def _other(chosen: random.Random, few: Sequence[One], one: One) -> One:
    if one is None or chosen.random() < 0.5:
        return chosen.choice(few)
    return one[0], chosen.choice((0, 1, 2, 3, 5))


def _filled(value: Any, net: Net) -> Any:
    """Return a part of an object with the names of source ranges replaced by these."""
    if isinstance(value, dict):
        return {key: _filled(each, net) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, net) for each in value]
    return {"narrow": net.narrow, "wide": net.wide}.get(value, value)


def _service(number: int, trait: Trait, family: str) -> dict[str, Any]:
    net = NETS[family]
    port: dict[str, Any] = {"name": "p", "port": trait.port, "targetPort": 8080, "protocol": trait.protocol}
    if trait.kind != "ClusterIP":
        port["nodePort"] = 30000 + number
    address = net.cluster.format(number)
    spec = {"type": trait.kind, "clusterIP": address, "clusterIPs": [address], "ipFamilies": [family], "ports": [port]}
    if trait.external:
        spec["externalIPs"] = [net.external.format(number)]
    ingress = [{"ip": net.balancer.format(number)}] if trait.kind == "LoadBalancer" else []
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "ns", "name": f"s{number}", **_filled(trait.metadata, net)},
        "spec": {**spec, **_filled(trait.spec, net)},
        "status": {"loadBalancer": {"ingress": ingress}} if ingress else {},
    }


def _slices(number: int, trait: Trait, mask: int, family: str) -> list[dict[str, Any]]:
    conditions = {"ready": not trait.terminating, "serving": True, "terminating": trait.terminating}
    endpoints = [
        {"addresses": [ip], "nodeName": node, "conditions": conditions}
        for bit, (ip, node) in enumerate(zip(NETS[family].pods, _NODES))
        if mask >> bit & 1
    ]
    parts = [[each] for each in endpoints] if trait.weights else [endpoints]
    return [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "addressType": family,
            "metadata": {
                "namespace": "ns",
                "name": f"s{number}-{part}",
                "labels": {"kubernetes.io/service-name": f"s{number}"},
                "annotations": {"kubenode.proxy/weight": str(part)} if trait.weights else {},
            },
            "ports": [{"name": "p", "port": 8080, "protocol": trait.protocol}],
            "endpoints": several,
        }
        for part, several in enumerate(parts, 1)
    ]


@cache
def service_ports(state: State, family: str, behaviour: str) -> dict[ServicePortName, ServicePortInfo]:
    """Return the ServicePorts of a state on our node."""
    addresses = [{"type": "InternalIP", "address": NETS[family].node}]
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"}, "status": {"addresses": addresses}}
    ]
    for number, one in enumerate(state, 1):
        if one is not None:
            trait = _combined(one[0])
            objects += [_service(number, trait, family), *_slices(number, trait, one[1], family)]
    context = NodeContext(family, "node1", behaviour=BEHAVIOURS[behaviour])
    return all_service_ports(ClusterState.from_objects(objects), context)


class Packet(NamedTuple):
    """The first packet of a connection."""

    source: str
    destination: str
    port: int
    protocol: str = "tcp"


@cache
def packets(services: int, family: str = "IPv4") -> list[Packet]:
    """Return packets of endpoints, other pods, the node, and clients inside and outside the source ranges."""
    net = NETS[family]
    sources = (net.pods[0], *net.clients, net.node)
    goals: list[tuple[Any, ...]] = [(net.cluster.format(99), 80)]
    for number in range(1, services + 1):
        address = net.cluster.format(number)
        goals += [(address, 80), (address, 81), (address, 80, "udp"), (net.external.format(number), 80)]
        goals += [(net.balancer.format(number), 80), (net.node, 30000 + number)]
    return [Packet(source, *goal) for goal in goals for source in sources]


class Changes(ABC, Generic[AnyState]):
    """What makes changes from state to state, and records in ``faults`` what went wrong."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.states = 0

    @abstractmethod
    def change(self, old: AnyState, new: AnyState, crash: int = -1) -> bool:
        """Make a change; return whether the process has ended after ``crash`` of its steps and another continued."""

    def changes(self, several: Iterable[tuple[AnyState, AnyState]]) -> None:
        for old, new in several:
            self.change(old, new)

    def crashes(self, several: Iterable[tuple[AnyState, AnyState]]) -> None:
        """Make each change again and again, with a crash after each of its steps."""
        for old, new in several:
            crash = 1
            while self.change(old, new, crash):
                crash += 1
