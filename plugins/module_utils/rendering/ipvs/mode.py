# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render ipvs mode: ServicePorts to virtual servers, real servers, ipsets, addresses and chains of one family."""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from ...addresses import family_of
from ...serviceports.info import Endpoint, ServicePortInfo
from ..iptables.mode import restore_program
from ..iptables.tables import CHAINS, ChainTable, JumpKey, whole_text
from ..merged import ABSENT, Entry, Journal, MergedTables
from ..rendering import Derivation, Options, Rendering, Tables
from ..settings import DataplaneSettings
from .chains import chain_table, out_filter_rules, redirect_rules
from .entries import NodeFacts, is_node_address, node_facts, service_port_entries
from .model import (
    ADDRESSES,
    DEVICE,
    DEVICES,
    FIREWALLED,
    REAL_SERVERS,
    REDIRECTED,
    SET_ELEMENTS,
    SETS,
    VIRTUAL_SERVERS,
    RealServerKey,
    VirtualServerKey,
)
from .policies import OUTSIDE, endpoint_lists
from .scheduling import hashed_by, requested_schedulers, schedule
from .sets import NAMES, definitions
from .text import (
    address_line,
    device_line,
    element_line,
    ip_batch_text,
    ipset_text,
    ipvsadm_text,
    real_server_line,
    set_line,
    virtual_server_line,
)


class IpvsContext(NamedTuple):
    """Settings of the family, and the facts that ServicePorts need from them."""

    settings: DataplaneSettings
    facts: NodeFacts


class FilledSets(Derivation):
    """Derives the chains: their rules depend on which sets have elements, and on firewalled and redirected ports."""

    def __init__(self, settings: DataplaneSettings) -> None:
        self._settings = settings
        self._plain_names = {actual: name for name, actual in NAMES[settings.family].items()}
        self._elements: Dict[str, int] = dict.fromkeys(self._plain_names.values(), 0)
        self._filled: Optional[FrozenSet[str]] = None

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

    def _chains(self, filled: FrozenSet[str], firewalled: Iterable[Any], redirected: Mapping[Any, Any]) -> ChainTable:
        return chain_table(self._settings, filled, firewalled, redirected)


class IpvsRendering(Rendering[IpvsContext]):
    """The tables of ipvs mode.

    devices: name to kind; addresses: address to True; sets: name to SetDefinition; set_elements: SetElementKey to True;
    chains: ChainKey to rules and JumpKey to 1; virtual_servers: VirtualServerKey to VirtualServer; real_servers:
    RealServerKey to RealServer. Addresses come last among the tables that packets traverse, see
    ``convergence.modes.ipvs``.
    """

    name = "ipvs"
    tables = (DEVICES, ADDRESSES, SETS, SET_ELEMENTS, CHAINS, VIRTUAL_SERVERS, REAL_SERVERS)
    parts = (FIREWALLED, REDIRECTED)
    entries_have_addresses = True
    source_without_detector = "kept, except for connections of the node itself"

    def settings_in_use(self, settings: DataplaneSettings) -> DataplaneSettings:
        """See the base class. Node ports have a virtual server on each address, except link-local ones."""
        owned = {address for _interface, address in settings.node_addresses if is_node_address(address)}
        addresses = tuple(("", address) for address in sorted(owned))
        return super().settings_in_use(settings)._replace(node_addresses=addresses)

    def context(self, settings: DataplaneSettings, options: Options) -> IpvsContext:
        """See the base class."""
        return IpvsContext(settings, node_facts(settings))

    def static_entries(self, context: IpvsContext) -> List[Entry]:
        """Return the dummy device and the sets; all chains are derived."""
        entries: List[Entry] = [(DEVICES, DEVICE, "dummy")]
        sets = definitions(context.settings.family, context.settings.behaviour)
        entries += [(SETS, name, definition) for name, definition in sets.items()]
        return entries

    def entries(self, service_port: ServicePortInfo, context: IpvsContext) -> List[Entry]:
        """See the base class."""
        return service_port_entries(service_port, context.facts)

    def endpoints(
        self, service_port: ServicePortInfo, external: bool, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """See the base class; kube-proxy takes all endpoints where none is local, whatever the traffic policy is."""
        lists = endpoint_lists(service_port, settings.behaviour)
        return lists.external if external and lists.redirected != OUTSIDE else lists.internal

    def ignored_policy(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> Sequence[str]:
        """See the base class."""
        return schedule(service_port, settings.scheduler, settings.schedulers).ignored

    def chosen_by(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """See the base class."""
        return hashed_by(schedule(service_port, settings.scheduler, settings.schedulers).server)

    def requested_schedulers(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> FrozenSet[str]:
        """See the base class."""
        return requested_schedulers(service_port, settings.scheduler)

    def drops_without_local(self, settings: DataplaneSettings) -> bool:
        """See the base class."""
        return settings.behaviour.local_means_local

    def derivation(self, context: IpvsContext) -> FilledSets:
        """See the base class."""
        return FilledSets(context.settings)

    def lines(self, family: str, table: str, key: Any, value: Any) -> List[str]:
        """Return an entry as ``ipvsadm -Sn``, ``ipset save`` or ``iptables`` write it, or as arguments of ``ip``."""
        return _LINES[table](family, key, value)

    def serves(self, entry: Entry, address: str, port: int) -> bool:
        """See the base class. Virtual and real servers affect their own address and port, other entries any."""
        key = entry[1]
        server = key.server if isinstance(key, RealServerKey) else key
        return not isinstance(server, VirtualServerKey) or (server.address, server.port) == (address, port)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> Dict[str, str]:
        """See the base class."""
        addresses = [address for address in tables[ADDRESSES] if family_of(address) == family]
        return {
            f"ip {family}": ip_batch_text(addresses),
            f"ipset {family}": ipset_text(tables[SETS], tables[SET_ELEMENTS]),
            restore_program(family): whole_text(tables[CHAINS]),
            f"ipvsadm {family}": ipvsadm_text(tables[VIRTUAL_SERVERS], tables[REAL_SERVERS]),
        }


def _chain_lines(_family: str, key: Any, value: Any) -> List[str]:
    rules = [key.rule] if isinstance(key, JumpKey) else value
    return [f"-t {key.table} -A {key.chain} {rule}" for rule in rules]


def _firewalled_lines(family: str, key: Any, _value: Any) -> List[str]:
    return [f"-t filter -A KUBE-IPVS-OUT-FILTER {rule}" for rule in out_filter_rules(family, [key])]


def _redirected_lines(family: str, key: Any, value: Any) -> List[str]:
    parts = redirect_rules(family, key, value)
    return [f"-t {chain.table} -A {chain.chain} {rule}" for chain, rules in parts.items() for rule in rules]


_LINES: Mapping[str, Callable[[str, Any, Any], List[str]]] = {
    DEVICES: lambda _family, key, _value: [device_line(key)],
    ADDRESSES: lambda _family, key, _value: [address_line(key)],
    SETS: lambda _family, key, value: [set_line(key, value)],
    SET_ELEMENTS: lambda _family, key, _value: [element_line(key)],
    CHAINS: _chain_lines,
    FIREWALLED: _firewalled_lines,
    REDIRECTED: _redirected_lines,
    VIRTUAL_SERVERS: lambda _family, key, value: [virtual_server_line(key, value)],
    REAL_SERVERS: lambda _family, key, value: [real_server_line(key, value)],
}

RENDERING = IpvsRendering()
