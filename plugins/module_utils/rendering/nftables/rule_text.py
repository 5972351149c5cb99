# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decompile the expressions of a rule to the syntax of the nft program.

This tracks the contents of each register, as ``nft list`` does. Expressions that it does not know, which only another
program can have added, are shown as ``[name attribute=value ...]``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, Optional, Union

from ...base.addresses import unpacked
from . import expressions as x
from .objects import PROTOCOL_NAMES, Expression, Rule

_PAYLOAD_FIELDS = {
    (x.LINK_HEADER, 12, 2): "ether type",
    (x.NETWORK_HEADER, 14, 4): "arp saddr ip",
    (x.NETWORK_HEADER, 12, 4): "ip saddr",
    (x.NETWORK_HEADER, 16, 4): "ip daddr",
    (x.NETWORK_HEADER, 8, 16): "ip6 saddr",
    (x.NETWORK_HEADER, 24, 16): "ip6 daddr",
    (x.NETWORK_HEADER, 7, 1): "ip6 hoplimit",
    (x.TRANSPORT_HEADER, 0, 2): "th sport",
    (x.TRANSPORT_HEADER, 2, 2): "th dport",
    (x.TRANSPORT_HEADER, 0, 1): "icmpv6 type",
    (x.TRANSPORT_HEADER, 8, 16): "icmpv6 taddr",
    (x.TRANSPORT_HEADER, 13, 1): "tcp flags",
}
_META_FIELDS = {
    x.META_PRIORITY: "meta priority",
    x.META_MARK: "meta mark",
    x.META_IIF: "iif",
    x.META_IIFNAME: "iifname",
    x.META_OIFNAME: "oifname",
    x.META_NFPROTO: "meta nfproto",
    x.META_L4PROTO: "meta l4proto",
}
#: By the key and, where there is one, the direction: the name and its size in a register.
_CT_FIELDS: dict[tuple[Union[int, bytes, str], ...], tuple[str, int]] = {
    (x.CT_STATE,): ("ct state", 4),
    (x.CT_STATUS,): ("ct status", 4),
    (x.CT_DIRECTION,): ("ct direction", 4),
    (x.CT_DST_IP, x.CT_ORIGINAL): ("ct original ip daddr", 4),
    (x.CT_DST_IP6, x.CT_ORIGINAL): ("ct original ip6 daddr", 16),
    (x.CT_PROTO_DST, x.CT_ORIGINAL): ("ct original proto-dst", 4),
}
#: By the result and the flags.
_FIB_FIELDS: dict[tuple[Union[int, bytes, str], ...], tuple[str, int]] = {
    (x.FIB_RESULT_ADDRTYPE, x.FIB_SADDR): ("fib saddr type", 4),
    (x.FIB_RESULT_ADDRTYPE, x.FIB_DADDR): ("fib daddr type", 4),
    (x.FIB_RESULT_OIF, x.FIB_SADDR | x.FIB_IIF | x.FIB_PRESENT): ("fib saddr . iif oif", 4),
}
_BIT_NAMES = {
    "ct state": {
        x.CT_STATE_ESTABLISHED: "established",
        x.CT_STATE_RELATED: "related",
        x.CT_STATE_NEW: "new",
        x.CT_STATE_UNTRACKED: "untracked",
    },
    "ct status": {x.CT_STATUS_DNAT: "dnat"},
}
_OPERATORS = {x.CMP_EQUAL: "", x.CMP_NOT_EQUAL: "!= ", x.CMP_AT_MOST: "<= ", x.CMP_AT_LEAST: ">= "}
_ADDRESS_KINDS = {x.RTN_LOCAL: "local", x.RTN_BROADCAST: "broadcast"}
_NFPROTO_NAMES = {2: "ipv4", 10: "ipv6"}
_ADDRESS_STARTS = {4: ((12, "ip saddr"), (16, "ip daddr")), 16: ((8, "ip6 saddr"), (24, "ip6 daddr"))}


class _Unknown(Exception):
    """Raised for an expression that none of our rules has."""


class _Held(NamedTuple):
    """The content of a register: its text, its size in bytes, and a mask or a change applied to it."""

    text: str
    size: int
    mask: bytes = b""
    xor: bytes = b""


class _Reader:
    """Turns the expressions of one rule into text.

    An expression that none of our rules has raises :class:`_Unknown`, or KeyError where a table lacks it.
    """

    def __init__(self) -> None:
        self.words: dict[int, _Held] = {}
        self.parts: list[str] = []

    def hold(self, number: int, held: _Held) -> None:
        self.words[x.register_word(number)] = held

    def held(self, number: int) -> _Held:
        return self.words[x.register_word(number)]

    def concatenation(self, number: int) -> str:
        """Return the texts of all registers from one on that have a content, joined."""
        texts: list[str] = []
        word = x.register_word(number)
        while word in self.words:
            held = self.words[word]
            texts.append(_masked_text(held))
            word += (held.size + 3) // 4
        if not texts:
            raise _Unknown
        return " . ".join(texts)

    def read(self, part: Expression) -> None:
        method = getattr(self, f"read_{part.name}", None)
        if method is None:
            raise _Unknown
        method(part)

    def read_payload(self, part: Expression) -> None:
        base, offset, size = (part.get(x.Payload.BASE), part.get(x.Payload.OFFSET), part.get(x.Payload.LEN))
        text = _PAYLOAD_FIELDS.get((base, offset, size))
        if text is None:
            text = next(
                (
                    name
                    for whole, fields in _ADDRESS_STARTS.items()
                    for start, name in fields
                    if base == x.NETWORK_HEADER and start == offset and size < whole
                ),
                None,
            )
        if text is None:
            raise _Unknown
        self.hold(part.get(x.Payload.DREG), _Held(text, size))

    def read_meta(self, part: Expression) -> None:
        name = _META_FIELDS[part.get(x.Meta.KEY)]
        if part.get(x.Meta.SREG):
            self.parts.append(f"{name} set {_changed_text(self.held(part.get(x.Meta.SREG)))}")
        else:
            self.hold(part.get(x.Meta.DREG), _Held(name, 16 if name in ("iifname", "oifname") else 4))

    def read_ct(self, part: Expression) -> None:
        found = _CT_FIELDS[tuple([value for _number, value in part.attributes[1:]])]
        self.hold(part.get(x.Ct.DREG), _Held(*found))

    def read_fib(self, part: Expression) -> None:
        found = _FIB_FIELDS[part.get(x.Fib.RESULT), part.get(x.Fib.FLAGS)]
        self.hold(part.get(x.Fib.DREG), _Held(*found))

    def read_numgen(self, part: Expression) -> None:
        if part.get(x.Ng.TYPE) != 1 or part.get(x.Ng.OFFSET):
            raise _Unknown
        self.hold(part.get(x.Ng.DREG), _Held(f"numgen random mod {part.get(x.Ng.MODULUS)}", 4))

    def read_hash(self, part: Expression) -> None:
        if part.get(x.Hash.OFFSET) or part.get(x.Hash.TYPE):
            raise _Unknown
        text = self.concatenation(part.get(x.Hash.SREG))
        self.hold(
            part.get(x.Hash.DREG),
            _Held(f"jhash {text} mod {part.get(x.Hash.MODULUS)} seed 0x{part.get(x.Hash.SEED):x}", 4),
        )

    def read_bitwise(self, part: Expression) -> None:
        before = self.held(part.get(x.Bitwise.SREG))
        if before.mask:
            raise _Unknown
        changed = before._replace(mask=part.get(x.Bitwise.MASK), xor=part.get(x.Bitwise.XOR))
        self.hold(part.get(x.Bitwise.DREG), changed)

    def read_byteorder(self, part: Expression) -> None:
        # nft writes no conversion, because the type of the value implies it.
        if part.get(x.Byteorder.SREG) != part.get(x.Byteorder.DREG) or self.held(part.get(x.Byteorder.SREG)).mask:
            raise _Unknown

    def read_cmp(self, part: Expression) -> None:
        held = self.held(part.get(x.Cmp.SREG))
        self.parts.append(_comparison(held, _OPERATORS[part.get(x.Cmp.OP)], part.get(x.Cmp.DATA)))
        if part.get(x.Cmp.OP) == x.CMP_EQUAL:
            self.words.clear()

    def read_lookup(self, part: Expression) -> None:
        key = self.concatenation(part.get(x.Lookup.SREG))
        name = part.get(x.Lookup.SET)
        target = part.get(x.Lookup.DREG, None)
        self.words.clear()
        if target is None:
            self.parts.append(f"{key} {'!= ' if part.get(x.Lookup.FLAGS) else ''}@{name}")
        elif target == 0:
            self.parts.append(f"{key} vmap @{name}")
        else:
            self.hold(target, _Held(f"{key} map @{name}", 4))

    def read_immediate(self, part: Expression) -> None:
        data = part.get(x.Immediate.DATA)
        if part.get(x.Immediate.DREG) == 0:
            self.parts.append(str(data))
        elif isinstance(data, bytes) and len(data) in (2, 4, 16):
            text = str(int.from_bytes(data, "big")) if len(data) == 2 else unpacked(data)
            self.hold(part.get(x.Immediate.DREG), _Held(text, len(data)))
        else:
            raise _Unknown

    def read_nat(self, part: Expression) -> None:
        if part.get(x.Nat.TYPE) != x.NAT_DESTINATION or part.get(x.Nat.FLAGS):
            raise _Unknown
        address = self.held(part.get(x.Nat.REG_ADDR_MIN)).text
        if " map @" in address:
            family = "ip6" if part.get(x.Nat.FAMILY) == x.NFPROTO["IPv6"] else "ip"
            self.parts.append(f"dnat {family} to {address}")
        elif not part.get(x.Nat.REG_PROTO_MIN):
            self.parts.append(f"dnat to {address}")
        else:
            shown = f"[{address}]" if ":" in address else address
            self.parts.append(f"dnat to {shown}:{self.held(part.get(x.Nat.REG_PROTO_MIN)).text}")

    def read_limit(self, part: Expression) -> None:
        if part.get(x.Limit.UNIT) != 1 or part.get(x.Limit.TYPE) or part.get(x.Limit.FLAGS):
            raise _Unknown
        self.parts.append(f"limit rate {part.get(x.Limit.RATE)}/second burst {part.get(x.Limit.BURST)} packets")

    def read_log(self, part: Expression) -> None:
        prefix = str(part.get(x.Log.PREFIX, "")).replace('"', "?")
        self.parts.append(f'log prefix "{prefix}" group {part.get(x.Log.GROUP)} snaplen {part.get(x.Log.SNAPLEN)}')

    def read_masq(self, part: Expression) -> None:
        first, last = part.get(x.Masq.REG_PROTO_MIN), part.get(x.Masq.REG_PROTO_MAX)
        ports = f" to :{self.held(first).text}-{self.held(last).text}" if first else ""
        random = " fully-random" if part.get(x.Masq.FLAGS) & x.NAT_FULLY_RANDOM else ""
        self.parts.append(f"masquerade{ports}{random}")

    def read_reject(self, part: Expression) -> None:
        if part.attributes not in (x.reject("IPv4").attributes, x.reject("IPv6").attributes):
            raise _Unknown
        self.parts.append("reject")

    def read_dynset(self, part: Expression) -> None:
        if part.get(x.Dynset.OP) != x.DYNSET_UPDATE or part.get(x.Dynset.SREG_DATA) or part.get(x.Dynset.TIMEOUT):
            raise _Unknown
        self.parts.append(
            f"update @{part.get(x.Dynset.SET_NAME)} {{ {self.concatenation(part.get(x.Dynset.SREG_KEY))} }}"
        )


def _masked_text(held: _Held) -> str:
    if not held.mask:
        return held.text
    if any(held.xor):
        raise _Unknown
    return f"{held.text} & {unpacked(held.mask)}"


def _number(raw: bytes) -> int:
    return int(struct.unpack("=I", raw)[0])


def _changed_text(held: _Held) -> str:
    """Return ``meta mark | 0x00004000``, ``meta mark ^ 0x00004000``, or an unchanged value."""
    if not held.mask and (" map @" in held.text or held.text == "0.0.0.0"):
        return held.text if held.text != "0.0.0.0" else "0:0"
    if len(held.mask) != 4:
        raise _Unknown
    mask, xor = _number(held.mask), _number(held.xor)
    if mask == ~xor & 0xFFFFFFFF:
        return f"{held.text} | 0x{xor:08x}"
    if mask == 0xFFFFFFFF:
        return f"{held.text} ^ 0x{xor:08x}"
    raise _Unknown


def _prefix_length(mask: bytes) -> Optional[int]:
    bits = bin(int.from_bytes(mask, "big"))[2:].zfill(len(mask) * 8)
    length = len(bits.rstrip("0"))
    return length if "0" not in bits[:length] else None


def _comparison(held: _Held, operator: str, data: bytes) -> str:
    text = held.text
    if text in _BIT_NAMES:
        names = _BIT_NAMES[text]
        bits = _number(held.mask) if held.mask else 0
        if not bits or bits & ~sum(names) or operator != "!= " or any(data):
            raise _Unknown
        return f"{text} {','.join(word for bit, word in names.items() if bits & bit)}"
    if text == "meta nfproto" and data[0] in _NFPROTO_NAMES:
        return f"{text} {operator}{_NFPROTO_NAMES[data[0]]}"
    if text == "ether type":
        return f"{text} {operator}0x{data.hex()}"
    if text == "meta priority":
        return f"{text} {operator}{_number(data) >> 16:x}:{_number(data) & 0xFFFF:x}"
    if text == "iif":
        return f"{text} {operator}{_number(data)}"
    if text == "fib saddr . iif oif":
        return f"{text} {operator}{'exists' if any(data) else 'missing'}"
    if text in ("icmpv6 type", "ip6 hoplimit"):
        return f"{text} {operator}{data[0]}"
    if text == "tcp flags":
        return f"{text} & 0x{held.mask[0]:x} {operator or '== '}0x{data[0]:x}"
    if text == "meta mark" and held.mask:
        return f"meta mark & 0x{_number(held.mask):08x} {operator or '== '}0x{_number(data):08x}"
    if text == "iifname":
        name = data.rstrip(b"\x00").decode(errors="replace")
        return f'iifname {operator}"{name}{"*" if len(data) < x.INTERFACE_NAME_BYTES else ""}"'
    if text == "meta l4proto":
        return f"meta l4proto {operator}{PROTOCOL_NAMES.get(data[0], data[0])}"
    if text.startswith("fib ") and _number(data) in _ADDRESS_KINDS:
        return f"{text} {operator}{_ADDRESS_KINDS[_number(data)]}"
    if text.startswith("numgen "):
        return f"{text} {operator}{_number(data)}"
    if text.startswith(("ip saddr", "ip daddr", "ip6 saddr", "ip6 daddr", "arp saddr ip")):
        return f"{text} {operator}{_address_text(held, data)}"
    raise _Unknown


def _address_text(held: _Held, data: bytes) -> str:
    whole = 16 if held.text.startswith("ip6") else 4
    length: Optional[int] = len(data) * 8
    if held.mask:
        length = _prefix_length(held.mask)
        if length is None:
            raise _Unknown
    address = unpacked(data.ljust(whole, b"\x00"))
    return address if length == whole * 8 else f"{address}/{length}"


def _raw(part: Expression) -> str:
    shown = " ".join(
        f"{number}={value.hex() if isinstance(value, bytes) else value}" for number, value in part.attributes
    )
    return f"[{part.name} {shown}]"


def rule_text(rule: Rule) -> str:
    """Return one rule as nft writes it, with its comment."""
    reader = _Reader()
    try:
        for part in rule.expressions:
            reader.read(part)
        text = " ".join(reader.parts)
    except (_Unknown, KeyError, struct.error):
        text = " ".join(_raw(part) for part in rule.expressions)
    if not rule.comment:
        return text
    shown = "".join(letter if letter.isprintable() and letter not in '"\\' else "?" for letter in rule.comment)
    return f'{text} comment "{shown}"'
