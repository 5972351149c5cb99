# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render nftables mode: ServicePorts to the table ``kube-proxy`` of one family."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

from ...serviceports.info import ServicePortInfo
from ..merged import Entry
from ..rendering import Options, Rendering
from ..settings import DataplaneSettings
from .layout import static_entries
from .objects import RESOURCE
from .service_ports import service_port_entries
from .text import describe, restore_text


class NftablesRendering(Rendering[DataplaneSettings]):
    """One table, ``nftables``, whose keys and values are described in ``objects``."""

    name = "nftables"
    tables = (RESOURCE,)

    def context(self, settings: DataplaneSettings, options: Options) -> DataplaneSettings:
        """See the base class."""
        return settings

    def static_entries(self, context: DataplaneSettings) -> List[Entry]:
        """Return base chains, sets and maps, and the rules that look up ServicePorts."""
        return static_entries(context)

    def entries(self, service_port: ServicePortInfo, context: DataplaneSettings) -> List[Entry]:
        """See the base class."""
        return service_port_entries(service_port, context)

    def lines(self, family: str, table: str, key: Any, value: Any) -> List[str]:
        """Return an entry in the syntax of the nft program."""
        return describe(family, key, value)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> Dict[str, str]:
        """See the base class."""
        return {f"nft {family}": restore_text(family, tables)}


RENDERING = NftablesRendering()
