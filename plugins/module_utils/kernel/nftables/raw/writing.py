# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writing of a saved table in one transaction, and a rehearsal that finds out whether the kernel would accept it.

The kernel does not accept every rule that it dumps. ``reading`` corrects what is known; of a table with any expression
that this project does not write itself, the transaction is rehearsed before its state is saved.
"""

from __future__ import annotations

from typing import Iterator, Mapping

from ....rendering.nftables.expressions import Immediate
from ....rendering.nftables.objects import TABLE_DORMANT, ChainValue, ObjectKey, Rule
from ...netlink.attributes import attribute, attribute_text, each_attribute, nested, parse_attributes, text_attribute
from ...netlink.protocol import NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, Message
from ...netlink.socket import NetlinkSocket
from .. import attributes as uapi
from .. import messages
from ..decoding import parse_expression, parse_hook
from ..expression_schema import SCHEMA
from .reading import RawChain, RawSet, RawTable, RawValue, StatefulKey

_NEW_OBJECT = uapi.SUBSYSTEM | 18
_ELEMENTS_BYTES = 60_000
_REHEARSED = "kubenode-rehearsal"


def rule_expressions(rule: bytes) -> Iterator[memoryview]:
    """Yield the attributes of each expression of a rule of a :class:`RawChain`."""
    parts = parse_attributes(memoryview(rule), 0, len(rule))
    raw = parts.get(uapi.NFTA_RULE_EXPRESSIONS, memoryview(b""))
    for _kind, part in each_attribute(raw, 0, len(raw)):
        yield part


def chain_value(value: RawChain) -> ChainValue:
    """Return the chain as this project models it, with unknown parts omitted: for display only."""
    found = parse_attributes(memoryview(value.definition), 0, len(value.definition))
    rules = [Rule(tuple(map(parse_expression, rule_expressions(rule)))) for rule in value.rules]
    return ChainValue(tuple(rules), parse_hook(found))


def replacement(family: str, name: str, present: bool, wanted: RawTable) -> list[Message]:
    """Return one transaction that deletes the table ``name`` if it is ``present`` and creates the wanted one, if any.

    ``family``: of the table: IPv4, IPv6 or ``inet``.
    """
    header = messages.family_header(family)
    in_table = header + text_attribute(uapi.NFTA_TABLE_NAME, name)
    batch: list[Message] = [messages.BATCH_BEGIN]
    if present:
        batch.append((messages.DELETE_TABLE, 0, in_table))
    table = wanted.get(ObjectKey("table", name))
    if isinstance(table, bytes):
        batch.append((messages.NEW_TABLE, NLM_F_CREATE, header + table))
        make = NLM_F_CREATE | NLM_F_EXCL
        for key, value in wanted.items():
            if isinstance(key, StatefulKey) and isinstance(value, bytes):
                batch.append((_NEW_OBJECT, make, header + value))
        chains = _owned_first({key.name: value for key, value in wanted.items() if isinstance(value, RawChain)})
        batch += [(messages.NEW_CHAIN, make, header + chain.definition) for chain in chains]
        sets = [(key.name, value) for key, value in wanted.items() if isinstance(value, RawSet)]
        for number, (_name, item) in enumerate(sets, 1):
            identity = attribute(uapi.NFTA_SET_ID, number.to_bytes(4, "big"))
            batch.append((messages.NEW_SET, make, header + item.definition + identity))
        # Before the rules: a set without a name accepts no more elements once a rule uses it.
        for set_name, item in sets:
            for block in _blocks(item.elements):
                payload = text_attribute(uapi.NFTA_SET_ELEM_LIST_SET, set_name) + nested(
                    uapi.NFTA_SET_ELEM_LIST_ELEMENTS, block
                )
                batch.append((messages.NEW_ELEMENT, make, in_table + payload))
        for chain in chains:
            batch += [(messages.NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, header + rule) for rule in chain.rules]
    batch.append(messages.BATCH_END)
    return batch


def _owned_first(chains: Mapping[str, RawChain]) -> list[RawChain]:
    """Return the chains in an order in which those without a name get their rules before the rule that owns them."""
    found: dict[str, RawChain] = {}

    def add(name: str, chain: RawChain) -> None:
        for rule in chain_value(chain).rules:
            verdicts = (part.get(Immediate.DATA) for part in rule.expressions if part.name == "immediate")
            for target in (verdict.partition(" ")[2] for verdict in verdicts if isinstance(verdict, str)):
                if target in owned and target not in found:
                    add(target, chains[target])
        found[name] = chain

    owned = {name for name, chain in chains.items() if chain.is_owned}
    if not owned:
        return list(chains.values())
    for name, chain in chains.items():
        if name not in found:
            add(name, chain)
    return list(found.values())


def _blocks(elements: tuple[bytes, ...]) -> Iterator[bytes]:
    """Yield blocks of encoded elements, as many together as one attribute holds."""
    parts: list[bytes] = []
    size = 0
    for element in elements:
        encoded = nested(uapi.NFTA_LIST_ELEM, element)
        if size + len(encoded) > _ELEMENTS_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(encoded)
        size += len(encoded)
    if parts:
        yield b"".join(parts)


def is_plain(table: RawTable) -> bool:
    """Return whether a table has only expressions that this project writes itself."""
    rules = (rule for value in table.values() if isinstance(value, RawChain) for rule in value.rules)
    names = {part.name for rule in rules for part in map(parse_expression, rule_expressions(rule))}
    return names <= SCHEMA.keys() and not any(isinstance(key, StatefulKey) for key in table)


def rehearsed(sock: NetlinkSocket, family: str, name: str, table: RawTable) -> str:
    """Return what the kernel refuses of a table that is created under another name; empty if it accepts everything.

    Nothing is created: the transaction ends with a message that must fail. Raises KernelError.
    """
    header = messages.family_header(family)
    trial = {key: _renamed(value) for key, value in table.items()}
    flags = attribute(uapi.NFTA_TABLE_FLAGS, TABLE_DORMANT.to_bytes(4, "big"))
    trial[ObjectKey("table", _REHEARSED)] = text_attribute(uapi.NFTA_TABLE_NAME, _REHEARSED) + flags
    batch = replacement(family, _REHEARSED, False, trial)
    missing = text_attribute(uapi.NFTA_CHAIN_TABLE, _REHEARSED) + text_attribute(uapi.NFTA_CHAIN_NAME, "missing")
    batch.insert(-1, (messages.DELETE_CHAIN, 0, header + missing))
    last = len(batch) - 2
    errors = [each for each in sock.transact(batch, True, False).errors if each.position != last]
    if not errors:
        return ""
    where = _object(batch[errors[0].position]) if errors[0].position else "the transaction"
    return f"table {name} ({family}): {where} could not be restored: the kernel would refuse it: {errors[0]}"


def _renamed(value: RawValue) -> RawValue:
    """Return the attributes of an object with the name of the table of the rehearsal."""

    def of(raw: bytes) -> bytes:
        # The name of the table has the same number in chains, rules, sets and objects.
        parts = each_attribute(memoryview(raw), 0, len(raw))
        return text_attribute(uapi.NFTA_TABLE_NAME, _REHEARSED) + b"".join(
            attribute(number, bytes(part)) for number, part in parts if number != uapi.NFTA_TABLE_NAME
        )

    if isinstance(value, RawChain):
        return RawChain(of(value.definition), tuple(map(of, value.rules)))
    return value._replace(definition=of(value.definition)) if isinstance(value, RawSet) else of(value)


def _object(message: Message) -> str:
    """Return what a message creates."""
    kind, _flags, payload = message
    found = parse_attributes(memoryview(payload), uapi.GENMSG_BYTES, len(payload))
    for created, label, number in (
        (messages.NEW_RULE, "a rule of chain", uapi.NFTA_RULE_CHAIN),
        (messages.NEW_CHAIN, "chain", uapi.NFTA_CHAIN_NAME),
        (messages.NEW_SET, "set", uapi.NFTA_SET_NAME),
        (messages.NEW_ELEMENT, "an element of set", uapi.NFTA_SET_ELEM_LIST_SET),
    ):
        if kind == created:
            return f"{label} {attribute_text(found[number])}"
    return "an object"
