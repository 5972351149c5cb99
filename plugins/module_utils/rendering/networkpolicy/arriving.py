# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The chains through which packets arrive: they decide whether a source address may be believed.

Policies judge addresses. So whatever has an address that is not of its sender is dropped before. Addresses that no
object names, such as link-local ones and those of groups, are judged by the interface alone.
"""

from __future__ import annotations

from typing import Optional, Sequence

from ...base.addresses import FAMILIES, IPV4, IPV6, Network
from ..nftables import expressions as x
from ..nftables.expressions import INTERFACE_NAME_BYTES, Expressions
from ..nftables.objects import BaseHook, ChainValue, Rule
from . import sets

#: After the destination was rewritten, because routes may depend on it: policy routing looks at both ends.
SOURCES_PRIORITY = -95
ARRIVING_PRIORITY = -90
FORWARD_PRIORITY = 0

_FROM_PODS = "from-pods"
_IGMP, _ICMPV6 = 2, 58
#: Receivers ignore such a message with a lower hop limit, which a router has forwarded (RFC 4861, sections 6.1, 7.1).
_NOT_FORWARDED = 255
_NEIGHBOUR_DISCOVERY = (133, 137)
#: Multicast listener discovery, versions 1 and 2, by which switches learn where to send neighbour discovery.
_LISTENER_DISCOVERY = ((130, 132), (143, 143))
_LINK_LOCAL = Network(0xFE80 << 112, 10, IPV6)
#: A host without an address sends from it, to broadcast addresses only.
_UNSPECIFIED = Network(0, 8, IPV4)
_GROUPS = (Network(0xE0 << 24, 4, IPV4), Network(0xFF << 120, 8, IPV6))


def always_accepted() -> list[Rule]:
    """Return the rules that accept what no policy concerns: open connections, and neighbour discovery."""
    known = x.has_state(x.CT_STATE_ESTABLISHED | x.CT_STATE_RELATED)
    return [x.rule(known, x.verdict("accept")), _neighbour_discovery()]


def _neighbour_discovery(source: Optional[Expressions] = None) -> Rule:
    return _accepted_icmpv6(_NEIGHBOUR_DISCOVERY, [*(source or ()), *x.hop_limit(_NOT_FORWARDED)])


def _accepted_icmpv6(types: tuple[int, int], also: Optional[Expressions] = None) -> Rule:
    """Return the rule that accepts ICMPv6 messages from the first to the last of two types. ``also``: if this holds."""
    kind = [x.meta(x.META_L4PROTO), x.compare(bytes((_ICMPV6,))), x.payload(x.TRANSPORT_HEADER, 0, 1)]
    low, high = (bytes((number,)) for number in types)
    within = [x.compare(low)] if low == high else [x.at_least(low), x.at_most(high)]
    return x.rule(x.of_family(IPV6), also or [], kind, within, x.verdict("accept"))


def interface_in(held: str) -> Expressions:
    """Match if the incoming interface is in a set."""
    return [x.meta(x.META_IIFNAME), x.lookup(held)]


def _from_pods(options: sets.Options) -> ChainValue:
    """Return the chain for packets from interfaces of pods, which accepts what their pods may send from.

    A pod that is not known yet is recognised by the route to it. Link-local addresses are not routed, and have rules of
    their own; without any address, a pod may look for one.
    """
    interface, address = x.meta(x.META_IIFNAME), INTERFACE_NAME_BYTES // 4
    bound = [
        x.rule(
            x.of_family(family),
            interface,
            x.source_address(family, address),
            x.lookup(sets.name(sets.BOUND, family)),
            x.verdict("accept"),
        )
        for family in FAMILIES
    ]
    link_local = [*x.of_family(IPV6), *x.in_network(_LINK_LOCAL, load_source=True)]
    unspecified = [x.source_address(IPV6), x.compare(bytes(16))]
    rules = [
        *bound,
        x.rule(link_local, x.verdict("accept")),
        _neighbour_discovery(unspecified),
        *(_accepted_icmpv6(types, unspecified) for types in _LISTENER_DISCOVERY),
    ]
    if options.exempt:
        exempt = interface_in(sets.EXEMPT_LINKS)
        rules += [
            x.rule(
                x.of_family(family),
                x.source_address(family),
                x.lookup(sets.name(sets.EXEMPT, family)),
                exempt,
                x.verdict("return"),
            )
            for family in FAMILIES
        ]
    return ChainValue((*rules, x.rule(x.not_routed_back(), x.verdict(f"goto {sets.FORGED}"))))


def _sources() -> list[Rule]:
    """Return the rules that drop packets with a source that is not of their sender, also of open connections.

    That is judged of what comes from an interface of pods, and of what claims to come from a pod of this node. What the
    node sends to itself or to a multicast group returns to it, and counts as routed back.
    """
    rules = [x.rule(interface_in(sets.POD_LINKS), x.verdict(f"jump {_FROM_PODS}"))]
    rules += [
        x.rule(
            x.of_family(family),
            x.source_address(family),
            x.lookup(sets.name(sets.HERE, family)),
            x.not_routed_back(),
            x.verdict(f"goto {sets.FORGED}"),
        )
        for family in FAMILIES
    ]
    return rules


def _link_chain(side: str) -> ChainValue:
    """Return the chain that denies traffic of pods with addresses of no object, except what links need.

    What the node sends to a multicast group returns through the interface, and is not from a pod.
    """
    looped = [*_to_group(IPV6), *x.is_local(x.FIB_SADDR)]
    return ChainValue(
        (
            *always_accepted(),
            *map(_accepted_icmpv6, _LISTENER_DISCOVERY),
            x.rule(x.of_family(IPV4), x.is_protocol(_IGMP), x.verdict("accept")),
            x.rule(looped, x.verdict("accept")),
            *(x.rule(x.of_family(family), x.verdict(f"goto {sets.drop_name(family, side)}")) for family in FAMILIES),
        )
    )


def _to_group(family: str) -> Expressions:
    (groups,) = [network for network in _GROUPS if network.family == family]
    return [*x.of_family(family), *x.in_network(groups, load_source=False)]


def _leaving_pods(options: sets.Options) -> list[Rule]:
    """Return the rules that find what pods send from an address that no object names.

    Nobody but the pod knows a link-local address, and anybody may send to broadcast addresses from 0.0.0.0.
    """
    rules = []
    for network in (_UNSPECIFIED, _LINK_LOCAL):
        family = network.family
        found = [*x.of_family(family), *x.in_network(network, load_source=True), *interface_in(sets.links("out"))]
        if options.egress_exempt:
            found += [x.destination_address(family), x.lookup(sets.name(sets.EGRESS_EXEMPT, family), inverted=True)]
        rules.append(x.rule(found, x.verdict(f"goto {sets.links('out')}")))
    return rules


def _between_pods() -> list[Rule]:
    """Return the rules that find what reaches pods on a bridge by an address that no object names.

    Every pod listens at link-local and broadcast addresses, and at those of multicast groups. What the node sends
    itself is not forwarded.
    """
    to_bridge = [x.meta(x.META_OIFNAME), x.lookup(sets.links("in"))]
    nameless = (
        [*x.of_family(IPV6), *x.in_network(_LINK_LOCAL, load_source=False)],
        *map(_to_group, FAMILIES),
        [*x.of_family(IPV4), *x.is_to_broadcast()],
    )
    return [x.rule(to_bridge, found, x.verdict(f"goto {sets.links('in')}")) for found in nameless]


def _node_addresses(options: sets.Options, others: Sequence[Expressions]) -> list[Rule]:
    """Return the rules that drop a source address of this node that did not come from it, where that matters.

    It does for destinations that are judged, and for those of the node itself, which may be virtual addresses: IPVS
    rewrites them later. ``others``: further destinations.
    """
    which = sets.POLICED if options.tiers else sets.ISOLATED
    judged = [
        [*x.of_family(family), x.destination_address(family), x.lookup(sets.name(which, family, "in"))]
        for family in FAMILIES
    ]
    return [
        x.rule(
            x.has_state(x.CT_STATE_NEW | x.CT_STATE_UNTRACKED),
            x.interface_name("lo", prefix=False, equal=False),
            x.is_local(x.FIB_SADDR),
            destination,
            x.verdict("drop"),
            comment="a source address of this node that did not come from it",
        )
        for destination in (*judged, *others, x.is_local(x.FIB_DADDR))
    ]


def chains(options: sets.Options, guarded: Sequence[Expressions]) -> dict[str, ChainValue]:
    """Return the chains by name. ``guarded``: further destinations that no forged address of this node may reach."""
    arriving = [*_node_addresses(options, guarded), *_leaving_pods(options)]
    return {
        **{sets.links(side): _link_chain(side) for side in sets.SIDES},
        _FROM_PODS: _from_pods(options),
        "sources": ChainValue(tuple(_sources()), BaseHook("filter", "prerouting", SOURCES_PRIORITY)),
        "arriving": ChainValue(tuple(arriving), BaseHook("filter", "prerouting", ARRIVING_PRIORITY)),
        "forward": ChainValue(tuple(_between_pods()), BaseHook("filter", "forward", FORWARD_PRIORITY)),
    }
