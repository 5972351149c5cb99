# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The answer to ``explain --from END --to END``: the flows between the ends, and the verdicts of network policies."""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence

from ..base.addresses import family_of
from ..base.errors import ProxyError, UnknownDestination
from ..cluster.model import NamespacedName
from ..cluster.state import ClusterState
from ..convergence.modes.mode import Mode
from ..serviceports.service_ports import cluster_ip_of
from .explain import ExplainedFamily, explain
from .flows import FlowExplainer, Kernel
from .policy import PolicyExplainer, Resolved, resolved, service_endpoints, service_target
from .target import PROTOCOLS, Destination, End

Policies = Callable[[Sequence[Resolved]], PolicyExplainer]


class Subject(NamedTuple):
    """The data for explanations of connections.

    ``kernel``: None to show only the decision of the model. ``policies``: explains network policies, given the
    endpoints of a Service; None if the node does not enforce any.
    """

    state: ClusterState
    families: Sequence[ExplainedFamily]
    mode: Mode
    node: str
    kernel: Optional[Kernel]
    policies: Optional[Policies]


def connection_document(subject: Subject, source: End, destination: End) -> dict[str, Any]:
    """Return the explanation as plain JSON values. Raises ProxyError if an end does not exist, or nothing is known."""
    flows, problems = _flows(subject, source, destination)
    services = explain(subject.state, subject.families, subject.mode.name, service_target(destination))
    endpoints = _chosen(flows) or service_endpoints(services)
    if subject.policies is None:
        document = _without_policies(subject, source, destination, "this node does not enforce network policies")
        if not flows:
            raise ProxyError(f"{destination}: this node does not enforce network policies, and Services have no icmp")
    elif services.found and not endpoints:
        document = _without_policies(subject, source, destination, "the Service has no endpoint for policies to judge")
    else:
        document = subject.policies(endpoints).document(source, destination)
    differences = [line for flow in flows for line in flow["differences"]]
    return {
        **document,
        "zone": services.zone,
        "mode": subject.mode.name,
        "behaviour": services.behaviour,
        "kernelRead": subject.kernel is not None,
        "flows": flows,
        "differences": list(dict.fromkeys(differences)),
        "problems": problems,
    }


def _without_policies(subject: Subject, source: End, destination: End, note: str) -> dict[str, Any]:
    return {
        "from": str(source),
        "to": str(destination),
        "node": subject.node,
        "allowed": True,
        "notes": [note],
        "connections": [],
    }


def _flows(subject: Subject, source: End, destination: End) -> tuple[list[dict[str, Any]], list[str]]:
    if not subject.mode.serves or destination.protocol not in PROTOCOLS:
        return [], []
    explainer = FlowExplainer(subject.state, subject.families, subject.mode, subject.kernel)
    found = [
        explainer.document(sender, source.port, Destination(receiver, destination.port, destination.protocol))
        for receiver in _receivers(subject, destination)
        for sender in _senders(subject, source)
        if family_of(sender) == family_of(receiver)
    ]
    if not found:
        raise ProxyError(f"{source} and {destination} have no addresses of the same family")
    return found, explainer.problems


def _pod_addresses(subject: Subject, end: End) -> Optional[Sequence[str]]:
    pod = subject.state.policy.pods.get(NamespacedName(end.namespace, end.name))
    return None if pod is None else pod.addresses


def _senders(subject: Subject, end: End) -> Sequence[str]:
    if not end.name:
        return (end.address,)
    addresses = _pod_addresses(subject, end)
    if addresses is None:
        hint = "" if subject.policies is not None else "; without network policies pods are not known, give an address"
        raise ProxyError(f"there is no pod {end.namespace}/{end.name}{hint}")
    return addresses


def _receivers(subject: Subject, end: End) -> Sequence[str]:
    if not end.name:
        return (end.address,)
    addresses = _pod_addresses(subject, end)
    return list(_cluster_ips(subject, end)) if addresses is None else addresses


def _cluster_ips(subject: Subject, end: End) -> Iterator[str]:
    service = subject.state.services.get(NamespacedName(end.namespace, end.name))
    if service is None:
        kinds = "pod or Service" if subject.policies is not None else "Service"
        raise UnknownDestination(f"there is no {kinds} {end.namespace}/{end.name} that this node serves")
    for family in subject.families:
        address = cluster_ip_of(service, family.context.family)
        if address:
            yield address


def _chosen(flows: Sequence[dict[str, Any]]) -> list[Resolved]:
    """Return the endpoints that the flows may reach."""
    chosen = ((item["endpoint"], flow) for flow in flows for item in flow["endpoints"] if item["chosen"])
    return list(dict.fromkeys(resolved(endpoint, flow["protocol"], flow["service"]) for endpoint, flow in chosen))
