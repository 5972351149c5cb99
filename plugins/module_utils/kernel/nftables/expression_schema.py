# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the attributes of expressions are encoded in messages. Source: linux/netfilter/nf_tables.h."""

from __future__ import annotations

from ...rendering.nftables import expressions as x


def _u32(attributes: tuple[int, ...]) -> dict[int, str]:
    return dict.fromkeys(attributes, "u32")


#: The encoding of each attribute that matters; attributes whose value is 0 when absent are in OPTIONAL.
SCHEMA: dict[str, dict[int, str]] = {
    "payload": _u32((x.Payload.DREG, x.Payload.BASE, x.Payload.OFFSET, x.Payload.LEN)),
    "meta": _u32((x.Meta.DREG, x.Meta.KEY, x.Meta.SREG)),
    "ct": {x.Ct.DIRECTION: "u8", **_u32((x.Ct.DREG, x.Ct.KEY, x.Ct.SREG))},
    "lookup": {x.Lookup.SET: "text", **_u32((x.Lookup.SREG, x.Lookup.DREG, x.Lookup.FLAGS))},
    "immediate": {x.Immediate.DATA: "data", **_u32((x.Immediate.DREG,))},
    "cmp": {x.Cmp.DATA: "data", **_u32((x.Cmp.SREG, x.Cmp.OP))},
    "bitwise": {
        x.Bitwise.MASK: "data",
        x.Bitwise.XOR: "data",
        **_u32((x.Bitwise.SREG, x.Bitwise.DREG, x.Bitwise.LEN, x.Bitwise.OP)),
    },
    "numgen": _u32((x.Ng.DREG, x.Ng.MODULUS, x.Ng.TYPE, x.Ng.OFFSET)),
    "hash": _u32((x.Hash.SREG, x.Hash.DREG, x.Hash.LEN, x.Hash.MODULUS, x.Hash.SEED, x.Hash.OFFSET, x.Hash.TYPE)),
    "nat": _u32(
        (
            x.Nat.TYPE,
            x.Nat.FAMILY,
            x.Nat.REG_ADDR_MIN,
            x.Nat.REG_ADDR_MAX,
            x.Nat.REG_PROTO_MIN,
            x.Nat.REG_PROTO_MAX,
            x.Nat.FLAGS,
        )
    ),
    "masq": _u32((x.Masq.FLAGS, x.Masq.REG_PROTO_MIN, x.Masq.REG_PROTO_MAX)),
    "fib": _u32((x.Fib.DREG, x.Fib.RESULT, x.Fib.FLAGS)),
    "reject": {x.Reject.ICMP_CODE: "u8", **_u32((x.Reject.TYPE,))},
    "byteorder": _u32((x.Byteorder.SREG, x.Byteorder.DREG, x.Byteorder.OP, x.Byteorder.LEN, x.Byteorder.SIZE)),
    "limit": {x.Limit.RATE: "u64", x.Limit.UNIT: "u64", **_u32((x.Limit.BURST, x.Limit.TYPE, x.Limit.FLAGS))},
    "log": {x.Log.GROUP: "u16", x.Log.PREFIX: "text", **_u32((x.Log.SNAPLEN,))},
    "dynset": {
        x.Dynset.SET_NAME: "text",
        x.Dynset.TIMEOUT: "u64",
        **_u32((x.Dynset.OP, x.Dynset.SREG_KEY, x.Dynset.SREG_DATA, x.Dynset.FLAGS)),
    },
}
OPTIONAL = {
    "bitwise": (x.Bitwise.OP,),
    "dynset": (x.Dynset.TIMEOUT, x.Dynset.FLAGS),
    "hash": (x.Hash.OFFSET, x.Hash.TYPE),
    "limit": (x.Limit.TYPE, x.Limit.FLAGS),
    "lookup": (x.Lookup.FLAGS,),
    "masq": (x.Masq.FLAGS, x.Masq.REG_PROTO_MIN, x.Masq.REG_PROTO_MAX),
    "nat": (x.Nat.FLAGS,),
    "numgen": (x.Ng.OFFSET,),
}

#: Attributes that only help to find an object within one transaction.
IGNORED = frozenset(
    [("dynset", x.Dynset.SET_ID), ("lookup", x.Lookup.SET_ID), ("numgen", x.Ng.SET_NAME), ("numgen", x.Ng.SET_ID)]
)
#: The attribute of an expression that names a set or map.
SET_NAMES = {"lookup": x.Lookup.SET, "dynset": x.Dynset.SET_NAME}
