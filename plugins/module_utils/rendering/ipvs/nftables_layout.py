# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table beside IPVS without the elements of Services: its sets, and constant rules.

Their effect on packets is that of the chains and ipsets of kube-proxy's ipvs mode (see ``chains``). IPVS takes packets
in the hook input at the priorities 98 and 99, after packet filters, and in output at -99 and -98, after destination
NAT; it sends them on through output again and postrouting. So the chains are at the priorities of the tables of
iptables, and connections of the node are filtered at -150, before IPVS takes them.
"""

from __future__ import annotations

from typing import Optional

from ...resources import Kind
from ..merged import Entry
from ..nftables import expressions as x
from ..nftables import objects as nft
from ..nftables.layout import FIREWALLED, HAIRPIN, from_local, loopback, masquerade_rules, set_role
from ..settings import DataplaneSettings
from . import sets

TABLE_NAME = "kubenode-ipvs"
#: Name of the resource table.
RESOURCE = Kind.IPVS_OBJECTS

ADDRESSES = "service-addresses"
NODE_PORTS = "node-ports"
LOCAL_NODE_PORTS = "local-node-ports"
HEALTH_CHECKS = "health-check-node-ports"
FIREWALLED_FOR_NODE = "firewalled-for-node"
REDIRECTED = "redirected-frontends"
REDIRECTED_INSIDE = "redirected-inside"
REDIRECTED_OUTSIDE = "redirected-outside"

#: The sets of frontends (address, protocol, port), by the name of the ipset that kube-proxy has for them.
FRONTENDS: dict[str, str] = {
    sets.CLUSTER_IP: "cluster-ip-frontends",
    sets.EXTERNAL_IP: "external-ip-frontends",
    sets.EXTERNAL_IP_LOCAL: "local-external-ip-frontends",
    sets.LOAD_BALANCER: "load-balancer-frontends",
    sets.LOAD_BALANCER_LOCAL: "local-load-balancer-frontends",
    sets.INTERNAL_DROPPED: "dropped-internal",
    sets.EXTERNAL_DROPPED: "dropped-external",
}

SERVICES = "services"
REDIRECT = "redirect-by-source"
INSIDE = "redirect-inside"
LOAD_BALANCER = "load-balancer"
NODE_PORT = "node-port"
MASQUERADING = "masquerading"
FIREWALL_CHECK = "firewall-check"
ADDRESS_FILTER = "address-filter"

_COMMON_CHAINS = (SERVICES, REDIRECT, INSIDE, LOAD_BALANCER, NODE_PORT, MASQUERADING, FIREWALL_CHECK, ADDRESS_FILTER)


_MASQUERADING = {LOCAL_NODE_PORTS: NODE_PORTS, FRONTENDS[sets.LOAD_BALANCER_LOCAL]: FRONTENDS[sets.LOAD_BALANCER]}


def exempted(key: nft.Key) -> Optional[nft.Key]:
    """Return the element whose connections an element exempts from masquerading, None for other entries."""
    if isinstance(key, nft.ElementKey) and key.name in _MASQUERADING:
        return key._replace(name=_MASQUERADING[key.name])
    return None


def ipvs_set_role(family: str, name: str) -> nft.SetRole:
    """Return the role of a set: its elements change with all others of their address, or of their node port."""
    if name in (NODE_PORTS, LOCAL_NODE_PORTS, HEALTH_CHECKS):
        return nft.SetRole(nft.Part.SELECTS, nft.key_length((nft.PROTOCOL, nft.PORT)))
    return set_role(family, name)


IPVS_TABLE = nft.TableIdentity(
    TABLE_NAME,
    "packet filter of ipvs mode, by kubenode-proxy",
    role=ipvs_set_role,
    common_chains=frozenset(_COMMON_CHAINS),
)

#: Destination NAT of other programs comes later, since it must not redirect connections to service addresses.
_BEFORE_NAT = -101
#: The chain that prevents this if they are addresses of the node.
SETTLING = nft.ObjectKey("chain", "nat-prerouting")
_SOURCE_NAT = 100
_MANGLE = -150
_FILTER = 0


def fixed_sets(settings: DataplaneSettings) -> dict[str, nft.SetValue]:
    """Return the sets and maps that always exist."""
    behaviour = settings.behaviour
    address = nft.ADDRESS_TYPES[settings.family]
    frontend, port = (address, nft.PROTOCOL, nft.PORT), (nft.PROTOCOL, nft.PORT)
    names = {name: made for name, made in FRONTENDS.items() if name not in sets.OWN_SETS or behaviour.local_means_local}
    found = {made: nft.SetValue(frontend) for made in names.values()}
    found[ADDRESSES] = nft.SetValue((address,))
    found[HAIRPIN] = nft.SetValue((address, address, nft.PROTOCOL, nft.PORT))
    found.update({name: nft.SetValue(port) for name in (NODE_PORTS, LOCAL_NODE_PORTS, HEALTH_CHECKS)})
    found[FIREWALLED] = nft.SetValue(frontend, (nft.VERDICT,))
    if not behaviour.ranges_hold_for_node:
        found[FIREWALLED_FOR_NODE] = nft.SetValue((address, address, nft.PROTOCOL, nft.PORT))
    if behaviour.inside_reaches_all:
        found[REDIRECTED] = nft.SetValue(frontend)
        found.update(
            {name: nft.SetValue(frontend, (address, nft.PORT)) for name in (REDIRECTED_INSIDE, REDIRECTED_OUTSIDE)}
        )
    return found


def _at(settings: DataplaneSettings, name: str) -> x.Expressions:
    """Match packets to the frontends of a set, by the name of kube-proxy's ipset."""
    return [*x.destination(settings.family), x.lookup(FRONTENDS[name])]


def _cluster_ip_rules(settings: DataplaneSettings) -> list[nft.Rule]:
    """Return the rule that masquerades connections to cluster IPs.

    Without a detector these are connections of the node whose source became the cluster IP itself.
    """
    mark = x.set_mark_bits(settings.masquerade_mark)
    to_cluster_ip = _at(settings, sets.CLUSTER_IP)
    if settings.masquerade_all:
        return [x.rule(to_cluster_ip, mark)]
    if settings.local_traffic is not None:
        return [x.rule(from_local(settings.local_traffic, False), to_cluster_ip, mark)]
    family = settings.family
    key = [x.source_address(family), *x.protocol_and_port(x.address_words(family))]
    return [x.rule(key, x.lookup(FRONTENDS[sets.CLUSTER_IP]), mark)]


def _services_rules(settings: DataplaneSettings) -> list[nft.Rule]:
    """Return the rules that mark new connections for masquerading."""
    family = settings.family
    mark = x.set_mark_bits(settings.masquerade_mark)
    rules = [x.rule(loopback(family, source=True), x.verdict("return"))]
    if settings.behaviour.inside_reaches_all:
        rules.append(x.rule(x.destination(family), x.lookup(REDIRECTED), x.verdict(f"jump {REDIRECT}")))
    rules.append(x.rule(_at(settings, sets.LOAD_BALANCER), x.verdict(f"jump {LOAD_BALANCER}")))
    rules += _cluster_ip_rules(settings)
    rules.append(x.rule(_at(settings, sets.EXTERNAL_IP), mark, x.verdict("return")))
    rules.append(x.rule(_at(settings, sets.EXTERNAL_IP_LOCAL), x.verdict("return")))
    rules.append(x.rule(x.is_local(x.FIB_DADDR), x.verdict(f"jump {NODE_PORT}")))
    return rules


def _redirect_chains(settings: DataplaneSettings) -> dict[str, list[nft.Rule]]:
    """Return the chains that send connections to the virtual server of the cluster IP: see ``policies``."""
    family = settings.family
    target = x.destination_nat(family, 0, x.address_words(family))
    inside = x.verdict(f"goto {INSIDE}")
    pods = settings.local_traffic
    return {
        INSIDE: [
            x.rule(x.is_local(x.FIB_SADDR), x.set_mark_bits(settings.masquerade_mark)),
            x.rule(x.destination(family), x.map_lookup(REDIRECTED_INSIDE), target),
        ],
        REDIRECT: [
            *([x.rule(from_local(pods, True), inside)] if pods is not None else []),
            x.rule(x.is_local(x.FIB_SADDR), inside),
            x.rule(x.destination(family), x.map_lookup(REDIRECTED_OUTSIDE), target),
        ],
    }


def _address_filter_rules(settings: DataplaneSettings) -> list[nft.Rule]:
    """Return the rules that keep new connections to service addresses from reaching daemons of the host.

    For kube-proxy health check node ports are an exception.
    """
    family, behaviour = settings.family, settings.behaviour
    dropped = (sets.INTERNAL_DROPPED, sets.EXTERNAL_DROPPED) if behaviour.local_means_local else ()
    rules = [x.rule(_at(settings, name), x.verdict("drop")) for name in dropped]
    served = (sets.CLUSTER_IP, sets.LOAD_BALANCER, sets.EXTERNAL_IP, sets.EXTERNAL_IP_LOCAL)
    rules += [x.rule(_at(settings, name), x.verdict("return")) for name in served]
    if not behaviour.virtual_addresses_are_closed:
        rules.append(x.rule(x.protocol_and_port(), x.lookup(HEALTH_CHECKS), x.verdict("return")))
    rules.append(x.rule(x.destination_address(family), x.lookup(ADDRESSES), x.reject(family)))
    return rules


def _between(family: str, name: str) -> x.Expressions:
    """Match packets by source, destination, protocol and port."""
    words = x.address_words(family)
    addresses = [x.source_address(family), x.destination_address(family, words)]
    return [*addresses, *x.protocol_and_port(2 * words), x.lookup(name)]


def _masquerading_rules(settings: DataplaneSettings) -> list[nft.Rule]:
    family, mark = settings.family, settings.masquerade_mark
    # The bit is cleared so that a packet that traverses this chain again is not masqueraded twice.
    marked = [*x.has_bits(x.meta(x.META_MARK), mark), *x.flip_mark_bits(mark)]
    return [*masquerade_rules(settings, marked), *masquerade_rules(settings, _between(family, HAIRPIN))]


def _regular_chains(settings: DataplaneSettings) -> dict[str, list[nft.Rule]]:
    """Return the chains without a hook, each after those that it refers to."""
    mark = x.set_mark_bits(settings.masquerade_mark)
    at_port = x.protocol_and_port()
    found = {
        LOAD_BALANCER: [x.rule(_at(settings, sets.LOAD_BALANCER_LOCAL), x.verdict("return")), x.rule(mark)],
        NODE_PORT: [
            x.rule(at_port, x.lookup(LOCAL_NODE_PORTS), x.verdict("return")),
            x.rule(at_port, x.lookup(NODE_PORTS), mark),
        ],
    }
    if settings.behaviour.inside_reaches_all:
        found.update(_redirect_chains(settings))
    found[SERVICES] = _services_rules(settings)
    found[MASQUERADING] = _masquerading_rules(settings)
    found[FIREWALL_CHECK] = [x.rule(x.destination(settings.family), x.verdict_lookup(FIREWALLED))]
    found[ADDRESS_FILTER] = _address_filter_rules(settings)
    return found


def _jump(target: str, new_only: bool = False) -> nft.Rule:
    return x.rule(x.new_connection() if new_only else [], x.verdict(f"jump {target}"))


def _base_chains(settings: DataplaneSettings) -> dict[str, nft.ChainValue]:
    behaviour, family = settings.behaviour, settings.family
    own_address = [x.destination_address(family), x.lookup(ADDRESSES)]
    settled = x.rule(x.is_local(x.FIB_DADDR), own_address, x.same_destination(family))
    hooks: dict[tuple[str, str, int], list[nft.Rule]] = {}
    if behaviour.ranges_hold_for_node:
        for hook in ("prerouting", "output"):
            hooks["filter", hook, _MANGLE] = [_jump(FIREWALL_CHECK, new_only=True)]
    else:
        # Where source ranges exclude the node: its connections have the address of the Service as their source.
        hooks["filter", "output", _MANGLE] = [x.rule(_between(family, FIREWALLED_FOR_NODE), x.verdict("drop"))]
    if behaviour.local_means_local:
        dropped = x.rule(x.new_connection(), _at(settings, sets.INTERNAL_DROPPED), x.verdict("drop"))
        hooks.setdefault(("filter", "output", _MANGLE), []).append(dropped)
    for hook in ("prerouting", "output"):
        hooks["nat", hook, _BEFORE_NAT] = [_jump(SERVICES), settled]
    hooks["filter", "input", _FILTER] = [_jump(ADDRESS_FILTER, new_only=True)]
    if not behaviour.ranges_hold_for_node:
        hooks["filter", "input", _FILTER].append(_jump(FIREWALL_CHECK))
        hooks["filter", "forward", _FILTER] = [_jump(FIREWALL_CHECK)]
    hooks["nat", "postrouting", _SOURCE_NAT] = [_jump(MASQUERADING)]
    return {
        f"{'early' if priority == _MANGLE else kind}-{hook}": nft.ChainValue(
            tuple(rules), nft.BaseHook(kind, hook, priority)
        )
        for (kind, hook, priority), rules in hooks.items()
    }


def static_entries(settings: DataplaneSettings) -> list[Entry]:
    """Return the entries that exist without any Service, in an order in which they can be created."""
    entries: list[Entry] = [(RESOURCE, IPVS_TABLE.key, nft.TableValue())]
    entries += [(RESOURCE, nft.ObjectKey("set", name), value) for name, value in fixed_sets(settings).items()]
    for name, rules in _regular_chains(settings).items():
        entries.append((RESOURCE, nft.ObjectKey("chain", name), nft.ChainValue(tuple(rules))))
    entries += [(RESOURCE, nft.ObjectKey("chain", name), value) for name, value in _base_chains(settings).items()]
    return entries
