# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of a raw ClusterNetworkPolicy (policy.networking.k8s.io), failing closed as its API requires.

A part of a rule that is not understood makes an Accept rule match nothing, and turns a Deny or Pass rule into one that
denies everything, as does a list of rules that is not a list. The field ``domainNames`` is not supported and treated in
the same way, as is any field that is not known: in the spec it concerns all rules.
"""

from __future__ import annotations

from typing import Any, Callable

from ..fields import Invalid, dns_subdomain, elements, fields_of, integer, leniently, mapping, sequence, shown, text
from ..policies.policy_model import (
    ACCEPT,
    ADMIN,
    BASELINE,
    DENY,
    LAST_PORT,
    PASS,
    BlockPeer,
    ClusterNetworkPolicy,
    NodePeer,
    Peer,
    PodPeer,
    PolicyPort,
    PolicyRule,
    closed,
)
from ..policies.selectors import parse_selector
from .network_policy import is_port_name, read_network

#: The versions that are read, the preferred one first. They differ only in what the API server admits.
VERSIONS = ("policy.networking.k8s.io/v1beta1", "policy.networking.k8s.io/v1alpha2")
_ACTIONS = (ACCEPT, DENY, PASS)
_TIERS = (ADMIN, BASELINE)
#: A peer of egress rules in the API's experimental channel, as are nodes.
_UNSUPPORTED = "domainNames"
_SPEC_FIELDS = ("tier", "priority", "subject", "ingress", "egress")
_MOST = 25
_MOST_PRIORITY = 1000
_PROTOCOLS = {"tcp": "TCP", "udp": "UDP", "sctp": "SCTP"}


def parse_cluster_network_policy(raw: dict[str, Any], skipped: list[Invalid]) -> ClusterNetworkPolicy:
    """Return the ClusterNetworkPolicy that a raw object describes.

    Parts of rules that are not understood are appended to ``skipped``. Raises Invalid.
    """
    metadata = mapping(raw.get("metadata"), "metadata")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    spec = mapping(raw.get("spec"), "spec")
    tier = spec.get("tier")
    if tier not in _TIERS:
        raise Invalid("spec.tier", f"{shown(tier)} is not one of {', '.join(_TIERS)}")
    ingress = _rules(spec.get("ingress"), "spec.ingress", "from", skipped)
    egress = _rules(spec.get("egress"), "spec.egress", "to", skipped)
    try:
        fields_of(spec, _SPEC_FIELDS, "spec")
    except Invalid as error:
        skipped.append(error)
        ingress, egress = (tuple(closed(rule.action) for rule in rules) for rules in (ingress, egress))
    return ClusterNetworkPolicy(
        name=name,
        tier=str(tier),
        priority=integer(spec.get("priority"), "spec.priority", 0, _MOST_PRIORITY),
        subject=_pods_or_namespaces(spec.get("subject"), "spec.subject"),
        ingress=ingress,
        egress=egress,
    )


def _only_field(raw: dict[str, Any], known: tuple[str, ...], field: str) -> str:
    """Return the name of the only field of an object. Raises Invalid unless it is one of the known ones."""
    given = [name for name, value in raw.items() if value is not None]
    if len(given) != 1 or given[0] not in known:
        raise Invalid(field, f"must have exactly one of {', '.join(known)}")
    return str(given[0])


def _pods_or_namespaces(value: object, field: str) -> PodPeer:
    raw = mapping(value, field)
    if _only_field(raw, ("namespaces", "pods"), field) == "namespaces":
        return PodPeer("", parse_selector(raw["namespaces"], f"{field}.namespaces"))
    pods = fields_of(raw["pods"], ("namespaceSelector", "podSelector"), f"{field}.pods")
    return PodPeer(
        "",
        parse_selector(pods.get("namespaceSelector"), f"{field}.pods.namespaceSelector"),
        parse_selector(pods.get("podSelector"), f"{field}.pods.podSelector"),
    )


def _rules(value: object, field: str, peers_field: str, skipped: list[Invalid]) -> tuple[PolicyRule, ...]:
    """Return the rules of one direction.

    Today's API server accepts at most 25. A later one may accept more, and to omit one could open what it denies.
    """
    items = leniently(elements, value, field, skipped, None)
    return (closed(DENY),) if items is None else tuple(_rule(*item, peers_field, skipped) for item in items)


def _rule(value: object, field: str, peers_field: str, skipped: list[Invalid]) -> PolicyRule:
    action: Any = None
    try:
        raw = mapping(value, field)
        action = raw.get("action")
        if action not in _ACTIONS:
            raise Invalid(f"{field}.action", f"{shown(action)} is not one of {', '.join(_ACTIONS)}")
        fields_of(raw, ("name", "action", peers_field, "protocols"), field)
        peers = _each(raw.get(peers_field), f"{field}.{peers_field}", _peers(peers_field == "to"))
        if not peers:
            raise Invalid(f"{field}.{peers_field}", "is missing")
        ports = _each(raw.get("protocols"), f"{field}.protocols", lambda item, where: [_port(item, where)])
        if raw.get("protocols") is not None and not ports:
            raise Invalid(f"{field}.protocols", "is empty")
        if any(port.name for port in ports) and not all(isinstance(peer, PodPeer) for peer in peers):
            raise Invalid(f"{field}.protocols", "names a port together with networks or nodes")
        return PolicyRule(tuple(peers), tuple(ports), str(action), text(raw.get("name"), f"{field}.name"))
    except Invalid as error:
        skipped.append(error)
        return closed(action)


def _each(value: object, field: str, read: Callable[[object, str], list[Any]]) -> list[Any]:
    items = sequence(value, field)
    if len(items) > _MOST:
        raise Invalid(field, f"has {len(items)} entries, more than {_MOST}")
    return [part for index, item in enumerate(items) for part in read(item, f"{field}[{index}]")]


def _peers(egress: bool) -> Callable[[object, str], list[Peer]]:
    def read(value: object, field: str) -> list[Peer]:
        raw = mapping(value, field)
        if egress and raw.get(_UNSUPPORTED) is not None:
            raise Invalid(f"{field}.{_UNSUPPORTED}", "is not supported")
        if egress and raw.get("nodes") is not None:
            _only_field(raw, ("nodes",), field)
            return [NodePeer(parse_selector(raw["nodes"], f"{field}.nodes"))]
        if egress and raw.get("networks") is not None:
            _only_field(raw, ("networks",), field)
            networks = sequence(raw["networks"], f"{field}.networks")
            if not 1 <= len(networks) <= _MOST:
                raise Invalid(f"{field}.networks", f"has {len(networks)} entries, not 1 to {_MOST}")
            return [BlockPeer(read_network(item, f"{field}.networks[{index}]")) for index, item in enumerate(networks)]
        return [_pods_or_namespaces(raw, field)]

    return read


def _port(value: object, field: str) -> PolicyPort:
    raw = mapping(value, field)
    kind = _only_field(raw, (*_PROTOCOLS, "destinationNamedPort"), field)
    if kind == "destinationNamedPort":
        if not is_port_name(raw[kind]):
            raise Invalid(f"{field}.{kind}", f"{shown(raw[kind])} is not the name of a port")
        return PolicyPort("", name=raw[kind])
    port = fields_of(raw[kind], ("destinationPort",), f"{field}.{kind}").get("destinationPort")
    if port is None:
        return PolicyPort(_PROTOCOLS[kind])
    return _numbers(port, f"{field}.{kind}.destinationPort", _PROTOCOLS[kind])


def _numbers(value: object, field: str, kind: str) -> PolicyPort:
    raw = mapping(value, field)
    if _only_field(raw, ("number", "range"), field) == "number":
        number = integer(raw["number"], f"{field}.number", 1, LAST_PORT)
        return PolicyPort(kind, number, number)
    ends = fields_of(raw["range"], ("start", "end"), f"{field}.range")
    first = integer(ends.get("start"), f"{field}.range.start", 1, LAST_PORT)
    return PolicyPort(kind, first, integer(ends.get("end"), f"{field}.range.end", first + 1, LAST_PORT))
