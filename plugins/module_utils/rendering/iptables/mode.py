# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render iptables mode: ServicePorts to the table of chains and jump rules of one family."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain as concatenated
from typing import Any, Iterable, Mapping

from ...base.addresses import IPV6
from ...resources import ABSENT
from ...serviceports.info import ServicePortInfo
from ..merged import Entry, Journal, MergedTables
from ..rendering import Derivation, Rendering, Tables
from ..settings import Arrival, DataplaneSettings
from .fixed import KUBE_FIREWALL, SERVICES, SHARED_CHAINS, fixed_chains, jumps, martian_rules, node_port_rules
from .reached import rules_for
from .services import service_port_entries
from .tables import CHAINS, FRAGMENTS, PRESENT, ChainKey, Fragment, JumpKey, Place, Rules, whole_text


class _SharedChain:
    """The fragments of one chain in their order."""

    def __init__(self, parts: Iterable[tuple[Place, Rules]] = ()) -> None:
        self._parts = sorted(parts)

    def set(self, place: Place, rules: Any) -> None:
        """Set, or with ABSENT remove, the fragment at a place."""
        index = bisect_left(self._parts, (place,))
        if index < len(self._parts) and self._parts[index][0] == place:
            del self._parts[index]
        if rules is not ABSENT:
            insort(self._parts, (place, rules))

    def rules(self) -> Any:
        """Return all rules; ABSENT if the chain has no fragment."""
        if not self._parts:
            return ABSENT
        return tuple(concatenated.from_iterable(rules for _place, rules in self._parts))


class SharedChains(Derivation):
    """Joins fragments into the chains that ServicePorts share: by rank, then in the order of ServicePort names."""

    def __init__(self) -> None:
        self._chains: dict[ChainKey, _SharedChain] = {}

    def whole(self, tables: Tables) -> None:
        """See the base class."""
        parts: dict[ChainKey, list[tuple[Place, Rules]]] = {}
        for fragment, rules in tables[FRAGMENTS].items():
            parts.setdefault(fragment.chain, []).append((fragment.place, rules))
        chains = tables[CHAINS]
        for chain, found in parts.items():
            chains[chain] = _SharedChain(found).rules()

    def update(self, merged: MergedTables, journal: Journal) -> None:
        """See the base class."""
        touched: dict[ChainKey, None] = {}
        fragments = merged.tables[FRAGMENTS]
        for fragment in journal.pop(FRAGMENTS, {}):
            chain = self._chains.setdefault(fragment.chain, _SharedChain())
            chain.set(fragment.place, fragments.get(fragment, ABSENT))
            touched[fragment.chain] = None
        for key in touched:
            merged.put(CHAINS, key, self._chains[key].rules())


class IptablesRendering(Rendering[DataplaneSettings]):
    """One table, ``chains``: ``ChainKey`` to its rules or PRESENT, and ``JumpKey`` to 1."""

    name = "iptables"
    tables = (CHAINS,)
    parts = (FRAGMENTS,)
    counts_endpoints = True
    closes_cluster_ips = False

    def at_size(self, settings: DataplaneSettings, endpoints: int) -> DataplaneSettings:
        """Omit the comments of per-endpoint rules above ``large_cluster_endpoints`` endpoints, as kube-proxy does."""
        return settings._replace(endpoint_comments=endpoints <= settings.large_cluster_endpoints)

    def context(self, settings: DataplaneSettings) -> DataplaneSettings:
        """See the base class."""
        return settings

    def static_entries(self, context: DataplaneSettings) -> list[Entry]:
        """Return the fixed chains, the empty shared chains, the end of KUBE-SERVICES, and the jump rules.

        Of KUBE-FIREWALL only the existence matters where its rules belong to kubelet.
        """
        entries: list[Entry] = [(CHAINS, chain, rules) for chain, rules in fixed_chains(context).items()]
        if martian_rules(context) is None:
            entries.append((CHAINS, KUBE_FIREWALL, PRESENT))
        entries += [(CHAINS, key, 1) for key in jumps()]
        entries += [(FRAGMENTS, Fragment(chain, 0, None), ()) for chain in SHARED_CHAINS]
        entries.append((FRAGMENTS, Fragment(SERVICES, 2, None), node_port_rules(context)))
        return entries

    def entries(self, service_port: ServicePortInfo, context: DataplaneSettings) -> list[Entry]:
        """See the base class."""
        return service_port_entries(service_port, context)

    def derivation(self, context: DataplaneSettings) -> SharedChains:
        """See the base class."""
        return SharedChains()

    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return the rules of a chain, of a fragment of it, or a jump, as arguments of ``iptables``."""
        if isinstance(key, JumpKey):
            return [f"-t {key.table} -A {key.chain} {key.rule}"]
        chain: ChainKey = key.chain if isinstance(key, Fragment) else key
        return [f"-t {chain.table} -A {chain.chain} {rule}" for rule in (value if isinstance(value, tuple) else ())]

    def checks_sources_first(self, settings: DataplaneSettings) -> bool:
        """See the base class."""
        return settings.behaviour.ranges_before_endpoints

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """See the base class."""
        return rules_for(tables.get(CHAINS, {}), place)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """See the base class."""
        return {restore_program(family): whole_text(tables[CHAINS])}


def restore_program(family: str) -> str:
    """Return ``iptables-restore`` or ``ip6tables-restore``."""
    return "ip6tables-restore" if family == IPV6 else "iptables-restore"


RENDERING = IptablesRendering()
