# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What would be programmed, as text in the syntax of the usual tools: pure, no node is needed or looked at."""

from __future__ import annotations

from typing import Dict, Mapping, Optional, Tuple

from ..addresses import FAMILIES, canonical_address, family_of
from ..cluster.model import Node
from ..configuration.model import IPVS, MODES, NFTABLES, KubeProxyConfiguration
from ..errors import ConfigurationError
from ..rendering.build_settings import dataplane_settings, routing_context
from ..rendering.iptables.render import desired_tables as iptables_tables
from ..rendering.iptables.tables import whole_text
from ..rendering.ipvs import model as ipvs
from ..rendering.ipvs.tables import desired_tables as ipvs_tables
from ..rendering.ipvs.text import ip_batch_text, ipset_text, ipvsadm_text
from ..rendering.nftables.tables import desired_tables as nftables_tables
from ..rendering.nftables.text import restore_text as nftables_text
from ..rendering.settings import DataplaneSettings
from ..serviceports.node import node_name
from ..serviceports.routes import ServicePortName, ServicePortRoute
from ..serviceports.table import all_routes
from .request import Request

Routes = Mapping[ServicePortName, ServicePortRoute]

_LOOPBACK = (("lo", "127.0.0.1"), ("lo", "::1"))
_IPTABLES = {"IPv4": "iptables-restore", "IPv6": "ip6tables-restore"}


def render(request: Request) -> Dict[str, str]:
    """The texts that make up the node's dataplane, by the tool that takes them as input.

    Keys: ``iptables-restore`` and ``ip6tables-restore``, or ``nft FAMILY``; in ipvs mode also ``ipset FAMILY``,
    ``ipvsadm FAMILY`` and ``ip FAMILY``. The node's addresses are those of the request, else those of its Node.
    Raises ConfigurationError, also if the node's name is neither given nor in the configuration.
    """
    mode = request.mode or request.configuration.mode
    if mode not in MODES:
        raise ConfigurationError(f"mode: {mode!r} cannot be rendered without a node; use one of {', '.join(MODES)}")
    configuration = request.configuration.with_mode(mode)
    given = request.node_name or configuration.hostname_override
    if not given:
        raise ConfigurationError("node_name: is needed to render, since no node is looked at")
    name = node_name(given, "")
    node = request.cluster.nodes.get(name)
    addresses = _addresses(request.node_addresses, node)
    texts: Dict[str, str] = {}
    for family in FAMILIES:
        settings = dataplane_settings(
            configuration,
            family,
            name,
            node,
            addresses,
            service_cidrs=request.cluster.service_cidr_list(family),
        )
        routes = all_routes(request.cluster, routing_context(configuration, family, name, node))
        texts.update(_texts(configuration, family, settings, routes))
    return texts


def _addresses(given: Tuple[str, ...], node: Optional[Node]) -> Tuple[Tuple[str, str], ...]:
    known = []
    for text in given or ((*node.internal_ips, *node.external_ips) if node is not None else ()):
        address = canonical_address(text)
        if address is None:
            raise ConfigurationError(f"node_addresses: {text!r} is not an IP address")
        known.append(("node", address))
    return (*_LOOPBACK, *known)


def _texts(
    configuration: KubeProxyConfiguration, family: str, settings: DataplaneSettings, routes: Routes
) -> Dict[str, str]:
    if configuration.mode == NFTABLES:
        return {f"nft {family}": nftables_text(family, nftables_tables(routes, settings))}
    if configuration.mode == IPVS:
        tables = ipvs_tables(routes, settings)
        return {
            f"ip {family}": ip_batch_text(
                address for address in tables[ipvs.ADDRESSES] if family_of(address) == family
            ),
            f"ipset {family}": ipset_text(tables[ipvs.SETS], tables[ipvs.SET_ELEMENTS]),
            _IPTABLES[family]: whole_text(tables[ipvs.CHAINS]),
            f"ipvsadm {family}": ipvsadm_text(tables[ipvs.VIRTUAL_SERVERS], tables[ipvs.REAL_SERVERS]),
        }
    return {_IPTABLES[family]: whole_text(iptables_tables(routes, settings)["chains"])}
