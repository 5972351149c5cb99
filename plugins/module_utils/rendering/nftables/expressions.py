# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the expressions of rules from their meaning. Source of all numbers: linux/netfilter/nf_tables.h.

Registers are counted in words of four bytes, from 0 to 15; :func:`register` returns the kernel's own number.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Optional, Union

from ...base.addresses import IPV6, Network
from .objects import Expression, Rule

CMP_EQUAL, CMP_NOT_EQUAL, CMP_AT_MOST, CMP_AT_LEAST = 0, 1, 3, 5
META_PRIORITY, META_MARK, META_IIF, META_IIFNAME, META_OIFNAME, META_NFPROTO, META_L4PROTO = 2, 3, 4, 6, 7, 15, 16
CT_STATE, CT_DIRECTION, CT_STATUS, CT_PROTO_DST, CT_DST_IP, CT_DST_IP6 = 0, 1, 2, 12, 20, 22
CT_STATE_ESTABLISHED, CT_STATE_RELATED, CT_STATE_NEW, CT_STATE_UNTRACKED = 0x2, 0x4, 0x8, 0x40
CT_STATUS_DNAT = 0x20
CT_ORIGINAL = 0
LINK_HEADER, NETWORK_HEADER, TRANSPORT_HEADER = 0, 1, 2
FIB_RESULT_OIF, FIB_RESULT_ADDRTYPE = 1, 3
FIB_SADDR, FIB_DADDR, FIB_IIF, FIB_PRESENT = 0x1, 0x2, 0x8, 0x20
RTN_LOCAL, RTN_BROADCAST = 2, 3
LOOKUP_INVERT = 0x1
BYTEORDER_HTON = 1
NAT_DESTINATION = 1
NAT_PORT_SPECIFIED = 0x2
NAT_FULLY_RANDOM = 0x10
DYNSET_UPDATE = 1
NFPROTO = {"IPv4": 2, "IPv6": 10}
INTERFACE_NAME_BYTES = 16


class Payload:
    """The attributes NFTA_PAYLOAD_*."""

    DREG, BASE, OFFSET, LEN = range(1, 5)


class Meta:
    """The attributes NFTA_META_*."""

    DREG, KEY, SREG = range(1, 4)


class Ct:
    """The attributes NFTA_CT_*."""

    DREG, KEY, DIRECTION, SREG = range(1, 5)


class Lookup:
    """The attributes NFTA_LOOKUP_*."""

    SET, SREG, DREG, SET_ID, FLAGS = range(1, 6)


class Immediate:
    """The attributes NFTA_IMMEDIATE_*."""

    DREG, DATA = range(1, 3)


class Cmp:
    """The attributes NFTA_CMP_*."""

    SREG, OP, DATA = range(1, 4)


class Bitwise:
    """The attributes NFTA_BITWISE_*."""

    SREG, DREG, LEN, MASK, XOR, OP = range(1, 7)


class Ng:
    """The attributes NFTA_NG_*."""

    DREG, MODULUS, TYPE, OFFSET, SET_NAME, SET_ID = range(1, 7)


class Hash:
    """The attributes NFTA_HASH_*."""

    SREG, DREG, LEN, MODULUS, SEED, OFFSET, TYPE = range(1, 8)


class Nat:
    """The attributes NFTA_NAT_*."""

    TYPE, FAMILY, REG_ADDR_MIN, REG_ADDR_MAX, REG_PROTO_MIN, REG_PROTO_MAX, FLAGS = range(1, 8)


class Masq:
    """The attributes NFTA_MASQ_*."""

    FLAGS, REG_PROTO_MIN, REG_PROTO_MAX = range(1, 4)


class Fib:
    """The attributes NFTA_FIB_*."""

    DREG, RESULT, FLAGS = range(1, 4)


class Reject:
    """The attributes NFTA_REJECT_*."""

    TYPE, ICMP_CODE = range(1, 3)


class Byteorder:
    """The attributes NFTA_BYTEORDER_*."""

    SREG, DREG, OP, LEN, SIZE = range(1, 6)


class Limit:
    """The attributes NFTA_LIMIT_*."""

    RATE, UNIT, BURST, TYPE, FLAGS = range(1, 6)


class Log:
    """The attributes NFTA_LOG_*."""

    GROUP, PREFIX, SNAPLEN = range(1, 4)


class Dynset:
    """The attributes NFTA_DYNSET_*."""

    SET_NAME, SET_ID, OP, SREG_KEY, SREG_DATA, TIMEOUT, EXPR, PAD, FLAGS, EXPRESSIONS = range(1, 11)


Expressions = list[Expression]
#: Equal expressions are one object: with session affinity, most expressions of the rules of each endpoint are equal.
_shared = lru_cache(maxsize=1024)


def register(word: int) -> int:
    """Return the kernel's number of the register that begins at a word; 16-byte registers have their own numbers."""
    return 1 + word // 4 if word % 4 == 0 else 8 + word


def register_word(number: int) -> int:
    """Return the word at which a register begins; the inverse of :func:`register`."""
    return number - 8 if number >= 8 else (number - 1) * 4


def address_words(family: str) -> int:
    """Return the number of words that an address of the family occupies."""
    return 4 if family == IPV6 else 1


@_shared
def payload(base: int, offset: int, size: int, word: int = 0) -> Expression:
    """Load bytes of the packet into a register."""
    return Expression(
        "payload", ((Payload.DREG, register(word)), (Payload.BASE, base), (Payload.OFFSET, offset), (Payload.LEN, size))
    )


def source_address(family: str, word: int = 0, size: int = 0) -> Expression:
    """Load the source address, or its first ``size`` bytes."""
    return payload(NETWORK_HEADER, 8 if family == IPV6 else 12, size or 4 * address_words(family), word)


def destination_address(family: str, word: int = 0, size: int = 0) -> Expression:
    """Load the destination address, or its first ``size`` bytes."""
    return payload(NETWORK_HEADER, 24 if family == IPV6 else 16, size or 4 * address_words(family), word)


@_shared
def meta(key: int, word: int = 0) -> Expression:
    """Load metadata of the packet into a register."""
    return Expression("meta", ((Meta.DREG, register(word)), (Meta.KEY, key)))


def protocol_and_port(word: int = 0) -> Expressions:
    """Load the transport protocol and the destination port, one word each."""
    return [meta(META_L4PROTO, word), payload(TRANSPORT_HEADER, 2, 2, word + 1)]


def destination(family: str) -> Expressions:
    """Load destination address, protocol and port: the key of a frontend."""
    return [destination_address(family), *protocol_and_port(address_words(family))]


def lookup(name: str, inverted: bool = False) -> Expression:
    """Continue only if a set contains the key in the registers, or (``inverted``) does not contain it."""
    flags: tuple[tuple[int, Union[int, bytes, str]], ...] = ((Lookup.FLAGS, LOOKUP_INVERT),) if inverted else ()
    return Expression("lookup", ((Lookup.SET, name), (Lookup.SREG, register(0)), *flags))


def map_lookup(name: str) -> Expression:
    """Load the data that a map has for a key into the first register; the rule ends if there is none."""
    return Expression("lookup", ((Lookup.SET, name), (Lookup.SREG, register(0)), (Lookup.DREG, register(0))))


def verdict_lookup(name: str) -> Expression:
    """Execute the verdict that a verdict map has for a key; the rule ends if there is none."""
    return Expression("lookup", ((Lookup.SET, name), (Lookup.SREG, register(0)), (Lookup.DREG, 0)))


@_shared
def compare(value: bytes, equal: bool = True, word: int = 0) -> Expression:
    """Continue only if a register equals, or does not equal, the value."""
    return Expression(
        "cmp", ((Cmp.SREG, register(word)), (Cmp.OP, CMP_EQUAL if equal else CMP_NOT_EQUAL), (Cmp.DATA, value))
    )


def at_least(value: bytes) -> Expression:
    """Continue only if a register is not below the value, in the order of the network."""
    return Expression("cmp", ((Cmp.SREG, register(0)), (Cmp.OP, CMP_AT_LEAST), (Cmp.DATA, value)))


def at_most(value: bytes) -> Expression:
    """Continue only if a register is not above the value, in the order of the network."""
    return Expression("cmp", ((Cmp.SREG, register(0)), (Cmp.OP, CMP_AT_MOST), (Cmp.DATA, value)))


def of_family(family: str) -> Expressions:
    """Match packets of an IP family, in a table for both."""
    return [meta(META_NFPROTO), compare(bytes((NFPROTO[family],)))]


def network_order() -> Expression:
    """Convert the first word from host byte order to network byte order."""
    return Expression(
        "byteorder",
        (
            (Byteorder.SREG, register(0)),
            (Byteorder.DREG, register(0)),
            (Byteorder.OP, BYTEORDER_HTON),
            (Byteorder.LEN, 4),
            (Byteorder.SIZE, 4),
        ),
    )


def set_meta(key: int) -> Expression:
    """Set metadata of the packet to the content of the first register."""
    return Expression("meta", ((Meta.KEY, key), (Meta.SREG, register(0))))


def limit(per_second: int, burst: int) -> Expression:
    """Continue only for that many packets a second."""
    return Expression("limit", ((Limit.RATE, per_second), (Limit.UNIT, 1), (Limit.BURST, burst)))


def log(group: int, prefix: str, bytes_of_packet: int) -> Expression:
    """Send the beginning of the packet to listeners of an NFLOG group."""
    return Expression("log", ((Log.GROUP, group), (Log.PREFIX, prefix), (Log.SNAPLEN, bytes_of_packet)))


def bitwise(mask: bytes, xor: bytes, word: int = 0) -> Expression:
    """Set a register to ``(register & mask) ^ xor``."""
    place = register(word)
    return Expression(
        "bitwise",
        (
            (Bitwise.SREG, place),
            (Bitwise.DREG, place),
            (Bitwise.LEN, len(mask)),
            (Bitwise.MASK, mask),
            (Bitwise.XOR, xor),
        ),
    )


def verdict(text: str) -> Expression:
    """Issue a verdict: ``drop``, ``return``, ``accept``, ``goto CHAIN`` or ``jump CHAIN``."""
    return Expression("immediate", ((Immediate.DREG, 0), (Immediate.DATA, text)))


def value(data: bytes, word: int) -> Expression:
    """Load a constant into a register."""
    return Expression("immediate", ((Immediate.DREG, register(word)), (Immediate.DATA, data)))


@_shared
def random_below(modulus: int, word: int = 0) -> Expression:
    """Load a random number from 0 to ``modulus`` - 1 into a register."""
    return Expression("numgen", ((Ng.DREG, register(word)), (Ng.MODULUS, modulus), (Ng.TYPE, 1)))


def source_port(word: int = 0) -> Expression:
    """Load the source port into a register, whose other two bytes become zero."""
    return payload(TRANSPORT_HEADER, 0, 2, word)


def hashed_below(modulus: int, seed: int, source: int, size: int, word: int = 0) -> Expression:
    """Load the hash of ``size`` bytes that begin at the word ``source``, from 0 to ``modulus`` - 1, into a register.

    The type of the hash is 0, jhash, which is the default.
    """
    return Expression(
        "hash",
        (
            (Hash.SREG, register(source)),
            (Hash.DREG, register(word)),
            (Hash.LEN, size),
            (Hash.MODULUS, modulus),
            (Hash.SEED, seed),
        ),
    )


def destination_nat(family: str, address: int, port: int) -> Expression:
    """Rewrite destination address and port to the contents of the registers at two words."""
    return Expression(
        "nat",
        (
            (Nat.TYPE, NAT_DESTINATION),
            (Nat.FAMILY, NFPROTO[family]),
            (Nat.REG_ADDR_MIN, register(address)),
            (Nat.REG_PROTO_MIN, register(port)),
        ),
    )


def same_destination(family: str) -> Expressions:
    """Fix the destination as it is, so that no later rule for new connections rewrites it."""
    settled = Expression(
        "nat", ((Nat.TYPE, NAT_DESTINATION), (Nat.FAMILY, NFPROTO[family]), (Nat.REG_ADDR_MIN, register(0)))
    )
    return [destination_address(family), settled]


def masquerade() -> Expression:
    """Rewrite the source to the address of the outgoing interface, with a random port."""
    return Expression("masq", ((Masq.FLAGS, NAT_FULLY_RANDOM),))


def masquerade_from(first: int, last: int) -> Expressions:
    """Rewrite the source to the address of the outgoing interface, with a random port of a range.

    The registers are those that the nft program uses, 16 bytes for each port, so that a table which it loaded from
    text is the same.
    """
    ports = [value(port.to_bytes(2, "big"), word) for word, port in ((0, first), (4, last))]
    flags = NAT_FULLY_RANDOM | NAT_PORT_SPECIFIED
    return [
        *ports,
        Expression("masq", ((Masq.FLAGS, flags), (Masq.REG_PROTO_MIN, register(0)), (Masq.REG_PROTO_MAX, register(4)))),
    ]


def is_protocol(number: int) -> Expressions:
    """Match the transport protocol."""
    return [meta(META_L4PROTO), compare(bytes([number]))]


def reject(family: str) -> Expression:
    """Answer with an ICMP error: port unreachable."""
    return Expression("reject", ((Reject.TYPE, 0), (Reject.ICMP_CODE, 4 if family == IPV6 else 3)))


def remember(set_name: str) -> Expression:
    """Add the key in the registers to a dynamic set, or restart its timeout."""
    return Expression(
        "dynset", ((Dynset.SET_NAME, set_name), (Dynset.OP, DYNSET_UPDATE), (Dynset.SREG_KEY, register(0)))
    )


def is_local(which: int) -> Expressions:
    """Match if the source (FIB_SADDR) or destination (FIB_DADDR) is an address of this node."""
    return _is_of_kind(which, RTN_LOCAL)


def is_to_broadcast() -> Expressions:
    """Match if the IPv4 destination is a broadcast address of this node's networks, or 255.255.255.255."""
    return _is_of_kind(FIB_DADDR, RTN_BROADCAST)


def _is_of_kind(which: int, kind: int) -> Expressions:
    fib = Expression("fib", ((Fib.DREG, register(0)), (Fib.RESULT, FIB_RESULT_ADDRTYPE), (Fib.FLAGS, which)))
    return [fib, compare(host_word(kind))]


def not_routed_back() -> Expressions:
    """Match if packets to the source would not leave through the interface that this one came from."""
    fib = Expression(
        "fib", ((Fib.DREG, register(0)), (Fib.RESULT, FIB_RESULT_OIF), (Fib.FLAGS, FIB_SADDR | FIB_IIF | FIB_PRESENT))
    )
    return [fib, compare(bytes(4))]


def hop_limit(number: int) -> Expressions:
    """Match the hop limit of an IPv6 packet."""
    return [payload(NETWORK_HEADER, 7, 1), compare(bytes((number,)))]


def host_word(number: int) -> bytes:
    """Return a number as a word in the order of the machine."""
    return struct.pack("=I", number)


def has_bits(load: Expression, bits: int) -> Expressions:
    """Match if any of the bits of a 32-bit value is set."""
    zero = bytes(4)
    return [load, bitwise(struct.pack("=I", bits), zero), compare(zero, equal=False)]


def has_state(bits: int) -> Expressions:
    """Match if connection tracking has the packet in one of some states."""
    return has_bits(Expression("ct", ((Ct.DREG, register(0)), (Ct.KEY, CT_STATE))), bits)


def new_connection() -> Expressions:
    """Match if the packet begins a connection."""
    return has_state(CT_STATE_NEW)


def was_redirected() -> Expressions:
    """Match if the destination of the connection was rewritten."""
    return has_bits(Expression("ct", ((Ct.DREG, register(0)), (Ct.KEY, CT_STATUS))), CT_STATUS_DNAT)


def protocol_and_direction() -> Expressions:
    """Load the protocol of a packet and its direction, one word each."""
    return [meta(META_L4PROTO), Expression("ct", ((Ct.DREG, register(1)), (Ct.KEY, CT_DIRECTION)))]


def original_protocol_and_port(word: int = 0) -> Expressions:
    """Load protocol and port to which the connection was opened, and the direction of the packet; one word each."""
    port = Expression("ct", ((Ct.DREG, register(word + 1)), (Ct.KEY, CT_PROTO_DST), (Ct.DIRECTION, CT_ORIGINAL)))
    return [meta(META_L4PROTO, word), port, Expression("ct", ((Ct.DREG, register(word + 2)), (Ct.KEY, CT_DIRECTION)))]


def original_destination(family: str) -> Expressions:
    """Load address, protocol and port to which the connection was opened, and the direction of the packet."""
    key = CT_DST_IP6 if family == IPV6 else CT_DST_IP
    address = Expression("ct", ((Ct.DREG, register(0)), (Ct.KEY, key), (Ct.DIRECTION, CT_ORIGINAL)))
    return [address, *original_protocol_and_port(address_words(family))]


def set_mark_bits(mark: int) -> Expressions:
    """Set the bits of the mark."""
    change = bitwise(struct.pack("=I", ~mark & 0xFFFFFFFF), struct.pack("=I", mark))
    return [meta(META_MARK), change, set_meta(META_MARK)]


def flip_mark_bits(mark: int) -> Expressions:
    """Flip the bits of the mark."""
    change = bitwise(b"\xff\xff\xff\xff", struct.pack("=I", mark))
    return [meta(META_MARK), change, set_meta(META_MARK)]


def prefix_mask(length: int, size: int) -> bytes:
    """Return the mask of a prefix of ``length`` bits in ``size`` bytes."""
    bits = size * 8
    return (((1 << length) - 1) << (bits - length)).to_bytes(size, "big")


def in_network(network: Network, load_source: bool, equal: bool = True) -> Expressions:
    """Match if the source (else the destination) is, or is not, in a range; a /0 needs no comparison."""
    size = 4 * address_words(network.family)
    load = source_address if load_source else destination_address
    first = network.first.to_bytes(size, "big")
    length = network.prefix_length
    if length and length % 8 == 0:
        return [load(network.family, 0, length // 8), compare(first[: length // 8], equal)]
    masked = bitwise(prefix_mask(length, size), bytes(size))
    return [load(network.family), masked, compare(first, equal)]


def interface_name(name: str, prefix: bool, equal: bool) -> Expressions:
    """Match if the incoming interface has, or does not have, this name or (``prefix``) a name that begins so."""
    data = name.encode()
    return [meta(META_IIFNAME), compare(data if prefix else data.ljust(INTERFACE_NAME_BYTES, b"\x00"), equal)]


def rule(*parts: Union[Expression, Expressions], comment: Optional[str] = None) -> Rule:
    """Return a rule made of expressions and lists of them."""
    flat: Expressions = []
    for part in parts:
        if isinstance(part, Expression):
            flat.append(part)
        else:
            flat.extend(part)
    return Rule(tuple(flat), comment or "")
