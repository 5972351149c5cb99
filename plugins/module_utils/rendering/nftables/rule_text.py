# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decompile the expressions of a rule to the syntax of the nft program.

This tracks the contents of each register, as ``nft list`` does. Expressions that it does not know, which only another
program can have added, are shown as ``[name attribute=value ...]``.
"""

from __future__ import annotations

import struct
from typing import Dict, List, Optional, Tuple, Union

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
_CT_FIELDS: Dict[Tuple[Union[int, bytes, str], ...], Tuple[str, int]] = {
    (x.CT_STATE,): ("ct state", 4),
    (x.CT_STATUS,): ("ct status", 4),
    (x.CT_DIRECTION,): ("ct direction", 4),
    (x.CT_DST_IP, x.CT_ORIGINAL): ("ct original ip daddr", 4),
    (x.CT_DST_IP6, x.CT_ORIGINAL): ("ct original ip6 daddr", 16),
    (x.CT_PROTO_DST, x.CT_ORIGINAL): ("ct original proto-dst", 4),
}
#: By the result and the flags.
_FIB_FIELDS: Dict[Tuple[Union[int, bytes, str], ...], Tuple[str, int]] = {
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
_ADDRESS_KINDS = {x.RTN_LOCAL: "local", x.RTN_BROADCAST: "broadcast"}
_NFPROTO_NAMES = {2: "ipv4", 10: "ipv6"}
_ADDRESS_STARTS = {4: ((12, "ip saddr"), (16, "ip daddr")), 16: ((8, "ip6 saddr"), (24, "ip6 daddr"))}


class _Unknown(Exception):
    """Raised for an expression that none of our rules has."""


class _Held:
    """The content of a register: its text, its size in bytes, and a mask or a change applied to it."""

    __slots__ = ("mask", "size", "text", "xor")

    def __init__(self, text: str, size: int, mask: bytes = b"", xor: bytes = b"") -> None:
        self.text = text
        self.size = size
        self.mask = mask
        self.xor = xor


class _Reader:
    """Turns the expressions of one rule into text."""

    def __init__(self) -> None:
        self.words: Dict[int, _Held] = {}
        self.parts: List[str] = []

    def hold(self, number: int, held: _Held) -> None:
        self.words[x.register_word(number)] = held

    def held(self, number: int) -> _Held:
        found = self.words.get(x.register_word(number))
        if found is None:
            raise _Unknown
        return found

    def concatenation(self, number: int) -> str:
        """Return the texts of all registers from one on that have a content, joined."""
        texts: List[str] = []
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
        base, offset, size = part.get(2), part.get(3), part.get(4)
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
        self.hold(part.get(1), _Held(text, size))

    def read_meta(self, part: Expression) -> None:
        name = _META_FIELDS.get(part.get(2))
        if name is None:
            raise _Unknown
        if part.get(3):
            self.parts.append(f"{name} set {_changed_text(self.held(part.get(3)))}")
        else:
            self.hold(part.get(1), _Held(name, 16 if name in ("iifname", "oifname") else 4))

    def read_ct(self, part: Expression) -> None:
        found = _CT_FIELDS.get(tuple([value for _number, value in part.attributes[1:]]))
        if found is None:
            raise _Unknown
        self.hold(part.get(1), _Held(*found))

    def read_fib(self, part: Expression) -> None:
        found = _FIB_FIELDS.get((part.get(2), part.get(3)))
        if found is None:
            raise _Unknown
        self.hold(part.get(1), _Held(*found))

    def read_numgen(self, part: Expression) -> None:
        if part.get(3) != 1 or part.get(4):
            raise _Unknown
        self.hold(part.get(1), _Held(f"numgen random mod {part.get(2)}", 4))

    def read_hash(self, part: Expression) -> None:
        if part.get(6) or part.get(7):
            raise _Unknown
        text = self.concatenation(part.get(1))
        self.hold(part.get(2), _Held(f"jhash {text} mod {part.get(4)} seed 0x{part.get(5):x}", 4))

    def read_bitwise(self, part: Expression) -> None:
        before = self.held(part.get(1))
        if before.mask:
            raise _Unknown
        self.hold(part.get(2), _Held(before.text, before.size, part.get(4), part.get(5)))

    def read_byteorder(self, part: Expression) -> None:
        # nft writes no conversion, because the type of the value implies it.
        if part.get(1) != part.get(2) or self.held(part.get(1)).mask:
            raise _Unknown

    def read_cmp(self, part: Expression) -> None:
        held = self.held(part.get(1))
        operators = {x.CMP_EQUAL: "", x.CMP_NOT_EQUAL: "!= ", x.CMP_AT_MOST: "<= ", x.CMP_AT_LEAST: ">= "}
        if part.get(2) not in operators:
            raise _Unknown
        self.parts.append(_comparison(held, operators[part.get(2)], part.get(3)))
        if part.get(2) == x.CMP_EQUAL:
            self.words.clear()

    def read_lookup(self, part: Expression) -> None:
        key = self.concatenation(part.get(2))
        name = part.get(1)
        target = part.get(3, None)
        self.words.clear()
        if target is None:
            self.parts.append(f"{key} {'!= ' if part.get(5) else ''}@{name}")
        elif target == 0:
            self.parts.append(f"{key} vmap @{name}")
        else:
            self.hold(target, _Held(f"{key} map @{name}", 4))

    def read_immediate(self, part: Expression) -> None:
        data = part.get(2)
        if part.get(1) == 0:
            self.parts.append(str(data))
        elif isinstance(data, bytes) and len(data) in (2, 4, 16):
            text = str(int.from_bytes(data, "big")) if len(data) == 2 else unpacked(data)
            self.hold(part.get(1), _Held(text, len(data)))
        else:
            raise _Unknown

    def read_nat(self, part: Expression) -> None:
        if part.get(1) != x.NAT_DESTINATION or part.get(7):
            raise _Unknown
        address = self.held(part.get(3)).text
        if " map @" in address:
            family = "ip6" if part.get(2) == x.NFPROTO["IPv6"] else "ip"
            self.parts.append(f"dnat {family} to {address}")
        elif not part.get(5):
            self.parts.append(f"dnat to {address}")
        else:
            shown = f"[{address}]" if ":" in address else address
            self.parts.append(f"dnat to {shown}:{self.held(part.get(5)).text}")

    def read_limit(self, part: Expression) -> None:
        if part.get(2) != 1 or part.get(4) or part.get(5):
            raise _Unknown
        self.parts.append(f"limit rate {part.get(1)}/second burst {part.get(3)} packets")

    def read_log(self, part: Expression) -> None:
        prefix = str(part.get(2, "")).replace('"', "?")
        self.parts.append(f'log prefix "{prefix}" group {part.get(1)} snaplen {part.get(3)}')

    def read_masq(self, part: Expression) -> None:
        ports = f" to :{self.held(part.get(2)).text}-{self.held(part.get(3)).text}" if part.get(2) else ""
        self.parts.append(f"masquerade{ports}{' fully-random' if part.get(1) & x.NAT_FULLY_RANDOM else ''}")

    def read_reject(self, part: Expression) -> None:
        if part.attributes not in (x.reject("IPv4").attributes, x.reject("IPv6").attributes):
            raise _Unknown
        self.parts.append("reject")

    def read_dynset(self, part: Expression) -> None:
        if part.get(3) != x.DYNSET_UPDATE or part.get(5) or part.get(6):
            raise _Unknown
        self.parts.append(f"update @{part.get(1)} {{ {self.concatenation(part.get(4))} }}")


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
    except (_Unknown, struct.error):
        text = " ".join(_raw(part) for part in rule.expressions)
    if not rule.comment:
        return text
    shown = "".join(letter if letter.isprintable() and letter not in '"\\' else "?" for letter in rule.comment)
    return f'{text} comment "{shown}"'
