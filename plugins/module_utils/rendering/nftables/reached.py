# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The elements and rules of nf_tables that the packets of one destination meet, from a desired or an observed table."""

from __future__ import annotations

import collections
from typing import Iterator, Mapping

from ..settings import Arrival
from .keys import address_key, transport_key
from .layout import NODE_PORT_KEY
from .objects import TABLE_NAME, ChainValue, ElementKey, Key, ObjectKey, Value
from .rule_text import rule_text
from .text import describe, describe_slots, table_family

_JUMPS = ("goto ", "jump ")
_TRANSPORT_BYTES = 8


class _Destination:
    """The keys of a destination in sets and maps."""

    def __init__(self, place: Arrival) -> None:
        self._address = address_key(place.address)
        self._transport = transport_key(place.protocol, place.port)
        self._frontend = self._address + self._transport
        self._node_port = place.node_port

    def has(self, key: ElementKey) -> bool:
        """Return whether an element is about the destination."""
        raw = key.key
        if self._node_port and raw.startswith(self._transport):
            return len(raw) == _TRANSPORT_BYTES or key.name.startswith(NODE_PORT_KEY)
        return raw == self._address or (raw.startswith(self._frontend) and not key.name.startswith(NODE_PORT_KEY))


def _targets(value: Value) -> Iterator[str]:
    """Yield the chains to which an element or a rule of a chain leads."""
    if isinstance(value, str):
        if value.startswith(_JUMPS):
            yield value[len(_JUMPS[0]) :]
    elif isinstance(value, ChainValue):
        for rule in value.rules:
            for part in rule.expressions:
                for _number, attribute in part.attributes:
                    if isinstance(attribute, str):
                        yield from _targets(attribute)


def objects_for(family: str, table: Mapping[Key, Value], place: Arrival, table_name: str = TABLE_NAME) -> list[str]:
    """Return the elements about a destination, and the rules of the chains that they lead to."""
    found: dict[str, None] = {}
    destination = _Destination(place)
    chains: dict[str, None] = {}
    for key in sorted(key for key in table if isinstance(key, ElementKey) and destination.has(key)):
        value = table[key]
        found.update(dict.fromkeys(describe_slots(family, key, value) or describe(family, key, value, table_name)))
        chains.update(dict.fromkeys(_targets(value)))
    queue = collections.deque(chains)
    while queue:
        name = queue.popleft()
        chain = table.get(ObjectKey("chain", name))
        if not isinstance(chain, ChainValue):
            continue
        for rule in chain.rules:
            found[f"rule {table_family(family)} {table_name} {name} {rule_text(rule)}"] = None
        for target in _targets(chain):
            if target not in chains:
                chains[target] = None
                queue.append(target)
    return list(found)
