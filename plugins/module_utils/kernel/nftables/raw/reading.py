# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading of a table as uninterpreted attributes, whichever program created it.

=============================  ==================================================
key                            value
=============================  ==================================================
``ObjectKey("table", name)``   attributes of the table
``ObjectKey("chain", name)``   :class:`RawChain`
``ObjectKey("set", name)``     :class:`RawSet`, of a set or map, anonymous ones too
:class:`StatefulKey`           attributes of a named counter, quota or the like
=============================  ==================================================

Only volatile attributes (handles, use counts, counters, expiring elements) are omitted. Source:
linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from typing import Callable, Container, Iterator, Mapping, NamedTuple, Optional, Union

from ....rendering.nftables.expressions import Dynset
from ....rendering.nftables.objects import SET_CONCAT, SET_EVAL, SET_INTERVAL, TABLE_OWNER, TABLE_PERSIST, ObjectKey
from ...netlink.attributes import attribute, attribute_text, each_attribute, nested, parse_attributes, text_attribute
from ...netlink.outcomes import refusals_as
from ...netlink.socket import NetlinkSocket
from .. import attributes as uapi
from .. import messages
from ..decoding import added_up, elements_in
from ..listing import dumped

_GET_OBJECT = uapi.SUBSYSTEM | 19

# The attributes that are kept for each kind of object, by number; all others are volatile or set by the kernel.
_TABLE_KEPT = frozenset((uapi.NFTA_TABLE_NAME, uapi.NFTA_TABLE_FLAGS, uapi.NFTA_TABLE_USERDATA))
_CHAIN_KEPT = frozenset(
    (
        uapi.NFTA_CHAIN_TABLE,
        uapi.NFTA_CHAIN_NAME,
        uapi.NFTA_CHAIN_HOOK,
        uapi.NFTA_CHAIN_POLICY,
        uapi.NFTA_CHAIN_TYPE,
        uapi.NFTA_CHAIN_USERDATA,
    )
)
_RULE_KEPT = frozenset(
    (
        uapi.NFTA_RULE_TABLE,
        uapi.NFTA_RULE_CHAIN,
        uapi.NFTA_RULE_EXPRESSIONS,
        uapi.NFTA_RULE_COMPAT,
        uapi.NFTA_RULE_USERDATA,
    )
)
_SET_KEPT = frozenset(
    (
        uapi.NFTA_SET_TABLE,
        uapi.NFTA_SET_NAME,
        uapi.NFTA_SET_FLAGS,
        uapi.NFTA_SET_KEY_TYPE,
        uapi.NFTA_SET_KEY_LEN,
        uapi.NFTA_SET_DATA_TYPE,
        uapi.NFTA_SET_DATA_LEN,
        uapi.NFTA_SET_POLICY,
        uapi.NFTA_SET_DESC,
        uapi.NFTA_SET_TIMEOUT,
        uapi.NFTA_SET_GC_INTERVAL,
        uapi.NFTA_SET_USERDATA,
        uapi.NFTA_SET_OBJ_TYPE,
        uapi.NFTA_SET_EXPR,
        uapi.NFTA_SET_EXPRESSIONS,
    )
)
_OBJECT_KEPT = frozenset(
    (uapi.NFTA_OBJ_TABLE, uapi.NFTA_OBJ_NAME, uapi.NFTA_OBJ_TYPE, uapi.NFTA_OBJ_DATA, uapi.NFTA_OBJ_USERDATA)
)
_ELEMENT_KEPT = frozenset(
    (
        uapi.NFTA_SET_ELEM_KEY,
        uapi.NFTA_SET_ELEM_DATA,
        uapi.NFTA_SET_ELEM_FLAGS,
        uapi.NFTA_SET_ELEM_TIMEOUT,
        uapi.NFTA_SET_ELEM_USERDATA,
        uapi.NFTA_SET_ELEM_EXPR,
        uapi.NFTA_SET_ELEM_OBJREF,
        uapi.NFTA_SET_ELEM_KEY_END,
        uapi.NFTA_SET_ELEM_EXPRESSIONS,
    )
)
#: Attributes of an expression that count traffic: all of them restart at zero.
_COUNTING = {
    "counter": (uapi.NFTA_COUNTER_BYTES, uapi.NFTA_COUNTER_PACKETS, uapi.NFTA_COUNTER_PAD),
    "quota": (uapi.NFTA_QUOTA_CONSUMED,),
    "last": (uapi.NFTA_LAST_SET, uapi.NFTA_LAST_MSECS, uapi.NFTA_LAST_PAD),
}
_COUNTING_OBJECTS = {uapi.NFT_OBJECT_COUNTER: _COUNTING["counter"], uapi.NFT_OBJECT_QUOTA: _COUNTING["quota"]}


class RawChain(NamedTuple):
    """Attributes of a chain, and of each of its rules in order."""

    definition: bytes
    rules: tuple[bytes, ...] = ()

    @property
    def is_owned(self) -> bool:
        """Return whether one rule owns the chain (``jump { ... }``); its name is the kernel's."""
        return uapi.NFTA_CHAIN_FLAGS in parse_attributes(memoryview(self.definition), 0, len(self.definition))


class RawSet(NamedTuple):
    """Attributes of a set, and those of each element: sorted, or those of ranges in the order in which to add them."""

    definition: bytes
    elements: tuple[bytes, ...] = ()


class StatefulKey(NamedTuple):
    """The key of a named stateful object. ``type``: uapi.NFT_OBJECT_COUNTER and so on."""

    kind: str
    type: int
    name: str


RawKey = Union[ObjectKey, StatefulKey]
RawValue = Union[bytes, RawChain, RawSet]
RawTable = dict[RawKey, RawValue]


def _without(raw: memoryview, numbers: Container[int]) -> bytes:
    """Return attributes unchanged, except that some numbers are omitted."""
    parts = each_attribute(raw, 0, len(raw))
    return b"".join(attribute(number, bytes(part)) for number, part in parts if number not in numbers)


def _kept(
    raw: memoryview,
    kept: Container[int],
    start: int = 0,
    rewrite: Optional[Mapping[int, Callable[[memoryview], bytes]]] = None,
) -> bytes:
    """Return the attributes numbered in ``kept``; ``rewrite`` maps a number to a function of its content."""
    parts = []
    for number, part in each_attribute(raw, start, len(raw)):
        if number in kept:
            change = (rewrite or {}).get(number)
            parts.append(attribute(number, bytes(part) if change is None else change(part)))
    return b"".join(parts)


def _expression(raw: memoryview) -> bytes:
    """Return an expression without its counters, in a form that the kernel accepts: its dumps are not always."""
    outer = parse_attributes(raw, 0, len(raw))
    name = attribute_text(outer[uapi.NFTA_EXPR_NAME]) if uapi.NFTA_EXPR_NAME in outer else ""
    if uapi.NFTA_EXPR_DATA not in outer:
        return bytes(raw)
    data = outer[uapi.NFTA_EXPR_DATA]
    if name in _COUNTING:
        rewritten = _without(data, _COUNTING[name])
    elif name in _DUMPED_OTHERWISE:
        rewritten = _DUMPED_OTHERWISE[name](data)
    else:
        return bytes(raw)
    return text_attribute(uapi.NFTA_EXPR_NAME, name) + nested(uapi.NFTA_EXPR_DATA, rewritten)


def _exthdr(data: memoryview) -> bytes:
    """Omit the flags where a field is set: the kernel refuses any."""
    sets = uapi.NFTA_EXTHDR_SREG in parse_attributes(data, 0, len(data))
    return _without(data, (uapi.NFTA_EXTHDR_FLAGS,) if sets else ())


def _osf(data: memoryview) -> bytes:
    """Omit flags of 0, which the kernel refuses."""
    flags = parse_attributes(data, 0, len(data)).get(uapi.NFTA_OSF_FLAGS, b"")
    return _without(data, () if any(flags) else (uapi.NFTA_OSF_FLAGS,))


def _dynset(data: memoryview) -> bytes:
    """Omit a timeout of 0, which a set without timeouts refuses, and add the flag that permits several statements."""
    several = Dynset.EXPRESSIONS in parse_attributes(data, 0, len(data))
    parts = []
    for number, part in each_attribute(data, 0, len(data)):
        content = bytes(part)
        if number == Dynset.TIMEOUT and not any(content):
            continue
        if number == Dynset.FLAGS and several:
            content = (int.from_bytes(content, "big") | uapi.NFT_DYNSET_F_EXPR).to_bytes(4, "big")
        elif number == Dynset.EXPR:
            content = _expression(part)
        elif number == Dynset.EXPRESSIONS:
            content = _expressions(part)
        parts.append(nested(number, content) if number in _STATEMENTS else attribute(number, content))
    return b"".join(parts)


_STATEMENTS = (Dynset.EXPR, Dynset.EXPRESSIONS)
_DUMPED_OTHERWISE = {"exthdr": _exthdr, "osf": _osf, "dynset": _dynset}


def _chain(raw: memoryview, found: Mapping[int, memoryview]) -> bytes:
    """Return the attributes of a chain; of its flags only that of a chain without a name, which one rule owns."""
    flags = int.from_bytes(found.get(uapi.NFTA_CHAIN_FLAGS, b""), "big") & uapi.NFT_CHAIN_BINDING
    return _kept(raw, _CHAIN_KEPT, uapi.GENMSG_BYTES) + (
        attribute(uapi.NFTA_CHAIN_FLAGS, flags.to_bytes(4, "big")) if flags else b""
    )


def _expressions(raw: memoryview) -> bytes:
    return b"".join(nested(number, _expression(part)) for number, part in each_attribute(raw, 0, len(raw)))


def _table_flags(raw: memoryview) -> bytes:
    """Return the table flags without the owner mark: the process that restores the table does not own it."""
    return (int.from_bytes(raw, "big") & ~(TABLE_OWNER | TABLE_PERSIST)).to_bytes(4, "big")


def _object(raw: memoryview, start: int) -> tuple[StatefulKey, bytes]:
    found = parse_attributes(raw, start, len(raw))
    number = int.from_bytes(found[uapi.NFTA_OBJ_TYPE], "big")
    counting = _COUNTING_OBJECTS.get(number, ())
    kept = _kept(raw, _OBJECT_KEPT, start, {uapi.NFTA_OBJ_DATA: lambda data: _without(data, counting)})
    return StatefulKey("object", number, attribute_text(found[uapi.NFTA_OBJ_NAME])), kept


class RawReader:
    """Reads the table of a family (IPv4, IPv6, ``inet``) and name over a socket."""

    def __init__(self, sock: NetlinkSocket, family: str, name: str) -> None:
        self._sock = sock
        self._name = name
        self._header = messages.family_header(family)
        self._in_table = self._header + text_attribute(uapi.NFTA_TABLE_NAME, name)

    def _dump(self, kind: int, payload: bytes) -> Iterator[memoryview]:
        with refusals_as(f"table {self._name} cannot be read"):
            slices = dumped(self._sock, kind, payload)
        for view, _kind, start, end in slices:
            yield view[start:end]

    def _of_table(self, kind: int) -> Iterator[tuple[memoryview, dict[int, memoryview]]]:
        for view in self._dump(kind, self._in_table):
            found = parse_attributes(view, uapi.GENMSG_BYTES, len(view))
            # The name of the table has the same number in tables, chains, rules, sets and objects.
            if attribute_text(found[uapi.NFTA_TABLE_NAME]) == self._name:
                yield view, found

    def everything(self) -> RawTable:
        """Return the whole table; empty if there is none. Raises KernelError."""
        table: RawTable = {}
        rewrite = {uapi.NFTA_TABLE_FLAGS: _table_flags}
        for view in self._dump(uapi.GET_TABLE, self._header):
            if attribute_text(parse_attributes(view, uapi.GENMSG_BYTES, len(view))[uapi.NFTA_TABLE_NAME]) == self._name:
                table[ObjectKey("table", self._name)] = _kept(view, _TABLE_KEPT, uapi.GENMSG_BYTES, rewrite)
        if not table:
            return table
        for view, _found in self._of_table(_GET_OBJECT):
            key, value = _object(view, uapi.GENMSG_BYTES)
            table[key] = value
        rules: dict[str, list[bytes]] = {}
        rewrite = {uapi.NFTA_RULE_EXPRESSIONS: _expressions}
        for view, found in self._of_table(messages.GET_RULE):
            chain = attribute_text(found[uapi.NFTA_RULE_CHAIN])
            rules.setdefault(chain, []).append(_kept(view, _RULE_KEPT, uapi.GENMSG_BYTES, rewrite))
        for view, found in self._of_table(messages.GET_CHAIN):
            name = attribute_text(found[uapi.NFTA_CHAIN_NAME])
            table[ObjectKey("chain", name)] = RawChain(_chain(view, found), tuple(rules.get(name, ())))
        for view, found in list(self._of_table(messages.GET_SET)):
            name = attribute_text(found[uapi.NFTA_SET_NAME])
            flags = int.from_bytes(found.get(uapi.NFTA_SET_FLAGS, b""), "big")
            count = int.from_bytes(found[uapi.NFTA_SET_COUNT], "big") if uapi.NFTA_SET_COUNT in found else None
            rewrite = {uapi.NFTA_SET_EXPR: _expression, uapi.NFTA_SET_EXPRESSIONS: _expressions}
            elements = () if flags & SET_EVAL else self._elements(name, flags, count)
            table[ObjectKey("set", name)] = RawSet(_kept(view, _SET_KEPT, uapi.GENMSG_BYTES, rewrite), elements)
        return table

    def _elements(self, name: str, flags: int, count: Optional[int]) -> tuple[bytes, ...]:
        """Return the elements of a set. Ranges are not in a hash table, and the kernel refuses them in a wrong order.

        The kernel lists ranges of a single field from the highest to the lowest but accepts them from the lowest only;
        it lists concatenated ones in the order in which they were added, a range within another one first.
        """
        if flags & SET_INTERVAL:
            listed = list(dict.fromkeys(self._dumped_elements(name)))
            return tuple(listed if flags & SET_CONCAT else reversed(listed))
        return tuple(sorted(added_up(lambda: dict.fromkeys(self._dumped_elements(name), True), count)))

    def _dumped_elements(self, name: str) -> Iterator[bytes]:
        rewrite = {uapi.NFTA_SET_ELEM_EXPR: _expression, uapi.NFTA_SET_ELEM_EXPRESSIONS: _expressions}
        for view in self._dump(
            messages.GET_ELEMENT, self._in_table + text_attribute(uapi.NFTA_SET_ELEM_LIST_SET, name)
        ):
            nest = elements_in(view, 0, len(view))
            for _kind, raw in each_attribute(nest, 0, len(nest)):
                if not any(
                    number == uapi.NFTA_SET_ELEM_EXPIRATION for number, _part in each_attribute(raw, 0, len(raw))
                ):
                    yield _kept(raw, _ELEMENT_KEPT, 0, rewrite)
