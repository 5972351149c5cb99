# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of the fields of raw Pods and Namespaces (core/v1) on which network policies depend.

Everything but the identity is read leniently: a pod that is skipped would not be protected.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from ...base.addresses import canonical_address, packed
from ..fields import (
    Invalid,
    dns_label,
    dns_subdomain,
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
from ..policies.policy_model import ContainerPort, Namespace, Pod

_ENDED = ("Succeeded", "Failed")
_ALWAYS = "Always"
_MAYBE_MULTICAST = ("ff", "22", "23")


def parse_pod(raw: Dict[str, Any], skipped: List[Invalid]) -> Pod:
    """Return the Pod that a raw object describes. Invalid parts are skipped and appended to ``skipped``.

    Raises Invalid if it has no valid identity.
    """
    metadata = mapping(raw.get("metadata"), "metadata")
    namespace = dns_label(metadata.get("namespace"), "metadata.namespace")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    spec = _part(raw.get("spec"), "spec", skipped)
    status = _part(raw.get("status"), "status", skipped)
    return Pod(
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


def parse_namespace(raw: Dict[str, Any], skipped: List[Invalid]) -> Namespace:
    """Return the Namespace that a raw object describes. Raises Invalid if it has no valid name."""
    metadata = mapping(raw.get("metadata"), "metadata")
    name = dns_label(metadata.get("name"), "metadata.name")
    labels = read_labels(metadata.get("labels"), skipped)
    return Namespace(interned(name), labels, bool(metadata.get("deletionTimestamp")))


def read_labels(value: object, skipped: List[Invalid]) -> Dict[str, str]:
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


def _part(value: object, field: str, skipped: List[Invalid]) -> Dict[str, Any]:
    return value if isinstance(value, dict) else leniently(mapping, value, field, skipped, {})


def _list(value: object, field: str, skipped: List[Invalid]) -> List[Any]:
    return value if isinstance(value, list) else leniently(sequence, value, field, skipped, [])


def _text(value: object, field: str, skipped: List[Invalid]) -> str:
    return value if isinstance(value, str) else leniently(text, value, field, skipped, "")


def _addresses(status: Dict[str, Any], skipped: List[Invalid]) -> Tuple[str, ...]:
    """Return the addresses of status.podIPs, or of status.podIP where there are none."""
    items = [
        (f"status.podIPs[{index}].ip", item.get("ip") if isinstance(item, dict) else item)
        for index, item in enumerate(_list(status.get("podIPs"), "status.podIPs", skipped))
    ]
    if not items and status.get("podIP"):
        items = [("status.podIP", status["podIP"])]
    found: Dict[str, None] = {}
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


def _ports(spec: Dict[str, Any], skipped: List[Invalid]) -> Tuple[ContainerPort, ...]:
    """Return the named ports of containers, and of init containers that keep running (sidecars)."""
    found: Dict[ContainerPort, None] = {}
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(_list(spec.get(kind), f"spec.{kind}", skipped)):
            where = f"spec.{kind}[{index}]"
            item = _part(container, where, skipped)
            if kind == "initContainers" and item.get("restartPolicy") != _ALWAYS:
                continue
            for position, port in enumerate(_list(item.get("ports"), f"{where}.ports", skipped)):
                named = leniently(_port, port, f"{where}.ports[{position}]", skipped, None)
                if named is not None:
                    found[named] = None
    return tuple(found)


def _port(value: object, field: str) -> Optional[ContainerPort]:
    """Return a port, None if it has no name. Raises Invalid."""
    raw = mapping(value, field)
    name = text(raw.get("name"), f"{field}.name")
    if not name:
        return None
    number = integer(raw.get("containerPort"), f"{field}.containerPort", 1, 65535)
    return ContainerPort(interned(name), protocol(raw.get("protocol"), f"{field}.protocol"), number)
