# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixed chains and jump rules of kube-proxy 1.36, which do not depend on Services; ipvs mode uses them too."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ...base.addresses import IPV4, IPV6, address_bits, is_loopback, parse_network
from ...base.errors import ConfigurationError
from ..settings import DataplaneSettings
from .names import NODE_PORTS_CHAIN, PREFIXES, SERVICES_CHAIN
from .tables import FILTER, MANGLE, NAT, ChainKey, JumpKey, Ownership, Rules

SERVICES = ChainKey(NAT, SERVICES_CHAIN)
NODE_PORTS = ChainKey(NAT, NODE_PORTS_CHAIN)
POSTROUTING = ChainKey(NAT, "KUBE-POSTROUTING")
MARK_MASQ = ChainKey(NAT, "KUBE-MARK-MASQ")
FILTER_SERVICES = ChainKey(FILTER, "KUBE-SERVICES")
EXTERNAL_SERVICES = ChainKey(FILTER, "KUBE-EXTERNAL-SERVICES")
FORWARD = ChainKey(FILTER, "KUBE-FORWARD")
FILTER_NODE_PORTS = ChainKey(FILTER, "KUBE-NODEPORTS")
PROXY_FIREWALL = ChainKey(FILTER, "KUBE-PROXY-FIREWALL")
KUBE_FIREWALL = ChainKey(FILTER, "KUBE-FIREWALL")
CANARIES = tuple(ChainKey(table, "KUBE-PROXY-CANARY") for table in (MANGLE, NAT, FILTER))

PROTOCOLS = ("tcp", "udp", "sctp")

INVALID_COUNTER = "ct_state_invalid_dropped_pkts"
LOCALHOST_COUNTER = "localhost_nps_accepted_pkts"

#: The chains to which every ServicePort may contribute rules.
SHARED_CHAINS = (FILTER_SERVICES, EXTERNAL_SERVICES, FILTER_NODE_PORTS, PROXY_FIREWALL, SERVICES, NODE_PORTS)
_INTERFACE_FORBIDDEN = frozenset(" \t\r\n\0\"'\\/!")


def comment(text: str) -> str:
    """Return ``-m comment --comment "text"``, as iptables-save quotes a text that has no quotes itself."""
    return f'-m comment --comment "{text}"'


def host_bits(family: str) -> str:
    """Return ``/32`` or ``/128``: the suffix that iptables-save adds to the address of a host."""
    return f"/{address_bits(family)}"


_MARTIAN_RULE = (
    f"! -s 127.0.0.0/8 -d 127.0.0.0/8 {comment('block incoming localnet connections')} "
    "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)


class LocalMatch(NamedTuple):
    """Parts of a rule that match this node's pods: each is empty or ends with a blank.

    ``source`` belongs before a destination address and ``interface`` after it. With ``never``, nothing can match.
    """

    source: str
    interface: str
    never: bool = False


def local_match(settings: DataplaneSettings, negated: bool = False) -> Optional[LocalMatch]:
    """Return the match for traffic of this node's pods (``negated``: all other traffic); None without a detector.

    Raises ConfigurationError for an invalid interface name or CIDR.
    """
    local = settings.local_traffic
    if local is None:
        return None
    inversion = "! " if negated else ""
    if local.kind == "cidr":
        network = parse_network(local.value)
        if network is None or network.family != settings.family:
            raise ConfigurationError(f"CIDR of local traffic {local.value!r}: not a CIDR of family {settings.family}")
        if network.prefix_length == 0:
            return LocalMatch("", "", never=negated)
        return LocalMatch(f"{inversion}-s {network} ", "")
    if local.kind not in ("bridge", "prefix"):
        raise ConfigurationError(f"kind of local traffic {local.kind!r}: must be cidr, bridge or prefix")
    name = local.value + ("+" if local.kind == "prefix" else "")
    if not local.value or len(name.encode()) > 15 + (local.kind == "prefix") or _INTERFACE_FORBIDDEN.intersection(name):
        raise ConfigurationError(f"interface of local traffic {local.value!r}: not the name of an interface")
    return LocalMatch("", f"{inversion}-i {name} ")


def mark_masquerade_rules(settings: DataplaneSettings) -> Rules:
    """Return the content of nat KUBE-MARK-MASQ: it only sets the mark."""
    mark = f"0x{settings.masquerade_mark:x}"
    return (f"-j MARK --set-xmark {mark}/{mark}",)


def masquerade_rules(settings: DataplaneSettings, match: str, options: str) -> list[str]:
    """Return the rules that masquerade packets that a match (empty, or ending with a blank) selects.

    If the source ports are limited, each protocol needs a separate rule.
    """
    first, last = settings.masquerade_ports
    rules = [f"-p {protocol} {match}-j MASQUERADE --to-ports {first}-{last}{options}" for protocol in PROTOCOLS if last]
    return [*rules, f"{match}-j MASQUERADE{options}"]


def postrouting_rules(settings: DataplaneSettings) -> Rules:
    """Return the rules of nat KUBE-POSTROUTING: they clear the mark of marked packets and masquerade them."""
    mark = f"0x{settings.masquerade_mark:x}"
    text = f"{comment('kubernetes service traffic requiring SNAT')} "
    return (
        f"-m mark ! --mark {mark}/{mark} -j RETURN",
        f"-j MARK --set-xmark {mark}/0x0",
        *masquerade_rules(settings, text, " --random-fully" if settings.random_fully else ""),
    )


def forward_accept_rules(settings: DataplaneSettings) -> Rules:
    """Return the two ACCEPT rules of filter KUBE-FORWARD that iptables and ipvs modes share."""
    mark = f"0x{settings.masquerade_mark:x}"
    return (
        f"{comment('kubernetes forwarding rules')} -m mark --mark {mark}/{mark} -j ACCEPT",
        f"{comment('kubernetes forwarding conntrack rule')} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    )


def forward_rules(settings: DataplaneSettings) -> Rules:
    """Return the content of filter KUBE-FORWARD in iptables mode."""
    if settings.conntrack_liberal:
        return forward_accept_rules(settings)
    counter = f"-m nfacct --nfacct-name {INVALID_COUNTER} " if INVALID_COUNTER in settings.nfacct_counters else ""
    return (f"-m conntrack --ctstate INVALID {counter}-j DROP", *forward_accept_rules(settings))


def martian_rules(settings: DataplaneSettings) -> Optional[Rules]:
    """Return the content of filter KUBE-FIREWALL, shared with kubelet, or None where kube-proxy does not manage it."""
    if not localhost_node_ports(settings):
        return None
    return (_MARTIAN_RULE,)


def localhost_node_ports(settings: DataplaneSettings) -> bool:
    """Return whether node ports answer on loopback addresses: never for IPv6."""
    return settings.localhost_node_ports and settings.family == IPV4


def node_port_rules(settings: DataplaneSettings) -> Rules:
    """Return the last rules of nat KUBE-SERVICES, which jump to the node ports."""
    note = comment("kubernetes service nodeports; NOTE: this must be the last rule in this chain")
    localhost = localhost_node_ports(settings)
    if not settings.node_port_cidrs:
        excluded = "" if localhost else ("! -d ::1/128 " if settings.family == IPV6 else "! -d 127.0.0.0/8 ")
        return (f"{excluded}{note} -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",)
    suffix = host_bits(settings.family)
    return tuple(
        f"-d {address}{suffix} {note} -j KUBE-NODEPORTS"
        for address in sorted(set(settings.node_port_addresses))
        if localhost or not is_loopback(address)
    )


def jump(table: str, chain: str, target: str, text: str, new_only: bool = False) -> JumpKey:
    """Return the jump from a built-in chain to ``target`` with a comment, inserted at the head of that chain."""
    state = "-m conntrack --ctstate NEW " if new_only else ""
    return JumpKey(table, chain, f"{state}{comment(text)} -j {target}")


def nat_jumps() -> tuple[JumpKey, ...]:
    """Return the jump rules of the nat table, equal in iptables and ipvs modes, in the order of their insertion."""
    return (
        jump(NAT, "OUTPUT", "KUBE-SERVICES", "kubernetes service portals"),
        jump(NAT, "PREROUTING", "KUBE-SERVICES", "kubernetes service portals"),
        jump(NAT, "POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules"),
    )


def jumps() -> tuple[JumpKey, ...]:
    """Return all jump rules of iptables mode, in the order in which each is inserted at the head of its chain."""
    visible, portals = "kubernetes externally-visible service portals", "kubernetes service portals"
    firewall = "kubernetes load balancer firewall"
    return (
        jump(FILTER, "INPUT", "KUBE-EXTERNAL-SERVICES", visible, new_only=True),
        jump(FILTER, "FORWARD", "KUBE-EXTERNAL-SERVICES", visible, new_only=True),
        jump(FILTER, "INPUT", "KUBE-NODEPORTS", "kubernetes health check service ports"),
        jump(FILTER, "FORWARD", "KUBE-SERVICES", portals, new_only=True),
        jump(FILTER, "OUTPUT", "KUBE-SERVICES", portals, new_only=True),
        jump(FILTER, "FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules"),
        jump(FILTER, "INPUT", "KUBE-PROXY-FIREWALL", firewall, new_only=True),
        jump(FILTER, "OUTPUT", "KUBE-PROXY-FIREWALL", firewall, new_only=True),
        jump(FILTER, "FORWARD", "KUBE-PROXY-FIREWALL", firewall, new_only=True),
        *nat_jumps(),
        JumpKey(FILTER, "INPUT", "-j KUBE-FIREWALL"),
        JumpKey(FILTER, "OUTPUT", "-j KUBE-FIREWALL"),
    )


def fixed_chains(settings: DataplaneSettings) -> dict[ChainKey, Rules]:
    """Return the chains whose rules do not depend on Services; KUBE-FIREWALL only if its content is ours."""
    chains: dict[ChainKey, Rules] = dict.fromkeys(CANARIES, ())
    firewall = martian_rules(settings)
    if firewall is not None:
        chains[KUBE_FIREWALL] = firewall
    chains[FORWARD] = forward_rules(settings)
    chains[POSTROUTING] = postrouting_rules(settings)
    chains[MARK_MASQ] = mark_masquerade_rules(settings)
    return chains


def ownership(settings: DataplaneSettings) -> Ownership:
    """Return which chains iptables mode owns.

    KUBE-FIREWALL is shared with kubelet; where kube-proxy does not fill it, only its existence is ours.
    """
    shared = frozenset((KUBE_FIREWALL,))
    presence_only = frozenset() if localhost_node_ports(settings) else shared
    fixed = frozenset((*SHARED_CHAINS, POSTROUTING, MARK_MASQ, FORWARD, *CANARIES))
    return Ownership(fixed, {NAT: PREFIXES}, shared, presence_only, frozenset((_MARTIAN_RULE,)))
