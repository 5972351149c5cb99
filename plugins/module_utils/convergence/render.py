# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rendering of the desired state in the syntax of the usual tools. It is pure: no node is needed or read."""

from __future__ import annotations

from typing import Optional

from ..base.addresses import FAMILIES, canonical_address
from ..base.errors import ConfigurationError
from ..cluster.model import Node
from ..configuration.validate import in_mode
from ..rendering.build_settings import dataplane_settings, node_context
from ..rendering.slot_limit import within_limit
from ..serviceports.node import node_name
from ..serviceports.table import all_service_ports
from .modes.choose import mode_without_node
from .prepare import rendering_warnings
from .report import conflict_warnings, ignored_annotations, unserved
from .request import Request
from .schedulers import requested

_LOOPBACK = (("lo", "127.0.0.1"), ("lo", "::1"))


def render(request: Request, warnings: Optional[list[str]] = None) -> dict[str, str]:
    """Return the node's desired rules as text, by the tool that accepts it as input.

    Keys: ``iptables-restore`` and ``ip6tables-restore``, or ``nft FAMILY``; in ipvs mode also ``ipset FAMILY``,
    ``ipvsadm FAMILY`` and ``ip FAMILY``; with network policies ``nft inet``. The node's addresses are those of the
    request, else those of its Node. Raises ConfigurationError, also if the node's name is neither given nor in the
    configuration.

    ``warnings``: gets what a convergence would warn of, or refuse, by the cluster state alone.
    """
    noted: list[str] = warnings if warnings is not None else []
    request.confine()
    mode = mode_without_node(request)
    configuration = in_mode(request.configuration, mode.name)
    rendering = mode.rendering
    given = request.node_name or configuration.hostname_override
    if not given:
        raise ConfigurationError("node_name: is required to render, because no node is inspected")
    name = node_name(given, "")
    node = request.cluster.nodes.get(name)
    addresses = _addresses(request.node_addresses, node)
    noted += rendering_warnings(request, name)
    noted += conflict_warnings(request.cluster.conflicts) if mode.serves else []
    texts: dict[str, str] = {}
    for family in FAMILIES if mode.serves else ():
        settings = dataplane_settings(
            configuration,
            family,
            node_name=name,
            node=node,
            node_addresses=addresses,
            service_cidrs=request.cluster.service_cidr_list(family),
            conntrack_liberal=configuration.conntrack.tcp_be_liberal,
        )
        every = all_service_ports(request.cluster, node_context(configuration, family, name, node))
        noted += unserved(rendering, every.values())
        service_ports = within_limit(rendering, every)
        settings = settings._replace(schedulers=frozenset(requested(rendering, service_ports.values(), settings)))
        noted += ignored_annotations(rendering, service_ports.values(), settings)
        texts.update(rendering.texts(family, rendering.desired_tables(service_ports, settings)))
    policies = configuration.node_proxy.network_policy
    if policies.enabled:
        from .policy import policy_text

        texts["nft inet"] = policy_text(request.cluster, policies, name, addresses)
    return texts


def _addresses(given: tuple[str, ...], node: Optional[Node]) -> tuple[tuple[str, str], ...]:
    known = []
    for text in given or ((*node.internal_ips, *node.external_ips) if node is not None else ()):
        address = canonical_address(text)
        if address is None:
            raise ConfigurationError(f"node_addresses: {text!r} is not an IP address")
        known.append(("node", address))
    return (*_LOOPBACK, *known)
