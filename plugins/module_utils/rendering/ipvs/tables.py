# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From routes to the desired tables of ipvs mode, for one family."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, Iterable, List, Mapping

from ...serviceports.routes import ServicePortName, ServicePortRoute
from ..settings import DataplaneSettings
from .chains import chain_table
from .entries import Entry, entries_of, node_facts
from .model import ADDRESSES, CHAINS, DEVICE, DEVICES, FIREWALLED, REAL_SERVERS, SET_ELEMENTS, SETS, VIRTUAL_SERVERS
from .sets import NAMES, definitions

ORDER = (DEVICES, ADDRESSES, SETS, SET_ELEMENTS, CHAINS, VIRTUAL_SERVERS, REAL_SERVERS)
"""The tables in the order in which ``apply_plan`` wants their resources."""


def static_entries(settings: DataplaneSettings) -> List[Entry]:
    """What there is without any Service: the dummy device and the sets. Chains are made of all entries at the end."""
    entries: List[Entry] = [(DEVICES, DEVICE, "dummy")]
    entries += [(SETS, name, definition) for name, definition in definitions(settings.family).items()]
    return entries


def filled_sets(family: str, elements: Iterable[Any]) -> FrozenSet[str]:
    """The sets that the element keys fill, by their names without the family's infix."""
    present = {key[0] for key in elements}
    return frozenset(name for name, actual in NAMES[family].items() if actual in present)


def merge(entries: Iterable[Entry], settings: DataplaneSettings) -> Dict[str, Dict[Any, Any]]:
    """The tables that entries make up, chains included; of entries with one key the first one counts."""
    tables: Dict[str, Dict[Any, Any]] = {name: {} for name in (*ORDER, FIREWALLED)}
    for table, key, value in entries:
        tables[table].setdefault(key, value)
    firewalled = tables.pop(FIREWALLED)
    tables[CHAINS] = dict(chain_table(settings, filled_sets(settings.family, tables[SET_ELEMENTS]), firewalled))
    return tables


def desired_tables(
    routes: Mapping[ServicePortName, ServicePortRoute], settings: DataplaneSettings
) -> Dict[str, Dict[Any, Any]]:
    """The desired tables of a family by name, in the order ``ORDER``.

    devices: name -> kind; addresses: address -> True; sets: name -> SetDefinition; set_elements: SetElementKey -> True;
    chains: ChainKey -> rules and JumpKey -> 1; virtual_servers: VirtualServerKey -> VirtualServer; real_servers:
    RealServerKey -> RealServer. Raises ConfigurationError for a local traffic detector that is not valid.
    """
    facts = node_facts(settings)
    entries = static_entries(settings)
    for key in sorted(routes):
        entries += entries_of(routes[key], facts)
    return merge(entries, settings)
