# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules of one ServicePort in iptables mode: kube-proxy 1.36's, written as iptables-save prints them."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

from ...base.addresses import IPV6, Network, networks_of
from ...serviceports.info import Endpoint, ServicePortInfo
from ...serviceports.weights import shares
from ..merged import Entry
from ..settings import DataplaneSettings
from . import fixed
from .fixed import comment
from .names import CLUSTER_PREFIX, ENDPOINT_PREFIX, EXTERNAL_PREFIX, FIREWALL_PREFIX, LOCAL_PREFIX, hash16
from .tables import CHAINS, FRAGMENTS, NAT, ChainKey, Fragment

_ADDRESS_MASK = {False: "255.255.255.255", True: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}


def probability(total: int, share: int = 1) -> str:
    """Return ``share/total`` as the kernel stores it: kube-proxy's ten digits, rounded to a multiple of 2**-31."""
    return f"{round(float(f'{share / total:.10f}') * 2**31) / 2**31:.11f}"


_PROBABILITIES: tuple[str, ...] = ("", *(probability(count) for count in range(1, 257)))


def _probability(total: int, share: int) -> str:
    return _PROBABILITIES[total] if share == 1 and total < len(_PROBABILITIES) else probability(total, share)


EXTERNAL_IP, LOAD_BALANCER_IP, NODE_PORT = "external IP", "loadbalancer IP", "node port"


class Firewall(NamedTuple):
    """The allowed sources of one kind of external addresses of a ServicePort, and the chain that accepts them."""

    what: str
    chain: str
    networks: tuple[Network, ...]


def _source_match(network: Network) -> str:
    return f"-s {network} " if network.prefix_length else ""


class _ServicePortRules:
    """Collects the contribution of one ServicePort; the attributes are kube-proxy's decisions for it."""

    def __init__(self, info: ServicePortInfo, settings: DataplaneSettings) -> None:
        self.info = info
        self.settings = settings
        self.name = str(info.key)
        self.protocol = info.protocol
        digest = hash16(self.name + self.protocol)
        self.cluster_chain = CLUSTER_PREFIX + digest
        self.local_chain = LOCAL_PREFIX + digest
        self.external_chain = EXTERNAL_PREFIX + digest
        self.firewalls = self._firewalls(digest)
        self.host = fixed.host_bits(info.family)
        local = bool(info.local)
        self.internal_chain = self.local_chain if info.internal_local else self.cluster_chain
        self.has_internal = info.has_any and (local or not info.internal_local)
        self.policy_chain = self.local_chain if info.external_local else self.cluster_chain
        self.has_external = info.has_any and (local or not info.external_local)
        self.uses_external_chain = info.has_any and info.externally_accessible and not self._is_closed()
        # Without the external chain, only the cluster IP leads to endpoints.
        by_cluster = self.uses_external_chain or not info.internal_local
        by_local = self.uses_external_chain or info.internal_local
        self.uses_cluster_chain = bool(info.cluster) and info.uses_cluster_endpoints and by_cluster
        self.uses_local_chain = local and info.uses_local_endpoints and by_local
        self.fragments: dict[ChainKey, list[str]] = {}
        self.chains: list[Entry] = []

    def add(self, chain: ChainKey, rule: str) -> None:
        self.fragments.setdefault(chain, []).append(rule)

    def add_chain(self, name: str, rules: list[str]) -> None:
        self.chains.append((CHAINS, ChainKey(NAT, name), tuple(rules)))

    def to(self, address: str, text: str) -> str:
        """Return the match of the ServicePort on one of its addresses."""
        return f"-d {address}{self.host} {self.port_match(self.info.port, text)}"

    def port_match(self, port: int, text: str, more: str = "") -> str:
        return f"-p {self.protocol} {comment(text)} {more}-m {self.protocol} --dport {port}"

    @property
    def refusal_comment(self) -> str:
        return f"{self.name} has no local endpoints" if self.info.has_any else f"{self.name} has no endpoints"

    @property
    def refusal_target(self) -> str:
        if self.info.has_any:
            return "-j DROP"
        return f"-j REJECT --reject-with {'icmp6' if self.info.family == IPV6 else 'icmp'}-port-unreachable"

    def dispatch(self) -> None:
        """Add the rules in shared chains that lead to the ServicePort, or reject its traffic if it has no endpoints."""
        info = self.info
        if self.has_internal:
            self.add(fixed.SERVICES, f"{self.to(info.cluster_ip, self.name + ' cluster IP')} -j {self.internal_chain}")
        else:
            self.add(fixed.FILTER_SERVICES, f"{self.to(info.cluster_ip, self.refusal_comment)} {self.refusal_target}")
        for address in info.external_ips:
            self.external_address(address, EXTERNAL_IP)
            self.refuse_external(address)
        for address in info.load_balancer_ips:
            self.external_address(address, LOAD_BALANCER_IP)
        for address in info.load_balancer_ips:
            self.refuse_external(address)
        if info.node_port:
            self.node_port()
        if info.health_check_node_port:
            match = comment(f"{self.name} health check node port")
            self.add(fixed.FILTER_NODE_PORTS, f"-p tcp {match} -m tcp --dport {info.health_check_node_port} -j ACCEPT")

    def external_address(self, address: str, what: str) -> None:
        """Add the rules that lead from an external address to the ServicePort, and drop sources not allowed."""
        firewall = self.firewalls.get(what)
        if self.info.has_any:
            target = firewall.chain if firewall else self.external_chain
            self.add(fixed.SERVICES, f"{self.to(address, f'{self.name} {what}')} -j {target}")
        if firewall:
            self.drop_others(firewall, lambda text: self.to(address, text))

    def drop_others(self, firewall: Firewall, match: Callable[[str], str]) -> None:
        """Drop packets that a firewall chain has not accepted; without endpoints, the others are rejected later."""
        if not self.info.has_any:
            if not self.settings.behaviour.ranges_before_endpoints:
                return
            for source in firewall.networks:
                accepted = match(f"{self.name} {firewall.what}")
                self.add(fixed.PROXY_FIREWALL, f"{_source_match(source)}{accepted} -j RETURN")
        self.add(fixed.PROXY_FIREWALL, f"{match(f'{self.name} traffic not accepted by {firewall.chain}')} -j DROP")

    def refuse_external(self, address: str) -> None:
        if not self.has_external:
            self.add(fixed.EXTERNAL_SERVICES, f"{self.to(address, self.refusal_comment)} {self.refusal_target}")

    def node_port(self) -> None:
        port = self.info.node_port
        firewall = self.firewalls.get(NODE_PORT)
        target = firewall.chain if firewall else self.external_chain
        if firewall:
            self.drop_others(firewall, lambda text: self.port_match(port, text, "-m addrtype --dst-type LOCAL "))
        if self.info.has_any:
            match = self.port_match(port, self.name)
            if fixed.localhost_node_ports(self.settings) and fixed.LOCALHOST_COUNTER in self.settings.nfacct_counters:
                counter = f"-m nfacct --nfacct-name {fixed.LOCALHOST_COUNTER}"
                self.add(fixed.NODE_PORTS, f"-d 127.0.0.0/8 {match} {counter} -j {target}")
            self.add(fixed.NODE_PORTS, f"{match} -j {target}")
        if not self.has_external:
            match = self.port_match(port, self.refusal_comment, "-m addrtype --dst-type LOCAL ")
            self.add(fixed.EXTERNAL_SERVICES, f"{match} {self.refusal_target}")

    def masquerade_rules(self) -> list[str]:
        """Return the rules that masquerade traffic to the cluster IP: all, or all except traffic from local pods."""
        info = self.info
        match = self.port_match(info.port, f"{self.name} cluster IP")
        destination = f"-d {info.cluster_ip}{self.host} "
        if self.settings.masquerade_all:
            return [f"{destination}{match} -j KUBE-MARK-MASQ"]
        other = fixed.local_match(self.settings, negated=True)
        if other is None or other.never:
            return []
        return [f"{other.source}{destination}{other.interface}{match} -j KUBE-MARK-MASQ"]

    def external_rules(self) -> list[str]:
        """Return the content of the chain for traffic to external addresses and node ports."""
        rules: list[str] = []
        if not self.info.external_local:
            rules.append(f"{comment(f'masquerade traffic for {self.name} external destinations')} -j KUBE-MARK-MASQ")
        else:
            pods = fixed.local_match(self.settings)
            if pods is not None:
                text = comment(f"pod traffic for {self.name} external destinations")
                rules.append(f"{pods.source}{pods.interface}{text} -j {self.cluster_chain}")
            source = "-m addrtype --src-type LOCAL -j"
            rules.append(
                f"{comment(f'masquerade LOCAL traffic for {self.name} external destinations')} {source} KUBE-MARK-MASQ"
            )
            rules.append(
                f"{comment(f'route LOCAL traffic for {self.name} external destinations')} {source} {self.cluster_chain}"
            )
        if self.has_external:
            rules.append(f"-j {self.policy_chain}")
        return rules

    def _firewalls(self, digest: str) -> dict[str, Firewall]:
        """Return the firewalls of the kinds of external addresses that not every source may use."""
        info = self.info
        found: dict[str, Firewall] = {}
        for what, used, sources in (
            (EXTERNAL_IP, info.external_ips, info.external_ip_sources),
            (LOAD_BALANCER_IP, info.load_balancer_ips, info.source_ranges),
            (NODE_PORT, info.node_port, info.node_port_sources),
        ):
            if used and sources is not None:
                # kube-proxy has this chain for load balancer addresses only.
                own = digest if what == LOAD_BALANCER_IP else hash16(f"{self.name}{self.protocol}{what}")
                found[what] = Firewall(what, FIREWALL_PREFIX + own, tuple(networks_of(sources)))
        return found

    def _is_closed(self) -> bool:
        """Return whether no source may use any external address or the node port."""
        used = sum(map(bool, (self.info.external_ips, self.info.load_balancer_ips, self.info.node_port)))
        closed = sum(not firewall.networks for firewall in self.firewalls.values())
        return closed == used > 0

    def firewall_rules(self, firewall: Firewall) -> list[str]:
        """Return the content of the chain of allowed sources.

        The external addresses themselves are allowed if the node is: its own traffic may have them as source.
        """
        text = comment(f"{self.name} {firewall.what}")
        rules = [f"{_source_match(network)}{text} -j {self.external_chain}" for network in firewall.networks]
        if any(network.contains(self.settings.node_ip) for network in firewall.networks):
            rules += [f"-s {own} {text} -j {self.external_chain}" for own in self.own_sources(firewall.what)]
        rules.append(comment(f"other traffic to {self.name} will be dropped by KUBE-PROXY-FIREWALL"))
        return rules

    def own_sources(self, what: str) -> list[str]:
        """Return the sources that a connection of the node to one of its addresses of a kind may have instead."""
        if what == NODE_PORT:
            return ["127.0.0.0/8"] if fixed.localhost_node_ports(self.settings) else []
        addresses = self.info.external_ips if what == EXTERNAL_IP else self.info.load_balancer_ips
        return [f"{address}{self.host}" for address in addresses]

    def endpoint_chain(self, endpoint: Endpoint) -> str:
        return ENDPOINT_PREFIX + hash16(self.name + self.protocol + endpoint.text)

    def recent(self, action: str, chain: str) -> str:
        return f"-m recent {action} --name {chain} --mask {_ADDRESS_MASK[self.info.family == IPV6]} --rsource "

    def balancing_rules(self, endpoints: Sequence[Endpoint]) -> list[str]:
        """Return the affinity rules, then one rule per endpoint with its probability among the endpoints left."""
        named = [
            (
                f"{comment(f'{self.name} -> {endpoint.text}')} " if self.settings.endpoint_comments else "",
                self.endpoint_chain(endpoint),
            )
            for endpoint in endpoints
        ]
        rules: list[str] = []
        if self.info.affinity_seconds:
            action = f"--rcheck --seconds {self.info.affinity_seconds} --reap"
            rules = [f"{text}{self.recent(action, chain)}-j {chain}" for text, chain in named]
        wanted = shares(endpoints) if self.info.weighted else (1,) * len(named)
        left = sum(wanted)
        for (text, chain), share in zip(named, wanted):
            if left > share:
                rules.append(f"{text}-m statistic --mode random --probability {_probability(left, share)} -j {chain}")
            else:
                rules.append(f"{text}-j {chain}")
            left -= share
        return rules

    def endpoint_rules(self, endpoint: Endpoint, chain: str) -> list[str]:
        """Return the rules that masquerade traffic of an endpoint to itself, then DNAT."""
        text = f"{comment(self.name)} " if self.settings.endpoint_comments else ""
        affinity = self.recent("--set", chain) if self.info.affinity_seconds else ""
        return [
            f"-s {endpoint.ip}{self.host} {text}-j KUBE-MARK-MASQ",
            f"-p {self.protocol} {text}{affinity}-m {self.protocol} -j DNAT --to-destination {endpoint.text}",
        ]

    def own_chains(self) -> None:
        """Add the chains that belong to this ServicePort alone."""
        masquerade = self.masquerade_rules() if self.has_internal else []
        if self.uses_external_chain:
            self.add_chain(self.external_chain, self.external_rules())
        for firewall in self.firewalls.values() if self.info.has_any else ():
            self.add_chain(firewall.chain, self.firewall_rules(firewall))
        for used, chain, endpoints in (
            (self.uses_cluster_chain, self.cluster_chain, self.info.cluster),
            (self.uses_local_chain, self.local_chain, self.info.local),
        ):
            if used:
                own = masquerade if chain == self.internal_chain else []
                self.add_chain(chain, [*own, *self.balancing_rules(endpoints)])
        for endpoint in self.info.reachable:
            chain = self.endpoint_chain(endpoint)
            self.add_chain(chain, self.endpoint_rules(endpoint, chain))


def service_port_entries(info: ServicePortInfo, settings: DataplaneSettings) -> list[Entry]:
    """Return the contribution of one ServicePort: fragments of shared chains, and its own chains.

    Raises ConfigurationError for an invalid detector of local traffic.
    """
    rules = _ServicePortRules(info, settings)
    rules.dispatch()
    rules.own_chains()
    fragments: list[Entry] = [
        (FRAGMENTS, Fragment(chain, 1, info.key), tuple(part)) for chain, part in rules.fragments.items()
    ]
    return [*fragments, *rules.chains]
