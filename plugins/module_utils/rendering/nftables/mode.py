# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render nftables mode: ServicePorts to the table ``kube-proxy`` of one family.

The text of entries is imported late (see docs/architecture.md): most runs of a module show none.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence

from ...serviceports.info import Endpoint, ServicePortInfo
from ...serviceports.weights import slots
from ..decision import Arrival, Client, Shares
from ..merged import Entry
from ..rendering import Options, Rendering
from ..settings import DataplaneSettings
from . import hashing
from .layout import static_entries
from .objects import RESOURCE
from .service_ports import service_port_entries


class NftablesRendering(Rendering[DataplaneSettings]):
    """One table, ``nftables``, whose keys and values are described in ``objects``."""

    name = "nftables"
    tables = (RESOURCE,)
    most_lists = hashing.MOST_LISTS
    most_lists_of_service = hashing.MOST_LISTS_OF_SERVICE

    def context(self, settings: DataplaneSettings, options: Options) -> DataplaneSettings:
        """See the base class."""
        return settings

    def static_entries(self, context: DataplaneSettings) -> List[Entry]:
        """Return base chains, sets and maps, and the rules that look up ServicePorts."""
        return static_entries(context)

    def entries(self, service_port: ServicePortInfo, context: DataplaneSettings) -> List[Entry]:
        """See the base class."""
        return service_port_entries(service_port, context)

    def ignored_annotation(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> Sequence[str]:
        """See the base class; schedulers that hash the source are stable hashing here."""
        policy = service_port.policy
        if policy.scheduler not in hashing.SCHEDULERS:
            return super().ignored_annotation(service_port, settings)
        rest = service_port._replace(policy=policy._replace(scheduler="", scheduler_flags=()))
        return [*super().ignored_annotation(rest, settings), *hashing.ignored(service_port, settings)]

    def requested_schedulers(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> FrozenSet[str]:
        """See the base class."""
        return hashing.requested(service_port)

    def lists_of(self, service_port: ServicePortInfo) -> int:
        """See the base class."""
        return hashing.lists_of(service_port)

    def chosen_by(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """See the base class."""
        if not hashing.is_hashed(service_port, settings):
            return ""
        return "address and port" if hashing.by_port(service_port) else "address"

    def endpoint_of(
        self, service_port: ServicePortInfo, endpoints: Sequence[Endpoint], client: Client, settings: DataplaneSettings
    ) -> Optional[Endpoint]:
        """See the base class."""
        if not endpoints or not hashing.is_hashed(service_port, settings):
            return None
        if hashing.by_port(service_port) and not client.port:
            return None
        return hashing.endpoint_of(service_port, endpoints, client.address, client.port)

    def shares_of(
        self, service_port: ServicePortInfo, endpoints: Sequence[Endpoint], settings: DataplaneSettings
    ) -> Shares:
        """See the base class."""
        if endpoints and hashing.is_hashed(service_port, settings):
            owned = Counter(hashing.slots_of(endpoints))
            return tuple(owned[position] for position in range(len(endpoints)))
        if not service_port.weighted:
            return (1,) * len(endpoints)
        places = Counter(slots(tuple(endpoints)))
        return tuple(places[endpoint] for endpoint in endpoints)

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> List[str]:
        """See the base class."""
        from .reached import objects_for

        return objects_for(family, tables.get(RESOURCE, {}), place)

    def lines(self, family: str, table: str, key: Any, value: Any) -> List[str]:
        """Return an entry in the syntax of the nft program."""
        from .text import describe

        return describe(family, key, value)

    def summary(self, family: str, table: str, key: Any, value: Any) -> List[str]:
        """See the base class; of slots, only how many each endpoint has."""
        from .text import describe, describe_slots

        return describe_slots(family, key, value) or describe(family, key, value)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> Dict[str, str]:
        """See the base class."""
        from .text import restore_text

        return {f"nft {family}": restore_text(family, tables)}


RENDERING = NftablesRendering()
