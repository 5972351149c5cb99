# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries that one ServicePort contributes to the tables of ipvs mode (kube-proxy 1.36).

Several ServicePorts may contribute the same key, such as one cluster IP with several ports; merging counts them.
"""

from __future__ import annotations

from typing import Callable, FrozenSet, Hashable, List, NamedTuple, Sequence, Tuple

from ...addresses import address_and_port, parse_network
from ...configuration.behaviour import Behaviour
from ...serviceports.info import Endpoint, ServicePortInfo, Sources
from ...serviceports.weights import risen, shares
from ..merged import Entry
from ..settings import DataplaneSettings
from .model import (
    ADDRESSES,
    DEVICE,
    FIREWALLED,
    REAL_SERVERS,
    REDIRECTED,
    SET_ELEMENTS,
    VIRTUAL_SERVERS,
    FirewalledPort,
    RealServer,
    RealServerKey,
    Redirect,
    SetElementKey,
    VirtualServerKey,
)
from .policies import INSIDE, endpoint_lists, keeps_flows
from .scheduling import hashed_by, schedule
from .sets import (
    CLUSTER_IP,
    EXTERNAL_DROPPED,
    EXTERNAL_IP,
    EXTERNAL_IP_LOCAL,
    HEALTH_CHECK_NODE_PORT,
    INTERNAL_DROPPED,
    IPVS_IPS,
    LOAD_BALANCER,
    LOAD_BALANCER_FW,
    LOAD_BALANCER_LOCAL,
    LOAD_BALANCER_SOURCE_CIDR,
    LOAD_BALANCER_SOURCE_IP,
    LOOP_BACK,
    NAMES,
    NODE_PORT_SETS,
)

_WANTED = RealServer(1)
#: Keeps its connections and gets no new ones.
_WITHOUT_NEW = RealServer(0)


class NodeFacts(NamedTuple):
    """The facts that ServicePorts need from the settings, computed once.

    ``owned``: addresses that other interfaces of the node have; they are not bound to the dummy device. ``node_ips``:
    the addresses on which node ports answer. ``scheduler``: the node's; ``schedulers``: others that can be used.
    """

    family: str
    scheduler: str
    owned: FrozenSet[str]
    node_ips: Tuple[str, ...]
    node_ip: str
    behaviour: Behaviour
    schedulers: FrozenSet[str] = frozenset()


def is_link_local(address: str) -> bool:
    """Return whether a canonical address is an IPv6 link-local one; 169.254.0.0/16 is treated as any other."""
    return ":" in address and address.startswith(("fe8", "fe9", "fea", "feb"))


def is_bindable(address: str) -> bool:
    """Return whether the kernel accepts a canonical address on the dummy device: no IPv6 loopback or multicast."""
    return ":" not in address or (address != "::1" and not (address.startswith("ff") and address.find(":") == 4))


def is_real_server(address: str) -> bool:
    """Return whether IPVS accepts a canonical address as a real server: unicast ones only (``ip_vs_new_dest``)."""
    if ":" in address:
        return is_bindable(address)
    first = address.partition(".")[0]
    return first != "0" and not (len(first) == 3 and "224" <= first <= "239")


def is_node_address(address: str) -> bool:
    """Return whether a local address counts as one of the node: not loopback, and for IPv6 not link-local."""
    return address != "::1" and not address.startswith("127.") and not is_link_local(address)


def node_facts(settings: DataplaneSettings) -> NodeFacts:
    """Compute the facts of a node from its settings.

    Node ports answer on all addresses of the node except those of the dummy device; when nodePortAddresses restrict
    them, on the addresses in these ranges, and then kube-proxy does count the dummy device's.
    """
    others = [address for interface, address in settings.node_addresses if interface != DEVICE]
    owned = [address for address in others if is_node_address(address)]
    restricted = bool(settings.node_port_cidrs) and not any(
        network is not None and network.prefix_length == 0 for network in map(parse_network, settings.node_port_cidrs)
    )
    if restricted:
        node_ips = [ip for ip in settings.node_port_addresses if not ip.startswith("127.") and ip != "::1"]
    else:
        node_ips = owned
    return NodeFacts(
        settings.family,
        settings.scheduler,
        frozenset(owned),
        tuple(dict.fromkeys(node_ips)),
        settings.node_ip,
        settings.behaviour,
        settings.schedulers,
    )


def service_port_entries(info: ServicePortInfo, facts: NodeFacts) -> List[Entry]:
    """Return what the ServicePort contributes: (table, key, value) triples. A key may occur more than once."""
    contribution = _Contribution(info, facts)
    contribution.add_all()
    return contribution.entries


class _Contribution:
    """Collects the entries of one ServicePort."""

    def __init__(self, info: ServicePortInfo, facts: NodeFacts) -> None:
        self.info = info
        self.facts = facts
        self.entries: List[Entry] = []
        self.lists = endpoint_lists(info, facts.behaviour)
        self._names = NAMES[info.family]
        fallback = facts.behaviour.hashing_falls_back
        self._settings = schedule(info, facts.scheduler, facts.schedulers, falls_back=fallback).server
        self._kept = [endpoint for endpoint in info.endpoints if keeps_flows(info, endpoint, facts.behaviour)]

    def add_all(self) -> None:
        """Add all entries."""
        info = self.info
        for endpoint in info.endpoints:
            if endpoint.is_local:
                self.in_set(LOOP_BACK, f"{endpoint.ip},{info.protocol}:{endpoint.port},{endpoint.ip}")
        self.in_set(CLUSTER_IP, f"{info.cluster_ip},{info.protocol}:{info.port}")
        self.add(ADDRESSES, info.cluster_ip, True)
        self.in_set(IPVS_IPS, info.cluster_ip)
        self.serve(info.cluster_ip, info.port, self.lists.internal)
        if self.lists.internal_dropped:
            self.in_set(INTERNAL_DROPPED, f"{info.cluster_ip},{info.protocol}:{info.port}")
        for address in info.external_ips:
            name = EXTERNAL_IP_LOCAL if info.external_local else EXTERNAL_IP
            self.in_set(name, f"{address},{info.protocol}:{info.port}")
            self.bind(address)
            self.serve_external(address, info.port, info.external_ip_sources)
        for address in info.load_balancer_ips:
            element = f"{address},{info.protocol}:{info.port}"
            self.in_set(LOAD_BALANCER, element)
            if info.external_local:
                self.in_set(LOAD_BALANCER_LOCAL, element)
            self.bind(address)
            self.serve_external(address, info.port, info.source_ranges)
        if info.node_port and self.facts.node_ips:
            _node_port_sets(info, self.facts, self.in_set)
            for address in self.facts.node_ips:
                self.serve_external(address, info.node_port, info.node_port_sources)
        if info.health_check_node_port and (self.facts.node_ips or not info.node_port):
            self.in_set(HEALTH_CHECK_NODE_PORT, str(info.health_check_node_port))

    def add(self, table: str, key: Hashable, value: object) -> None:
        self.entries.append((table, key, value))

    def in_set(self, name: str, element: str) -> None:
        self.entries.append((SET_ELEMENTS, SetElementKey(self._names[name], element), True))

    def bind(self, address: str) -> None:
        if address not in self.facts.owned and not is_link_local(address) and is_bindable(address):
            self.add(ADDRESSES, address, True)
            self.in_set(IPVS_IPS, address)

    def serve(self, address: str, number: int, endpoints: Sequence[Endpoint]) -> None:
        """Add a virtual server and its real servers."""
        server = VirtualServerKey(self.info.protocol, address, number)
        self.add(VIRTUAL_SERVERS, server, self._settings)
        shared = risen(endpoints) if hashed_by(self._settings) else endpoints
        weights = shares(shared) if self.info.weighted else ()
        for index, endpoint in enumerate(endpoints):
            if is_real_server(endpoint.ip):
                value = RealServer(weights[index]) if weights else _WANTED
                self.add(REAL_SERVERS, RealServerKey(server, endpoint.ip, endpoint.port), value)
        for endpoint in self._kept:
            if endpoint not in endpoints and is_real_server(endpoint.ip):
                self.add(REAL_SERVERS, RealServerKey(server, endpoint.ip, endpoint.port), _WITHOUT_NEW)

    def serve_external(self, address: str, number: int, sources: Sources) -> None:
        """Add the virtual server of an external address or node port, and what its policy and sources require."""
        info = self.info
        self.serve(address, number, self.lists.external)
        element = f"{address},{info.protocol}:{number}"
        if self.lists.external_dropped:
            self.in_set(EXTERNAL_DROPPED, element)
        if self.lists.redirected:
            target = address_and_port(info.cluster_ip, info.port)
            redirect = Redirect(target, self.lists.redirected == INSIDE)
            self.add(REDIRECTED, VirtualServerKey(info.protocol, address, number), redirect)
        if sources is not None:
            self.restrict(address, number, sources)

    def restrict(self, address: str, number: int, sources: Sequence[str]) -> None:
        """Restrict an address and port to sources.

        A connection of the node to one of these addresses has that address as its source, which no range names, so
        the address itself becomes an allowed source if a range contains the node's IP. Otherwise kube-proxy drops the
        connection in OUTPUT by that source, even if a range contains the address.
        """
        info, facts = self.info, self.facts
        element = f"{address},{info.protocol}:{number}"
        self.in_set(LOAD_BALANCER_FW, element)
        node_is_allowed = False
        for text in sources:
            self.in_set(LOAD_BALANCER_SOURCE_CIDR, f"{element},{_element_network(text)}")
            network = parse_network(text)
            node_is_allowed = node_is_allowed or (network is not None and network.contains(facts.node_ip))
        if node_is_allowed:
            self.in_set(LOAD_BALANCER_SOURCE_IP, f"{element},{address}")
        elif not facts.behaviour.ranges_hold_for_node:
            self.add(FIREWALLED, FirewalledPort(address, info.protocol, number), True)


def _element_network(network: str) -> str:
    """Return a range as ipset prints it: a single address without its prefix length."""
    address, _slash, length = network.partition("/")
    return address if length == ("128" if ":" in address else "32") else network


def _node_port_sets(info: ServicePortInfo, facts: NodeFacts, in_set: Callable[[str, str], None]) -> None:
    for name in NODE_PORT_SETS[info.protocol][: 2 if info.external_local else 1]:
        if info.protocol == "sctp":
            for address in facts.node_ips:
                in_set(name, f"{address},sctp:{info.node_port}")
        else:
            in_set(name, str(info.node_port))
