# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Selection of the endpoints to check."""

from __future__ import annotations

from typing import Collection, Dict, Iterable, List, NamedTuple, Set, Tuple

from ...cluster.fields import special_use
from ...cluster.model import NamespacedName, Service
from ...cluster.state import ClusterState
from ...configuration.node_proxy import HealthChecks
from .attempt import Target

Places = Dict[Target, Set[Tuple[str, int]]]


class Chosen(NamedTuple):
    """The targets to check, and the reason for each Service whose endpoints are not all checked."""

    targets: Tuple[Target, ...]
    unchecked: Dict[NamespacedName, str]


def places_of(state: ClusterState, name: NamespacedName) -> Places:
    """Return a Service's targets with the endpoint's address and port that depend on each; port 0 means all ports.

    Only TCP ports can be checked, unless the check has a separate port.
    """
    service = state.services.get(name)
    found: Places = {}
    if service is None or service.check is None:
        return found
    for item in state.slices_of(name).values():
        for endpoint in item.endpoints:
            if service.check.port:
                target = Target(name, endpoint.address, service.check.port, service.check)
                found.setdefault(target, set()).add((endpoint.address, 0))
                continue
            for port in item.ports:
                if port.protocol == "TCP":
                    target = Target(name, endpoint.address, port.port, service.check)
                    found.setdefault(target, set()).add((endpoint.address, port.port))
    return found


def choose(
    state: ClusterState, names: Iterable[NamespacedName], settings: HealthChecks, own_addresses: Collection[str]
) -> Chosen:
    """Return the targets of these Services: static ones first, then others by name, up to the maximum.

    A Service of the cluster is never checked at loopback, link-local or own addresses of the node: its owner must not
    be able to make the agent connect to what only the node can reach.
    """
    targets: List[Target] = []
    unchecked: Dict[NamespacedName, str] = {}
    services = [service for service in map(state.services.get, names) if service is not None]
    for service in sorted(services, key=lambda item: (not item.static, item.key)):
        reason = ""
        wanted = sorted(places_of(state, service.key))
        if not service.static:
            allowed = [item for item in wanted if item.address not in own_addresses and not special_use(item.address)]
            if len(allowed) < len(wanted):
                reason = "endpoints at addresses of this node are not checked"
            wanted = allowed
        room = max(0, settings.most_endpoints - len(targets))
        if len(wanted) > room:
            limit = f"at most {settings.most_endpoints} are"
            reason = f"{len(wanted) - room} of {len(wanted)} endpoints are not checked: {limit}"
        targets += wanted[:room]
        if reason:
            unchecked[service.key] = reason
    return Chosen(tuple(targets), unchecked)


def not_allowed(service: Service, settings: HealthChecks) -> str:
    """Return why a Service may not have its endpoints checked; empty if it may.

    One of the cluster may if its namespace is listed, and not with a CA file.
    """
    if service.static or service.check is None:
        return ""
    if service.namespace not in settings.namespaces:
        return "is not checked: its namespace is not in healthChecks.namespaces"
    return "is not checked: only a static Service may name a CA file" if service.check.ca else ""
