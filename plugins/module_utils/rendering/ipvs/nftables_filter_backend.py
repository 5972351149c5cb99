# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter backend of ipvs mode in nf_tables: one table of each family, which needs neither iptables nor ipset."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ...serviceports.info import Endpoint
from ..merged import Entry
from ..nftables.firewall import restrict
from ..nftables.keys import address_key, transport_key
from ..nftables.layout import HAIRPIN, SERVICE_KEY
from ..nftables.objects import ElementKey
from ..nftables.reached import objects_for
from ..nftables.text import describe, table_text
from ..settings import Arrival, DataplaneSettings
from . import nftables_layout as layout
from .entries import INSIDE, Contribution
from .filter_backend import FilterBackend

_PORT_BYTES = 4


class NftablesContribution(Contribution):
    """See the base class."""

    def _element(self, name: str, key: bytes, value: object = True) -> None:
        self.entries.append((layout.RESOURCE, ElementKey("element", name, key), value))

    def _frontend(self, address: str, number: int) -> bytes:
        return address_key(address) + transport_key(self.info.protocol, number)

    def add_hairpin(self, endpoint: Endpoint) -> None:
        """See the base class."""
        address = address_key(endpoint.ip)
        self._element(HAIRPIN, address + address + transport_key(self.info.protocol, endpoint.port))

    def add_to_set(self, name: str, address: str, number: int) -> None:
        """See the base class."""
        self._element(layout.FRONTENDS[name], self._frontend(address, number))

    def add_own_address(self, address: str) -> None:
        """See the base class."""
        self._element(layout.ADDRESSES, address_key(address))

    def add_node_port(self) -> None:
        """See the base class."""
        key = transport_key(self.info.protocol, self.info.node_port)
        self._element(layout.NODE_PORTS, key)
        if self.info.external_local:
            self._element(layout.LOCAL_NODE_PORTS, key)

    def add_health_check(self, number: int) -> None:
        """See the base class."""
        self._element(layout.HEALTH_CHECKS, transport_key("tcp", number))

    def redirect(self, address: str, number: int) -> None:
        """See the base class."""
        info = self.info
        frontend = self._frontend(address, number)
        inside = self.lists.redirected == INSIDE
        port = transport_key(info.protocol, info.port)[-_PORT_BYTES:]
        self._element(layout.REDIRECTED, frontend)
        name = layout.REDIRECTED_INSIDE if inside else layout.REDIRECTED_OUTSIDE
        self._element(name, frontend, address_key(info.cluster_ip) + port)

    def restrict(self, address: str, number: int, sources: Sequence[str]) -> None:
        """See the base class."""
        own, frontend, node_ip = address_key(address), self._frontend(address, number), self.facts.settings.node_ip
        found = restrict(self.info.family, SERVICE_KEY, keys=[frontend], sources=sources, own=[own], node_ip=node_ip)
        self.entries += [(layout.RESOURCE, key, value) for _table, key, value in found]
        if not self.allows_node(sources) and not self.behaviour.ranges_hold_for_node:
            self._element(layout.FIREWALLED_FOR_NODE, own + frontend)


class NftablesFilterBackend(FilterBackend):
    """See the base class. The keys and values of its one table are defined in ``rendering.nftables.objects``."""

    name = "nftables"
    tables = (layout.RESOURCE,)
    contribution = NftablesContribution

    def static_entries(self, settings: DataplaneSettings) -> list[Entry]:
        """Return the table with its chains and sets."""
        return layout.static_entries(settings)

    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return an entry in the syntax of the nft program."""
        return describe(family, key, value, layout.TABLE_NAME)

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """See the base class."""
        return objects_for(family, tables.get(layout.RESOURCE, {}), place, layout.TABLE_NAME)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """See the base class."""
        return {f"nft {family}": table_text(family, layout.IPVS_TABLE, tables[layout.RESOURCE])}


NFTABLES_FILTER_BACKEND = NftablesFilterBackend()
