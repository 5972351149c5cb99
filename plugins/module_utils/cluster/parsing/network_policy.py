# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of raw NetworkPolicies (networking.k8s.io/v1), and of the Pods and Namespaces on which they depend.

Of a NetworkPolicy, parts that are not understood never allow anything. Of Pods and Namespaces, everything but the
identity is read leniently: a pod that is skipped would not be protected.

A peer or port that is not understood matches nothing; the others of its rule apply. So does a rule, or the whole spec,
that has a field which is not known: the field may restrict what the others allow. The policy as a whole is refused only
if it is unclear which pods it selects, or for which direction.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Optional, TypeVar

from ...base.addresses import Network, canonical_address, packed, parse_network
from ..fields import (
    Invalid,
    converted,
    dns_label,
    dns_subdomain,
    elements,
    fields_of,
    flag,
    integer,
    interned,
    leniently,
    mapping,
    protocol,
    sequence,
    shown,
    special_use,
    text,
)
from ..policies import policy_model
from ..policies.selectors import EVERYTHING, parse_selector

_PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*")
_SPEC_FIELDS = ("podSelector", "policyTypes", "ingress", "egress")
_PEER_FIELDS = ("podSelector", "namespaceSelector", "ipBlock")
_BLOCK_FIELDS = ("cidr", "except")
_PORT_FIELDS = ("protocol", "port", "endPort")
Part = TypeVar("Part")
_ENDED = ("Succeeded", "Failed")
_ALWAYS = "Always"
_MAYBE_MULTICAST = ("ff", "22", "23")


def parse_pod(raw: dict[str, Any], skipped: list[Invalid]) -> policy_model.Pod:
    """Return the Pod that a raw object describes. Invalid parts are skipped and appended to ``skipped``.

    Raises Invalid if it has no valid identity.
    """
    metadata = mapping(raw.get("metadata"), "metadata")
    namespace = dns_label(metadata.get("namespace"), "metadata.namespace")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    spec = _part(raw.get("spec"), "spec", skipped)
    status = _part(raw.get("status"), "status", skipped)
    return policy_model.Pod(
        namespace=interned(namespace),
        name=name,
        uid=_text(metadata.get("uid"), "metadata.uid", skipped),
        labels=read_labels(metadata.get("labels"), skipped),
        created=_text(metadata.get("creationTimestamp"), "metadata.creationTimestamp", skipped),
        deleting=metadata.get("deletionTimestamp") is not None,
        node_name=interned(_text(spec.get("nodeName"), "spec.nodeName", skipped)),
        host_network=leniently(flag, spec.get("hostNetwork"), "spec.hostNetwork", skipped, False),
        ended=_text(status.get("phase"), "status.phase", skipped) in _ENDED,
        addresses=_addresses(status, skipped),
        ports=_ports(spec, skipped),
    )


def parse_namespace(raw: dict[str, Any], skipped: list[Invalid]) -> policy_model.Namespace:
    """Return the Namespace that a raw object describes. Raises Invalid if it has no valid name."""
    metadata = mapping(raw.get("metadata"), "metadata")
    name = dns_label(metadata.get("name"), "metadata.name")
    labels = read_labels(metadata.get("labels"), skipped)
    return policy_model.Namespace(interned(name), labels, bool(metadata.get("deletionTimestamp")))


def read_labels(value: object, skipped: list[Invalid]) -> dict[str, str]:
    """Return labels, without those whose key (in YAML) or value is not a string."""
    labels = {}
    for key, item in _part(value, "metadata.labels", skipped).items():
        if not isinstance(key, str):
            skipped.append(Invalid("metadata.labels", f"the key {shown(key)} is not a string"))
        elif isinstance(item, str):
            labels[interned(key)] = interned(item)
        else:
            skipped.append(Invalid(f"metadata.labels[{key}]", f"{shown(item)} is not a string"))
    return labels


def _part(value: object, field: str, skipped: list[Invalid]) -> dict[str, Any]:
    return value if isinstance(value, dict) else leniently(mapping, value, field, skipped, {})


def _list(value: object, field: str, skipped: list[Invalid]) -> list[Any]:
    return value if isinstance(value, list) else leniently(sequence, value, field, skipped, [])


def _text(value: object, field: str, skipped: list[Invalid]) -> str:
    return value if isinstance(value, str) else leniently(text, value, field, skipped, "")


def _addresses(status: dict[str, Any], skipped: list[Invalid]) -> tuple[str, ...]:
    """Return the addresses of status.podIPs, or of status.podIP where there are none."""
    items = [
        (f"status.podIPs[{index}].ip", item.get("ip") if isinstance(item, dict) else item)
        for index, item in enumerate(_list(status.get("podIPs"), "status.podIPs", skipped))
    ]
    if not items and status.get("podIP"):
        items = [("status.podIP", status["podIP"])]
    found: dict[str, None] = {}
    for field, value in items:
        address = canonical_address(value) if isinstance(value, str) else None
        if address is None:
            skipped.append(Invalid(field, f"{shown(value)} is not an IP address"))
            continue
        special = not_global(address)
        if special:
            skipped.append(Invalid(field, f"{address} is {special}"))
        else:
            found[address] = None
    return tuple(found)


def not_global(address: str) -> str:
    """Return why a canonical address is not global unicast (RFC 4291, RFC 1122), or an empty text."""
    # Most addresses are decided without this.
    raw = packed(address) if address.startswith(_MAYBE_MULTICAST) else None
    if raw and (raw[0] == 0xFF if len(raw) == 16 else raw[0] & 0xF0 == 0xE0):
        return "a multicast address"
    return special_use(address)


def _ports(spec: dict[str, Any], skipped: list[Invalid]) -> tuple[policy_model.ContainerPort, ...]:
    """Return the named ports of containers, and of init containers that keep running (sidecars)."""
    found: dict[policy_model.ContainerPort, None] = {}
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(_list(spec.get(kind), f"spec.{kind}", skipped)):
            where = f"spec.{kind}[{index}]"
            item = _part(container, where, skipped)
            if kind == "initContainers" and item.get("restartPolicy") != _ALWAYS:
                continue
            for position, port in enumerate(_list(item.get("ports"), f"{where}.ports", skipped)):
                named = leniently(_container_port, port, f"{where}.ports[{position}]", skipped, None)
                if named is not None:
                    found[named] = None
    return tuple(found)


def _container_port(value: object, field: str) -> Optional[policy_model.ContainerPort]:
    """Return a port, None if it has no name. Raises Invalid."""
    raw = mapping(value, field)
    name = text(raw.get("name"), f"{field}.name")
    if not name:
        return None
    number = integer(raw.get("containerPort"), f"{field}.containerPort", 1, 65535)
    return policy_model.ContainerPort(interned(name), protocol(raw.get("protocol"), f"{field}.protocol"), number)


def parse_network_policy(raw: dict[str, Any], skipped: list[Invalid]) -> policy_model.NetworkPolicy:
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
    return policy_model.NetworkPolicy(
        namespace=namespace, name=name, pods=pods, directions=directions, ingress=ingress, egress=egress
    )


def _directions(value: object, has_egress: bool, skipped: list[Invalid]) -> tuple[str, ...]:
    listed = sequence(value, "spec.policyTypes")
    if not listed:
        return policy_model.DIRECTIONS if has_egress else (policy_model.INGRESS,)
    for index, item in enumerate(listed):
        if item not in policy_model.DIRECTIONS:
            skipped.append(
                Invalid(
                    f"spec.policyTypes[{index}]",
                    f"{shown(item)} is not {policy_model.INGRESS} or {policy_model.EGRESS}",
                )
            )
    known = tuple(direction for direction in policy_model.DIRECTIONS if direction in listed)
    if not known:
        raise Invalid("spec.policyTypes", f"names neither {policy_model.INGRESS} nor {policy_model.EGRESS}")
    return known


def _parts(
    value: object, field: str, read: Callable[[object, str], Part], skipped: list[Invalid]
) -> tuple[Optional[Part], ...]:
    """Read the elements of a list separately; a value that is not a list gives one part that is not understood."""

    def read_one(item: object, where: str) -> Optional[Part]:
        if item is None:
            raise Invalid(where, "is null")
        return read(item, where)

    items = leniently(elements, value, field, skipped, None)
    return (None,) if items is None else tuple(leniently(read_one, *item, skipped, None) for item in items)


def _rules(
    value: object, field: str, peers_field: str, namespace: str, skipped: list[Invalid]
) -> tuple[Optional[policy_model.PolicyRule], ...]:
    def read_peer(item: object, where: str) -> policy_model.Peer:
        return _peer(item, where, namespace)

    def read_rule(item: object, where: str) -> policy_model.PolicyRule:
        raw = fields_of(item, (peers_field, "ports"), where)
        return policy_model.PolicyRule(
            _parts(raw.get(peers_field), f"{where}.{peers_field}", read_peer, skipped),
            _parts(raw.get("ports"), f"{where}.ports", _port, skipped),
        )

    return _parts(value, field, read_rule, skipped)


def _peer(value: object, field: str, namespace: str) -> policy_model.Peer:
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
        return policy_model.PodPeer("", parse_selector(raw["namespaceSelector"], f"{field}.namespaceSelector"), pods)
    return policy_model.PodPeer(namespace, None, pods if "podSelector" in given else EVERYTHING)


def read_network(value: object, field: str) -> Network:
    """Return the range of a CIDR, host bits cleared. Raises Invalid."""
    return converted(value, field, parse_network, "a CIDR")


def read_block(value: object, field: str) -> policy_model.BlockPeer:
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
    return policy_model.BlockPeer(network, tuple(excepted))


def _contains(outer: Network, inner: Network) -> bool:
    shift = (32 if outer.family == "IPv4" else 128) - outer.prefix_length
    return inner.first >> shift == outer.first >> shift


def is_port_name(value: object) -> bool:
    """Return whether a value is an IANA service name (RFC 6335), as names of container ports must be."""
    return isinstance(value, str) and _PORT_NAME.fullmatch(value) is not None


def _port(value: object, field: str) -> policy_model.PolicyPort:
    raw = fields_of(value, _PORT_FIELDS, field)
    kind = protocol(raw.get("protocol"), f"{field}.protocol")
    port, last = raw.get("port"), raw.get("endPort")
    if port is None:
        if last is not None:
            raise Invalid(f"{field}.endPort", "needs a port")
        return policy_model.PolicyPort(kind)
    if isinstance(port, str):
        if not is_port_name(port):
            raise Invalid(f"{field}.port", f"{shown(port)} is neither a number nor the name of a port")
        if last is not None:
            raise Invalid(f"{field}.endPort", "needs a port that is a number")
        return policy_model.PolicyPort(kind, name=port)
    first = integer(port, f"{field}.port", 1, policy_model.LAST_PORT)
    return policy_model.PolicyPort(kind, first, integer(last, f"{field}.endPort", first, policy_model.LAST_PORT, first))
