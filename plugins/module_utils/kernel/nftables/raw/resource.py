# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Save a table as the kernel reports it, whichever program created it, and restore it unchanged.

Its objects are kept as uninterpreted netlink attributes: only volatile ones (handles, use counts, counters, expiring
elements) are omitted. So a table that kube-proxy itself created is restored with everything that this project would
never create: comments, intervals, anonymous sets. Keys and values: see ``reading``.
"""

from __future__ import annotations

import time
from typing import Any, Iterator, List, Tuple

from ....errors import KernelError
from ....rendering.ipvs.nftables_layout import IPVS_TABLE
from ....rendering.networkpolicy.sets import TABLE as POLICY_TABLE
from ....rendering.networkpolicy.text import element_text
from ....rendering.nftables.layout import SERVICES_TABLE
from ....rendering.nftables.objects import (
    SET_CONCAT,
    ChainValue,
    ElementKey,
    ObjectKey,
    Rule,
    TableIdentity,
    TableValue,
)
from ....rendering.nftables.text import chain_lines, element_texts, table_family, table_line
from ....resources import Change, Kind, Resource
from ...netlink.attributes import attribute, each_attribute, nested, parse_attributes, text_attribute
from ...netlink.outcomes import is_forbidden, is_transient
from ...netlink.protocol import NETLINK_NETFILTER, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, Message
from ...netlink.socket import NetlinkSocket
from .. import messages
from ..attributes import (
    NFTA_LIST_ELEM,
    NFTA_RULE_EXPRESSIONS,
    NFTA_SET_ELEM_DATA,
    NFTA_SET_ELEM_KEY,
    NFTA_SET_ELEM_LIST_ELEMENTS,
    NFTA_SET_ELEM_LIST_SET,
    NFTA_SET_ID,
    NFTA_TABLE_FLAGS,
    NFTA_TABLE_NAME,
    SUBSYSTEM,
)
from ..decoding import parse_data, parse_expression, parse_hook, ranges
from ..listing import ownership_text
from .reading import RawChain, RawKey, RawReader, RawSet, RawTable, RawValue, StatefulKey

_NEW_OBJECT = SUBSYSTEM | 18
_ELEMENTS_BYTES = 60_000
_ATTEMPTS = 5


def replacement(family: str, name: str, present: bool, wanted: RawTable) -> List[Message]:
    """Return one transaction that deletes the table ``name`` if it is ``present`` and creates the wanted one, if any.

    ``family``: of the table: IPv4, IPv6 or ``inet``.
    """
    header = messages.family_header(family)
    in_table = header + text_attribute(NFTA_TABLE_NAME, name)
    batch: List[Message] = [messages.BATCH_BEGIN]
    if present:
        batch.append((messages.DELETE_TABLE, 0, in_table))
    table = wanted.get(ObjectKey("table", name))
    if isinstance(table, bytes):
        batch.append((messages.NEW_TABLE, NLM_F_CREATE, header + table))
        make = NLM_F_CREATE | NLM_F_EXCL
        for key, value in wanted.items():
            if isinstance(key, StatefulKey) and isinstance(value, bytes):
                batch.append((_NEW_OBJECT, make, header + value))
        chains = [value for value in wanted.values() if isinstance(value, RawChain)]
        batch += [(messages.NEW_CHAIN, make, header + chain.definition) for chain in chains]
        sets = [(key.name, value) for key, value in wanted.items() if isinstance(value, RawSet)]
        for number, (_name, item) in enumerate(sets, 1):
            identity = attribute(NFTA_SET_ID, number.to_bytes(4, "big"))
            batch.append((messages.NEW_SET, make, header + item.definition + identity))
        # Before the rules: a set without a name accepts no more elements once a rule uses it.
        for set_name, item in sets:
            for block in _blocks(item.elements):
                payload = text_attribute(NFTA_SET_ELEM_LIST_SET, set_name) + nested(NFTA_SET_ELEM_LIST_ELEMENTS, block)
                batch.append((messages.NEW_ELEMENT, make, in_table + payload))
        for chain in chains:
            batch += [(messages.NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, header + rule) for rule in chain.rules]
    batch.append(messages.BATCH_END)
    return batch


def _blocks(elements: Tuple[bytes, ...]) -> Iterator[bytes]:
    """Yield blocks of encoded elements, as many together as one attribute holds."""
    parts: List[bytes] = []
    size = 0
    for element in elements:
        encoded = nested(NFTA_LIST_ELEM, element)
        if size + len(encoded) > _ELEMENTS_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(encoded)
        size += len(encoded)
    if parts:
        yield b"".join(parts)


class RawTableResource(Resource[RawKey, RawValue]):
    """The raw table of a family, object by object; a change replaces the whole table in one transaction.

    ``table`` and ``table_family`` of a subclass identify another table than that of Services.
    """

    kind = Kind.TABLE_OBJECTS
    atomic = True
    table: TableIdentity = SERVICES_TABLE
    table_family: str = ""

    def __init__(self, family: str) -> None:
        self.family = family
        self._table_family = self.table_family or family

    def observe(self) -> RawTable:
        """See the module. Raises KernelError."""
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            return RawReader(sock, self._table_family, self.table.name).everything()

    def apply(self, change: Change[RawKey, RawValue]) -> None:
        """Apply the change to the table; retry if another program changes it meanwhile. Raises KernelError."""
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            for attempt in range(1, _ATTEMPTS + 1):
                observed = RawReader(sock, self._table_family, self.table.name).everything()
                wanted = {key: value for key, value in observed.items() if key not in change.removed}
                wanted.update({key: new for key, (_old, new) in change.replaced.items()})
                wanted.update(change.added)
                batch = replacement(self._table_family, self.table.name, bool(observed), wanted)
                errors = sock.transact(batch, single_send=True, acknowledge=False).errors
                if not errors:
                    return
                again = any(map(is_transient, errors))
                if attempt == _ATTEMPTS or not again:
                    position = errors[0].position
                    where = f"message {position} of {len(batch)}" if position else "transaction"
                    table = f"table {self.table.name} ({self._table_family})"
                    text = f"{table} cannot be restored: {where}: {errors[0]}"
                    if is_forbidden(errors[0]):
                        owned = ownership_text(sock, self._table_family, self.table.name)
                        text += f"; {owned}" if owned else ""
                    raise KernelError(text)
                time.sleep(0.05 * attempt)

    def describe(self, key: RawKey, value: RawValue) -> List[str]:
        """Describe one object approximately as the nft program shows it."""
        table = f"{table_family(self._table_family)} {self.table.name}"
        if isinstance(value, RawChain):
            return [f"chain {key.name} {{", *chain_lines(_chain_value(value)), "}"]
        if isinstance(value, RawSet):
            return [f"set {key.name} {{", *(f"\t{text}" for text in self.element_texts(key.name, value)), "}"]
        if isinstance(key, StatefulKey):
            return [f"object {table} {key.name} (type {key.type})"]
        return [table_line(table, _table_value(value))]

    def element_texts(self, _name: str, value: RawSet) -> Iterator[str]:
        """Yield the elements of the set of that name approximately as the nft program shows them."""
        for key, data in map(key_and_data, value.elements):
            yield element_texts(self.family, ElementKey("element", "", key), data)[0]


def key_and_data(element: bytes) -> Tuple[bytes, Any]:
    """Return the key of an element of a :class:`RawSet`, and its data: bytes, the text of a verdict, or True."""
    found = parse_attributes(memoryview(element), 0, len(element))
    key = parse_data(found[NFTA_SET_ELEM_KEY]) if NFTA_SET_ELEM_KEY in found else b""
    data = parse_data(found[NFTA_SET_ELEM_DATA]) if NFTA_SET_ELEM_DATA in found else True
    return key if isinstance(key, bytes) else b"", data


def rule_expressions(rule: bytes) -> Iterator[memoryview]:
    """Yield the attributes of each expression of a rule of a :class:`RawChain`."""
    parts = parse_attributes(memoryview(rule), 0, len(rule))
    raw = parts.get(NFTA_RULE_EXPRESSIONS, memoryview(b""))
    for _kind, part in each_attribute(raw, 0, len(raw)):
        yield part


def _table_value(value: RawValue) -> TableValue:
    raw = value if isinstance(value, bytes) else b""
    return TableValue(int.from_bytes(parse_attributes(memoryview(raw), 0, len(raw)).get(NFTA_TABLE_FLAGS, b""), "big"))


def _chain_value(value: RawChain) -> ChainValue:
    """Return the chain as this project models it, with unknown parts omitted: for display only."""
    found = parse_attributes(memoryview(value.definition), 0, len(value.definition))
    rules = [Rule(tuple(map(parse_expression, rule_expressions(rule)))) for rule in value.rules]
    return ChainValue(tuple(rules), parse_hook(found))


class RawIpvsTableResource(RawTableResource):
    """The table beside IPVS, of one family."""

    kind = Kind.IPVS_OBJECTS
    table = IPVS_TABLE


class RawPolicyTableResource(RawTableResource):
    """The table of network policies, of both families."""

    kind = Kind.POLICY_OBJECTS
    table = POLICY_TABLE
    table_family = "inet"

    def __init__(self) -> None:
        super().__init__("")

    def element_texts(self, name: str, value: RawSet) -> Iterator[str]:
        """Yield the elements of the set of that name in the syntax of the nft program."""
        of_ranges = POLICY_TABLE.intervals.get(name)
        if of_ranges is not None:
            found = ranges(map(memoryview, value.elements), bool(of_ranges.flags & SET_CONCAT))
        else:
            found = dict(map(key_and_data, value.elements))
        for key, data in found.items():
            yield element_text(name, key, data)
