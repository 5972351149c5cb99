# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter backend of ipvs mode in iptables: ipsets, and chains that match them, with kube-proxy's names."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, Optional

from ...resources import ABSENT
from ..iptables.mode import restore_program
from ..iptables.reached import rules_for
from ..iptables.tables import CHAINS, ChainTable, JumpKey, whole_text
from ..merged import Entry, Journal, MergedTables
from ..rendering import Derivation, Tables
from ..settings import Arrival, DataplaneSettings
from .chains import INSIDE_CHAIN, OUTSIDE_CHAIN, chain_table, out_filter_rules, redirect_rules
from .filter_backend import FilterBackend
from .ipset_entries import IpsetContribution
from .model import FIREWALLED, REDIRECTED, SET_ELEMENTS, SETS, SetElementKey
from .sets import NAMES, PROTOCOL_OF_NODE_PORTS, definitions
from .text import element_line, ipset_text, set_line


class FilledSets(Derivation):
    """Derives the chains: their rules depend on which sets have elements, and on firewalled and redirected ports."""

    def __init__(self, settings: DataplaneSettings) -> None:
        self._settings = settings
        self._plain_names = {actual: name for name, actual in NAMES[settings.family].items()}
        self._elements: dict[str, int] = dict.fromkeys(self._plain_names.values(), 0)
        self._filled: Optional[frozenset[str]] = None

    def whole(self, tables: Tables) -> None:
        """See the base class."""
        present = {key[0] for key in tables[SET_ELEMENTS]}
        filled = frozenset(self._plain_names[name] for name in present)
        tables[CHAINS] = dict(self._chains(filled, tables[FIREWALLED], tables[REDIRECTED]))

    def update(self, merged: MergedTables, journal: Journal) -> None:
        """See the base class."""
        rows = merged.tables[SET_ELEMENTS]
        for key, value in journal.get(SET_ELEMENTS, {}).items():
            self._elements[self._plain_names[key.set]] += (key in rows) - (value is not ABSENT)
        firewalled, redirected = journal.pop(FIREWALLED, {}), journal.pop(REDIRECTED, {})
        filled = frozenset(name for name, count in self._elements.items() if count)
        if not firewalled and not redirected and filled == self._filled:
            return
        self._filled = filled
        wanted = self._chains(filled, merged.tables[FIREWALLED], merged.tables[REDIRECTED])
        for key in [key for key in merged.tables[CHAINS] if key not in wanted]:
            merged.put(CHAINS, key, ABSENT)
        for key, value in wanted.items():
            merged.put(CHAINS, key, value)

    def _chains(self, filled: frozenset[str], firewalled: Iterable[Any], redirected: Mapping[Any, Any]) -> ChainTable:
        return chain_table(self._settings, filled, firewalled, redirected)


class IptablesFilterBackend(FilterBackend):
    """See the base class.

    sets: name to SetDefinition; set_elements: SetElementKey to True; chains: ChainKey to rules and JumpKey to 1.
    """

    name = "iptables"
    tables = (SETS, SET_ELEMENTS, CHAINS)
    parts = (FIREWALLED, REDIRECTED)
    contribution = IpsetContribution

    def static_entries(self, settings: DataplaneSettings) -> list[Entry]:
        """Return the sets; all chains are derived."""
        return [(SETS, name, value) for name, value in definitions(settings.family, settings.behaviour).items()]

    def derivation(self, settings: DataplaneSettings) -> FilledSets:
        """See the base class."""
        return FilledSets(settings)

    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return an entry as ``ipset save`` or ``iptables`` write it."""
        return _LINES[table](family, key, value)

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """See the base class."""
        elements = [key for key in tables.get(SET_ELEMENTS, {}) if _is_about(key, place)]
        rules = rules_for(tables.get(CHAINS, {}), place, (INSIDE_CHAIN, OUTSIDE_CHAIN))
        return [*map(element_line, sorted(elements)), *rules]

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """See the base class."""
        return {
            f"ipset {family}": ipset_text(tables[SETS], tables[SET_ELEMENTS]),
            restore_program(family): whole_text(tables[CHAINS]),
        }


def _is_about(key: SetElementKey, place: Arrival) -> bool:
    """Return whether an element of a set is about a destination."""
    if key.element in (place.address, str(place.port)):
        return key.element == place.address or PROTOCOL_OF_NODE_PORTS.get(key.set) == place.protocol
    frontend = f"{place.address},{place.protocol}:{place.port}"
    return key.element == frontend or key.element.startswith(f"{frontend},")


def _chain_lines(_family: str, key: Any, value: Any) -> list[str]:
    rules = [key.rule] if isinstance(key, JumpKey) else value
    return [f"-t {key.table} -A {key.chain} {rule}" for rule in rules]


def _firewalled_lines(family: str, key: Any, _value: Any) -> list[str]:
    return [f"-t filter -A KUBE-IPVS-OUT-FILTER {rule}" for rule in out_filter_rules(family, [key])]


def _redirected_lines(family: str, key: Any, value: Any) -> list[str]:
    parts = redirect_rules(family, key, value)
    return [f"-t {chain.table} -A {chain.chain} {rule}" for chain, rules in parts.items() for rule in rules]


_LINES: Mapping[str, Callable[[str, Any, Any], list[str]]] = {
    SETS: lambda _family, key, value: [set_line(key, value)],
    SET_ELEMENTS: lambda _family, key, _value: [element_line(key)],
    CHAINS: _chain_lines,
    FIREWALLED: _firewalled_lines,
    REDIRECTED: _redirected_lines,
}

IPTABLES_FILTER_BACKEND = IptablesFilterBackend()
