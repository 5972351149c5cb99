# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of network policies in the syntax of the nft program, for users and for ``nft -f``."""

from __future__ import annotations

from typing import Any, Mapping

from ..nftables.objects import CLASSID, ElementKey, Key, SetValue, Value, key_length
from ..nftables.text import concatenation_text, object_lines, script
from . import bridge_keys, bridged
from .sets import ALL_SETS, TABLE_COMMENT, TABLE_NAME, definitions

_FAMILY = "inet"
_SETS = {**definitions(ALL_SETS), **bridged.definitions()}


def _range_text(value: SetValue, raw: bytes) -> str:
    """Return ``10.0.0.0-10.0.0.255``; single values in a concatenation are written once."""
    half = len(raw) // 2
    first, last = raw[:half], raw[half:]
    texts: list[str] = []
    position = 0
    for part in value.key:
        end = position + key_length((part,))
        ends = [_range_end(part, each[position:end]) for each in (first, last)]
        texts.append(ends[0] if ends[0] == ends[1] else "-".join(ends))
        position = end
    return " . ".join(texts)


def _range_end(part: str, raw: bytes) -> str:
    if part == CLASSID:
        # In a set of ranges it is in network byte order.
        return f"{int.from_bytes(raw[:2], 'big'):x}:{int.from_bytes(raw[2:], 'big'):x}"
    return concatenation_text((part,), raw)


def element_text(set_name: str, raw: bytes, value: Value) -> str:
    """Return an element in the form in which ``elements = { }`` lists it."""
    definition = _SETS.get(set_name)
    if definition is None:
        # In a set of another program the meaning of the key is unknown.
        return f"0x{raw.hex()}"
    if not raw:
        # The catch-all element of another program.
        key = "*"
    else:
        key = _range_text(definition, raw) if definition.is_interval else concatenation_text(definition.key, raw)
    if isinstance(value, bytes) and definition.data is not None:
        return f"{key} : {concatenation_text(definition.data, value)}"
    return f"{key} : {value}" if isinstance(value, str) else key


def describe(key: Key, value: Any) -> list[str]:
    """Return one entry of the table in the syntax of the nft program."""
    family = _FAMILY
    if bridge_keys.is_bridged(key):
        key, family = bridge_keys.plain(key), bridge_keys.BRIDGE
    if isinstance(key, ElementKey):
        return [f"element {family} {TABLE_NAME} {key.name} {{ {element_text(key.name, key.key, value)} }}"]
    return object_lines(f"{family} {TABLE_NAME}", key, value)


def restore_text(table: Mapping[Key, Value]) -> str:
    """Return a script for ``nft -f`` that replaces the table by the desired one."""
    name = f"{_FAMILY} {TABLE_NAME}"
    return script(name, TABLE_COMMENT, table, lambda key, value: [element_text(key.name, key.key, value)])
