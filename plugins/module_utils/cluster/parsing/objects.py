# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of raw objects (decoded JSON) into values of the model, or into a Refusal that names the invalid field."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Union

from ...base.errors import Refusal, defect_text
from ..fields import Invalid, address, cidr, dns_subdomain, elements, interned, leniently, mapping, shown, text
from ..model import EndpointSlice, Node, Service, ServiceCIDR
from ..policies.policy_model import ClusterNetworkPolicy, Namespace, NetworkPolicy, Pod
from .cluster_network_policy import VERSIONS, parse_cluster_network_policy
from .network_policy import parse_namespace, parse_network_policy, parse_pod, read_labels
from .service import parse_endpoint_slice, parse_service
from .weight import WEIGHT, parse_weight

#: How many invalid parts of an object are named; the last line counts the others. Two bytes may make a part.
MOST_PARTS = 20
ZONE_LABEL = "topology.kubernetes.io/zone"
HOSTNAME_LABEL = "kubernetes.io/hostname"

Parsed = Union[Service, EndpointSlice, Node, ServiceCIDR, Pod, Namespace, NetworkPolicy, ClusterNetworkPolicy]


class ObjectKey(NamedTuple):
    """The identity of a raw object: kind, namespace (empty for cluster-scoped kinds) and name."""

    kind: str
    namespace: str
    name: str

    @property
    def full_name(self) -> str:
        """The name, after the namespace if there is one."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ParsedObject(NamedTuple):
    """What is known of a raw object once it is parsed.

    ``value`` and ``skipped``: as :func:`parse_object` returns them. ``is_supported``: whether the proxy reads objects
    of its kind and API group.
    """

    key: ObjectKey
    value: Union[Parsed, Refusal, None]
    skipped: tuple[Refusal, ...] = ()
    is_supported: bool = True


def parse_node(raw: dict[str, Any], skipped: list[Invalid]) -> Node:
    """Return the Node that a raw object describes.

    Invalid addresses and pod CIDRs are skipped and appended to ``skipped``. Raises Invalid.
    """
    metadata = mapping(raw.get("metadata"), "metadata")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    labels = mapping(metadata.get("labels"), "metadata.labels")
    annotations = metadata.get("annotations")
    weight = parse_weight(annotations, WEIGHT, skipped) if isinstance(annotations, dict) else None
    spec = mapping(raw.get("spec"), "spec")
    addresses = _node_addresses(mapping(raw.get("status"), "status").get("addresses"), skipped)
    given = elements(spec.get("podCIDRs"), "spec.podCIDRs")
    if not given and spec.get("podCIDR"):
        given = [(spec["podCIDR"], "spec.podCIDR")]
    pod_cidrs = filter(None, [leniently(cidr, *item, skipped, "") for item in given])
    taints = elements(spec.get("taints"), "spec.taints")
    taint_keys = [text(mapping(value, field).get("key"), f"{field}.key") for value, field in taints]
    return Node(
        name=name,
        internal_ips=tuple(addresses["InternalIP"]),
        external_ips=tuple(addresses["ExternalIP"]),
        pod_cidrs=tuple(pod_cidrs),
        zone=text(labels.get(ZONE_LABEL), f"metadata.labels[{ZONE_LABEL}]"),
        taint_keys=tuple(taint_keys),
        deleting=bool(metadata.get("deletionTimestamp")),
        hostname=text(labels.get(HOSTNAME_LABEL), f"metadata.labels[{HOSTNAME_LABEL}]"),
        weight=1 if weight is None else weight,
        labels=read_labels(labels, []),
    )


def _node_addresses(raw: object, skipped: list[Invalid]) -> dict[str, list[str]]:
    """Return the internal and external addresses of a Node, by type, in the order of status.addresses."""
    found: dict[str, list[str]] = {"InternalIP": [], "ExternalIP": []}

    def read(value: object, field: str) -> None:
        item = mapping(value, field)
        kind = text(item.get("type"), f"{field}.type")
        if kind in found:
            found[kind].append(address(item.get("address"), f"{field}.address"))

    for value, field in elements(raw, "status.addresses"):
        leniently(read, value, field, skipped, None)
    return found


def parse_service_cidr(raw: dict[str, Any], _skipped: list[Invalid]) -> ServiceCIDR:
    """Return the ServiceCIDR that a raw object describes. Raises Invalid if any of its CIDRs is invalid."""
    metadata = mapping(raw.get("metadata"), "metadata")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    spec = mapping(raw.get("spec"), "spec")
    return ServiceCIDR(name, tuple(cidr(*item) for item in elements(spec.get("cidrs"), "spec.cidrs")))


class _Kind(NamedTuple):
    versions: tuple[str, ...]
    parse: Callable[[dict[str, Any], list[Invalid]], Optional[Parsed]]


_KINDS: dict[str, _Kind] = {
    "Service": _Kind(("v1",), parse_service),
    "EndpointSlice": _Kind(("discovery.k8s.io/v1",), parse_endpoint_slice),
    "Node": _Kind(("v1",), parse_node),
    "ServiceCIDR": _Kind(("networking.k8s.io/v1",), parse_service_cidr),
    "Pod": _Kind(("v1",), parse_pod),
    "Namespace": _Kind(("v1",), parse_namespace),
    "NetworkPolicy": _Kind(("networking.k8s.io/v1",), parse_network_policy),
    "ClusterNetworkPolicy": _Kind(VERSIONS, parse_cluster_network_policy),
}

KINDS: tuple[str, ...] = tuple(_KINDS)


def is_supported(raw: object) -> bool:
    """Return whether a raw object is of a kind and API group that the proxy reads; others are ignored silently."""
    if not isinstance(raw, dict):
        return True
    kind = raw.get("kind")
    if not isinstance(kind, str) or not kind:
        return True
    known = _KINDS.get(kind)
    if known is None:
        return False
    version = raw.get("apiVersion")
    if not isinstance(version, str) or not version or version in known.versions:
        return True
    # The same kind in another API group is an unrelated type (a Knative Service); an older version is the same type.
    return version.rpartition("/")[0] == known.versions[0].rpartition("/")[0]


def object_key(raw: object) -> ObjectKey:
    """Return kind, namespace and name of a raw object, with empty text for each that is not a string."""
    if not isinstance(raw, dict):
        return ObjectKey("", "", "")
    metadata = raw.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    kind, namespace, name = raw.get("kind"), metadata.get("namespace"), metadata.get("name")
    # Many parts of the agent keep these texts.
    return ObjectKey(
        interned(kind) if isinstance(kind, str) else "",
        interned(namespace) if isinstance(namespace, str) else "",
        interned(name) if isinstance(name, str) else "",
    )


def parse_object(raw: object, skipped: Optional[list[Refusal]] = None) -> Union[Parsed, Refusal, None]:
    """Return one raw object as a value of the model.

    Returns None for an object that the proxy does not serve (another kind, headless, labelled for another proxy) and a
    Refusal for an invalid one; no input raises. Invalid parts on which nothing else in the object depends (addresses,
    endpoints, peers of a policy) are skipped and appended to ``skipped``, the first of them by name.
    """
    invalid_parts: list[Invalid] = []
    try:
        if not is_supported(raw):
            return None
        if not isinstance(raw, dict):
            raise Invalid("", f"{shown(raw)} is not an object")
        known = _KINDS.get(text(raw.get("kind"), "kind"))
        if known is None:
            raise Invalid("kind", "is missing")
        version = raw.get("apiVersion")
        if version is not None and version not in known.versions:
            raise Invalid("apiVersion", f"{shown(version)} is not {' or '.join(known.versions)}")
        parsed = known.parse(raw, invalid_parts)
    except Invalid as error:
        return _refusal(raw, error)
    if invalid_parts and skipped is not None:
        skipped += [_refusal(raw, error) for error in _named(invalid_parts)]
    return parsed


def _named(parts: list[Invalid]) -> list[Invalid]:
    others = len(parts) - MOST_PARTS
    if others <= 0:
        return parts
    last = parts[MOST_PARTS - 1]
    reason = f"{last.reason}; and {others} more parts of the object are invalid"
    return [*parts[: MOST_PARTS - 1], Invalid(last.field, reason)]


def parsed_object(raw: object, key: ObjectKey) -> ParsedObject:
    """Return one raw object with this key in parsed form; no input raises.

    If a defect of the parser makes it raise something else than Invalid, that refuses only this object.
    """
    skipped: list[Refusal] = []
    try:
        value = parse_object(raw, skipped)
    except MemoryError:
        raise
    except Exception as error:
        skipped = []
        value = _refusal(raw, Invalid("", f"cannot be read, which is a defect of this program: {defect_text(error)}"))
    return ParsedObject(key, value, tuple(skipped), value is not None or is_supported(raw))


def _refusal(raw: object, error: Invalid) -> Refusal:
    key = object_key(raw)
    return Refusal(key.kind or "object", key.namespace, key.name, error.field, error.reason)
