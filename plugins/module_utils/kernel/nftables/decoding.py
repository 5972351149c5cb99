# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decode the reports of nf_tables: expressions, sets, hooks and elements, as values of the resource table."""

from __future__ import annotations

import struct
import time
from typing import Any, Callable, Iterable, Iterator, Optional, TypeVar, Union

from ...rendering.nftables import objects as nft
from ...rendering.nftables.expressions import Nat
from ..netlink.attributes import NLA_TYPE_MASK, attribute_text, each_attribute, nested_in, number_in, parse_attributes
from . import attributes as uapi
from . import messages
from .expression_schema import IGNORED, OPTIONAL, SCHEMA

# Size and type of NFTA_LIST_ELEM, NFTA_SET_ELEM_KEY and NFTA_DATA_VALUE before the key of an element, and of
# NFTA_SET_ELEM_DATA and NFTA_DATA_VALUE before its data: nf_tables writes them in this order.
_KEY_HEADERS = struct.Struct("=6H")
_DATA_HEADERS = struct.Struct("=4H")
_HEADER = struct.Struct("=2H")
_INCOMPLETE_ATTEMPTS = 20
_RESIZE_SECONDS = 0.05
#: A set of at most this many elements fits into one datagram of a dump, which the kernel reads atomically.
_FEW_ELEMENTS = 300

_NAT_RANGES = ((Nat.REG_ADDR_MIN, Nat.REG_ADDR_MAX), (Nat.REG_PROTO_MIN, Nat.REG_PROTO_MAX))

Encoded = Union[bytes, memoryview]
Element = TypeVar("Element")
Data = TypeVar("Data")


def elements_in(view: memoryview, start: int, end: int) -> memoryview:
    """Return the encoded elements in a message of nf_tables about a set; empty if it has none."""
    found = parse_attributes(view, start + uapi.GENMSG_BYTES, end)
    return found.get(uapi.NFTA_SET_ELEM_LIST_ELEMENTS, memoryview(b""))


def verdict_text(found: dict[int, memoryview]) -> str:
    """Return ``drop``, ``goto CHAIN`` and so on, from the attributes of NFTA_DATA_VERDICT."""
    code = struct.unpack(">i", found[uapi.NFTA_VERDICT_CODE])[0]
    word = messages.VERDICT_NAMES.get(code, f"verdict {code}")
    return f"{word} {attribute_text(found[uapi.NFTA_VERDICT_CHAIN])}" if uapi.NFTA_VERDICT_CHAIN in found else word


def parse_data(raw: memoryview) -> Any:
    """Return bytes, or the text of a verdict, from NFTA_DATA attributes."""
    found = parse_attributes(raw, 0, len(raw))
    verdict = found.get(uapi.NFTA_DATA_VERDICT)
    if verdict is not None:
        return verdict_text(parse_attributes(verdict, 0, len(verdict)))
    return bytes(found.get(uapi.NFTA_DATA_VALUE, b""))


def _attribute_value(kind: str, raw: memoryview) -> Any:
    if kind == "text":
        return attribute_text(raw)
    if kind == "data":
        return parse_data(raw)
    return int.from_bytes(raw, "big")


def parse_expression(raw: memoryview) -> nft.Expression:
    """Parse one expression to the form in which this project writes it, without default and redundant values."""
    outer = parse_attributes(raw, 0, len(raw))
    name = attribute_text(outer[uapi.NFTA_EXPR_NAME])
    inner = outer.get(uapi.NFTA_EXPR_DATA, memoryview(b""))
    schema = SCHEMA.get(name, {})
    values: dict[int, Any] = {}
    for number, part in each_attribute(inner, 0, len(inner)):
        if (name, number) in IGNORED:
            continue
        kind = schema.get(number)
        value = bytes(part) if kind is None else _attribute_value(kind, part)
        if (kind is None and not any(value)) or (number in OPTIONAL.get(name, ()) and not value):
            continue
        values[number] = value
    if name == "nat":
        _normalise_nat(values)
    return nft.Expression(name, tuple(sorted(values.items())))


def _normalise_nat(values: dict[int, Any]) -> None:
    """Remove the upper end of a range of one, and the flags 1 and 2, which only repeat what the registers imply."""
    for lower, upper in _NAT_RANGES:
        if values.get(upper) == values.get(lower):
            values.pop(upper, None)
    values[Nat.FLAGS] = values.get(Nat.FLAGS, 0) & ~0x3
    if not values[Nat.FLAGS]:
        del values[Nat.FLAGS]


def type_names(number: int) -> tuple[str, ...]:
    """Return the parts of a concatenated type; a part without a name here is ``type-N``."""
    names: list[str] = []
    while number:
        part = number & 0x3F
        names.append(nft.DATA_TYPE_NAMES.get(part, f"type-{part}"))
        number >>= 6
    return tuple(reversed(names))


def parse_set(found: dict[int, memoryview]) -> nft.SetValue:
    """Parse the definition of a set."""
    flags = number_in(found, uapi.NFTA_SET_FLAGS)
    data: Any = None
    if flags & nft.SET_MAP:
        number = number_in(found, uapi.NFTA_SET_DATA_TYPE)
        data = (nft.VERDICT,) if number == messages.DATA_TYPE_VERDICT else type_names(number)
    dynamic = bool(flags & nft.SET_EVAL)
    # A dynamic set has its default size only once a rule uses it.
    size = number_in(nested_in(found, uapi.NFTA_SET_DESC), uapi.NFTA_SET_DESC_SIZE) or nft.DEFAULT_DYNAMIC_SIZE
    timeout = number_in(found, uapi.NFTA_SET_TIMEOUT)
    if flags & nft.SET_TIMEOUT and timeout:
        flags &= ~nft.SET_TIMEOUT
    key = type_names(number_in(found, uapi.NFTA_SET_KEY_TYPE))
    return nft.SetValue(
        key=key,
        data=data,
        dynamic=dynamic,
        timeout=timeout,
        size=size if dynamic else 0,
        flags=flags & ~(nft.SET_MAP | nft.SET_EVAL),
        counted=uapi.NFTA_SET_EXPR in found or uapi.NFTA_SET_EXPRESSIONS in found,
    )


def parse_hook(found: dict[int, memoryview]) -> Optional[nft.BaseHook]:
    """Return the hook of a chain, or None."""
    hook = nested_in(found, uapi.NFTA_CHAIN_HOOK)
    if not hook:
        return None
    number = number_in(hook, uapi.NFTA_HOOK_HOOKNUM)
    name = nft.HOOKS[number] if number < len(nft.HOOKS) else f"hook-{number}"
    priority = struct.unpack(">i", hook[uapi.NFTA_HOOK_PRIORITY])[0]
    policy = number_in(found, uapi.NFTA_CHAIN_POLICY, 1)
    return nft.BaseHook(attribute_text(found[uapi.NFTA_CHAIN_TYPE]), name, priority, policy)


def _element_layout(nest: Encoded) -> Optional[tuple[str, bool]]:
    """Return the layout of the first of some encoded elements, for ``struct``, and whether it has data.

    Headers and values take turns in it. None for an element with other attributes than key, data and counter.
    """
    size, _kind, _size, key_kind, value_size, value_kind = _KEY_HEADERS.unpack_from(nest)
    key_size, heads = value_size - 4, _KEY_HEADERS.size
    rest = size - heads - key_size
    if (key_kind & NLA_TYPE_MASK, value_kind & NLA_TYPE_MASK) != (uapi.NFTA_SET_ELEM_KEY, uapi.NFTA_DATA_VALUE):
        return None
    layout = f"={heads}s{key_size}s"
    with_data = (
        rest >= _HEADER.size and _HEADER.unpack_from(nest, size - rest)[1] & NLA_TYPE_MASK == uapi.NFTA_SET_ELEM_DATA
    )
    if with_data:
        if rest < _DATA_HEADERS.size:
            return None
        _size, _kind, data_size, value_kind = _DATA_HEADERS.unpack_from(nest, size - rest)
        if value_kind & NLA_TYPE_MASK != uapi.NFTA_DATA_VALUE or data_size % 4:
            return None
        layout += f"{_DATA_HEADERS.size}s{data_size - 4}s"
        rest -= _DATA_HEADERS.size + data_size - 4
    if rest:
        # The value of a counter is not part of the element's value.
        if rest < _HEADER.size:
            return None
        counter_size, counter_kind = _HEADER.unpack_from(nest, size - rest)
        if (counter_size, counter_kind & NLA_TYPE_MASK) != (rest, uapi.NFTA_SET_ELEM_EXPR):
            return None
        layout += f"{_HEADER.size}s{rest - _HEADER.size}x"
    return None if size % 4 or key_size % 4 or len(nest) % size else (layout, with_data)


def _uniform_elements(nest: Encoded) -> Optional[dict[bytes, Any]]:
    """Return what :func:`parse_elements` does for elements with keys of one size and data of one size, else None.

    Most sets are uniform and may have tens of thousands of elements, which few calls decode together.
    """
    found = _element_layout(nest) if len(nest) >= _KEY_HEADERS.size else None
    if found is None:
        return None
    layout, with_data = found
    columns = list(zip(*struct.iter_unpack(layout, nest)))
    if any(headers.count(headers[0]) != len(headers) for headers in columns[::2]):
        return None
    return dict(zip(columns[1], columns[3])) if with_data else dict.fromkeys(columns[1], True)


def parse_elements(nests: Iterable[Encoded]) -> dict[bytes, Any]:
    """Return the elements of a set from NFTA_SET_ELEM_LIST_ELEMENTS attributes: key to True, verdict or data."""
    found: dict[bytes, Any] = {}
    parsed: dict[bytes, Any] = {}
    for nest in nests:
        uniform = _uniform_elements(nest)
        if uniform is not None:
            found.update(uniform)
            continue
        for _number, raw in each_attribute(memoryview(nest), 0, len(nest)):
            parts = parse_attributes(raw, 0, len(raw))
            key = parse_data(parts[uapi.NFTA_SET_ELEM_KEY]) if uapi.NFTA_SET_ELEM_KEY in parts else messages.CATCH_ALL
            data: Any = True
            if uapi.NFTA_SET_ELEM_DATA in parts:
                # Thousands of elements share a verdict.
                encoded = bytes(parts[uapi.NFTA_SET_ELEM_DATA])
                data = parsed.get(encoded)
                if data is None:
                    data = parsed[encoded] = parse_data(memoryview(encoded))
            found[key] = data
    return found


def added_up(
    dump: Callable[[], dict[Element, Data]], count: Optional[int], uncounted: Optional[Element] = None
) -> dict[Element, Data]:
    """Return all elements of a set, in the order received. ``count``: their number, if the kernel reports it.

    ``uncounted``: the element that the kernel does not count, if the set has it.

    While the kernel resizes a hash table, which continues for a while after a large load, a dump silently lacks
    elements. An element that was seen once exists: so dumps are merged until they are complete or, if the kernel
    reports no number, until two large ones in a row add nothing new.
    """
    found = dump()
    for _attempt in range(_INCOMPLETE_ATTEMPTS):
        if len(found) - (uncounted in found) == count or (count is None and len(found) < _FEW_ELEMENTS):
            return found
        before = len(found)
        if count is not None:
            time.sleep(_RESIZE_SECONDS)
        found.update(dump())
        if len(found) == before and count is None:
            return found
    return found


def _joined(bounds: list[tuple[bytes, bool, Any]]) -> Iterator[tuple[bytes, Any]]:
    """Yield ranges from the elements where they begin and end: (key, whether it begins there, data)."""
    # At the same key, a range ends before the next one begins.
    ordered = sorted(bounds, key=lambda bound: bound[:2])
    for position, (key, begins, data) in enumerate(ordered):
        if begins:
            following = ordered[position + 1][0] if position + 1 < len(ordered) else b""
            size = len(key)
            last = (int.from_bytes(following, "big") - 1).to_bytes(size, "big") if following else b"\xff" * size
            yield key + last, data


def ranges(elements: Iterable[memoryview], concatenated: bool) -> dict[bytes, Any]:
    """Return the ranges in encoded elements: first and last key, joined, to True, verdict or data.

    ``concatenated``: the key has several fields; if it has one, a range is two elements, its beginning and its end.
    """
    found: dict[bytes, Any] = {}
    bounds: list[tuple[bytes, bool, Any]] = []
    for raw in elements:
        parts = parse_attributes(raw, 0, len(raw))
        key = parse_data(parts[uapi.NFTA_SET_ELEM_KEY]) if uapi.NFTA_SET_ELEM_KEY in parts else messages.CATCH_ALL
        data = parse_data(parts[uapi.NFTA_SET_ELEM_DATA]) if uapi.NFTA_SET_ELEM_DATA in parts else True
        # The catch-all element has no key.
        if concatenated or not key:
            last = parse_data(parts[uapi.NFTA_SET_ELEM_KEY_END]) if uapi.NFTA_SET_ELEM_KEY_END in parts else key
            found[key + last] = data
        else:
            flags = number_in(parts, uapi.NFTA_SET_ELEM_FLAGS)
            bounds.append((key, not flags & messages.ELEMENT_INTERVAL_END, data))
    found.update(_joined(bounds))
    return found
