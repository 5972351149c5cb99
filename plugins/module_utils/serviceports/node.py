# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The identity of this node: its name in the cluster, and its addresses."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..base.addresses import IPV4, IPV6, LOOPBACK, UNSPECIFIED, canonical_address, family_of
from ..base.errors import ConfigurationError
from ..cluster.model import Node


class NodeAddresses(NamedTuple):
    """The node's own address of each family (loopback where none is known), and which family is the primary one."""

    primary_family: str
    ipv4: str
    ipv6: str

    def of(self, family: str) -> str:
        """Return the address of a family."""
        return self.ipv6 if family == IPV6 else self.ipv4


def node_name(override: str, hostname: str) -> str:
    """Return the name of this node in Node objects and EndpointSlices.

    ``override`` (hostnameOverride) takes precedence over ``hostname`` (that of the operating system); surrounding
    blanks are stripped and letters lowered, as the kubelet does. Raises ConfigurationError if nothing remains.
    """
    name = override.strip().lower() or hostname.strip().lower()
    if not name:
        raise ConfigurationError("hostnameOverride: is empty, and the node has no host name")
    return name


def node_addresses(node: Optional[Node], bind_address: str = "") -> NodeAddresses:
    """Return the node's addresses: a Node's (None if it is not known), overridden by bindAddress.

    The first of all InternalIPs, then ExternalIPs, is the primary one; the first of the other family is the secondary
    one. A ``bind_address`` other than ``0.0.0.0`` and ``::`` replaces the address of its family and makes that family
    the primary one.
    """
    chosen = dict(LOOPBACK)
    primary = IPV4
    reported = node.internal_ips + node.external_ips if node is not None else ()
    if reported:
        primary = family_of(reported[0])
        for address in reversed(reported):
            chosen[family_of(address)] = address
    bind = canonical_address(bind_address)
    if bind is not None and bind not in UNSPECIFIED.values():
        primary = family_of(bind)
        chosen[primary] = bind
    return NodeAddresses(primary, chosen[IPV4], chosen[IPV6])
