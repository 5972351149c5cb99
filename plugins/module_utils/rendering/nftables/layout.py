# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The part of the table that does not depend on Services: hooks, sets, and the rules that look up frontends.

Base chains, their hooks and their priorities are kube-proxy's, so that other programs can place their chains around
them as they do around kube-proxy's. The difference is behind the verdicts: see :mod:`.balancing`.
"""

from __future__ import annotations

from functools import lru_cache

from ...base.addresses import IPV6, Network, is_loopback, packed, parse_network
from ..merged import Entry
from ..settings import DataplaneSettings, LocalTraffic
from . import expressions as x
from . import objects as nft
from . import traffic
from .keys import protocol_key

CLUSTER_IPS = "cluster-ips"
NODE_PORT_IPS = "nodeport-ips"
HAIRPIN = "hairpin-connections"
NO_ENDPOINT_SERVICES = "no-endpoint-services"
NO_ENDPOINT_NODE_PORTS = "no-endpoint-nodeports"
LOCALHOST_REJECTED = "localhost-nodeport-reject-ports"
LOCALHOST_COUNTS = "localhost-nodeport-rejected"
#: Names of what is counted beside that: the agent's listeners at loopback addresses, and failures to open them.
LOCALHOST_LISTENERS, LOCALHOST_UNOPENED = "localhost-listeners", "localhost-unopened"
FRONTENDS = "service-frontends"
NODE_PORT_FRONTENDS = "nodeport-frontends"
ENDPOINTS = "service-endpoints"
LOCAL_ENDPOINTS = "service-local-endpoints"
NODE_PORT_ENDPOINTS = "nodeport-endpoints"
NODE_PORT_LOCAL_ENDPOINTS = "nodeport-local-endpoints"
FIREWALLED = "firewalled-frontends"
NODE_PORT_FIREWALLED = "firewalled-nodeports"
#: Begins the names of the sets of allowed sources, behind the kind of their frontends.
SOURCE_RANGES = "source-ranges-"
#: The kinds of frontends: they begin the names of their chains and maps.
SERVICE_KEY = ""
NODE_PORT_KEY = "nodeport-"

REJECT_CHAIN = "reject-chain"
LOCALHOST_REJECT = "localhost-nodeport-reject"
SERVICES = "services"
FIREWALL_CHECK = "firewall-check"
SERVICE_ENDPOINTS_CHECK = "service-endpoints-check"
NODE_PORT_ENDPOINTS_CHECK = "nodeport-endpoints-check"
CLUSTER_IPS_CHECK = "cluster-ips-check"
NODE_PORT_CHECK = "nodeport-firewall-check"
MASQUERADING = "masquerading"
#: The chains of the hooks at which restricted node ports are refused, by hook.
NODE_PORT_HOOKS = {hook: f"filter-{hook}-nodeports" for hook in ("prerouting", "output")}

_COMMON_CHAINS = (
    REJECT_CHAIN,
    LOCALHOST_REJECT,
    SERVICES,
    FIREWALL_CHECK,
    SERVICE_ENDPOINTS_CHECK,
    NODE_PORT_ENDPOINTS_CHECK,
    CLUSTER_IPS_CHECK,
    NODE_PORT_CHECK,
    MASQUERADING,
)
#: Maps of node ports; others have names that begin with ``nodeport-``.
_NODE_PORT_MAPS = (NO_ENDPOINT_NODE_PORTS, NODE_PORT_FIREWALLED, LOCALHOST_REJECTED)
_REFUSING = (NO_ENDPOINT_SERVICES, FIREWALLED, *_NODE_PORT_MAPS)


@lru_cache(maxsize=4096)
def set_role(family: str, name: str) -> nft.SetRole:
    """Return the role of a set: its elements change with all others of their address, or of their node port."""
    if name in (HAIRPIN, LOCALHOST_COUNTS) or SOURCE_RANGES in name:
        return nft.SetRole(nft.Part.HELPS)
    by_port = name in _NODE_PORT_MAPS or (name.startswith(NODE_PORT_KEY) and name != NODE_PORT_IPS)
    part = nft.Part.REFUSES if name in _REFUSING else nft.Part.SELECTS
    return nft.SetRole(part, nft.key_length((nft.PROTOCOL, nft.PORT) if by_port else (nft.ADDRESS_TYPES[family],)))


SERVICES_TABLE = nft.TableIdentity(
    nft.TABLE_NAME,
    "rules for kube-proxy",
    role=set_role,
    common_chains=frozenset(_COMMON_CHAINS),
    restricting_chains=frozenset(NODE_PORT_HOOKS.values()),
)


def fixed_sets(family: str, counted: bool = False) -> dict[str, nft.SetValue]:
    """Return the sets and maps that always exist.

    ``counted``: the maps that each new connection looks up, those of frontends and of endpoints, count.
    """
    address = nft.ADDRESS_TYPES[family]
    frontend: tuple[str, ...] = (address, nft.PROTOCOL, nft.PORT)
    node_port: tuple[str, ...] = (nft.PROTOCOL, nft.PORT)
    endpoint = (address, nft.PORT)
    verdict = (nft.VERDICT,)
    return {
        CLUSTER_IPS: nft.SetValue((address,)),
        HAIRPIN: nft.SetValue((address, address, nft.PROTOCOL, nft.PORT)),
        NO_ENDPOINT_SERVICES: nft.SetValue(frontend, verdict),
        NO_ENDPOINT_NODE_PORTS: nft.SetValue(node_port, verdict),
        FIREWALLED: nft.SetValue(frontend, verdict),
        ENDPOINTS: nft.SetValue((*frontend, nft.INDEX), endpoint, counted=counted),
        LOCAL_ENDPOINTS: nft.SetValue((*frontend, nft.INDEX), endpoint, counted=counted),
        NODE_PORT_ENDPOINTS: nft.SetValue((*node_port, nft.INDEX), endpoint, counted=counted),
        NODE_PORT_LOCAL_ENDPOINTS: nft.SetValue((*node_port, nft.INDEX), endpoint, counted=counted),
        FRONTENDS: nft.SetValue(frontend, verdict, counted=counted),
        NODE_PORT_FRONTENDS: nft.SetValue(node_port, verdict, counted=counted),
    }


def from_local(traffic: LocalTraffic, local: bool) -> x.Expressions:
    """Match packets that come, or do not come, from a pod of this node, by the detector's definition."""
    if traffic.kind == "cidr":
        network = parse_network(traffic.value)
        return [] if network is None else x.in_network(network, load_source=True, equal=local)
    return x.interface_name(traffic.value, traffic.kind == "prefix", local)


def loopback(family: str, *, source: bool = False, equal: bool = True) -> x.Expressions:
    """Match destination (else source) addresses that are, or are not, loopback ones."""
    if family == IPV6:
        load = x.source_address if source else x.destination_address
        return [load(family), x.compare(bytes(15) + b"\x01", equal=equal)]
    return x.in_network(Network(127 << 24, 8, family), load_source=source, equal=equal)


def node_port_match(settings: DataplaneSettings, dispatching: bool) -> x.Expressions:
    """Match destination addresses on which node ports answer."""
    if settings.node_port_cidrs:
        return [x.destination_address(settings.family), x.lookup(NODE_PORT_IPS)]
    local = x.is_local(x.FIB_DADDR) if dispatching else []
    return [*local, *loopback(settings.family, equal=False)]


def _services_rules(settings: DataplaneSettings) -> list[nft.Rule]:
    family = settings.family
    to_cluster_ip = [x.destination_address(family), x.lookup(CLUSTER_IPS)]
    mark = x.set_mark_bits(settings.masquerade_mark)
    rules: list[nft.Rule] = []
    if settings.masquerade_all:
        rules.append(x.rule(to_cluster_ip, mark, comment="masquerade all clusterIP traffic"))
    elif settings.local_traffic is not None:
        comment = "masquerade clusterIP traffic from outside cluster"
        rules.append(x.rule(to_cluster_ip, from_local(settings.local_traffic, False), mark, comment=comment))
    else:
        # After ipvs mode the dummy device keeps cluster IPs with open connections. They are the source of what the node
        # sends to them.
        from_cluster_ip = [x.source_address(family), x.lookup(CLUSTER_IPS)]
        rules.append(x.rule(from_cluster_ip, mark, comment="masquerade traffic from clusterIPs"))
    rules.append(x.rule(x.destination(family), x.verdict_lookup(FRONTENDS)))
    at_node_port = [*node_port_match(settings, True), *x.protocol_and_port()]
    rules.append(x.rule(at_node_port, x.verdict_lookup(NODE_PORT_FRONTENDS)))
    return rules


def _cluster_ips_rules(settings: DataplaneSettings) -> list[nft.Rule]:
    family = settings.family
    refused = [x.destination_address(family), x.lookup(CLUSTER_IPS), x.reject(family)]
    rules = [x.rule(refused, comment="Reject traffic to invalid ports of ClusterIPs")]
    if settings.service_cidrs:
        rules.append(x.rule(x.is_local(x.FIB_DADDR), x.verdict("return"), comment="node-local programs"))
    for text in sorted(set(settings.service_cidrs)):
        network = parse_network(text)
        if network is not None and network.family == family:
            unallocated = x.in_network(network, load_source=False)
            rules.append(x.rule(unallocated, x.verdict("drop"), comment="Drop traffic to unallocated ClusterIPs"))
    return rules


def masquerade_rules(settings: DataplaneSettings, match: x.Expressions) -> list[nft.Rule]:
    """Return the rules that masquerade packets that the expressions match.

    If the source ports are limited, each protocol needs a separate rule: the nft program accepts no other form.
    """
    first, last = settings.masquerade_ports
    limited = [
        x.rule(x.is_protocol(number), match, x.masquerade_from(first, last))
        for number in nft.PROTOCOL_NUMBERS.values()
        if last
    ]
    return [*limited, x.rule(match, x.masquerade())]


def _regular_chains(settings: DataplaneSettings) -> dict[str, list[nft.Rule]]:
    family = settings.family
    mark = settings.masquerade_mark
    connection = [
        x.source_address(family),
        x.destination_address(family, x.address_words(family)),
        *x.protocol_and_port(2 * x.address_words(family)),
    ]
    at_node_port = [*node_port_match(settings, False), *x.protocol_and_port()]
    no_endpoints = [x.rule(at_node_port, x.verdict_lookup(NO_ENDPOINT_NODE_PORTS))]
    if settings.localhost_rejected:
        at_loopback = [*loopback(family), *x.protocol_and_port()]
        no_endpoints.append(x.rule(at_loopback, x.verdict_lookup(LOCALHOST_REJECTED)))
    return {
        REJECT_CHAIN: [x.rule(x.reject(family))],
        FIREWALL_CHECK: [x.rule(x.destination(family), x.verdict_lookup(FIREWALLED))],
        SERVICE_ENDPOINTS_CHECK: [x.rule(x.destination(family), x.verdict_lookup(NO_ENDPOINT_SERVICES))],
        NODE_PORT_ENDPOINTS_CHECK: no_endpoints,
        CLUSTER_IPS_CHECK: _cluster_ips_rules(settings),
        MASQUERADING: [
            # The bit is cleared so that a packet that traverses this chain again is not masqueraded twice.
            *masquerade_rules(settings, [*x.has_bits(x.meta(x.META_MARK), mark), *x.flip_mark_bits(mark)]),
            *masquerade_rules(settings, [*x.was_redirected(), *connection, x.lookup(HAIRPIN)]),
        ],
        SERVICES: _services_rules(settings),
    }


def _localhost_entries(settings: DataplaneSettings) -> list[Entry]:
    """Return what refuses node ports at loopback addresses, and counts the packets of each protocol (KEP-6032).

    The map has kube-proxy's name and type, so that either finds the other's; the counters are elements of a set. Its
    keys have a second part because the nft program aborts at a key of one byte that occupies a whole register.
    """
    counts = [*x.protocol_and_direction(), x.lookup(LOCALHOST_COUNTS), x.reject(settings.family)]
    entries: dict[nft.Key, nft.Value] = {
        nft.ObjectKey("set", LOCALHOST_COUNTS): nft.SetValue((nft.PROTOCOL, nft.DIRECTION), counted=True),
        nft.ObjectKey("set", LOCALHOST_REJECTED): nft.SetValue((nft.PROTOCOL, nft.PORT), (nft.VERDICT,)),
        nft.ObjectKey("chain", LOCALHOST_REJECT): nft.ChainValue((x.rule(counts),)),
    }
    for name in settings.localhost_rejected:
        entries[nft.ElementKey("element", LOCALHOST_COUNTS, protocol_key(name) + bytes(4))] = True
    return [(nft.RESOURCE, key, value) for key, value in entries.items()]


def _base_chains() -> dict[str, nft.ChainValue]:
    def new(*targets: str) -> tuple[nft.Rule, ...]:
        return tuple(x.rule(x.new_connection(), x.verdict(f"jump {target}")) for target in targets)

    def always(target: str) -> tuple[nft.Rule, ...]:
        return (x.rule(x.verdict(f"jump {target}")),)

    return {
        "filter-prerouting-pre-dnat": nft.ChainValue(new(FIREWALL_CHECK), nft.BaseHook("filter", "prerouting", -110)),
        "filter-output-pre-dnat": nft.ChainValue(new(FIREWALL_CHECK), nft.BaseHook("filter", "output", -110)),
        "filter-input": nft.ChainValue(
            new(NODE_PORT_ENDPOINTS_CHECK, SERVICE_ENDPOINTS_CHECK), nft.BaseHook("filter", "input", 0)
        ),
        "filter-forward": nft.ChainValue(
            new(SERVICE_ENDPOINTS_CHECK, CLUSTER_IPS_CHECK), nft.BaseHook("filter", "forward", 0)
        ),
        "filter-output": nft.ChainValue(
            new(SERVICE_ENDPOINTS_CHECK, CLUSTER_IPS_CHECK), nft.BaseHook("filter", "output", 0)
        ),
        "nat-prerouting": nft.ChainValue(always(SERVICES), nft.BaseHook("nat", "prerouting", -100)),
        "nat-output": nft.ChainValue(always(SERVICES), nft.BaseHook("nat", "output", -100)),
        "nat-postrouting": nft.ChainValue(always(MASQUERADING), nft.BaseHook("nat", "postrouting", 100)),
    }


def static_entries(settings: DataplaneSettings) -> list[Entry]:
    """Return the entries that exist without any Service, in an order in which they can be created."""
    entries: list[Entry] = [(nft.RESOURCE, nft.TABLE_KEY, nft.TableValue())]
    sets = fixed_sets(settings.family, settings.count_connections)
    if settings.node_port_cidrs:
        sets[NODE_PORT_IPS] = nft.SetValue((nft.ADDRESS_TYPES[settings.family],))
    entries.extend((nft.RESOURCE, nft.ObjectKey("set", name), value) for name, value in sets.items())
    if settings.localhost_rejected:
        entries.extend(_localhost_entries(settings))
    for name, rules in _regular_chains(settings).items():
        entries.append((nft.RESOURCE, nft.ObjectKey("chain", name), nft.ChainValue(tuple(rules))))
    entries.extend((nft.RESOURCE, nft.ObjectKey("chain", name), value) for name, value in _base_chains().items())
    if settings.count_bytes:
        entries.extend(traffic.static_entries(settings.family))
    if settings.node_port_cidrs:
        for address in settings.node_port_addresses:
            raw = packed(address)
            if raw is not None and not is_loopback(address):
                entries.append((nft.RESOURCE, nft.ElementKey("element", NODE_PORT_IPS, raw), True))
    return entries
