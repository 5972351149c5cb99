# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render another mode in which some ServicePorts have userspace mode: the agent forwards their connections.

Their addresses are on the device of the other mode if it has one, else on that of userspace mode. Beside nftables mode
the agent also forwards connections to node ports at loopback addresses, of any ServicePort.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

from ...serviceports.info import ServicePortInfo
from ..merged import Entry
from ..rendering import Derivation, Rendering
from ..settings import Arrival, DataplaneSettings
from .mode import RENDERING, ListenerAddresses, listener_addresses, localhost_entries
from .model import ADDRESSES, LISTENERS


class Contexts(NamedTuple):
    """The contexts of the other mode and of userspace mode."""

    main: Any
    forwarded: ListenerAddresses


class RenderingWithListeners(Rendering[Contexts]):
    """The tables of another mode, and those of userspace mode that it does not have."""

    entries_have_addresses = True

    def __init__(self, main: Rendering[Any]) -> None:
        self._main = main
        self.name = main.name
        self.has_device = ADDRESSES in main.tables
        """Whether the other mode has a device with addresses."""
        # A listener is added after its address. Where it replaces rules, it is added before these are removed.
        self.tables = (*main.tables, LISTENERS) if self.has_device else (*RENDERING.tables, *main.tables)
        self.parts = main.parts
        self.most_lists, self.most_lists_of_service = main.most_lists, main.most_lists_of_service
        self.counts_endpoints = main.counts_endpoints

    def at_size(self, settings: DataplaneSettings, endpoints: int) -> DataplaneSettings:
        """See the base class."""
        return self._main.at_size(settings, endpoints)

    def settings_in_use(self, settings: DataplaneSettings) -> DataplaneSettings:
        """See the base class. userspace mode uses all addresses of the node, on which the other mode may not depend."""
        forwarded = RENDERING.settings_in_use(settings)
        return self._main.settings_in_use(settings)._replace(
            node_addresses=forwarded.node_addresses, node_port_addresses=forwarded.node_port_addresses
        )

    def context(self, settings: DataplaneSettings) -> Contexts:
        """See the base class."""
        return Contexts(self._main.context(settings), listener_addresses(settings))

    def static_entries(self, context: Contexts) -> list[Entry]:
        """Return the static entries of the other mode, and the device if it has none."""
        device = [] if self.has_device else RENDERING.static_entries(context.forwarded)
        return [*device, *self._main.static_entries(context.main)]

    def entries(self, service_port: ServicePortInfo, context: Contexts) -> list[Entry]:
        """See the base class."""
        if service_port.policy.userspace:
            return RENDERING.entries(service_port, context.forwarded)
        return [*self._main.entries(service_port, context.main), *localhost_entries(service_port, context.forwarded)]

    def serving(self, service_port: ServicePortInfo) -> Rendering[Any]:
        """See the base class."""
        return RENDERING if service_port.policy.userspace else self._main

    def slot_lists(self, service_port: ServicePortInfo) -> int:
        """See the base class."""
        return self.serving(service_port).slot_lists(service_port)

    def derivation(self, context: Contexts) -> Derivation:
        """See the base class."""
        return self._main.derivation(context.main)

    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """See the base class."""
        return self._of(table).lines(family, table, key, value)

    def summary(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """See the base class."""
        return self._of(table).summary(family, table, key, value)

    def serves(self, entry: Entry, address: str, port: int) -> bool:
        """See the base class."""
        return self._of(entry[0]).serves(entry, address, port)

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """See the base class."""
        return [*RENDERING.rows(family, tables, place), *self._main.rows(family, tables, place)]

    def common_keys(self, static: Sequence[Entry], tables: Mapping[str, Mapping[Any, Any]]) -> list[tuple[str, Any]]:
        """See the base class."""
        return self._main.common_keys(static, tables)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """See the base class."""
        return {**RENDERING.texts(family, tables), **self._main.texts(family, tables)}

    def _of(self, table: str) -> Rendering[Any]:
        return self._main if table in self._main.tables else RENDERING
