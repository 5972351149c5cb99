# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From routes to the desired table of chains and jump rules of one family."""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Tuple

from ...serviceports.routes import ServicePortName, ServicePortRoute
from ..settings import DataplaneSettings
from .fixed import KUBE_FIREWALL, SERVICES, fixed_chains, jumps, martian_rules, node_port_rules, shared_chain_names
from .services import CHAINS, FRAGMENTS, Entry, entries_of
from .tables import PRESENT, ChainKey, ChainTable, Fragment, Rules

Routes = Mapping[ServicePortName, ServicePortRoute]


def endpoint_comments(routes: Routes, settings: DataplaneSettings) -> bool:
    """Whether rules that name one endpoint bear a comment: up to ``large_cluster_endpoints`` endpoints of any state."""
    return sum(len(route.endpoints) for route in routes.values()) <= settings.large_cluster_endpoints


def static_entries(settings: DataplaneSettings) -> List[Entry]:
    """What there is without any Service, jumps aside: fixed chains, shared chains and the tail of KUBE-SERVICES."""
    entries = [Entry(CHAINS, chain, rules) for chain, rules in fixed_chains(settings).items()]
    entries += [Entry(FRAGMENTS, Fragment(chain, 0, None), ()) for chain in shared_chain_names()]
    entries.append(Entry(FRAGMENTS, Fragment(SERVICES, 2, None), node_port_rules(settings)))
    return entries


def static_table(settings: DataplaneSettings) -> ChainTable:
    """The part that is not made of entries: jump rules, and KUBE-FIREWALL where only its presence matters."""
    table: ChainTable = {}
    if martian_rules(settings) is None:
        table[KUBE_FIREWALL] = PRESENT
    for key in jumps():
        table[key] = 1
    return table


def join(fragments: Mapping[Fragment, Rules]) -> Dict[ChainKey, Rules]:
    """Shared chains made of their parts: by rank, then in the order of the routes' keys."""
    by_chain: Dict[ChainKey, List[Tuple[Tuple[int, Tuple[str, ...]], Rules]]] = {}
    for (chain, rank, route), rules in fragments.items():
        by_chain.setdefault(chain, []).append(((rank, route or ()), rules))
    chains: Dict[ChainKey, Rules] = {}
    for chain, parts in by_chain.items():
        parts.sort()
        chains[chain] = tuple(rule for _order, rules in parts for rule in rules)
    return chains


def merge(entries: Iterable[Entry], settings: DataplaneSettings) -> ChainTable:
    """The table that entries make up, together with :func:`static_table`."""
    fragments: Dict[Fragment, Rules] = {}
    table: ChainTable = {}
    for entry in entries:
        if isinstance(entry.key, Fragment):
            fragments[entry.key] = entry.rules
        else:
            table[entry.key] = entry.rules
    shared: Mapping[ChainKey, Rules] = join(fragments)
    table.update(shared.items())
    table.update(static_table(settings))
    return table


def desired_tables(routes: Routes, settings: DataplaneSettings) -> Dict[str, ChainTable]:
    """The desired tables of the family: one, ``chains``, of ``ChainKey`` to rules and ``JumpKey`` to 1.

    Raises ConfigurationError for a local traffic detector that is not valid.
    """
    comments = endpoint_comments(routes, settings)
    entries = static_entries(settings)
    for key in sorted(routes):
        entries += entries_of(routes[key], settings, comments)
    return {CHAINS: merge(entries, settings)}
