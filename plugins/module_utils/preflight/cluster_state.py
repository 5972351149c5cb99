# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check that the cluster state is complete, contains this Node, and does not cut off most Services."""

from __future__ import annotations

from typing import AbstractSet, Collection, Mapping, NamedTuple, Sequence

from ..base.errors import some_of
from ..cluster.model import EndpointSlice, NamespacedName, Node, Service
from ..cluster.parsing.objects import ParsedObject
from ..cluster.state import ClusterState
from .findings import ERROR, INCOMPLETE_SNAPSHOT, LOSS, NODE, OTHER_CLUSTER, Finding

POLICIES_COMMAND = "kubectl get services,endpointslices,nodes,pods,namespaces,networkpolicies -A -o json"
COMPLETE_COMMAND = "kubectl get services,endpointslices,nodes -A -o json"
#: With fewer Services on a node than this, a percentage of them is not meaningful.
LOSS_MINIMUM = 10
#: What a new node needs first: access to the API server, and name resolution.
FIRST_SERVICES = (
    NamespacedName("default", "kubernetes"),
    NamespacedName("kube-system", "kube-dns"),
    NamespacedName("kube-system", "coredns"),
)
_NAMED = 5

_FOR_SERVICES = ("Service", "EndpointSlice")
_FOR_POLICIES = ("Pod", "Namespace")


def is_first(item: ParsedObject) -> bool:
    """Return whether an object is one of the first Services, or an EndpointSlice of one."""
    if isinstance(item.value, EndpointSlice):
        return item.value.service_key in FIRST_SERVICES
    return item.key.kind == "Service" and NamespacedName(item.key.namespace, item.key.name) in FIRST_SERVICES


class Host(NamedTuple):
    """Identity of a host: the Node name to search for, the host's own names, and its addresses."""

    node_name: str
    host_names: Sequence[str]
    addresses: Collection[str]


def completeness_findings(
    kinds: AbstractSet[str], outside: bool = False, *, policies: bool = False, services: bool = True
) -> list[Finding]:
    """Return an error if the cluster state has no object of a kind that every cluster has.

    A running cluster has at least the Service ``default/kubernetes`` with its EndpointSlice, a Node, Namespaces and
    Pods. ``kinds``: those of which there is an object. ``outside``: for a host outside the cluster, which needs no
    Node. ``policies``: network policies are enforced, so that Namespaces and Pods are needed too.
    ``services``: Services are served.
    """
    required = (*(_FOR_SERVICES if services else ()), "Node", *(_FOR_POLICIES if policies else ()))
    missing = [kind for kind in required if kind not in kinds and not (outside and kind == "Node")]
    if not missing:
        return []
    command = POLICIES_COMMAND if policies else COMPLETE_COMMAND
    return [
        Finding(
            INCOMPLETE_SNAPSHOT,
            ERROR,
            f"the cluster state has no {' and no '.join(missing)}, so it is not that of a complete cluster",
            f'make a complete snapshot with "{command}", as a user who may list all of these',
        )
    ]


def _node_of_name(nodes: Mapping[str, Node], host: Host) -> str:
    """Return which Node is probably meant by the host's names and why, or empty text."""
    names = {name.strip().lower() for name in (host.node_name, *host.host_names) if name.strip()}
    short = {name.partition(".")[0] for name in names}
    by_name = [name for name in nodes if name in names or name.partition(".")[0] in short]
    by_label = [node.name for node in nodes.values() if node.hostname and node.hostname.lower() in names | short]
    for found, what in (by_name, "the same short name"), (by_label, "this host's name in its label {}"):
        if len(found) == 1:
            return f"Node {found[0]} has {what}".format("kubernetes.io/hostname")
    return ""


def _node_of_address(nodes: Mapping[str, Node], host: Host) -> str:
    """Return the name of the only Node with an address of the host, or empty text."""
    names = [node.name for node in nodes.values() if not set(node.addresses).isdisjoint(host.addresses)]
    return names[0] if len(names) == 1 else ""


def node_findings(cluster: ClusterState, host: Host) -> list[Finding]:
    """Return an error if the host's node name is that of no Node, or of another host; it suggests the right one.

    Without a Node no endpoint is local, and with that of another host the wrong ones are: the host would drop traffic
    of policy Local.
    """
    owner = _node_of_address(cluster.nodes, host)
    is_named = host.node_name in cluster.nodes
    if is_named and owner in ("", host.node_name):
        return []
    likely = "" if is_named else _node_of_name(cluster.nodes, host)
    if owner and not likely:
        address = next(address for address in cluster.nodes[owner].addresses if address in host.addresses)
        likely = f"Node {owner} has this host's address {address}"
    listed = some_of(sorted(cluster.nodes), _NAMED) or "none"
    what = f"no Node is named {host.node_name} (the cluster state has {listed})"
    if is_named:
        what = f"Node {host.node_name} has no address of this host"
    if likely:
        return [Finding(NODE, ERROR, f"{what}; {likely}", "set node_name (role: service_proxy_node_name) to its name")]
    remedy = (
        "give the name of its Node (node_name, role: service_proxy_node_name), exclude the host from the play, "
        "or declare it a host outside the cluster (outside_host, role: service_proxy_outside_host)"
    )
    return [Finding(NODE, ERROR, what, remedy)]


def loss_findings(
    before: AbstractSet[str], after: AbstractSet[str], names: Mapping[str, str], limit_percent: float
) -> list[Finding]:
    """Return an error if more than ``limit_percent`` of the Services that have endpoints would have none.

    ``before``, ``after``: cluster IPs of one family of the Services with endpoints in the kernel, now and after the
    change. ``names``: the Service of a cluster IP, if known. Below LOSS_MINIMUM Services there is no finding.
    """
    lost = sorted(before - after)
    if len(before) < LOSS_MINIMUM or len(lost) * 100 <= limit_percent * len(before):
        return []
    shown = some_of(sorted(names.get(address, address) for address in lost), _NAMED)
    what = (
        f"{len(lost)} of the {len(before)} Services that have endpoints on this node would lose all of them "
        f"({shown}), more than {limit_percent:g} %"
    )
    remedy = (
        "check the cluster state; if it is right, add this finding to ignore_findings or raise max_unserved_percent"
    )
    return [Finding(LOSS, ERROR, what, remedy)]


def origin_of(services: Mapping[NamespacedName, Service]) -> dict[NamespacedName, str]:
    """Return when the first Services of a cluster were created, which identifies it; empty if that is not known."""
    found = [service for service in map(services.get, FIRST_SERVICES) if service is not None]
    return {service.key: service.created for service in found if service.created}


def origin_findings(before: Mapping[NamespacedName, str], now: Mapping[NamespacedName, str]) -> list[Finding]:
    """Return an error if the cluster is another one than before.

    One of the Services by which it is known may be created again, but no cluster forgets all of them. ``before``,
    ``now``: when they were created (see :func:`origin_of`); ``now`` lacks a Service that does not exist.
    """
    if not before or any(now.get(service) == created for service, created in before.items()):
        return []
    seen = [
        f"Service {service} " + (f"was created at {now[service]}, not {created}" if service in now else "is missing")
        for service, created in before.items()
    ]
    what = f"this is another cluster than the one whose Services are programmed, which are kept ({', '.join(seen)})"
    remedy = "correct the kubeconfig; if the cluster was made again, add this finding to ignore_findings"
    return [Finding(OTHER_CLUSTER, ERROR, what, remedy)]
