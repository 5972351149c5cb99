# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of a raw EndpointSlice (discovery.k8s.io/v1)."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from ...base.addresses import IPV4, IPV6, canonical_address, family_of
from ..fields import (
    Invalid,
    dns_label,
    dns_subdomain,
    elements,
    flag,
    integer,
    interned,
    mapping,
    optional_dns_label,
    protocol,
    sequence,
    sharing,
    shown,
    special_use,
    text,
)
from ..model import EndpointSlice, SliceEndpoint, SlicePort
from .weight import CILIUM_MOST, CILIUM_WEIGHT, WEIGHT, parse_weight

SERVICE_NAME_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
TRIGGER_TIME_ANNOTATION = "endpoints.kubernetes.io/last-change-trigger-time"
_NO_CONDITIONS: Dict[str, Any] = {}
_new = tuple.__new__


def parse_endpoint_slice(raw: Dict[str, Any], skipped: List[Invalid]) -> Optional[EndpointSlice]:
    """Return the EndpointSlice that a raw object describes, or None for one that no Service can use.

    No Service can use slices labelled headless, slices without an owning Service, and slices of addressType FQDN.
    Endpoints without an address and ports without a number are dropped; invalid endpoints are skipped and appended to
    ``skipped``. Raises Invalid.
    """
    metadata = mapping(raw.get("metadata"), "metadata")
    namespace = dns_label(metadata.get("namespace"), "metadata.namespace")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    labels = mapping(metadata.get("labels"), "metadata.labels")
    owner = labels.get(SERVICE_NAME_LABEL)
    family = raw.get("addressType")
    if labels.get(HEADLESS_LABEL) is not None or owner is None or owner == "" or family == "FQDN":
        return None
    owner = dns_label(owner, f"metadata.labels[{SERVICE_NAME_LABEL}]")
    if family not in (IPV4, IPV6):
        raise Invalid("addressType", f"{shown(family)} is not IPv4, IPv6 or FQDN")
    annotations = mapping(metadata.get("annotations"), "metadata.annotations")
    return EndpointSlice(
        namespace=namespace,
        name=name,
        service_name=owner,
        family=interned(family),
        ports=_ports(sequence(raw.get("ports"), "ports")),
        endpoints=_endpoints(sequence(raw.get("endpoints"), "endpoints"), family, skipped),
        trigger_time=interned(
            text(annotations.get(TRIGGER_TIME_ANNOTATION), f"metadata.annotations[{TRIGGER_TIME_ANNOTATION}]")
        ),
        weight=parse_weight(annotations, WEIGHT, skipped),
        alias_weight=parse_weight(annotations, CILIUM_WEIGHT, skipped, CILIUM_MOST),
    )


#: Most slices of a cluster have the same few ports.
_shared = sharing(SlicePort)


def _ports(raw_ports: List[Any]) -> Tuple[SlicePort, ...]:
    ports: List[SlicePort] = []
    for index, raw in enumerate(raw_ports):
        try:
            port = _port(raw)
        except Invalid as error:
            raise error.under(f"ports[{index}]") from None
        if port.port:
            ports.append(port)
    return _shared(tuple(ports))


def _port(raw: object) -> SlicePort:
    if not isinstance(raw, dict):
        raise Invalid("", f"{shown(raw)} is not an object")
    name = optional_dns_label(raw.get("name"), "name")
    return SlicePort(name, protocol(raw.get("protocol"), "protocol"), integer(raw.get("port"), "port", 0, 65535, 0))


def _endpoints(raw_endpoints: List[Any], family: str, skipped: List[Invalid]) -> Tuple[SliceEndpoint, ...]:
    endpoints: List[SliceEndpoint] = []
    for index, raw in enumerate(raw_endpoints):
        try:
            endpoint = _endpoint(raw, family)
        except Invalid as error:
            skipped.append(error.under(f"endpoints[{index}]"))
            continue
        if endpoint is not None:
            endpoints.append(endpoint)
    return tuple(endpoints)


def _endpoint(raw: object, family: str) -> Optional[SliceEndpoint]:
    if not isinstance(raw, dict):
        raise Invalid("", f"{shown(raw)} is not an object")
    # With 100,000 endpoints each call counts, so type checks of valid values are inlined.
    addresses = raw.get("addresses")
    if addresses.__class__ is not list:
        addresses = sequence(addresses, "addresses")
    if not addresses:
        return None
    # Like kube-proxy, read the first address only (the API defines no meaning for the others).
    first = addresses[0]
    if first.__class__ is not str:
        first = text(first, "addresses[0]")
    address = canonical_address(first)
    if address is None:
        raise Invalid("addresses[0]", f"{shown(first)} is not an IP address")
    if family_of(address) != family:
        raise Invalid("addresses[0]", f"{address} is not of the addressType {family}")
    special = special_use(address)
    if special:
        raise Invalid("addresses[0]", f"{address} is {special}")
    conditions = raw.get("conditions")
    if conditions is None:
        conditions = _NO_CONDITIONS
    elif not isinstance(conditions, dict):
        raise Invalid("conditions", f"{shown(conditions)} is not an object")
    zone_hints: Tuple[str, ...] = ()
    node_hints: Tuple[str, ...] = ()
    if raw.get("hints"):
        hints = mapping(raw["hints"], "hints")
        zone_hints = _hint_names(hints.get("forZones"), "hints.forZones")
        node_hints = _hint_names(hints.get("forNodes"), "hints.forNodes")
    ready, serving, terminating = conditions.get("ready"), conditions.get("serving"), conditions.get("terminating")
    if ready is not True or serving is not True or terminating is not False:
        ready = flag(ready, "conditions.ready", True)
        serving = flag(serving, "conditions.serving", True)
        terminating = flag(terminating, "conditions.terminating", False)
    node = raw.get("nodeName")
    node = interned(node if node.__class__ is str else text(node, "nodeName"))
    # SliceEndpoint(...) takes twice as long.
    return _new(SliceEndpoint, (address, node, ready, serving, terminating, zone_hints, node_hints))


def _hint_names(raw: object, field: str) -> Tuple[str, ...]:
    names = (text(mapping(value, where).get("name"), f"{where}.name") for value, where in elements(raw, field))
    return tuple(dict.fromkeys(names))
