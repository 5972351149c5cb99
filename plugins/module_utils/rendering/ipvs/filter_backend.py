# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter backend of ipvs mode: the packet filter beside IPVS, which marks, masquerades and filters its connections.

IPVS only rewrites destinations. The filter backend decides which connections are masqueraded, which sources may
connect, and which ports of service addresses are closed: chains of iptables with ipsets, as kube-proxy creates them, or
one table of nf_tables. Both have the same effect on packets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Mapping

from ..merged import Entry
from ..rendering import Derivation
from ..settings import Arrival, DataplaneSettings
from .entries import Contribution


class FilterBackend(ABC):
    """The pure half of a filter backend.

    ``name``: as in a NodeProxyConfiguration. ``tables``: the tables that its resources hold, in order of dependence.
    ``parts``: further tables that ServicePorts contribute to. ``contribution``: collects the entries of one of them.
    """

    name: str = ""
    tables: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    contribution: type[Contribution]

    @abstractmethod
    def static_entries(self, settings: DataplaneSettings) -> list[Entry]:
        """Return the entries that exist without any Service, in an order in which they can be created."""

    def derivation(self, settings: DataplaneSettings) -> Derivation:
        """Return the derivation of entries from all contributions together, for one set of tables."""
        return Derivation()

    @abstractmethod
    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return an entry in native syntax."""

    @abstractmethod
    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """Return what tables, desired or observed ones, have for a destination, in native syntax."""

    @abstractmethod
    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """Return desired tables as input of the usual tools, by tool."""
