# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies of the node in a convergence: from the cluster state to the stage of their table.

It is imported only where policies are enforced: Ansible ships modules as source, which each run compiles.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Iterable, Optional, Sequence

from ..base.addresses import FAMILIES, Network, family_of_packed, networks_of, packed, unpacked
from ..base.progress import Progress, unheeded
from ..cluster.state import ClusterState
from ..configuration.node_proxy import CUT, DENY, NetworkPolicySettings
from ..kernel.conntrack.connections import Connection, cutting_connections
from ..kernel.conntrack.socket import Steps
from ..kernel.facts import interface_addresses, kernel_release
from ..kernel.modules.modules import asking_loads
from ..kernel.nftables.features import has_bridge_family
from ..kernel.pod_links import PodLinks
from ..networkpolicy.matching.owners import Address, AddressOwners, counts
from ..networkpolicy.node_policy import NodePolicy, unselected_pods, unused_policies
from ..networkpolicy.rows import (
    BOUND,
    BRIDGED,
    EXEMPT_LINK,
    HERE,
    LINK,
    POD_LINK,
    PORT,
    PORT_BOUND,
    PORT_CLOSED,
    PORT_UNTAGGED,
    Row,
)
from ..preflight.findings import Finding
from ..preflight.policies import bridge_findings, other_implementations, unknown_pod_findings
from ..preflight.processes import processes
from ..rendering.networkpolicy.elements import desired_table
from ..rendering.networkpolicy.sets import NO_LOG, SIDES, Options
from ..rendering.networkpolicy.text import restore_text
from ..resources import Resource, Stage, UnloadedResource
from .handles import KernelHandles

_NAMED_CLAIMS = 5
_NAMED_POLICIES = 20


def policy_options(settings: NetworkPolicySettings) -> Options:
    """Return the options on which the rules of the table depend."""
    return Options(
        tiers=settings.cluster_policies,
        cut=settings.established_connections == CUT,
        log_group=settings.log_group if settings.log_denied else NO_LOG,
        unknown=settings.unknown_pods == DENY,
        egress_exempt=bool(settings.egress_exempt_cidrs),
        exempt=bool(settings.exempt_sources),
    )


def raw_addresses(addresses: Iterable[tuple[str, str]]) -> list[Address]:
    """Return the addresses of pairs (interface, address), packed."""
    return [raw for raw in (packed(address) for _interface, address in addresses) if raw is not None]


def node_policy(
    cluster: ClusterState,
    settings: NetworkPolicySettings,
    node_name: str,
    addresses: Iterable[tuple[str, str]],
    ranges: Optional[Sequence[Network]] = None,
    *,
    progress: Progress = unheeded,
) -> NodePolicy:
    """Return the policies of a node. ``addresses``: of the node, as pairs (interface, address).

    ``ranges``: its pod ranges, by default those that :func:`pod_ranges` finds. ``progress``: see :class:`.NodePolicy`.
    """
    return NodePolicy(
        node_name,
        cluster.policy,
        raw_addresses(addresses),
        settings.cluster_policies,
        pod_ranges=pod_ranges(cluster, settings, node_name) if ranges is None else ranges,
        egress_exempt=networks_of(settings.egress_exempt_cidrs),
        exempt=networks_of(settings.exempt_sources),
        progress=progress,
    )


def find_links(policy: NodePolicy, settings: NetworkPolicySettings, links: Optional[PodLinks] = None) -> None:
    """Determine the interfaces of pods, on which sources are checked and link-local traffic may be denied.

    ``links``: what finds the interfaces. Raises KernelError.
    """
    pods = {unpacked(address): (address, local.pod) for local in policy.local.values() for address in local.at}
    links = links or PodLinks()
    found = links.find(sorted(pods))
    restricted = {side: policy.restricted(side) for side in SIDES}
    rows: list[Row] = []
    port_rows: list[Row] = []
    for text, link in found.items():
        address, pod = pods[text]
        exempt = settings.exempt_sources and pod.namespace in (settings.exempt_source_namespaces or (pod.namespace,))
        if settings.check_sources:
            rows += [(POD_LINK, link.interface), (BOUND, link.interface, address), (HERE, address)]
        # Nothing but the node can reach the link-local address of a pod that has an interface of its own.
        sides = [side for side in SIDES if address in restricted[side] and (side == "out" or link.is_bridge)]
        rows += [(LINK, side, link.interface) for side in sides]
        if exempt:
            rows.append((EXEMPT_LINK, link.interface))
        if link.port is not None:
            port_rows.append((PORT_BOUND, link.port[1], address))
            port_rows += [] if exempt else [(PORT_CLOSED, link.port[1], family_of_packed(address))]
    if settings.check_sources and any(link.is_bridge for link in found.values()) and _judges_frames():
        rows += [(BRIDGED,), *port_rows, *((PORT, interface) for _number, interface in links.ports)]
        rows += [(PORT_UNTAGGED, port[1]) for port, has_trunk in links.ports.items() if not has_trunk]
    policy.set_links(rows)


def _judges_frames() -> bool:
    """Return whether nf_tables sees the frames of bridges; also if it is not loaded yet, which a check must not do."""
    return bool(asking_loads("nf_tables", kernel_release())) or has_bridge_family()


def pod_ranges(cluster: ClusterState, settings: NetworkPolicySettings, node_name: str) -> tuple[Network, ...]:
    """Return the ranges in which traffic of addresses of no known pod is denied; none if it is allowed."""
    if settings.unknown_pods != DENY:
        return ()
    node = cluster.nodes.get(node_name)
    texts = settings.pod_cidrs or (node.pod_cidrs if node is not None else ())
    return tuple(networks_of(texts))


def annotation_warnings(policy: NodePolicy) -> list[str]:
    """Return lines for the first policies that are too large, and the first pods that claim an address of the node."""
    large = [
        f"NetworkPolicy {key}: spec.{direction.lower()}: allows nothing, because it has {reason}; its pods are isolated"
        for (key, direction), reason in sorted(policy.too_large.items())
    ]
    claims = sorted(policy.owners.refused())
    lines = [f"Pod {key}: status.podIPs: {unpacked(address)} is an address of this node" for address, key in claims]
    disputed = [_disputed(policy.owners, address) for address in sorted(policy.owners.disputed)]
    return [
        *_first(large, _NAMED_POLICIES, "more policies allow nothing, because of their size"),
        *_first(lines, _NAMED_CLAIMS, "more pods claim addresses of this node"),
        *_first(disputed, _NAMED_CLAIMS, "more addresses of pods of this node are claimed by several pods"),
    ]


def _disputed(owners: AddressOwners, address: Address) -> str:
    """Return the line about an address that pods of this node and others claim."""
    own = owners.local[address]
    others = sorted((pod.key, pod.node_name) for pod in owners.claims(address) if not pod.deleting and pod not in own)
    named = [str(pod.key) for pod in own] + [f"{key} of node {node or 'unknown'}" for key, node in others]
    claims = ", ".join(_first(named, _NAMED_CLAIMS, "more"))
    return f"{unpacked(address)}: several Pods claim this address of a pod of this node, whose policies apply: {claims}"


def policy_coverage(policy: NodePolicy, cluster: ClusterState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the pods of the node that no policy selects, and the policies that select no pod of the cluster."""
    return tuple(map(str, unselected_pods(policy))), tuple(map(str, unused_policies(cluster.policy)))


def _first(lines: list[str], most: int, others: str) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"{len(lines) - most} {others}"]


def policy_findings(cluster: ClusterState, settings: NetworkPolicySettings, node_name: str) -> list[Finding]:
    """Return findings about anything that keeps policies from being enforced on this node, or that enforces others."""
    pods = (pod for pod in cluster.policy.pods.values() if pod.node_name == node_name and counts(pod))
    addresses = [address for pod in pods for address in pod.addresses]
    judges_frames = _judges_frames if settings.check_sources else lambda: True
    found = [*bridge_findings(addresses, judges_frames=judges_frames), *other_implementations(processes())]
    if settings.unknown_pods == DENY:
        found += unknown_pod_findings(addresses, pod_ranges(cluster, settings, node_name))
    return found


def policy_text(
    cluster: ClusterState, settings: NetworkPolicySettings, node_name: str, addresses: Iterable[tuple[str, str]]
) -> str:
    """Return the table of a node as text for ``nft -f``; see :func:`node_policy`."""
    policy = node_policy(cluster, settings, node_name, addresses)
    return restore_text(desired_table(policy.table.rows, policy_options(settings)))


def policy_stage(
    policy: NodePolicy, settings: NetworkPolicySettings, handles: KernelHandles, check: bool = False
) -> Stage:
    """Return the stage of the table. In a check, a kernel module that is not loaded counts as an empty table."""
    resource: Resource[Any, Any] = handles.network_policy()
    if check and not handles.has_nftables():
        resource = UnloadedResource.instead_of(resource)
    return Stage(resource, desired_table(policy.table.rows, policy_options(settings)))


def cutting_denied(
    policy: NodePolicy, addresses: Optional[AbstractSet[Address]] = None, progress: Progress = unheeded
) -> Steps[int]:
    """Delete connection tracking entries of connections that policies no longer allow; return how many.

    ``addresses``: only those with one of these at an end, by default with a pod that policies select. Wherever it
    pauses, the policies may change. The node's own connections to its pods are always allowed, from any of its
    addresses (network policy contract, section 3.2): one to a cluster IP that is on a device of the proxy comes from
    that address. Raises KernelError.
    """
    own = {packed(item.address) for item in interface_addresses()}

    def denied(connection: Connection) -> bool:
        judge = policy.judge()
        if connection.source in own or not any(map(judge.is_policed, connection[:2])):
            return False
        return not judge.allows(connection.source, connection.destination, connection.protocol, connection.port)

    wanted = policy.policed() if addresses is None else addresses
    count = 0
    for family in FAMILIES:
        chosen = {address for address in wanted if family_of_packed(address) == family}
        if chosen:
            count += yield from cutting_connections(family, chosen, denied, progress)
    return count
