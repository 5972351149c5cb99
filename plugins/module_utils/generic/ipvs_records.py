# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's virtual servers as data, in the terms in which a user declares them."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from ..base.addresses import FAMILIES, IPV6, canonical_address, family_of
from ..base.errors import ConfigurationError
from ..base.ipvs_schedulers import flag_names
from ..kernel.ipvs.servers import IpvsSocket
from ..rendering.ipvs.model import FIREWALL_MARK, ONE_PACKET, VirtualServer, VirtualServerKey
from .ipvs_services import FORWARDING

_FORWARDING_NAMES = {kernel: name for name, kernel in FORWARDING.items()}


class Selection(NamedTuple):
    """A selection of virtual servers: those that agree with every given field."""

    address: Optional[str] = None
    port: Optional[int] = None
    protocol: Optional[str] = None
    firewall_mark: Optional[int] = None

    def canonical(self) -> Selection:
        """Return the selection with its address in canonical text. Raises ConfigurationError."""
        if self.address is None:
            return self
        address = canonical_address(self.address)
        if address is None:
            raise ConfigurationError(f"address: {self.address!r} is not an IP address")
        return self._replace(address=address)

    def includes(self, key: VirtualServerKey) -> bool:
        """Return whether a virtual server is listed."""
        if key.protocol == FIREWALL_MARK:
            if (self.address, self.port, self.protocol) != (None, None, None):
                return False
            return self.firewall_mark in (None, key.port)
        if self.firewall_mark is not None:
            return False
        pairs = ((self.address, key.address), (self.port, key.port), (self.protocol, key.protocol))
        return all(wanted is None or wanted == found for wanted, found in pairs)


def records(connection: IpvsSocket, selection: Selection) -> list[dict[str, Any]]:
    """Return the selected virtual servers with their real servers, in a stable order. Raises KernelError.

    ``selection``: canonical.
    """
    found = []
    for family in FAMILIES:
        servers = connection.virtual_servers(family, marks=True)
        chosen = sorted(key for key in servers if selection.includes(key))
        table = connection.real_servers_of(chosen)
        of_server: dict[VirtualServerKey, list[dict[str, Any]]] = {key: [] for key in chosen}
        for key, value in sorted(table.servers.items()):
            of_server[key.server].append(
                {
                    "address": key.ip,
                    "port": key.port,
                    "weight": value.weight,
                    "forwarding": _FORWARDING_NAMES.get(value.forwarding, value.forwarding),
                    "connections": table.connections.get(key, 0),
                }
            )
        found += [{**_record(key, servers[key]), "real_servers": of_server[key]} for key in chosen]
    return found


def _record(key: VirtualServerKey, value: VirtualServer) -> dict[str, Any]:
    marked = key.protocol == FIREWALL_MARK
    return {
        "address": "" if marked else key.address,
        "port": 0 if marked else key.port,
        "protocol": "" if marked else key.protocol,
        "firewall_mark": key.port if marked else 0,
        "family": "ipv6" if family_of(key.address) == IPV6 else "ipv4",
        "scheduler": value.scheduler,
        "flags": [name for bit, name in flag_names(value.scheduler).items() if value.flags & bit],
        "persistence": value.timeout,
        "persistence_prefix": value.netmask,
        "one_packet": bool(value.flags & ONE_PACKET),
    }
