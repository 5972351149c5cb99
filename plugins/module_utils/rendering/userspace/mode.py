# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render userspace mode: ServicePorts to listeners, and to the addresses at which clients reach them."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from ...base.addresses import family_of
from ...serviceports.info import Endpoint, ServicePortInfo
from ..decision import Arrival, Client, Masquerade
from ..ipvs.text import address_line, device_line, ip_batch_text
from ..merged import Entry
from ..rendering import Options, Rendering
from ..settings import DataplaneSettings
from .entries import ListenerAddresses, chosen_endpoints, listener_addresses, refusal, service_port_entries
from .model import ADDRESSES, DEVICE, DEVICES, LISTENERS, ListenerKey, listener_line


class UserspaceRendering(Rendering[ListenerAddresses]):
    """Tables: the device, its addresses, and the listeners. The agent itself forwards connections."""

    name = "userspace"
    tables = (DEVICES, ADDRESSES, LISTENERS)
    entries_have_addresses = True
    replaces_source = True
    forwards = True
    scheduler = "rr"
    refused_with = "TCP reset, or for UDP ICMP port unreachable"

    def settings_in_use(self, settings: DataplaneSettings) -> DataplaneSettings:
        """See the base class. The node's own addresses decide which addresses are bound to the device."""
        chosen = tuple(sorted(set(settings.node_port_addresses)))
        owned = tuple(("", address) for address in sorted(listener_addresses(settings).owned))
        return settings._replace(node_addresses=owned, node_port_addresses=chosen)

    def context(self, settings: DataplaneSettings, options: Options) -> ListenerAddresses:
        """See the base class."""
        return listener_addresses(settings)

    def static_entries(self, context: ListenerAddresses) -> List[Entry]:
        """Return the device."""
        return [(DEVICES, DEVICE, "dummy")]

    def entries(self, service_port: ServicePortInfo, context: ListenerAddresses) -> List[Entry]:
        """See the base class."""
        return service_port_entries(service_port, context)

    def endpoints(
        self, service_port: ServicePortInfo, external: bool, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """See the base class; addresses that the agent must not connect to are omitted."""
        only_local = service_port.external_local if external else service_port.internal_local
        return () if refusal(service_port) else chosen_endpoints(service_port, only_local)

    def endpoints_for(
        self, service_port: ServicePortInfo, external: bool, client: Client, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """See the base class; a listener has one list of endpoints for all clients."""
        return self.endpoints(service_port, external, settings)

    def manner(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """See the base class."""
        return "in turn"

    def masquerade(
        self, service_port: ServicePortInfo, external: bool, client: Client, settings: DataplaneSettings
    ) -> Masquerade:
        """See the base class."""
        return Masquerade(True, "the agent forwards the connection")

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> List[str]:
        """See the base class."""
        key = ListenerKey(place.protocol, place.address, place.port)
        found = [address_line(item, DEVICE) for item in tables.get(ADDRESSES, {}) if item == place.address]
        listeners = tables.get(LISTENERS, {})
        return found + ([listener_line(key, listeners[key])] if key in listeners else [])

    def drops_without_local(self, settings: DataplaneSettings) -> bool:
        """See the base class. The agent opens no socket then, so the kernel refuses."""
        return False

    def refusal(self, service_port: ServicePortInfo) -> str:
        """See the base class. SCTP is not forwarded."""
        return refusal(service_port)

    def lines(self, family: str, table: str, key: Any, value: Any) -> List[str]:
        """Return a listener in words, a device or an address as arguments of ``ip``."""
        if table == LISTENERS:
            return [listener_line(key, value)]
        return [device_line(key) if table == DEVICES else address_line(key, DEVICE)]

    def serves(self, entry: Entry, address: str, port: int) -> bool:
        """See the base class."""
        key = entry[1]
        return (key.address, key.port) == (address, port) if isinstance(key, ListenerKey) else key == address

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> Dict[str, str]:
        """See the base class."""
        addresses = [address for address in tables[ADDRESSES] if family_of(address) == family]
        listeners = sorted(listener_line(key, value) for key, value in tables[LISTENERS].items())
        return {
            f"ip {family}": ip_batch_text(addresses, DEVICE),
            f"listeners {family}": "".join(f"{line}\n" for line in listeners),
        }


RENDERING = UserspaceRendering()
