# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pure functions from a configuration and facts about the node to the inputs of ServicePorts and modes."""

from __future__ import annotations

from typing import Iterable, Optional, Sequence

from ..base.addresses import IPV4, family_of
from ..cluster.model import Node
from ..configuration import model
from ..configuration.feature_gates import ALLOW_SERVICE_EXTERNAL_IPS, LOCALHOST_NODE_PORTS
from ..serviceports.node import NodeAddresses
from ..serviceports.node import node_addresses as addresses_of_node
from ..serviceports.node_ports import names_loopback, node_port_addresses, resolve_primary
from ..serviceports.service_ports import of_family
from ..serviceports.table import NodeContext
from .settings import DataplaneSettings, LocalTraffic


def node_context(
    configuration: model.KubeProxyConfiguration, family: str, node_name: str, node: Optional[Node]
) -> NodeContext:
    """Return the node's part in computing the ServicePorts of one family; ``node`` (None if unknown) gives the zone."""
    zone = node.zone if node is not None else ""
    allow_external_ips = configuration.gate(ALLOW_SERVICE_EXTERNAL_IPS)
    policy = configuration.node_proxy.service_policy
    return NodeContext(
        family=family,
        node_name=node_name,
        zone=zone,
        allow_external_ips=allow_external_ips,
        behaviour=configuration.behaviour,
        policy=policy,
        outside=configuration.node_proxy.outside_host,
    )


def local_traffic(
    configuration: model.KubeProxyConfiguration, family: str, pod_cidrs: Sequence[str]
) -> Optional[LocalTraffic]:
    """Return how traffic of this node's pods is recognised in one family; None if it cannot be.

    ``pod_cidrs``: spec.podCIDRs of the Node. The first CIDR of the family counts; interfaces serve both families.
    """
    mode = configuration.detect_local_mode
    if mode == model.BRIDGE_INTERFACE:
        return LocalTraffic("bridge", configuration.detect_local.bridge_interface)
    if mode == model.INTERFACE_NAME_PREFIX:
        return LocalTraffic("prefix", configuration.detect_local.interface_name_prefix)
    cidrs: Sequence[str] = ()
    if mode == model.CLUSTER_CIDR:
        cidrs = configuration.cluster_cidrs
    elif mode == model.NODE_CIDR:
        cidrs = pod_cidrs
    return next((LocalTraffic("cidr", cidr) for cidr in cidrs if family_of(cidr) == family), None)


def localhost_node_ports(configuration: model.KubeProxyConfiguration, own: NodeAddresses) -> bool:
    """Return whether node ports answer on 127.0.0.1 of a node with these addresses.

    They do in iptables mode, unless nodePortAddresses exclude loopback: so they do not with ``primary`` and an IPv4
    address, but without one ``primary`` chooses no IPv4 address, which means all of them. Kernel parameters and rules
    follow this decision alike, because route_localnet is safe only with the rule. Raises ConfigurationError for a value
    of nodePortAddresses that is not a CIDR.
    """
    if not configuration.effective_localhost_node_ports:
        return False
    values = resolve_primary(configuration.effective_node_port_addresses, (own.ipv4, own.ipv6))
    return node_port_addresses(values, IPV4).contains_loopback


def localhost_rejected(configuration: model.KubeProxyConfiguration, family: str) -> tuple[str, ...]:
    """Return the protocols whose node ports are refused at the loopback addresses of a family (KEP-6032).

    In nftables mode, whose table cannot redirect connections from there, these are all protocols. But TCP is not one of
    them where nodePortAddresses name loopback addresses, since an agent forwards its connections.
    """
    if not configuration.effective_localhost_listeners or not configuration.gate(LOCALHOST_NODE_PORTS):
        return ()
    return ("udp", "sctp") if names_loopback(configuration.node_port_addresses, family) else ("tcp", "udp", "sctp")


def localhost_listeners(configuration: model.KubeProxyConfiguration, family: str) -> bool:
    """Return whether an agent forwards TCP connections to node ports at the loopback address of a family."""
    return DataplaneSettings(family, localhost_rejected=localhost_rejected(configuration, family)).localhost_listeners


def dataplane_settings(
    configuration: model.KubeProxyConfiguration,
    family: str,
    *,
    node_name: str,
    node: Optional[Node],
    node_addresses: Iterable[tuple[str, str]],
    service_cidrs: Sequence[str] = (),
    conntrack_liberal: bool = False,
    random_fully: bool = True,
    nfacct_counters: Sequence[str] = (),
) -> DataplaneSettings:
    """Return the settings of one family.

    ``node``: this node's Node, None if it is not known. ``node_addresses``: (interface, address) of all interfaces,
    loopback included, without the proxy's own dummy device; it may contain both families. ``service_cidrs``: of all
    ServiceCIDRs. The other facts: see :class:`DataplaneSettings`. Raises ConfigurationError for a value of
    nodePortAddresses that is not a CIDR.
    """
    own = addresses_of_node(node, configuration.bind_address)
    ordered = (own.ipv4, own.ipv6)
    chosen = node_port_addresses(resolve_primary(configuration.effective_node_port_addresses, ordered), family)
    addresses = tuple((interface, address) for interface, address in node_addresses if family_of(address) == family)
    return DataplaneSettings(
        family=family,
        node_name=node_name,
        node_ip=own.of(family),
        masquerade_mark=configuration.masquerade_mark,
        masquerade_all=configuration.masquerade_all,
        local_traffic=local_traffic(configuration, family, node.pod_cidrs if node is not None else ()),
        node_port_cidrs=() if chosen.match_all else chosen.cidrs,
        node_port_addresses=chosen.node_ips(addresses),
        node_addresses=addresses,
        localhost_node_ports=family == IPV4 and localhost_node_ports(configuration, own),
        localhost_rejected=localhost_rejected(configuration, family),
        conntrack_liberal=conntrack_liberal,
        random_fully=random_fully,
        nfacct_counters=tuple(nfacct_counters),
        scheduler=configuration.scheduler,
        exclude_cidrs=of_family(configuration.ipvs.exclude_cidrs, family),
        service_cidrs=of_family(tuple(service_cidrs), family),
        behaviour=configuration.behaviour,
        masquerade_ports=configuration.masquerade_ports,
        count_connections=configuration.node_proxy.traffic.count_connections,
        count_bytes=configuration.node_proxy.traffic.count_bytes,
    )
