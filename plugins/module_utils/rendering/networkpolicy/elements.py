# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render the rows of a node's policies to elements of the table."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Tuple

from ...base.addresses import IPV4, IPV6, family_of_packed
from ...networkpolicy import rows
from ...networkpolicy.rows import Row
from ...resources import ABSENT, Change, difference
from ..nftables.expressions import INTERFACE_NAME_BYTES
from ..nftables.objects import ElementKey, Key, ObjectKey, TableValue, Value
from . import bridged, layout, sets
from .layout import class_bytes
from .sets import Options

Entry = Tuple[Key, Value]


def static_entries(options: Options) -> Dict[Key, Value]:
    """Return the table without elements."""
    found: Dict[Key, Value] = {sets.TABLE.key: TableValue()}
    found.update({ObjectKey("set", name): value for name, value in sets.definitions(options).items()})
    chains = layout.chains(options, rows.EVERYTHING_ID)
    found.update({ObjectKey("chain", name): value for name, value in chains.items()})
    return found


def _port_key(number: bytes, protocol: int, port: int) -> bytes:
    return number + bytes((protocol, 0, 0, 0)) + port.to_bytes(2, "big") + b"\0\0"


def _port_range(number: int, protocol: int, first: int, last: int) -> bytes:
    """Return the key of a range; all its parts are in network byte order (see ``layout``)."""
    raw = number.to_bytes(4, "big")
    return _port_key(raw, protocol, first) + _port_key(raw, protocol, last)


def _interface(name: str) -> bytes:
    return name.encode().ljust(INTERFACE_NAME_BYTES, b"\0")


class Elements:
    """Render rows with the options of one table."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._grants = {
            (side, size): sets.name(sets.GRANTS, family, side)
            for side in sets.SIDES
            for family, size in ((IPV4, 4), (IPV6, 16))
        }

    def entries(self, row: Row, value: Any) -> List[Entry]:
        """Return the elements of a row."""
        kind = row[0]
        if kind == rows.GRANT:
            _kind, side, number, address = row
            name = self._grants[side, len(address)]
            return [(ElementKey("element", name, class_bytes(number) + address), class_bytes(value))]
        return list(self._others(kind, row, value))

    def _others(self, kind: str, row: Row, value: Any) -> Iterator[Entry]:
        if kind == rows.CLASS:
            yield ElementKey("element", sets.name(sets.PODS, family_of_packed(row[1])), row[1]), class_bytes(value)
        elif kind == rows.BLOCK:
            name = sets.name(sets.BLOCKS, family_of_packed(row[1]))
            yield ElementKey("element", name, row[1] + row[2]), class_bytes(value)
        elif kind == rows.PORTS:
            yield self._ports(*row[1:]), True
        elif kind == rows.ANY:
            yield (
                ElementKey("element", sets.name(sets.ANY, family_of_packed(row[2]), row[1]), row[2]),
                class_bytes(value),
            )
        elif kind == rows.SELF:
            yield ElementKey("element", sets.name(sets.SELF, family_of_packed(row[1])), row[1] * 2), True
        elif kind == rows.ISOLATED:
            yield ElementKey("element", sets.name(sets.ISOLATED, family_of_packed(row[2]), row[1]), row[2]), True
        elif kind == rows.POLICED:
            for name in (sets.DENIED, *((sets.POLICED,) if self._options.tiers else ())):
                yield ElementKey("element", sets.name(name, family_of_packed(row[2]), row[1]), row[2]), True
        elif kind == rows.KNOWN:
            yield ElementKey("element", sets.name(sets.KNOWN, family_of_packed(row[1])), row[1]), True
        elif kind == rows.POD_RANGE:
            yield ElementKey("element", sets.name(sets.POD_RANGES, family_of_packed(row[1])), row[1] + row[2]), True
        elif kind == rows.LINK:
            yield ElementKey("element", sets.links(row[1]), _interface(row[2])), True
        elif kind == rows.POD_LINK:
            for name in (sets.POD_LINKS, sets.FORGED):
                yield ElementKey("element", name, _interface(row[1])), True
        elif kind == rows.BOUND:
            name = sets.name(sets.BOUND, family_of_packed(row[2]))
            yield ElementKey("element", name, _interface(row[1]) + row[2]), True
        elif kind == rows.HERE:
            yield ElementKey("element", sets.name(sets.HERE, family_of_packed(row[1])), row[1]), True
        elif kind in (rows.BRIDGED, rows.PORT, rows.PORT_UNTAGGED, rows.PORT_BOUND, rows.PORT_CLOSED):
            yield from self._of_ports(kind, row)
        elif kind == rows.EXEMPT_LINK:
            yield ElementKey("element", sets.EXEMPT_LINKS, _interface(row[1])), True
        elif kind == rows.EXEMPT:
            yield ElementKey("element", sets.name(sets.EXEMPT, family_of_packed(row[1])), row[1] + row[2]), True
        elif kind == rows.EGRESS_EXEMPT:
            yield ElementKey("element", sets.name(sets.EGRESS_EXEMPT, family_of_packed(row[1])), row[1] + row[2]), True
        elif self._options.tiers:
            yield self._of_tier(kind, row), class_bytes(value) if kind == rows.TIER_GRANT else True

    @staticmethod
    def _ports(number: int, protocol: int, first: int, last: int) -> Key:
        if first == last:
            return ElementKey("element", sets.PORTS, _port_key(class_bytes(number), protocol, first))
        return ElementKey("element", sets.PORT_RANGES, _port_range(number, protocol, first, last))

    def _of_ports(self, kind: str, row: Row) -> Iterator[Entry]:
        if kind == rows.BRIDGED:
            yield from bridged.entries(self._options).items()
        elif kind in (rows.PORT, rows.PORT_UNTAGGED):
            yield bridged.element(sets.FORGED if kind == rows.PORT else sets.POD_LINKS, _interface(row[1])), True
        elif kind == rows.PORT_CLOSED:
            yield bridged.element(sets.name(bridged.CLOSED, row[2]), _interface(row[1])), True
        else:
            family = family_of_packed(row[2])
            yield bridged.element(sets.name(sets.BOUND, family), _interface(row[1]) + row[2]), True
            yield bridged.element(sets.name(sets.HERE, family), row[2]), True

    @staticmethod
    def _of_tier(kind: str, row: Row) -> Key:
        if kind == rows.TIER_GRANT:
            _kind, tier, side, number, address = row
            grants = sets.tier_grants(tier.lower(), side, family_of_packed(address))
            return ElementKey("element", grants, class_bytes(number) + address)
        if kind == rows.TIER_PORTS:
            return ElementKey("element", f"{sets.TIER_PORTS}-{row[1].lower()}", _port_range(*row[2:]))
        return ElementKey("element", f"{sets.TIER_OTHERS}-{row[1].lower()}", class_bytes(row[2]))


def desired_table(found: Mapping[Row, Any], options: Options) -> Dict[Key, Value]:
    """Return the whole table for rows."""
    table = static_entries(options)
    entries = Elements(options).entries
    for row, value in found.items():
        table.update(entries(row, value))
    return table


def change_of(journal: Mapping[Row, Any], found: Mapping[Row, Any], options: Options) -> Change[Key, Value]:
    """Return the table's change for changed rows. ``journal``: their values before; ``found``: all rows."""
    entries = Elements(options).entries
    before = {key: value for row, old in journal.items() if old is not ABSENT for key, value in entries(row, old)}
    now = {key: value for row in journal if row in found for key, value in entries(row, found[row])}
    return difference(before, now)
