# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The values of ipvs mode's resource tables: virtual servers, real servers, sets and their elements.

Addresses are canonical text, ports and seconds plain numbers, protocols lower case (tcp, udp, sctp).
"""

from __future__ import annotations

from typing import NamedTuple, Union

from ...base.addresses import IPV6, address_and_port, family_of
from ...resources import Kind

DEVICE = "kube-ipvs0"
"""The dummy device that has the service addresses."""

PERSISTENT = 0x1
HASHED = 0x2
ONE_PACKET = 0x4

MASQUERADE = "masquerade"

FIREWALL_MARK = "fwmark"
"""In place of a protocol: the virtual server takes packets with a firewall mark. See VirtualServerKey."""

# The resource tables of ipvs mode, except the chains.
DEVICES = Kind.DEVICES
ADDRESSES = Kind.ADDRESSES
SETS = Kind.SETS
SET_ELEMENTS = Kind.SET_ELEMENTS
VIRTUAL_SERVERS = Kind.VIRTUAL_SERVERS
REAL_SERVERS = Kind.REAL_SERVERS
# Not a resource: contributions of ServicePorts to the chain KUBE-IPVS-OUT-FILTER.
FIREWALLED = "firewalled"
# Not a resource either: their contributions to the chains KUBE-IPVS-INSIDE and KUBE-IPVS-OUTSIDE.
REDIRECTED = "redirected"


class VirtualServerKey(NamedTuple):
    """Identity of a virtual server.

    With protocol FIREWALL_MARK, ``port`` is the mark, and ``address`` is 0.0.0.0 or ::, for the address family.
    """

    protocol: str
    address: str
    port: int

    def __str__(self) -> str:
        """Return ``1.2.3.4:80/TCP`` as kube-proxy writes it, or ``firewall mark 5 (IPv4)``."""
        if self.protocol == FIREWALL_MARK:
            return f"firewall mark {self.port} ({family_of(self.address)})"
        return f"{address_and_port(self.address, self.port)}/{self.protocol.upper()}"


class VirtualServer(NamedTuple):
    """Settings of a virtual server.

    ``flags``: PERSISTENT and scheduler flags of linux/ip_vs.h, without HASHED, which belongs to the kernel.
    ``timeout``: seconds of persistence, 0 without. ``netmask``: prefix length in bits by which persistent clients are
    grouped (32 or 128: no grouping).
    """

    scheduler: str
    flags: int
    timeout: int
    netmask: int


class RealServerKey(NamedTuple):
    """Identity of a real server: the virtual server it belongs to, its address and port."""

    server: VirtualServerKey
    ip: str
    port: int

    def __str__(self) -> str:
        return f"{self.server}/{address_and_port(self.ip, self.port)}"


class RealServer(NamedTuple):
    """Settings of a real server. ``forwarding``: masquerade (NAT), route, tunnel, local or bypass."""

    weight: int
    forwarding: str = MASQUERADE


class SetDefinition(NamedTuple):
    """The definition of an ipset: type as ``ipset create`` takes it, family (empty for bitmaps) and maximum size."""

    type: str
    family: str
    limit: int = 65536


class SetElementKey(NamedTuple):
    """One element of a set, in ipset's own text: ``10.0.0.1,tcp:80,10.2.0.0/16``, ``30080``, ``fd00::1``."""

    set: str
    element: str

    def __str__(self) -> str:
        return f"{self.set} {self.element}"


class FirewalledPort(NamedTuple):
    """A load balancer address and port whose source ranges exclude this node itself."""

    address: str
    protocol: str
    port: int


class Redirect(NamedTuple):
    """Connections to an external address or node port that are sent to the endpoints of the cluster IP.

    ``target``: cluster IP and port as ``1.2.3.4:80``. ``from_inside``: those of this node and its pods; if not, all
    others.
    """

    target: str
    from_inside: bool


def server_of(key: Union[VirtualServerKey, RealServerKey]) -> VirtualServerKey:
    """Return the virtual server itself, or the one of a real server."""
    return key.server if isinstance(key, RealServerKey) else key


def host_prefix(family: str) -> int:
    """Return the netmask of virtual servers that distinguish every client: 32 or 128 bits."""
    return 128 if family == IPV6 else 32
