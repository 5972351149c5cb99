# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts of an Ansible inventory, made from Node objects: their variables, groups and the address to connect to."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Collection, NamedTuple, Sequence

from ..base.addresses import canonical_address
from ..cluster.fields import dns_subdomain, flag, mapping, sequence, text
from .border import canonical_host, is_controller

#: The types of addresses of a Node, in the order of the documentation of Kubernetes.
ADDRESS_TYPES = ("Hostname", "InternalIP", "ExternalIP", "InternalDNS", "ExternalDNS")
PREFIX = "kubernetes_node_"
_ROLE_LABEL = "node-role.kubernetes.io/"
_OLD_ROLE_LABEL = "kubernetes.io/role"
_ZONE_LABEL, _REGION_LABEL = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
_INFO = ("architecture", "containerRuntimeVersion", "kernelVersion", "kubeletVersion", "operatingSystem", "osImage")
# A name that ssh and other connection plugins receive as an argument must not be taken for an option.
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9.]{0,251}[A-Za-z0-9])?")


class NodeHost(NamedTuple):
    """A host: its name, which is that of the Node, its variables, and the groups that it is in.

    ``shared``: its addresses, and its name, that are an address or the name of another Node, too, in canonical form.
    """

    name: str
    variables: dict[str, Any]
    groups: list[str]
    shared: Collection[str] = ()

    @property
    def addresses(self) -> dict[str, list[str]]:
        """The addresses by type, as the Node reports them."""
        found: dict[str, list[str]] = self.variables[f"{PREFIX}addresses"]
        return found

    def address(self, types: Sequence[str]) -> str:
        """Return the first address by types that is not shared, empty if there is none."""
        listed = (address for kind in types for address in self.addresses.get(kind, ()))
        return next((each for each in listed if canonical_host(each) not in self.shared), "")


def with_shared_addresses(hosts: Collection[NodeHost]) -> list[NodeHost]:
    """Return the hosts with the addresses that several have, which say nothing about who answers there.

    A kubelet may report any address as its own, and so let a playbook for its Node change another host. Which of the
    Nodes reports its own cannot be decided, so none is reached by it.
    """
    claimed = {
        host.name: {canonical_host(each) for each in (host.name, *chain.from_iterable(host.addresses.values()))}
        for host in hosts
    }
    claimants: dict[str, set[str]] = {}
    for name, addresses in claimed.items():
        for each in addresses:
            claimants.setdefault(each, set()).add(name)
    return [
        host._replace(shared=sorted(each for each in claimed[host.name] if len(claimants[each]) > 1)) for host in hosts
    ]


def node_host(raw: dict[str, Any]) -> NodeHost:
    """Return the host of a raw Node. Raises Invalid for one that has no valid name or a field of the wrong type."""
    metadata = mapping(raw.get("metadata"), "metadata")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    spec, status = mapping(raw.get("spec"), "spec"), mapping(raw.get("status"), "status")
    pairs = sorted(mapping(metadata.get("labels"), "metadata.labels").items())
    labels = {key: text(value, "metadata.labels") for key, value in pairs}
    info = mapping(status.get("nodeInfo"), "status.nodeInfo")
    roles = _roles(labels)
    ready, schedulable = _is_ready(status), not flag(spec.get("unschedulable"), "spec.unschedulable", False)
    zone = labels.get(_ZONE_LABEL, "")
    variables = {
        "name": name,
        "addresses": _addresses(status),
        "labels": labels,
        "roles": roles,
        "zone": zone,
        "region": labels.get(_REGION_LABEL, ""),
        "ready": ready,
        "schedulable": schedulable,
        "taints": [_taint(item) for item in sequence(spec.get("taints"), "spec.taints")],
        "pod_cidrs": [text(item, "spec.podCIDRs") for item in sequence(spec.get("podCIDRs"), "spec.podCIDRs")],
        "info": {key: text(info.get(key), f"status.nodeInfo.{key}") for key in _INFO},
    }
    groups = ["ready" if ready else "not_ready"]
    groups += [] if schedulable else ["unschedulable"]
    groups += [f"role_{role}" for role in roles]
    groups += [f"zone_{zone}"] if zone else []
    return NodeHost(name, {f"{PREFIX}{key}": value for key, value in variables.items()}, groups)


def _roles(labels: dict[str, str]) -> list[str]:
    found = {label[len(_ROLE_LABEL) :] for label in labels if label.startswith(_ROLE_LABEL)}
    found.add(labels.get(_OLD_ROLE_LABEL, ""))
    return sorted(found - {""})


def _is_ready(status: dict[str, Any]) -> bool:
    for item in sequence(status.get("conditions"), "status.conditions"):
        condition = mapping(item, "status.conditions")
        if condition.get("type") == "Ready":
            return bool(condition.get("status") == "True")
    return False


def _addresses(status: dict[str, Any]) -> dict[str, list[str]]:
    """Return the valid addresses by type, without those of the controller itself.

    Kubelets report them, and a connection plugin passes them to programs.
    """
    found: dict[str, list[str]] = {}
    for item in sequence(status.get("addresses"), "status.addresses"):
        entry = mapping(item, "status.addresses")
        kind, value = text(entry.get("type"), "status.addresses.type"), text(entry.get("address"), "status.addresses")
        address = canonical_address(value) if kind.endswith("IP") else value
        is_address = address and (kind.endswith("IP") or _HOST_NAME.fullmatch(address))
        if kind in ADDRESS_TYPES and address and is_address and not is_controller(address):
            found.setdefault(kind, []).append(address)
    return found


def _taint(item: object) -> dict[str, str]:
    taint = mapping(item, "spec.taints")
    return {key: text(taint.get(key), f"spec.taints.{key}") for key in ("key", "value", "effect")}
