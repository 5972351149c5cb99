# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The desired tables of one family, kept up to date one Service at a time at a cost of O(change).

What a mode works out from all contributions together (the chains that Services share) is worked out again only where a
contribution to it changed. The outcome is what the mode's ``desired_tables`` gives for the same routes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain as concatenated
from typing import Any, Dict, Hashable, Iterable, List, Mapping, Sequence, Tuple

from ...cluster.model import NamespacedName
from ...configuration.model import IPVS, NFTABLES
from ...convergence.merged import ABSENT, Entry, Journal, MergedTables
from ...rendering.iptables import render as iptables
from ...rendering.iptables.services import CHAINS as IPTABLES_CHAINS
from ...rendering.iptables.services import FRAGMENTS
from ...rendering.iptables.services import entries_of as iptables_entries
from ...rendering.iptables.tables import ChainKey, Fragment, Rules
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.chains import chain_table
from ...rendering.ipvs.entries import entries_of as ipvs_entries
from ...rendering.ipvs.entries import node_facts
from ...rendering.ipvs.sets import NAMES
from ...rendering.ipvs.tables import static_entries as ipvs_static
from ...rendering.nftables.layout import static_entries as nftables_static
from ...rendering.nftables.objects import RESOURCE
from ...rendering.nftables.tables import entries_of as nftables_entries
from ...rendering.settings import DataplaneSettings
from ...resources import Change
from ...serviceports.routes import ServicePortName, ServicePortRoute

#: Contributes what is there without any Service; comes before every real name.
_STATIC = ServicePortName("", "", "", "")

Changes = Dict[str, Change[Any, Any]]


def change_of(rows: Mapping[Hashable, Any], journal: Mapping[Hashable, Any]) -> Change[Any, Any]:
    """What separates the values in a journal from those in the table now."""
    change: Change[Any, Any] = Change()
    for key, before in journal.items():
        now = rows.get(key, ABSENT)
        if before is ABSENT:
            if now is not ABSENT:
                change.added[key] = now
        elif now is ABSENT:
            change.removed[key] = before
        elif before != now:
            change.replaced[key] = (before, now)
    return change


class DesiredTables:
    """The tables of one mode and family; :attr:`desired` has what the resources should hold, by table name.

    ``stale`` tells that a setting which depends on all Services together has changed, so that each one has to be put
    again.
    """

    def __init__(self, settings: DataplaneSettings, names: Iterable[str]) -> None:
        self.settings = settings
        self.stale = False
        self._merged = MergedTables(names)
        self._ports: Dict[NamespacedName, Tuple[ServicePortName, ...]] = {}

    @property
    def desired(self) -> Mapping[str, Mapping[Any, Any]]:
        """Desired tables by name. They change in place."""
        return self._merged.tables

    def put(self, service: NamespacedName, routes: Sequence[ServicePortRoute]) -> None:
        """Take the routes of a Service in place of its earlier ones; none if it is gone."""
        before = self._ports.get(service, ())
        now = tuple(route.key for route in routes)
        for key in before:
            if key not in now:
                self._merged.replace(key, [])
        for route in routes:
            self._merged.replace(route.key, self._entries(route))
        if now:
            self._ports[service] = now
        else:
            self._ports.pop(service, None)

    def settle(self) -> None:
        """Follow the setting that ``stale`` tells about; every Service has to be put again afterwards."""
        self.stale = False

    def follow(self, settings: DataplaneSettings) -> bool:
        """Take settings with other addresses of the node or ServiceCIDRs.

        Returns whether Services that can be reached by addresses of the node have to be put again.
        """
        self.settings = settings
        self._put_static()
        return False

    def _put_static(self) -> None:
        """Contribute what is there without any Service."""
        raise KeyError(_STATIC)

    def take_changes(self) -> Changes:
        """What changed in the desired tables since the last call, by table."""
        self._derive(self._merged.journal)
        taken = self._merged.take_journal()
        changes = {table: change_of(self._merged.tables[table], rows) for table, rows in taken.items()}
        return {table: change for table, change in changes.items() if change}

    def _entries(self, route: ServicePortRoute) -> List[Entry]:
        raise KeyError(route.key)

    def _derive(self, journal: Journal) -> None:
        """Work out again what follows from the keys in the journal."""


class _SharedChain:
    """The parts of one chain in their order, and the rules that they make up."""

    def __init__(self) -> None:
        self._parts: List[Tuple[Tuple[int, Tuple[str, ...]], Rules]] = []

    def set(self, fragment: Fragment, rules: Any) -> None:
        """Take, or with ABSENT leave out, one part."""
        place = (fragment.rank, tuple(fragment.route or ()))
        index = bisect_left(self._parts, (place,))
        if index < len(self._parts) and self._parts[index][0] == place:
            del self._parts[index]
        if rules is not ABSENT:
            insort(self._parts, (place, rules))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def rules(self) -> Rules:
        """All rules."""
        return tuple(concatenated.from_iterable(rules for _place, rules in self._parts))


class IptablesTables(DesiredTables):
    """Table ``chains`` of iptables mode."""

    def __init__(self, settings: DataplaneSettings) -> None:
        super().__init__(settings, (IPTABLES_CHAINS, FRAGMENTS))
        self._shared: Dict[ChainKey, _SharedChain] = {}
        self._comments = True
        self._endpoints = 0
        self._endpoints_of: Dict[NamespacedName, int] = {}
        self._put_static()
        self._derive(self._merged.journal)

    def _put_static(self) -> None:
        self._merged.replace(_STATIC, list(iptables.static_entries(self.settings)))
        for key, value in iptables.static_table(self.settings).items():
            self._merged.put(IPTABLES_CHAINS, key, value)

    def put(self, service: NamespacedName, routes: Sequence[ServicePortRoute]) -> None:
        """See the base class. Above a number of endpoints all rules are written without some of their comments."""
        count = sum(len(route.endpoints) for route in routes)
        self._endpoints += count - self._endpoints_of.pop(service, 0)
        if count:
            self._endpoints_of[service] = count
        super().put(service, routes)
        self.stale = self._comments != (self._endpoints <= self.settings.large_cluster_endpoints)

    def settle(self) -> None:
        """See the base class: the number of endpoints decides about comments."""
        self._comments = self._endpoints <= self.settings.large_cluster_endpoints
        self.stale = False

    def _entries(self, route: ServicePortRoute) -> List[Entry]:
        return list(iptables_entries(route, self.settings, self._comments))

    def _derive(self, journal: Journal) -> None:
        touched: Dict[ChainKey, None] = {}
        parts = self._merged.tables[FRAGMENTS]
        for fragment in journal.pop(FRAGMENTS, {}):
            self._shared.setdefault(fragment.chain, _SharedChain()).set(fragment, parts.get(fragment, ABSENT))
            touched[fragment.chain] = None
        for chain in touched:
            shared = self._shared[chain]
            self._merged.put(IPTABLES_CHAINS, chain, shared.rules() if shared else ABSENT)


class IpvsTables(DesiredTables):
    """The tables of ipvs mode; its chains depend on which sets have elements."""

    def __init__(self, settings: DataplaneSettings) -> None:
        names = (
            ipvs.DEVICES,
            ipvs.ADDRESSES,
            ipvs.SETS,
            ipvs.SET_ELEMENTS,
            ipvs.CHAINS,
            ipvs.VIRTUAL_SERVERS,
            ipvs.REAL_SERVERS,
            ipvs.FIREWALLED,
        )
        super().__init__(settings, names)
        self._facts = node_facts(settings)
        self._plain_name = {actual: name for name, actual in NAMES[settings.family].items()}
        self._elements: Dict[str, int] = dict.fromkeys(self._plain_name.values(), 0)
        self._put_static()

    def _put_static(self) -> None:
        self._merged.replace(_STATIC, ipvs_static(self.settings))
        self._set_chains()

    def follow(self, settings: DataplaneSettings) -> bool:
        """See the base class. Virtual servers of node ports are made for each address of the node."""
        super().follow(settings)
        self._facts = node_facts(settings)
        return True

    def _entries(self, route: ServicePortRoute) -> List[Entry]:
        return ipvs_entries(route, self._facts)

    def _derive(self, journal: Journal) -> None:
        before = self._filled()
        rows = self._merged.tables[ipvs.SET_ELEMENTS]
        for key, value in journal.get(ipvs.SET_ELEMENTS, {}).items():
            self._elements[self._plain_name[key.set]] += (key in rows) - (value is not ABSENT)
        firewalled = journal.pop(ipvs.FIREWALLED, {})
        if firewalled or self._filled() != before:
            self._set_chains()

    def _filled(self) -> List[str]:
        return [name for name, count in self._elements.items() if count]

    def _set_chains(self) -> None:
        wanted = chain_table(self.settings, frozenset(self._filled()), self._merged.tables[ipvs.FIREWALLED])
        for key in [key for key in self._merged.tables[ipvs.CHAINS] if key not in wanted]:
            self._merged.put(ipvs.CHAINS, key, ABSENT)
        for key, value in wanted.items():
            self._merged.put(ipvs.CHAINS, key, value)


class NftablesTables(DesiredTables):
    """Table ``nftables`` of nftables mode."""

    def __init__(self, settings: DataplaneSettings) -> None:
        super().__init__(settings, (RESOURCE,))
        self._put_static()

    def _put_static(self) -> None:
        self._merged.replace(_STATIC, list(nftables_static(self.settings)))

    def _entries(self, route: ServicePortRoute) -> List[Entry]:
        return list(nftables_entries(route, self.settings))


def desired_tables(mode: str, settings: DataplaneSettings) -> DesiredTables:
    """Empty tables (no Services) of a mode."""
    if mode == IPVS:
        return IpvsTables(settings)
    return NftablesTables(settings) if mode == NFTABLES else IptablesTables(settings)
