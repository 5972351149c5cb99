# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render the rows of a node's policies to elements of the table."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from ...base.addresses import IPV4, IPV6, family_of_packed
from ...networkpolicy import rows
from ...networkpolicy.rows import Row
from ...resources import ABSENT, Change, difference
from ..nftables.expressions import INTERFACE_NAME_BYTES
from ..nftables.objects import ElementKey, Key, ObjectKey, TableValue, Value
from . import bridged, layout, sets
from .layout import class_bytes
from .sets import Options

Entry = tuple[Key, Value]


def static_entries(options: Options) -> dict[Key, Value]:
    """Return the table without elements."""
    found: dict[Key, Value] = {sets.TABLE.key: TableValue()}
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


#: The set or map of rows about one address, by their kind.
_OF_ADDRESS = {rows.CLASS: sets.PODS, rows.KNOWN: sets.KNOWN, rows.HERE: sets.HERE, rows.SELF: sets.SELF}
#: That of rows about a range of addresses.
_OF_RANGE = {
    rows.BLOCK: sets.BLOCKS,
    rows.POD_RANGE: sets.POD_RANGES,
    rows.EXEMPT: sets.EXEMPT,
    rows.EGRESS_EXEMPT: sets.EGRESS_EXEMPT,
}
#: Those of rows about a direction of an address.
_OF_SIDE = {rows.ANY: (sets.ANY,), rows.ISOLATED: (sets.ISOLATED,), rows.POLICED: (sets.DENIED, sets.POLICED)}
#: Those of rows about an interface.
_OF_INTERFACE = {rows.POD_LINK: (sets.POD_LINKS, sets.FORGED), rows.EXEMPT_LINK: (sets.EXEMPT_LINKS,)}
#: In the table of ports.
_OF_PORT = {rows.PORT: sets.FORGED, rows.PORT_UNTAGGED: sets.POD_LINKS}


class Elements:
    """Render rows with the options of one table."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._grants = {
            (side, size): sets.name(sets.GRANTS, family, side)
            for side in sets.SIDES
            for family, size in ((IPV4, 4), (IPV6, 16))
        }

    def entries(self, row: Row, value: Any) -> list[Entry]:
        """Return the elements of a row."""
        kind = row[0]
        if kind == rows.GRANT:
            _kind, side, number, address = row
            name = self._grants[side, len(address)]
            return [(ElementKey("element", name, class_bytes(number) + address), class_bytes(value))]
        if kind == rows.BRIDGED:
            return list(bridged.entries(self._options).items())
        data = value if value is True else class_bytes(value)
        found: list[Entry] = [(ElementKey("element", name, key), data) for name, key in self._places(kind, row)]
        return found or [(key, data) for key in _of_ports(kind, row)]

    def _places(self, kind: str, row: Row) -> Iterator[tuple[str, bytes]]:
        """Yield the sets that have an element for a row, each with its key."""
        if kind in _OF_ADDRESS:
            _kind, address = row
            yield sets.name(_OF_ADDRESS[kind], family_of_packed(address)), address * (2 if kind == rows.SELF else 1)
        elif kind in _OF_RANGE:
            _kind, first, last = row
            yield sets.name(_OF_RANGE[kind], family_of_packed(first)), first + last
        elif kind in _OF_SIDE:
            _kind, side, address = row
            for name in _OF_SIDE[kind]:
                if name != sets.POLICED or self._options.tiers:
                    yield sets.name(name, family_of_packed(address), side), address
        elif kind in _OF_INTERFACE:
            _kind, interface = row
            yield from ((name, _interface(interface)) for name in _OF_INTERFACE[kind])
        elif kind == rows.LINK:
            _kind, side, interface = row
            yield sets.links(side), _interface(interface)
        elif kind == rows.BOUND:
            _kind, interface, address = row
            yield sets.name(sets.BOUND, family_of_packed(address)), _interface(interface) + address
        elif kind == rows.PORTS:
            _kind, number, protocol, first, last = row
            if first == last:
                yield sets.PORTS, _port_key(class_bytes(number), protocol, first)
            else:
                yield sets.PORT_RANGES, _port_range(number, protocol, first, last)
        elif self._options.tiers:
            yield from _of_tier(kind, row)


def _of_tier(kind: str, row: Row) -> Iterator[tuple[str, bytes]]:
    if kind == rows.TIER_GRANT:
        _kind, tier, side, number, address = row
        yield sets.tier_grants(tier.lower(), side, family_of_packed(address)), class_bytes(number) + address
    elif kind == rows.TIER_PORTS:
        _kind, action, *ports = row
        yield f"{sets.TIER_PORTS}-{action.lower()}", _port_range(*ports)
    elif kind == rows.TIER_OTHERS:
        _kind, action, number = row
        yield f"{sets.TIER_OTHERS}-{action.lower()}", class_bytes(number)


def _of_ports(kind: str, row: Row) -> Iterator[ElementKey]:
    """Yield the keys of a row in the table of ports."""
    if kind in _OF_PORT:
        yield bridged.element(_OF_PORT[kind], _interface(row[1]))
    elif kind == rows.PORT_CLOSED:
        yield bridged.element(sets.name(bridged.CLOSED, row[2]), _interface(row[1]))
    elif kind == rows.PORT_BOUND:
        _kind, interface, address = row
        yield bridged.element(sets.name(sets.BOUND, family_of_packed(address)), _interface(interface) + address)
        yield bridged.element(sets.name(sets.HERE, family_of_packed(address)), address)


def desired_table(found: Mapping[Row, Any], options: Options) -> dict[Key, Value]:
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
