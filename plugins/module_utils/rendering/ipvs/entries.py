# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries that one ServicePort contributes to the tables of ipvs mode (kube-proxy 1.36).

Addresses, virtual servers and real servers do not depend on the filter backend; for the rest, each filter backend has a
subclass of :class:`Contribution`. Several ServicePorts may contribute the same key, such as one cluster IP with several
ports; merging counts them.

A virtual server has one list of real servers for all clients. With externalTrafficPolicy Local, connections from inside
the node reach all endpoints and those from outside only local ones, so one of the two must go to another virtual
server: that of the cluster IP, which has the right list. So the destination of connections from inside is rewritten to
the cluster IP, or, where the cluster IP itself is limited to local endpoints, that of connections from outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Hashable, NamedTuple, Sequence

from ...base.addresses import is_link_local, is_loopback, parse_network
from ...configuration.behaviour import Behaviour
from ...serviceports.info import Endpoint, ServicePortInfo, Sources
from ...serviceports.weights import risen, shares
from ..merged import Entry
from ..settings import DataplaneSettings
from . import sets
from .model import ADDRESSES, DEVICE, REAL_SERVERS, VIRTUAL_SERVERS, RealServer, RealServerKey, VirtualServerKey
from .scheduling import hashed_by, schedule

Endpoints = tuple[Endpoint, ...]

NOBODY, INSIDE, OUTSIDE = "", "inside", "outside"


class Lists(NamedTuple):
    """The endpoints behind the cluster IP, and behind external addresses and node ports.

    ``redirected``: whose connections to external addresses are sent to the cluster IP: NOBODY, INSIDE or OUTSIDE.
    ``internal_dropped``, ``external_dropped``: connections that arrive there are dropped.
    """

    internal: Endpoints
    external: Endpoints
    redirected: str = NOBODY
    internal_dropped: bool = False
    external_dropped: bool = False


def endpoint_lists(info: ServicePortInfo, behaviour: Behaviour) -> Lists:
    """Return the endpoints of the ServicePort's virtual servers.

    kube-proxy 1.36 uses all endpoints where a policy Local finds none on this node.
    """
    closed = behaviour.local_means_local
    internal = info.local if info.internal_local and (info.local or closed) else info.cluster
    external = info.local if info.external_local and (info.local or closed) else info.cluster
    redirected = NOBODY
    if info.external_local and behaviour.inside_reaches_all:
        redirected = OUTSIDE if info.internal_local else INSIDE
        external = info.cluster if redirected == OUTSIDE else external
    without_local = closed and info.has_any and not info.local
    return Lists(
        internal,
        external,
        redirected,
        without_local and info.internal_local,
        without_local and info.external_local and redirected != OUTSIDE,
    )


def keeps_flows(info: ServicePortInfo, endpoint: Endpoint, behaviour: Behaviour) -> bool:
    """Return whether an endpoint that gets no new connections remains as a real server of weight 0.

    The kernel then keeps its connections. TCP connections of a removed real server are kept without this: see
    ``draining``. An endpoint of weight 0 keeps those of every protocol for as long as it has that weight.
    """
    if not endpoint.weight:
        return endpoint.ready or endpoint.serving
    return behaviour.terminating_keep_flows and info.key.protocol != "TCP" and endpoint.serving and endpoint.terminating


_WANTED = RealServer(1)
#: Keeps its connections and gets no new ones.
_WITHOUT_NEW = RealServer(0)


class IpvsFacts(NamedTuple):
    """The settings, and the facts that ServicePorts need from them, computed once.

    ``owned``: addresses that other interfaces of the node have; they are not bound to the dummy device. ``node_ips``:
    the addresses on which node ports answer.
    """

    settings: DataplaneSettings
    owned: frozenset[str]
    node_ips: tuple[str, ...]


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
    return not is_loopback(address) and not is_link_local(address)


def ipvs_facts(settings: DataplaneSettings) -> IpvsFacts:
    """Compute the facts from the settings of a node.

    Node ports answer on all addresses of the node except those of the dummy device; when nodePortAddresses restrict
    them, on the addresses of the settings in these ranges. Those of a node never have the dummy device's, while
    kube-proxy 1.36 counts them if a range contains them, and so opens node ports on addresses of Services.
    """
    others = [address for interface, address in settings.node_addresses if interface != DEVICE]
    owned = [address for address in others if is_node_address(address)]
    restricted = bool(settings.node_port_cidrs) and not any(
        network is not None and network.prefix_length == 0 for network in map(parse_network, settings.node_port_cidrs)
    )
    node_ips = [ip for ip in settings.node_port_addresses if not is_loopback(ip)] if restricted else owned
    return IpvsFacts(settings, frozenset(owned), tuple(dict.fromkeys(node_ips)))


class Contribution(ABC):
    """Collects the entries of one ServicePort; the filter backend implements the abstract methods."""

    def __init__(self, info: ServicePortInfo, facts: IpvsFacts) -> None:
        self.info = info
        self.facts = facts
        self.entries: list[Entry] = []
        settings = facts.settings
        self.behaviour = settings.behaviour
        self.lists = endpoint_lists(info, self.behaviour)
        fallback = self.behaviour.hashing_falls_back
        self._settings = schedule(info, settings.scheduler, settings.schedulers, falls_back=fallback).server
        self._kept = [endpoint for endpoint in info.endpoints if keeps_flows(info, endpoint, self.behaviour)]

    def add_all(self) -> list[Entry]:
        """Add all entries and return them."""
        info = self.info
        for endpoint in info.endpoints:
            if endpoint.is_local:
                self.add_hairpin(endpoint)
        self.add_to_set(sets.CLUSTER_IP, info.cluster_ip, info.port)
        self.add(ADDRESSES, info.cluster_ip, True)
        self.add_own_address(info.cluster_ip)
        self._serve(info.cluster_ip, info.port, self.lists.internal)
        if self.lists.internal_dropped:
            self.add_to_set(sets.INTERNAL_DROPPED, info.cluster_ip, info.port)
        for address in info.external_ips:
            self.add_to_set(sets.EXTERNAL_IP_LOCAL if info.external_local else sets.EXTERNAL_IP, address, info.port)
            self._bind(address)
            self._serve_external(address, info.port, info.sources_at(address))
        for address in info.load_balancer_ips:
            self.add_to_set(sets.LOAD_BALANCER, address, info.port)
            if info.external_local:
                self.add_to_set(sets.LOAD_BALANCER_LOCAL, address, info.port)
            self._bind(address)
            self._serve_external(address, info.port, info.sources_at(address))
        if info.node_port and self.facts.node_ips:
            self.add_node_port()
            for address in self.facts.node_ips:
                self._serve_external(address, info.node_port, info.node_port_sources)
        if info.health_check_node_port and (self.facts.node_ips or not info.node_port):
            self.add_health_check(info.health_check_node_port)
        return self.entries

    def add(self, table: str, key: Hashable, value: object) -> None:
        """Add one entry."""
        self.entries.append((table, key, value))

    @abstractmethod
    def add_hairpin(self, endpoint: Endpoint) -> None:
        """Masquerade connections of a local endpoint to itself."""

    @abstractmethod
    def add_to_set(self, name: str, address: str, number: int) -> None:
        """Add an address and port to one of the sets of both, by its name in ``sets`` without a family."""

    @abstractmethod
    def add_own_address(self, address: str) -> None:
        """Add an address of the dummy device; its other ports are closed."""

    @abstractmethod
    def add_node_port(self) -> None:
        """Add the node port."""

    @abstractmethod
    def add_health_check(self, number: int) -> None:
        """Add a health check node port."""

    @abstractmethod
    def redirect(self, address: str, number: int) -> None:
        """Redirect connections of some clients to an external address or node port to the servers of the cluster IP."""

    @abstractmethod
    def restrict(self, address: str, number: int, sources: Sequence[str]) -> None:
        """Restrict an address and port to sources.

        A connection of the node to one of these addresses has that address as its source, which no range names, so
        the address itself becomes an allowed source if a range contains the node's IP. Otherwise kube-proxy drops the
        connection in OUTPUT by that source, even if a range contains the address.
        """

    def allows_node(self, sources: Sequence[str]) -> bool:
        """Return whether one of the ranges contains the node's IP."""
        networks = map(parse_network, sources)
        return any(network is not None and network.contains(self.facts.settings.node_ip) for network in networks)

    def _bind(self, address: str) -> None:
        is_taken = address in self.facts.owned or address in self.info.unbound
        if not is_taken and not is_link_local(address) and is_bindable(address):
            self.add(ADDRESSES, address, True)
            self.add_own_address(address)

    def _serve(self, address: str, number: int, endpoints: Sequence[Endpoint]) -> None:
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

    def _serve_external(self, address: str, number: int, sources: Sources) -> None:
        """Add the virtual server of an external address or node port, and the entries for its policy and sources."""
        self._serve(address, number, self.lists.external)
        if self.lists.external_dropped:
            self.add_to_set(sets.EXTERNAL_DROPPED, address, number)
        if self.lists.redirected:
            self.redirect(address, number)
        if sources is not None:
            self.restrict(address, number, sources)
