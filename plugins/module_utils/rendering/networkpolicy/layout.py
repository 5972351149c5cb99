# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The chains of the table of network policies: constant rules, independent of the policies.

A packet is evaluated after destination NAT and before source NAT, where its addresses are those of the pods: the class
of the peer is looked up by its address; class and pod give a port set; and the port set contains the port or not.
``meta priority`` holds the intermediate result between lookups: it is the only scratch register whose
use the nft program can list. It is set to 0 before a packet leaves a chain.
"""

from __future__ import annotations

from ...base.addresses import FAMILIES
from ..nftables import expressions as x
from ..nftables.expressions import Expressions
from ..nftables.objects import BaseHook, ChainValue, Expression, Rule
from . import arriving, sets

POSTROUTING_PRIORITY = 95
INPUT_PRIORITY = 101
_TCP = 6
_PORT_PROTOCOLS = (6, 17, 132)
_FIN_SYN_RST_ACK, _SYN = 0x17, 0x02
_TCP_FLAGS_OFFSET = 13
_LOGGED_BYTES = 128
_LOGS_PER_SECOND, _LOG_BURST = 10, 20
_NO_PRIORITY = bytes(4)

_SET_PRIORITY = x.set_meta(x.META_PRIORITY)
_RESET = [x.value(_NO_PRIORITY, 0), _SET_PRIORITY]
_RETURN = [*_RESET, x.verdict("return")]


def _own(family: str, side: str, word: int = 0) -> Expression:
    """Load the address of the selected pod."""
    return (x.source_address if side == "out" else x.destination_address)(family, word)


def _peer(family: str, side: str) -> Expression:
    return (x.destination_address if side == "out" else x.source_address)(family)


def _ports_key() -> Expressions:
    return [x.meta(x.META_PRIORITY), *x.protocol_and_port(1)]


def _ranges_key() -> Expressions:
    """Load the key of a set of ranges, in which nft keeps all parts in network byte order."""
    return [x.meta(x.META_PRIORITY), x.network_order(), *x.protocol_and_port(1)]


def _granted(everything: int) -> list[Rule]:
    """Return the rules that accept a packet if the port set in the priority contains it."""
    whole = [x.meta(x.META_PRIORITY), x.compare(class_bytes(everything))]
    return [
        x.rule(whole, _RETURN),
        x.rule(_ports_key(), x.lookup(sets.PORTS), _RETURN),
        x.rule(_ranges_key(), x.lookup(sets.PORT_RANGES), _RETURN),
    ]


def class_bytes(value: int) -> bytes:
    """Return a class, port set or outcome as stored in a register."""
    return x.host_word(value)


def _classify(family: str, side: str) -> list[Rule]:
    """Return the rules that look up the class of the peer; a pod's own class replaces that of its range."""
    own = x.of_family(family)
    return [
        x.rule(own, _peer(family, side), x.map_lookup(sets.name(sets.BLOCKS, family)), _SET_PRIORITY),
        x.rule(own, _peer(family, side), x.map_lookup(sets.name(sets.PODS, family)), _SET_PRIORITY),
    ]


def _by_class(family: str, side: str, grants: str) -> Rule:
    """Return the rule that replaces the class in the priority by its grant."""
    key = [*x.of_family(family), x.meta(x.META_PRIORITY), _own(family, side, 1)]
    return x.rule(key, x.map_lookup(grants), _SET_PRIORITY)


def _policy_chain(family: str, side: str, options: sets.Options, everything: int) -> ChainValue:
    """Return the chain that evaluates NetworkPolicies for isolated pods; it returns if the packet is allowed."""
    own = [*x.of_family(family), _own(family, side)]
    drop = x.verdict(f"goto {sets.drop_name(family, side)}")
    rules: list[Rule] = []
    if options.tiers:
        rules.append(x.rule(*_to_itself(family), _RETURN))
    elif options.cut:
        rules.append(_half_open(drop))
    rules.append(x.rule(_RESET))
    rules.append(x.rule(own, x.map_lookup(sets.name(sets.ANY, family, side)), _SET_PRIORITY))
    rules += _granted(everything)
    rules += _classify(family, side)
    rules.append(_by_class(family, side, sets.name(sets.GRANTS, family, side)))
    rules += _granted(everything)
    rules.append(x.rule(drop))
    return ChainValue(tuple(rules))


def _to_itself(family: str) -> tuple[Expressions, Expression]:
    width = x.address_words(family)
    addresses = [x.source_address(family), x.destination_address(family, width)]
    return [*x.of_family(family), *addresses], x.lookup(sets.name(sets.SELF, family))


def _half_open(drop: Expression) -> Rule:
    """Drop a TCP packet that would start a connection without being its first one."""
    tcp = [x.meta(x.META_L4PROTO), x.compare(bytes((_TCP,)))]
    flags = x.payload(x.TRANSPORT_HEADER, _TCP_FLAGS_OFFSET, 1)
    masked = x.bitwise(bytes((_FIN_SYN_RST_ACK,)), b"\0")
    return x.rule(x.new_connection(), tcp, flags, masked, x.compare(bytes((_SYN,)), equal=False), drop)


def _tiers_chain(family: str, side: str, options: sets.Options) -> ChainValue:
    """Return the chain that evaluates policies of any API for selected pods; it returns if the packet is allowed."""
    drop = x.verdict(f"goto {sets.drop_name(family, side)}")
    admin, baseline = sets.TIERS
    judge = x.verdict(f"goto {sets.name('policy', family, side)}")
    isolated = [*x.of_family(family), _own(family, side), x.lookup(sets.name(sets.ISOLATED, family, side)), judge]
    rules = [_half_open(drop)] if options.cut else []
    rules += _tier(family, side, admin, drop)
    rules.append(x.rule(isolated))
    rules += _tier(family, side, baseline, drop)
    # No rule above with a port applies to a packet whose header ends before the port, or is not found: nobody needs it.
    rules.append(x.rule(_without_ports(), _RETURN))
    rules.append(x.rule(x.payload(x.TRANSPORT_HEADER, 2, 2), x.at_least(bytes(2)), _RETURN))
    rules.append(x.rule(drop))
    return ChainValue(tuple(rules))


def _without_ports() -> Expressions:
    """Match protocols that have no ports."""
    return [x.meta(x.META_L4PROTO), *(x.compare(bytes((number,)), equal=False) for number in _PORT_PROTOCOLS)]


def _tier(family: str, side: str, tier: str, drop: Expression) -> list[Rule]:
    accept, deny = sets.OUTCOMES
    other = [*_without_ports(), x.meta(x.META_PRIORITY)]
    return [
        x.rule(_RESET),
        *_classify(family, side),
        _by_class(family, side, sets.tier_grants(tier, side, family)),
        x.rule(_ranges_key(), x.lookup(f"{sets.TIER_PORTS}-{deny}"), drop),
        x.rule(_ranges_key(), x.lookup(f"{sets.TIER_PORTS}-{accept}"), _RETURN),
        x.rule(other, x.lookup(f"{sets.TIER_OTHERS}-{deny}"), drop),
        x.rule(other, x.lookup(f"{sets.TIER_OTHERS}-{accept}"), _RETURN),
    ]


def log_prefix(side: str) -> str:
    """Return the text that the kernel sends with a denied packet."""
    return f"denied {side} "


def drop_chain(counted: Expressions, prefix: str, options: sets.Options) -> ChainValue:
    """Return the chain that counts, logs and drops packets. ``counted``: what looks up the element that counts."""
    rules = [x.rule(counted, x.verdict("drop")), x.rule(x.verdict("drop"))]
    if options.log_group != sets.NO_LOG:
        logged = x.log(options.log_group, prefix, _LOGGED_BYTES)
        rules.insert(0, x.rule(x.limit(_LOGS_PER_SECOND, _LOG_BURST), logged))
    return ChainValue(tuple(rules))


def _judged(family: str, side: str, options: sets.Options) -> Rule:
    """Return the rule that sends packets of selected pods to the policy chains."""
    which, chain = (sets.POLICED, "tiers") if options.tiers else (sets.ISOLATED, "policy")
    listed = [*x.of_family(family), _own(family, side), x.lookup(sets.name(which, family, side))]
    if options.egress_exempt and side == "out":
        listed += [_peer(family, side), x.lookup(sets.name(sets.EGRESS_EXEMPT, family), inverted=True)]
    return x.rule(listed, x.verdict(f"jump {sets.name(chain, family, side)}"))


def _unknown(family: str, side: str) -> list[Expression]:
    """Return what matches an address in the node's pod ranges that belongs to no known pod."""
    own = _own(family, side)
    ranges, known = sets.name(sets.POD_RANGES, family), sets.name(sets.KNOWN, family)
    return [*x.of_family(family), own, x.lookup(ranges), own, x.lookup(known, inverted=True)]


def _hooks(options: sets.Options) -> dict[str, ChainValue]:
    no_interface = [x.meta(x.META_IIF), x.compare(x.host_word(0))]
    from_node = [*no_interface, *x.is_local(x.FIB_SADDR), x.verdict("accept")]
    leaving = [*arriving.always_accepted(), x.rule(from_node)]
    if options.unknown:
        leaving += [
            x.rule(_unknown(family, side), x.verdict(f"goto {sets.drop_name(family, side)}"))
            for side in ("out", "in")
            for family in FAMILIES
        ]
    if not options.tiers:
        leaving += [x.rule(*_to_itself(family), x.verdict("accept")) for family in FAMILIES]
    leaving += [_judged(family, side, options) for side in ("out", "in") for family in FAMILIES]
    loopback = x.interface_name("lo", prefix=False, equal=True)
    to_node = [x.rule(loopback, x.verdict("accept")), *arriving.always_accepted()]
    to_node += [_judged(family, "out", options) for family in FAMILIES]
    return {
        "postrouting": ChainValue(tuple(leaving), BaseHook("filter", "postrouting", POSTROUTING_PRIORITY)),
        "input": ChainValue(tuple(to_node), BaseHook("filter", "input", INPUT_PRIORITY)),
    }


def chains(options: sets.Options, everything: int) -> dict[str, ChainValue]:
    """Return all chains by name, each after those that it refers to. ``everything``: the port set of all packets."""
    found: dict[str, ChainValue] = {}
    for family in FAMILIES:
        for side in sets.SIDES:
            denied = [*x.of_family(family), _own(family, side), x.lookup(sets.name(sets.DENIED, family, side))]
            found[sets.drop_name(family, side)] = drop_chain(denied, log_prefix(side), options)
            found[sets.name("policy", family, side)] = _policy_chain(family, side, options, everything)
            if options.tiers:
                found[sets.name("tiers", family, side)] = _tiers_chain(family, side, options)
    found[sets.FORGED] = drop_chain(arriving.interface_in(sets.FORGED), log_prefix(sets.FORGED), options)
    found.update(arriving.chains(options, [_unknown(family, "in") for family in FAMILIES] if options.unknown else []))
    found.update(_hooks(options))
    return found
