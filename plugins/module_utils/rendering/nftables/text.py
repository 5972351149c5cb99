# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table in the syntax of the nft program: for users to read, and for ``nft -f`` to load."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Callable, Mapping, cast

from ...base.addresses import IPV4, IPV6, unpacked
from ...cluster.account import SLOTS
from . import objects as nft
from . import rule_text
from .layout import LOCALHOST_COUNTS, NODE_PORT_KEY, SERVICES_TABLE
from .traffic import NODE_PORT_TRAFFIC, SERVICE_TRAFFIC

_TYPEOF = {
    "ipv4_addr": "ip daddr",
    "ipv6_addr": "ip6 daddr",
    nft.PROTOCOL: "meta l4proto",
    nft.PORT: "th dport",
    nft.INDEX: "numgen random mod 65536",
}


#: The beginning of the names that ``firewall.source_ranges_name`` gives for service addresses.
_SOURCE_RANGES = "source-ranges-"


def table_family(family: str) -> str:
    """Return ``ip``, ``ip6``, or ``inet`` for tables of both families."""
    return {IPV4: "ip", IPV6: "ip6"}.get(family, family)


def _hexadecimal(raw: bytes) -> str:
    return f"0x{raw.hex()}"


#: What shows a part of a key or of data, by its type.
_PART_TEXTS: Mapping[str, Callable[[bytes], str]] = {
    "ipv4_addr": unpacked,
    "ipv6_addr": unpacked,
    nft.PROTOCOL: lambda raw: nft.PROTOCOL_NAMES.get(raw[0], str(raw[0])),
    nft.PORT: lambda raw: str(int.from_bytes(raw[:2], "big")),
    nft.INDEX: lambda raw: str(nft.index_of(raw)),
    nft.CLASSID: lambda raw: f"{nft.index_of(raw) >> 16:x}:{nft.index_of(raw) & 0xFFFF:x}",
    nft.INTERFACE: lambda raw: '"{}"'.format(raw.rstrip(b"\0").decode(errors="replace")),
    nft.DIRECTION: lambda raw: "original" if raw[0] == nft.ORIGINAL else "reply",
}


def concatenation_text(parts: tuple[str, ...], raw: bytes) -> str:
    """Return a key or data as nft writes it, e.g. ``10.96.0.1 . tcp . 443``."""
    texts: list[str] = []
    position = 0
    for part in parts:
        size = nft.DATA_TYPES[part][1] if part in nft.DATA_TYPES else len(raw) - position
        texts.append(_PART_TEXTS.get(part, _hexadecimal)(raw[position : position + size]))
        position += size
    return " . ".join(texts)


def key_parts(family: str, name: str, raw: bytes) -> tuple[str, ...]:
    """Return the parts of a key of a set of the layout, by the set's name where the length does not determine them."""
    address = "ipv6_addr" if family == IPV6 else "ipv4_addr"
    if name.startswith(_SOURCE_RANGES):
        return (address, nft.PROTOCOL, nft.PORT, address)
    if name.startswith(NODE_PORT_KEY + _SOURCE_RANGES):
        return (nft.PROTOCOL, nft.PORT, address)
    if name == LOCALHOST_COUNTS:
        return (nft.PROTOCOL, nft.DIRECTION)
    if name == SERVICE_TRAFFIC:
        return (address, nft.PROTOCOL, nft.PORT, nft.DIRECTION)
    if name == NODE_PORT_TRAFFIC:
        return (nft.PROTOCOL, nft.PORT, nft.DIRECTION)
    size = nft.DATA_TYPES[address][1]
    transport = (nft.PROTOCOL, nft.PORT)
    shapes = {
        size: (address,),
        8: transport,
        size + 8: (address, *transport),
        2 * size + 8: (address, address, *transport),
    }
    return shapes.get(len(raw), ("unknown",))


def _endpoint_text(family: str, raw: bytes) -> str:
    return concatenation_text(("ipv6_addr" if family == IPV6 else "ipv4_addr", nft.PORT), raw)


def element_texts(family: str, key: nft.ElementKey, value: nft.Value) -> list[str]:
    """Return the elements of an entry as they are written between the braces of ``elements = { }``."""
    # The element of another program that matches what no other one does has no key.
    text = concatenation_text(key_parts(family, key.name, key.key), key.key) if key.key else "*"
    if isinstance(value, (tuple, nft.SparseList)):
        items = nft.list_items(cast(nft.ListValue, value))
        return [f"{text} . {index} : {_endpoint_text(family, data)}" for index, data in items]
    if isinstance(value, bool):
        return [text]
    return [f"{text} : {value if isinstance(value, str) else _endpoint_text(family, value)}"]


def table_line(table: str, value: object) -> str:
    """Return the table, ``ip kube-proxy``, with its flags if it has any."""
    flags = value.flags if isinstance(value, nft.TableValue) else 0
    words = ((nft.TABLE_DORMANT, "dormant"), (nft.TABLE_OWNER, "owner"), (nft.TABLE_PERSIST, "persist"))
    names = [word for flag, word in words if flags & flag]
    return f"table {table} {{ flags {','.join(names)}; }}" if names else f"table {table}"


def set_lines(name: str, value: nft.SetValue) -> list[str]:
    """Return the definition of a set, without elements and braces around it."""
    kind = "set" if value.data is None else "map"
    parts = value.key if value.data is None or value.data == (nft.VERDICT,) else value.key + value.data
    typeof = nft.INDEX in parts
    names = _TYPEOF if typeof else {}
    shown = " . ".join(names.get(part, part) for part in value.key)
    if value.data is not None:
        shown += " : " + " . ".join(names.get(part, part) for part in value.data)
    lines = [f"{kind} {name} {{", f"\t{'typeof' if typeof else 'type'} {shown}"]
    if value.size:
        lines.append(f"\tsize {value.size}")
    words = (("dynamic", value.dynamic), ("timeout", value.timeout), ("interval", value.is_interval))
    flags = [word for word, present in words if present]
    if flags:
        lines.append(f"\tflags {','.join(flags)}")
    if value.timeout:
        lines.append(f"\ttimeout {_duration(value.timeout)}")
    if value.counted:
        lines.append("\tcounter")
    return lines


def _duration(milliseconds: int) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    text = ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, seconds = divmod(seconds, size)
        if amount:
            text += f"{amount}{unit}"
    return text + (f"{rest}ms" if rest else "")


def chain_lines(value: nft.ChainValue) -> list[str]:
    """Return the lines between the braces of a chain."""
    lines: list[str] = []
    if value.base is not None:
        policy = "accept" if value.base.policy else "drop"
        hook = value.base
        lines.append(f"\ttype {hook.type} hook {hook.hook} priority {hook.priority}; policy {policy};")
    lines.extend("\t" + rule_text.rule_text(rule) for rule in value.rules)
    return lines


def object_lines(table: str, key: nft.Key, value: nft.Value) -> list[str]:
    """Return lines that show the table itself, a set or a chain, as blocks that ``nft -f`` accepts."""
    if isinstance(value, nft.SetValue):
        return [*set_lines(key.name, value), "}"]
    if isinstance(value, nft.ChainValue):
        return [f"chain {key.name} {{", *chain_lines(value), "}"]
    return [table_line(table, value)]


def describe(family: str, key: nft.Key, value: nft.Value, table_name: str = nft.TABLE_NAME) -> list[str]:
    """Return lines that show one entry of the table as commands or blocks that ``nft -f`` accepts."""
    table = f"{table_family(family)} {table_name}"
    if isinstance(key, nft.ElementKey):
        return [f"element {table} {key.name} {{ {text} }}" for text in element_texts(family, key, value)]
    return object_lines(table, key, value)


def describe_slots(family: str, key: nft.Key, value: nft.Value) -> list[str]:
    """Return one comment for each endpoint of a list of slots, with the number of its slots; none for other entries."""
    if not isinstance(key, nft.ElementKey) or not isinstance(value, tuple) or len(value) != SLOTS:
        return []
    frontend = concatenation_text(key_parts(family, key.name, key.key), key.key)
    counts = sorted(Counter(cast(tuple[bytes, ...], value)).items())
    return [
        f"# {key.name}: {frontend} : {_endpoint_text(family, data)}, {count} of {SLOTS} slots" for data, count in counts
    ]


def restore_text(family: str, tables: Mapping[str, Mapping[nft.Key, nft.Value]]) -> str:
    """Return a script for ``nft -f`` that replaces the family's table by the desired one; empty if none is desired."""
    return table_text(family, SERVICES_TABLE, tables[nft.RESOURCE])


def table_text(family: str, identity: nft.TableIdentity, table: Mapping[nft.Key, nft.Value]) -> str:
    """Return a script for ``nft -f`` that replaces a table by the desired one; empty if none is desired."""
    if identity.key not in table:
        return ""
    name = f"{table_family(family)} {identity.name}"
    return script(name, identity.comment, table, partial(element_texts, family))


def script(
    name: str, comment: str, table: Mapping[nft.Key, nft.Value], texts: Callable[[nft.ElementKey, nft.Value], list[str]]
) -> str:
    """Return a script for ``nft -f`` that replaces a table by the desired one.

    ``name``: with its family. ``texts`` returns elements as they are written between the braces of ``elements = { }``.
    """
    # Declared first, so that the deletion succeeds whether or not the table exists.
    lines = [f"table {name}", f"delete table {name}", f"table {name} {{", f'\tcomment "{comment}"']
    elements: dict[str, list[str]] = {}
    for key, value in table.items():
        if isinstance(key, nft.ElementKey):
            elements.setdefault(key.name, []).extend(texts(key, value))
    for key, value in table.items():
        if isinstance(value, nft.SetValue):
            block = set_lines(key.name, value)
            if key.name in elements:
                block.append("\telements = { " + ",\n\t\t     ".join(elements[key.name]) + " }")
            lines.extend("\t" + line for line in [*block, "}"])
    for key, value in table.items():
        if isinstance(value, nft.ChainValue):
            lines.extend("\t" + line for line in object_lines(name, key, value))
    return "\n".join([*lines, "}\n"])
