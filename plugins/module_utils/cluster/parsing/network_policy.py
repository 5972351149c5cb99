# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of a raw NetworkPolicy (networking.k8s.io/v1): parts that are not understood never allow anything.

A peer or port that is not understood matches nothing; the others of its rule apply. So does a rule, or the whole spec,
that has a field which is not known: the field may restrict what the others allow. The policy as a whole is refused only
if it is unclear which pods it selects, or for which direction.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from ...base.addresses import Network, parse_network
from ..fields import (
    Invalid,
    converted,
    dns_label,
    dns_subdomain,
    elements,
    fields_of,
    integer,
    leniently,
    mapping,
    protocol,
    sequence,
    shown,
)
from ..policies.policy_model import (
    DIRECTIONS,
    EGRESS,
    INGRESS,
    LAST_PORT,
    BlockPeer,
    NetworkPolicy,
    Peer,
    PodPeer,
    PolicyPort,
    PolicyRule,
)
from ..policies.selectors import EVERYTHING, parse_selector

_PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*")
_SPEC_FIELDS = ("podSelector", "policyTypes", "ingress", "egress")
_PEER_FIELDS = ("podSelector", "namespaceSelector", "ipBlock")
_BLOCK_FIELDS = ("cidr", "except")
_PORT_FIELDS = ("protocol", "port", "endPort")
Part = TypeVar("Part")


def parse_network_policy(raw: Dict[str, Any], skipped: List[Invalid]) -> NetworkPolicy:
    """Return the NetworkPolicy that a raw object describes, with None in place of parts that are not understood.

    These parts are appended to ``skipped``. Defaults of the API server are filled in. Raises Invalid.
    """
    metadata = mapping(raw.get("metadata"), "metadata")
    namespace = dns_label(metadata.get("namespace"), "metadata.namespace")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    spec = mapping(raw.get("spec"), "spec")
    pods = parse_selector(spec.get("podSelector"), "spec.podSelector")
    ingress = _rules(spec.get("ingress"), "spec.ingress", "from", namespace, skipped)
    egress = _rules(spec.get("egress"), "spec.egress", "to", namespace, skipped)
    directions = _directions(spec.get("policyTypes"), bool(egress), skipped)
    try:
        fields_of(spec, _SPEC_FIELDS, "spec")
    except Invalid as error:
        skipped.append(error)
        ingress, egress = (None,) * len(ingress), (None,) * len(egress)
    return NetworkPolicy(
        namespace=namespace, name=name, pods=pods, directions=directions, ingress=ingress, egress=egress
    )


def _directions(value: object, has_egress: bool, skipped: List[Invalid]) -> Tuple[str, ...]:
    listed = sequence(value, "spec.policyTypes")
    if not listed:
        return DIRECTIONS if has_egress else (INGRESS,)
    for index, item in enumerate(listed):
        if item not in DIRECTIONS:
            skipped.append(Invalid(f"spec.policyTypes[{index}]", f"{shown(item)} is not {INGRESS} or {EGRESS}"))
    known = tuple(direction for direction in DIRECTIONS if direction in listed)
    if not known:
        raise Invalid("spec.policyTypes", f"names neither {INGRESS} nor {EGRESS}")
    return known


def _parts(
    value: object, field: str, read: Callable[[object, str], Part], skipped: List[Invalid]
) -> Tuple[Optional[Part], ...]:
    """Read the elements of a list separately; a value that is not a list gives one part that is not understood."""

    def read_one(item: object, where: str) -> Optional[Part]:
        if item is None:
            raise Invalid(where, "is null")
        return read(item, where)

    items = leniently(elements, value, field, skipped, None)
    return (None,) if items is None else tuple(leniently(read_one, *item, skipped, None) for item in items)


def _rules(
    value: object, field: str, peers_field: str, namespace: str, skipped: List[Invalid]
) -> Tuple[Optional[PolicyRule], ...]:
    def read_peer(item: object, where: str) -> Peer:
        return _peer(item, where, namespace)

    def read_rule(item: object, where: str) -> PolicyRule:
        raw = fields_of(item, (peers_field, "ports"), where)
        return PolicyRule(
            _parts(raw.get(peers_field), f"{where}.{peers_field}", read_peer, skipped),
            _parts(raw.get("ports"), f"{where}.ports", _port, skipped),
        )

    return _parts(value, field, read_rule, skipped)


def _peer(value: object, field: str, namespace: str) -> Peer:
    raw = fields_of(value, _PEER_FIELDS, field)
    given = [name for name in _PEER_FIELDS if raw.get(name) is not None]
    if not given:
        raise Invalid(field, f"has none of {', '.join(_PEER_FIELDS)}")
    if "ipBlock" in given:
        if len(given) > 1:
            raise Invalid(field, f"has ipBlock together with {given[0]}")
        return read_block(raw["ipBlock"], f"{field}.ipBlock")
    pods = parse_selector(raw.get("podSelector"), f"{field}.podSelector")
    if "namespaceSelector" in given:
        return PodPeer("", parse_selector(raw["namespaceSelector"], f"{field}.namespaceSelector"), pods)
    return PodPeer(namespace, None, pods if "podSelector" in given else EVERYTHING)


def read_network(value: object, field: str) -> Network:
    """Return the range of a CIDR, host bits cleared. Raises Invalid."""
    return converted(value, field, parse_network, "a CIDR")


def read_block(value: object, field: str) -> BlockPeer:
    """Return an ipBlock. Raises Invalid, including for an exception that is not a proper part of the range."""
    raw = fields_of(value, _BLOCK_FIELDS, field)
    network = read_network(raw.get("cidr"), f"{field}.cidr")
    excepted = []
    for item, where in elements(raw.get("except"), f"{field}.except"):
        part = read_network(item, where)
        inside = part.family == network.family and part.prefix_length > network.prefix_length
        if not inside or not _contains(network, part):
            raise Invalid(where, f"{part} is not a proper part of {network}")
        excepted.append(part)
    return BlockPeer(network, tuple(excepted))


def _contains(outer: Network, inner: Network) -> bool:
    shift = (32 if outer.family == "IPv4" else 128) - outer.prefix_length
    return inner.first >> shift == outer.first >> shift


def is_port_name(value: object) -> bool:
    """Return whether a value is an IANA service name (RFC 6335), as names of container ports must be."""
    return isinstance(value, str) and _PORT_NAME.fullmatch(value) is not None


def _port(value: object, field: str) -> PolicyPort:
    raw = fields_of(value, _PORT_FIELDS, field)
    kind = protocol(raw.get("protocol"), f"{field}.protocol")
    port, last = raw.get("port"), raw.get("endPort")
    if port is None:
        if last is not None:
            raise Invalid(f"{field}.endPort", "needs a port")
        return PolicyPort(kind)
    if isinstance(port, str):
        if not is_port_name(port):
            raise Invalid(f"{field}.port", f"{shown(port)} is neither a number nor the name of a port")
        if last is not None:
            raise Invalid(f"{field}.endPort", "needs a port that is a number")
        return PolicyPort(kind, name=port)
    first = integer(port, f"{field}.port", 1, LAST_PORT)
    return PolicyPort(kind, first, integer(last, f"{field}.endPort", first, LAST_PORT, first))
