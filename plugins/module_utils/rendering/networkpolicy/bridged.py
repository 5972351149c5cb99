# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of the ports of bridges with pods, which the hooks for IP do not distinguish.

It exists while such a bridge does, beside the table of policies and as part of it (``bridge_keys.py``). It accepts only
IP and ARP without a VLAN tag, and addresses from their own port.
"""

from __future__ import annotations

from typing import Callable

from ...base.addresses import FAMILIES, IPV4, IPV6, Network
from ..nftables import expressions as x
from ..nftables import objects as nft
from ..nftables.expressions import INTERFACE_NAME_BYTES, Expressions
from .arriving import interface_in
from .bridge_keys import TABLE, prefixed
from .layout import drop_chain, log_prefix
from .sets import BOUND, FORGED, HERE, POD_LINKS, Options, name

CLOSED = "closed"

#: Before bridge-netfilter, which rewrites destinations.
_PRIORITY = -300
_ETHER_TYPE = 12
_ARP = 0x0806
_TYPES = {IPV4: 0x0800, IPV6: 0x86DD}
_ICMPV6, _ROUTER_ADVERTISEMENT, _ADVERTISEMENT, _REDIRECT = 58, 134, 136, 137
_LINK_LOCAL = Network(0xFE80 << 112, 10, IPV6)
_AFTER_INTERFACE = INTERFACE_NAME_BYTES // 4
_DROP = x.verdict(f"goto {FORGED}")


def _ether_type(number: int) -> Expressions:
    return [x.payload(x.LINK_HEADER, _ETHER_TYPE, 2), x.compare(number.to_bytes(2, "big"))]


def _not_judged() -> Expressions:
    """Match frames that no rule for IP is shown: with a tag, or of a protocol by which pods could exchange packets."""
    known = [x.compare(number.to_bytes(2, "big"), equal=False) for number in (_ARP, *_TYPES.values())]
    return [x.payload(x.LINK_HEADER, _ETHER_TYPE, 2), *known]


def _claim(
    found: Expressions, load: Callable[[int], nft.Expression], family: str, harmless: list[Expressions]
) -> list[nft.Rule]:
    """Return the rules for frames that claim an address. ``found``: matches them; ``load``: loads it at a word.

    ``harmless``: match addresses that are accepted from every port.
    """
    interface = x.meta(x.META_IIFNAME)
    return [
        x.rule(found, interface, load(_AFTER_INTERFACE), x.lookup(name(BOUND, family)), x.verdict("accept")),
        x.rule(found, load(0), x.lookup(name(HERE, family)), _DROP),
        *(x.rule(found, each, x.verdict("accept")) for each in harmless),
        x.rule(found, interface_in(name(CLOSED, family)), _DROP),
    ]


def _icmpv6(kind: int) -> Expressions:
    return [
        *_ether_type(_TYPES[IPV6]),
        *x.is_protocol(_ICMPV6),
        x.payload(x.TRANSPORT_HEADER, 0, 1),
        x.compare(bytes((kind,))),
    ]


def _neighbours() -> list[nft.Rule]:
    """Return the rules about addresses in messages of neighbour discovery, all of which may have a link-local source.

    A known pod is no router, and advertises only what it may send from.
    """
    closed = interface_in(name(CLOSED, IPV6))
    of_another = [
        *_icmpv6(_ADVERTISEMENT),
        x.meta(x.META_IIFNAME),
        x.payload(x.TRANSPORT_HEADER, 8, 16, _AFTER_INTERFACE),
        x.lookup(name(BOUND, IPV6), inverted=True),
    ]
    is_global = [
        x.payload(x.TRANSPORT_HEADER, 8, 2),
        x.bitwise(b"\xff\xc0", bytes(2)),
        x.compare(b"\xfe\x80", equal=False),
    ]
    return [
        x.rule(of_another, x.payload(x.TRANSPORT_HEADER, 8, 16), x.lookup(name(HERE, IPV6)), _DROP),
        x.rule(of_another, closed, is_global, _DROP),
        *(x.rule(_icmpv6(kind), closed, _DROP) for kind in (_ROUTER_ADVERTISEMENT, _REDIRECT)),
    ]


def _rules() -> list[nft.Rule]:
    arp = x.payload(x.NETWORK_HEADER, 14, 4)
    rules = [x.rule(_not_judged(), interface_in(POD_LINKS), _DROP)]
    rules += _neighbours()
    rules += _claim(
        _ether_type(_ARP), lambda word: x.payload(x.NETWORK_HEADER, 14, 4, word), IPV4, [[arp, x.compare(bytes(4))]]
    )
    link_local = x.in_network(_LINK_LOCAL, load_source=True)
    for family in FAMILIES:
        unspecified = [x.source_address(family), x.compare(bytes(4 * x.address_words(family)))]
        rules += _claim(
            _ether_type(_TYPES[family]),
            lambda word, family=family: x.source_address(family, word),  # type: ignore[misc]
            family,
            [unspecified, link_local] if family == IPV6 else [unspecified],
        )
    return rules


def definitions() -> dict[str, nft.SetValue]:
    """Return the sets by name."""
    found = {POD_LINKS: nft.SetValue((nft.INTERFACE,)), FORGED: nft.SetValue((nft.INTERFACE,), counted=True)}
    for family in FAMILIES:
        address = nft.ADDRESS_TYPES[family]
        found[name(BOUND, family)] = nft.SetValue((nft.INTERFACE, address))
        found[name(HERE, family)] = nft.SetValue((address,))
        found[name(CLOSED, family)] = nft.SetValue((nft.INTERFACE,))
    return found


def entries(options: Options) -> dict[nft.Key, nft.Value]:
    """Return the table without elements."""
    found: dict[nft.Key, nft.Value] = {TABLE.key: nft.TableValue()}
    found.update({nft.ObjectKey("set", set_name): value for set_name, value in definitions().items()})
    found[nft.ObjectKey("chain", FORGED)] = drop_chain(interface_in(FORGED), log_prefix(FORGED), options)
    found[nft.ObjectKey("chain", "frames")] = nft.ChainValue(
        tuple(_rules()), nft.BaseHook("filter", "prerouting", _PRIORITY)
    )
    return {prefixed(key): value for key, value in found.items()}


def element(set_name: str, key: bytes) -> nft.ElementKey:
    """Return the key of an element of the table of ports."""
    return prefixed(nft.ElementKey("element", set_name, key))
