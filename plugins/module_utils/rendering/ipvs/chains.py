# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The chains of ipvs mode (kube-proxy 1.36): they mark, masquerade and filter by the ipsets.

Rules are texts as iptables-save prints them, without ``-A CHAIN``. They depend on which sets have elements, not on the
number of Services; only KUBE-IPVS-OUT-FILTER has a rule for each firewalled address.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import AbstractSet, Iterable, Mapping

from ...base.addresses import IPV6
from ...configuration.behaviour import KUBE_PROXY, Behaviour
from ..iptables import fixed
from ..iptables.fixed import comment, host_bits
from ..iptables.tables import FILTER, MANGLE, NAT, ChainKey, ChainTable, JumpKey, Ownership, Rules
from ..settings import DataplaneSettings
from . import sets
from .model import FirewalledPort, Redirect, VirtualServerKey

NODE_PORT = ChainKey(NAT, "KUBE-NODE-PORT")
LOAD_BALANCER_CHAIN = ChainKey(NAT, "KUBE-LOAD-BALANCER")
HEALTH_CHECK = ChainKey(FILTER, "KUBE-NODE-PORT")
SOURCE_RANGES_FIREWALL = ChainKey(FILTER, "KUBE-SOURCE-RANGES-FIREWALL")
IPVS_FILTER = ChainKey(FILTER, "KUBE-IPVS-FILTER")
IPVS_OUT_FILTER = ChainKey(FILTER, "KUBE-IPVS-OUT-FILTER")
# Chains that kube-proxy does not have. Those of the table mangle see a connection of the node before IPVS does.
EARLY_FIREWALL = ChainKey(MANGLE, "KUBE-PROXY-FIREWALL")
EARLY_RANGES = ChainKey(MANGLE, "KUBE-SOURCE-RANGES-FIREWALL")
EARLY_FILTER = ChainKey(MANGLE, "KUBE-IPVS-OUT-FILTER")
INSIDE_CHAIN = ChainKey(NAT, "KUBE-IPVS-INSIDE")
OUTSIDE_CHAIN = ChainKey(NAT, "KUBE-IPVS-OUTSIDE")
OWN_CHAINS: tuple[ChainKey, ...] = (EARLY_FIREWALL, EARLY_RANGES, EARLY_FILTER, INSIDE_CHAIN, OUTSIDE_CHAIN)

ALL_CHAINS: tuple[ChainKey, ...] = (
    fixed.SERVICES,
    fixed.POSTROUTING,
    NODE_PORT,
    LOAD_BALANCER_CHAIN,
    fixed.MARK_MASQ,
    fixed.FORWARD,
    HEALTH_CHECK,
    fixed.PROXY_FIREWALL,
    SOURCE_RANGES_FIREWALL,
    IPVS_FILTER,
    IPVS_OUT_FILTER,
    *OWN_CHAINS,
)

Redirected = Mapping[VirtualServerKey, Redirect]
NO_REDIRECTS: Redirected = MappingProxyType({})

_PROTOCOL_NUMBERS = {"tcp": 6, "udp": 17, "sctp": 132}


def ownership() -> Ownership:
    """Return which chains ipvs mode owns."""
    return Ownership(frozenset(ALL_CHAINS), {})


def jumps(behaviour: Behaviour = KUBE_PROXY) -> tuple[JumpKey, ...]:
    """Return the jump rules of ipvs mode, in the order in which each is inserted at the head of its chain."""
    firewall = "kube-proxy firewall rules"
    found = [
        *fixed.nat_jumps(),
        fixed.jump(FILTER, "FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules"),
        fixed.jump(FILTER, "INPUT", "KUBE-NODE-PORT", "kubernetes health check rules"),
    ]
    if behaviour.ranges_hold_for_node:
        hooks = ("PREROUTING", "OUTPUT")
        found += [fixed.jump(MANGLE, hook, EARLY_FIREWALL.chain, firewall, new_only=True) for hook in hooks]
    else:
        found += [fixed.jump(FILTER, hook, fixed.PROXY_FIREWALL.chain, firewall) for hook in ("INPUT", "FORWARD")]
    if behaviour.local_means_local:
        found.append(fixed.jump(MANGLE, "OUTPUT", EARLY_FILTER.chain, "kubernetes ipvs access filter", new_only=True))
    found += [
        fixed.jump(FILTER, "INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter"),
        fixed.jump(FILTER, "OUTPUT", "KUBE-IPVS-OUT-FILTER", "kubernetes ipvs access filter"),
    ]
    return tuple(found)


def _match(family: str, name: str, directions: str, commented: bool = True) -> str:
    # iptables-save escapes quotes within a comment; iptables-restore removes the backslash again.
    text = comment(sets.SETS[name].comment.replace("'", "\\'")) + " " if commented else ""
    return f"{text}-m set --match-set {sets.NAMES[family][name]} {directions}"


def _cluster_ip_rules(settings: DataplaneSettings) -> list[str]:
    """Return the rules that masquerade connections to cluster IPs.

    Without a detector only connections of the host whose source became the cluster IP itself are masqueraded.
    """
    match = _match(settings.family, sets.CLUSTER_IP, "dst,dst")
    if settings.masquerade_all:
        return [f"{match} -j KUBE-MARK-MASQ"]
    others = fixed.local_match(settings, negated=True)
    if others is None:
        return [f"{_match(settings.family, sets.CLUSTER_IP, 'src,dst')} -j KUBE-MARK-MASQ"]
    if others.never:
        return []
    return [f"{others.source}{others.interface}{match} -j KUBE-MARK-MASQ"]


def _external_accept_rules(family: str, name: str) -> list[str]:
    match = _match(family, name, "dst,dst")
    return [
        f"{match} -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT",
        f"{match} -m addrtype --dst-type LOCAL -j ACCEPT",
    ]


def services_rules(
    settings: DataplaneSettings, filled: AbstractSet[str], redirected: Redirected = NO_REDIRECTS
) -> Rules:
    """Return the rules of nat KUBE-SERVICES. ``filled``: the sets that have elements, without the family's infix."""
    family = settings.family
    rules = [f"-s {'::1/128' if family == IPV6 else '127.0.0.0/8'} -j RETURN"]
    if redirected:
        pods = fixed.local_match(settings)
        rules += [f"{pods.source}{pods.interface}-j {INSIDE_CHAIN.chain}"] if pods is not None else []
        rules += [f"-m addrtype --src-type LOCAL -j {INSIDE_CHAIN.chain}", f"-j {OUTSIDE_CHAIN.chain}"]
    if sets.LOAD_BALANCER in filled:
        rules.append(f"{_match(family, sets.LOAD_BALANCER, 'dst,dst')} -j KUBE-LOAD-BALANCER")
    if sets.CLUSTER_IP in filled:
        rules += _cluster_ip_rules(settings)
    if sets.EXTERNAL_IP in filled:
        rules.append(f"{_match(family, sets.EXTERNAL_IP, 'dst,dst')} -j KUBE-MARK-MASQ")
        rules += _external_accept_rules(family, sets.EXTERNAL_IP)
    if sets.EXTERNAL_IP_LOCAL in filled:
        rules += _external_accept_rules(family, sets.EXTERNAL_IP_LOCAL)
    rules.append("-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT")
    rules += [
        f"{_match(family, name, 'dst,dst', commented=False)} -j ACCEPT"
        for name in (sets.CLUSTER_IP, sets.LOAD_BALANCER)
        if name in filled
    ]
    return tuple(rules)


def node_port_rules(family: str, filled: AbstractSet[str]) -> Rules:
    """Return the rules of nat KUBE-NODE-PORT.

    Traffic to ports with externalTrafficPolicy Local keeps its source, other traffic is masqueraded.
    """
    rules = []
    for protocol, (plain, local) in sets.NODE_PORT_SETS.items():
        directions = "dst,dst" if protocol == "sctp" else "dst"
        for name, target in ((local, "RETURN"), (plain, "KUBE-MARK-MASQ")):
            if name in filled:
                rules.append(f"-p {protocol} {_match(family, name, directions)} -j {target}")
    return tuple(rules)


def ipvs_filter_rules(family: str, filled: AbstractSet[str], behaviour: Behaviour = KUBE_PROXY) -> Rules:
    """Return the rules of filter KUBE-IPVS-FILTER, which keep service addresses from reaching daemons of the host.

    For kube-proxy health check node ports are an exception.
    """
    rules = [
        f"-m conntrack --ctstate NEW {_match(family, name, 'dst,dst')} -j DROP"
        for name in (sets.INTERNAL_DROPPED, sets.EXTERNAL_DROPPED)
        if name in filled
    ]
    rules += [
        f"{_match(family, name, 'dst,dst', commented=False)} -j RETURN"
        for name in (sets.LOAD_BALANCER, sets.CLUSTER_IP, sets.EXTERNAL_IP, sets.EXTERNAL_IP_LOCAL)
    ]
    if not behaviour.virtual_addresses_are_closed:
        rules.append(f"{_match(family, sets.HEALTH_CHECK_NODE_PORT, 'dst', commented=False)} -j RETURN")
    answer = "icmp6-port-unreachable" if family == IPV6 else "icmp-port-unreachable"
    addresses = _match(family, sets.IPVS_IPS, "dst", commented=False)
    rules.append(f"-m conntrack --ctstate NEW {addresses} -j REJECT --reject-with {answer}")
    return tuple(rules)


def policy_chains(
    settings: DataplaneSettings, filled: AbstractSet[str], redirected: Redirected
) -> dict[ChainKey, Rules]:
    """Return the chains that kube-proxy does not have: see ``policies``.

    IPVS refuses a connection of the node to a virtual server without real servers before the table filter sees it, so
    the table mangle drops it.
    """
    family = settings.family
    found: dict[ChainKey, Rules] = {}
    if settings.behaviour.local_means_local:
        dropped = f"{_match(family, sets.INTERNAL_DROPPED, 'dst,dst')} -j DROP"
        found[EARLY_FILTER] = (dropped,) if sets.INTERNAL_DROPPED in filled else ()
    if settings.behaviour.inside_reaches_all:
        inside: list[str] = []
        outside: list[str] = []
        for server, redirect in sorted(redirected.items()):
            parts = redirect_rules(family, server, redirect)
            inside += parts[INSIDE_CHAIN]
            outside += parts[OUTSIDE_CHAIN]
        found[INSIDE_CHAIN], found[OUTSIDE_CHAIN] = tuple(inside), tuple(outside)
    return found


def redirect_rules(family: str, server: VirtualServerKey, redirect: Redirect) -> dict[ChainKey, Rules]:
    """Return the rules for connections to one address and port: from this node and its pods, and from others."""
    match = f"-d {server.address}{host_bits(family)} -p {server.protocol} -m {server.protocol} --dport {server.port}"
    masquerade = f"{match} -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ"
    target = f"{match} -j DNAT --to-destination {redirect.target}"
    if redirect.from_inside:
        return {INSIDE_CHAIN: (masquerade, target), OUTSIDE_CHAIN: ()}
    return {INSIDE_CHAIN: (masquerade, f"{match} -j ACCEPT"), OUTSIDE_CHAIN: (target,)}


def out_filter_rules(family: str, firewalled: Iterable[FirewalledPort]) -> Rules:
    """Return the rules of filter KUBE-IPVS-OUT-FILTER, for addresses whose source ranges exclude the node itself."""
    return tuple(
        f"-s {address}{host_bits(family)} -m ipvs --vproto {_PROTOCOL_NUMBERS[protocol]} --vaddr {address} "
        f"--vport {port} -j DROP"
        for address, protocol, port in sorted(firewalled)
    )


def chains(
    settings: DataplaneSettings,
    filled: AbstractSet[str],
    firewalled: Iterable[FirewalledPort],
    redirected: Redirected = NO_REDIRECTS,
) -> dict[ChainKey, Rules]:
    """Return all chains of ipvs mode with their rules.

    ``filled``: the sets that have elements, by their names without the family's infix (as in ``sets``). Raises
    ConfigurationError for an invalid detector of local traffic.
    """
    family, behaviour = settings.family, settings.behaviour
    hairpin = fixed.masquerade_rules(settings, f"{_match(family, sets.LOOP_BACK, 'dst,dst,src')} ", "")
    kept = [f"{_match(family, sets.LOAD_BALANCER_LOCAL, 'dst,dst')} -j RETURN"]
    ranges = [
        f"{_match(family, name, 'dst,dst,src')} -j RETURN"
        for name in (sets.LOAD_BALANCER_SOURCE_CIDR, sets.LOAD_BALANCER_SOURCE_IP)
        if name in filled
    ]
    firewall = [f"{_match(family, sets.LOAD_BALANCER_FW, 'dst,dst')} -j KUBE-SOURCE-RANGES-FIREWALL"]
    early = behaviour.ranges_hold_for_node
    return {
        fixed.SERVICES: services_rules(settings, filled, redirected),
        fixed.POSTROUTING: (*(hairpin if sets.LOOP_BACK in filled else ()), *fixed.postrouting_rules(settings)),
        NODE_PORT: node_port_rules(family, filled),
        LOAD_BALANCER_CHAIN: (*(kept if sets.LOAD_BALANCER_LOCAL in filled else ()), "-j KUBE-MARK-MASQ"),
        fixed.MARK_MASQ: fixed.mark_masquerade_rules(settings),
        fixed.FORWARD: fixed.forward_accept_rules(settings),
        HEALTH_CHECK: (f"{_match(family, sets.HEALTH_CHECK_NODE_PORT, 'dst')} -j ACCEPT",),
        (EARLY_FIREWALL if early else fixed.PROXY_FIREWALL): tuple(firewall) if sets.LOAD_BALANCER_FW in filled else (),
        (EARLY_RANGES if early else SOURCE_RANGES_FIREWALL): (*ranges, "-j DROP"),
        IPVS_FILTER: ipvs_filter_rules(family, filled, behaviour),
        IPVS_OUT_FILTER: out_filter_rules(family, firewalled),
        **policy_chains(settings, filled, redirected),
    }


def chain_table(
    settings: DataplaneSettings,
    filled: AbstractSet[str],
    firewalled: Iterable[FirewalledPort],
    redirected: Redirected = NO_REDIRECTS,
) -> ChainTable:
    """Return chains and jump rules in one table, as the resource of chains requires; see :func:`chains`."""
    table: ChainTable = dict(chains(settings, filled, firewalled, redirected).items())
    table.update((key, 1) for key in jumps(settings.behaviour))
    return table
