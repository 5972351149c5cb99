# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries that one ServicePort contributes to the tables of ipvs mode (kube-proxy 1.36).

Several ServicePorts may contribute the same key, such as one cluster IP with several ports; merging counts them.
"""

from __future__ import annotations

from typing import Callable, FrozenSet, List, NamedTuple, Sequence, Tuple

from ...addresses import parse_network
from ...serviceports.info import Endpoint, ServicePortInfo
from ..merged import Entry
from ..settings import DataplaneSettings
from .model import (
    ADDRESSES,
    DEVICE,
    FIREWALLED,
    PERSISTENT,
    REAL_SERVERS,
    SCHEDULER_FLAG_2,
    SET_ELEMENTS,
    VIRTUAL_SERVERS,
    FirewalledPort,
    RealServer,
    RealServerKey,
    SetElementKey,
    VirtualServer,
    VirtualServerKey,
    host_prefix,
)
from .sets import (
    CLUSTER_IP,
    EXTERNAL_IP,
    EXTERNAL_IP_LOCAL,
    HEALTH_CHECK_NODE_PORT,
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


class NodeFacts(NamedTuple):
    """The facts that ServicePorts need from the settings, computed once.

    ``owned``: addresses that other interfaces of the node have; they are not bound to the dummy device. ``node_ips``:
    the addresses on which node ports answer.
    """

    family: str
    scheduler: str
    owned: FrozenSet[str]
    node_ips: Tuple[str, ...]
    node_ip: str


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
        settings.scheduler or "rr",
        frozenset(owned),
        tuple(dict.fromkeys(node_ips)),
        settings.node_ip,
    )


def virtual_server(info: ServicePortInfo, scheduler: str) -> VirtualServer:
    """Return the settings of a ServicePort's virtual servers: affinity is persistence, and ``mh`` also hashes ports."""
    flags = PERSISTENT if info.affinity_seconds else 0
    if scheduler == "mh":
        flags |= SCHEDULER_FLAG_2
    return VirtualServer(scheduler, flags, info.affinity_seconds, host_prefix(info.family))


def real_servers(info: ServicePortInfo, only_local: bool) -> Sequence[Endpoint]:
    """Return the endpoints behind a virtual server: local ones if only these are wanted and there are any, else all."""
    return info.local if only_local and info.local else info.cluster


def service_port_entries(info: ServicePortInfo, facts: NodeFacts) -> List[Entry]:
    """Return what the ServicePort contributes: (table, key, value) triples. A key may occur more than once."""
    entries: List[Entry] = []
    add = entries.append
    names = NAMES[info.family]
    protocol, port = info.protocol, info.port
    settings = virtual_server(info, facts.scheduler)

    def in_set(name: str, element: str) -> None:
        add((SET_ELEMENTS, SetElementKey(names[name], element), True))

    def serve(address: str, number: int, only_local: bool) -> None:
        server = VirtualServerKey(protocol, address, number)
        add((VIRTUAL_SERVERS, server, settings))
        for endpoint in real_servers(info, only_local):
            if is_real_server(endpoint.ip):
                add((REAL_SERVERS, RealServerKey(server, endpoint.ip, endpoint.port), _WANTED))

    def bind(address: str) -> None:
        if address not in facts.owned and not is_link_local(address) and is_bindable(address):
            add((ADDRESSES, address, True))
            in_set(IPVS_IPS, address)

    for endpoint in info.endpoints:
        if endpoint.is_local:
            in_set(LOOP_BACK, f"{endpoint.ip},{protocol}:{endpoint.port},{endpoint.ip}")

    in_set(CLUSTER_IP, f"{info.cluster_ip},{protocol}:{port}")
    add((ADDRESSES, info.cluster_ip, True))
    in_set(IPVS_IPS, info.cluster_ip)
    serve(info.cluster_ip, port, info.internal_local)

    for address in info.external_ips:
        in_set(EXTERNAL_IP_LOCAL if info.external_local else EXTERNAL_IP, f"{address},{protocol}:{port}")
        bind(address)
        serve(address, port, info.external_local)

    for address in info.load_balancer_ips:
        _load_balancer_sets(info, facts, address, in_set, add)
        bind(address)
        serve(address, port, info.external_local)

    if info.node_port:
        if not facts.node_ips:
            return entries
        _node_port_sets(info, facts, in_set)
        for address in facts.node_ips:
            serve(address, info.node_port, info.external_local)
    if info.health_check_node_port:
        in_set(HEALTH_CHECK_NODE_PORT, str(info.health_check_node_port))
    return entries


def _load_balancer_sets(
    info: ServicePortInfo,
    facts: NodeFacts,
    address: str,
    in_set: Callable[[str, str], None],
    add: Callable[[Entry], None],
) -> None:
    """Add the set elements of one load balancer address, source ranges included.

    A host connection to such an address has the address itself as its source, so it is accepted by that source if a
    range covers the node, and otherwise dropped on its way out.
    """
    element = f"{address},{info.protocol}:{info.port}"
    in_set(LOAD_BALANCER, element)
    if info.external_local:
        in_set(LOAD_BALANCER_LOCAL, element)
    if not info.source_ranges:
        return
    in_set(LOAD_BALANCER_FW, element)
    node_is_allowed = False
    for text in info.source_ranges:
        in_set(LOAD_BALANCER_SOURCE_CIDR, f"{element},{_element_network(text)}")
        network = parse_network(text)
        node_is_allowed = node_is_allowed or (network is not None and network.contains(facts.node_ip))
    if node_is_allowed:
        in_set(LOAD_BALANCER_SOURCE_IP, f"{element},{address}")
    else:
        add((FIREWALLED, FirewalledPort(address, info.protocol, info.port), True))


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
