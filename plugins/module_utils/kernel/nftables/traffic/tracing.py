# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Follow the packets of one flow through the rules of nf_tables, by the kernel's own tracing.

A separate table marks the packets for tracing (``meta nftrace set 1``). Its flag ``owner`` binds it to the socket that
created it: the kernel deletes it when the socket is closed, even if the process is killed. Source:
linux/netfilter/nf_tables.h (enum nft_trace_attributes).
"""

from __future__ import annotations

import os
import select
import time
from typing import NamedTuple, Optional

from ....base.addresses import packed
from ....base.closing import Closing, closed_on_error
from ....base.errors import KernelError
from ....rendering.nftables import expressions as x
from ....rendering.nftables.objects import PROTOCOL_NUMBERS, TABLE_OWNER, BaseHook, Expression, Rule, TableIdentity
from ....rendering.nftables.rule_text import rule_text
from ....rendering.nftables.text import table_family
from ....rendering.settings import Arrival, Client
from ...netlink.attributes import attribute, attribute_text, each_attribute, number_in, parse_attributes, text_attribute
from ...netlink.listener import NetlinkListener
from ...netlink.outcomes import NetlinkRefusal
from ...netlink.protocol import NETLINK_NETFILTER, NLM_F_CREATE, Message
from ...netlink.socket import NetlinkSocket
from .. import attributes as uapi
from .. import messages
from ..decoding import parse_expression
from ..user_data import rule_comment

_NFNLGRP_NFTRACE = 9
_TRACE = uapi.SUBSYSTEM | 17
_TABLE, _CHAIN, _HANDLE, _TYPE, _VERDICT, _ID, _POLICY = 1, 2, 3, 4, 5, 6, 16
_TYPE_POLICY, _TYPE_RULE = 1, 3
_RULE_HANDLE = 3
_META_NFTRACE = 12
#: Before connection tracking (-200) and the table raw (-300).
_PRIORITY = -350
#: Packets marked per second, and how many may come at once, so that a busy flow does not slow the node down.
_RATE, _BURST = 10, 5
#: The most packets that are followed.
MOST_PACKETS = 20
_FAMILIES = {number: family for family, number in messages.FAMILY_NUMBERS.items()}


class Hit(NamedTuple):
    """A rule or policy that decided about a packet. ``verdict``: as nft writes it; ``rule``: its text, if known.

    ``packet``: counted from 1; 0 for those that another program traces.
    """

    packet: int
    table: str
    chain: str
    verdict: str
    rule: str


def _rule(family: str, client: Client, arrival: Arrival) -> Rule:
    parts: list[Expression] = [
        *(x.source_address(family), x.compare(packed(client.address) or b"")),
        *(x.destination_address(family), x.compare(packed(arrival.address) or b"")),
        *(x.meta(x.META_L4PROTO), x.compare(bytes((PROTOCOL_NUMBERS[arrival.protocol],)))),
        *(x.payload(x.TRANSPORT_HEADER, 2, 2), x.compare(arrival.port.to_bytes(2, "big"))),
    ]
    if client.port:
        parts += [x.payload(x.TRANSPORT_HEADER, 0, 2), x.compare(client.port.to_bytes(2, "big"))]
    limit = x.limit(_RATE, _BURST)
    return Rule((*parts, limit, x.value(b"\x01", 0), x.set_meta(_META_NFTRACE)))


class Tracer(Closing):
    """Traces the packets of a flow while it is open; a context manager. Raises KernelError."""

    def __init__(self, family: str, client: Client, arrival: Arrival) -> None:
        self._name = f"kubenode-trace-{os.getpid()}"
        self._sock = NetlinkSocket(NETLINK_NETFILTER)
        self._texts: dict[tuple[str, str], dict[int, str]] = {}
        self._packets = 0
        with closed_on_error(self._sock):
            self._listener = NetlinkListener(NETLINK_NETFILTER, (_NFNLGRP_NFTRACE,), "traced packets")
        with closed_on_error(self):
            self._mark(family, _rule(family, client, arrival))

    def _mark(self, family: str, rule: Rule) -> None:
        encoder = messages.Encoder(family, TableIdentity(self._name, ""))
        owned = TABLE_OWNER.to_bytes(4, "big")
        table = messages.family_header(family) + text_attribute(uapi.NFTA_TABLE_NAME, self._name)
        batch: list[Message] = [
            messages.BATCH_BEGIN,
            (messages.NEW_TABLE, NLM_F_CREATE, table + attribute(uapi.NFTA_TABLE_FLAGS, owned)),
        ]
        for hook in ("prerouting", "output"):
            batch += [encoder.chain(hook, BaseHook("filter", hook, _PRIORITY)), encoder.rule(hook, rule)]
        errors = self._sock.transact([*batch, messages.BATCH_END], single_send=True, acknowledge=False).errors
        if errors:
            raise KernelError(f"packets cannot be traced: {errors[0]}")

    def close(self) -> None:
        """Stop tracing: the kernel deletes the table with the socket."""
        self._sock.close()
        self._listener.close()

    def follow(self, seconds: float) -> list[Hit]:
        """Return the decisions about the packets of the next seconds, at most MOST_PACKETS. Raises KernelError."""
        found: list[Hit] = []
        numbers: dict[int, int] = {}
        end = time.monotonic() + seconds
        while self._packets < MOST_PACKETS:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._listener.fileno()], [], [], left)[0]:
                break
            for item in self._listener.notifications():
                if item.kind == _TRACE:
                    hit = self._hit(item.payload, numbers)
                    if hit is not None and hit.packet:
                        found.append(hit)
        return found

    def _hit(self, payload: memoryview, numbers: dict[int, int]) -> Optional[Hit]:
        found = parse_attributes(payload, 4, len(payload))
        if _TABLE not in found or _CHAIN not in found or _ID not in found:
            return None
        number = int.from_bytes(found[_ID], "big")
        family, table = _FAMILIES.get(payload[0], ""), attribute_text(found[_TABLE])
        kind = number_in(found, _TYPE)
        if table == self._name:
            # The rule that marks a packet is the first one that it meets. The kernel uses its numbers again.
            if kind == _TYPE_RULE and _HANDLE in found:
                self._packets += 1
                numbers[number] = self._packets
            return None
        if kind == _TYPE_POLICY:
            verdict = _code_name(found.get(_POLICY))
            rule = "policy"
        else:
            verdict = _verdict_text(found.get(_VERDICT))
            handle = number_in(found, _HANDLE)
            rule = self._rules(family, table).get(handle, f"handle {handle}") if handle else "end of the chain"
        place = f"{table_family(family)} {table}"
        return Hit(numbers.get(number, 0), place, attribute_text(found[_CHAIN]), verdict, rule)

    def _rules(self, family: str, table: str) -> dict[int, str]:
        """Return the rules of a table by handle; they are read when the first packet meets one of them."""
        known = self._texts.get((family, table))
        if known is None:
            known = self._texts[family, table] = {}
            if family:
                request = messages.family_header(family) + text_attribute(uapi.NFTA_RULE_TABLE, table)
                known.update(_read_rules(self._sock, request, table))
        return known


def _read_rules(sock: NetlinkSocket, request: bytes, table: str) -> dict[int, str]:
    texts: dict[int, str] = {}
    try:
        dump = sock.dump(messages.GET_RULE, request)
    except NetlinkRefusal:
        return texts
    for buffer, _kind, start, end in dump:
        found = parse_attributes(buffer, start + 4, end)
        if _RULE_HANDLE not in found or attribute_text(found[uapi.NFTA_RULE_TABLE]) != table:
            continue
        raw = found.get(uapi.NFTA_RULE_EXPRESSIONS, memoryview(b""))
        parts = tuple([parse_expression(part) for _number, part in each_attribute(raw, 0, len(raw))])
        rule = Rule(parts, rule_comment(found, uapi.NFTA_RULE_USERDATA))
        texts[int.from_bytes(found[_RULE_HANDLE], "big")] = rule_text(rule)
    return texts


def _code_name(raw: Optional[memoryview]) -> str:
    code = int.from_bytes(raw or b"", "big", signed=True)
    return messages.VERDICT_NAMES.get(code, str(code))


def _verdict_text(raw: Optional[memoryview]) -> str:
    """Return the verdict in an attribute; the kernel nests it in the same way as in an element."""
    if raw is None:
        return ""
    found = parse_attributes(raw, 0, len(raw))
    if uapi.NFTA_DATA_VERDICT in found and uapi.NFTA_VERDICT_CODE not in found:
        found = parse_attributes(found[uapi.NFTA_DATA_VERDICT], 0, len(found[uapi.NFTA_DATA_VERDICT]))
    chain = attribute_text(found[uapi.NFTA_VERDICT_CHAIN]) if uapi.NFTA_VERDICT_CHAIN in found else ""
    return f"{_code_name(found.get(uapi.NFTA_VERDICT_CODE))} {chain}".strip()
