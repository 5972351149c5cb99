# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The limit of stable hashing on a node: which of the Services that request it are hashed.

The slots of a ServicePort need hundreds of elements of a map for each of its addresses, so the number of such lists in
the tables of a family is limited (``Rendering.most_lists``), and that of one Service as well, whose lists change
together. Other Services choose at random, as without the annotation, and a warning names each.

All nodes must agree on which these are; otherwise a client's endpoint would depend on the node. So the limits are
constants, and only the Services themselves decide. They are admitted in the order of their age, while their namespace
has at most as many lists as are left (:func:`.account.within_share`), and in each namespace up to the first that does
not fit. So creating one never affects an older one, and no namespace takes the lists of others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from ..cluster.account import within_share
from ..cluster.model import NO_POLICY, YOUNGEST, NamespacedName
from ..serviceports.info import ServicePortInfo
from .rendering import Rendering, ServicePorts


class _Request(NamedTuple):
    """What a Service requests. The order of requests is that in which Services are admitted."""

    created: str
    service: NamespacedName
    lists: int


class SlotLimit:
    """The Services of one family that request slots in a mode, kept up to date one Service at a time.

    A change of endpoints costs nothing. A change of requests costs O(Services that request) while more than half of the
    lists are requested. ``admitted``: the lists of the Services that are admitted.
    """

    def __init__(self, rendering: Rendering[Any]) -> None:
        self._rendering = rendering
        self._requests: dict[NamespacedName, _Request] = {}
        self._in_order: list[_Request] = []
        self._lists = self.admitted = 0
        self._too_large: set[NamespacedName] = set()
        self._refused: frozenset[NamespacedName] = frozenset()

    def count(self, services: Mapping[NamespacedName, Sequence[ServicePortInfo]]) -> set[NamespacedName]:
        """Replace the ServicePorts of these Services; a Service without any requests nothing.

        Return the Services that are admitted now and were not before, or the other way round.
        """
        changed = False
        for service, ports in services.items():
            changed |= self._replace(service, self._request_of(service, ports))
        if not changed:
            return set()
        before, self._refused = self._refused, self._find_refused()
        self.admitted = self._lists - sum(self._requests[service].lists for service in self._refused)
        return {service for service in before ^ self._refused if service in self._requests}

    def has(self, service: NamespacedName) -> bool:
        """Return whether a Service requests slots."""
        return service in self._requests

    def slot_lists(self, service: NamespacedName) -> int:
        """Return the number of lists of a Service that is admitted; 0 of others."""
        request = self._requests.get(service)
        return request.lists if request is not None and self.admits(service) else 0

    def admits(self, service: NamespacedName) -> bool:
        """Return whether a Service has the slots that it requests, if any."""
        return service not in self._refused

    def applied(self, info: ServicePortInfo) -> ServicePortInfo:
        """Return a ServicePort as it is rendered: without its scheduler if the Service is not admitted."""
        if info.policy is NO_POLICY or self.admits(info.key.service) or not self._rendering.slot_lists(info):
            return info
        policy = info.policy
        problem = f"scheduler {policy.scheduler} is not used: {self._reason(info.key.service)}"
        policy = policy._replace(scheduler="", scheduler_flags=(), problems=(*policy.problems, problem))
        return info._replace(policy=policy)

    def _reason(self, service: NamespacedName) -> str:
        most = self._rendering.most_lists_of_service
        lists = self._requests[service].lists
        if lists > most:
            return f"its ports have {lists} addresses and node ports, but at most {most} of a Service can be hashed"
        return (
            f"older Services have too many of the {self._rendering.most_lists} addresses and node ports that can be "
            "hashed; a namespace has at most as many as are left"
        )

    def _request_of(self, service: NamespacedName, ports: Sequence[ServicePortInfo]) -> Optional[_Request]:
        lists = sum([self._rendering.slot_lists(port) for port in ports if port.policy is not NO_POLICY])
        return _Request(ports[0].created or YOUNGEST, service, lists) if lists else None

    def _replace(self, service: NamespacedName, request: Optional[_Request]) -> bool:
        """Replace the requests of a Service; return whether they changed."""
        before = self._requests.get(service)
        if before == request:
            return False
        if before is not None:
            del self._requests[service]
            del self._in_order[bisect_left(self._in_order, before)]
            self._lists -= before.lists
            self._too_large.discard(service)
        if request is not None:
            self._requests[service] = request
            insort(self._in_order, request)
            self._lists += request.lists
            if request.lists > self._rendering.most_lists_of_service:
                self._too_large.add(service)
        return True

    def _find_refused(self) -> frozenset[NamespacedName]:
        left = self._rendering.most_lists
        refused = set(self._too_large)
        if within_share(self._lists, left - self._lists):
            return frozenset(refused)
        taken: Counter[str] = Counter()
        full: set[str] = set()
        for _created, service, lists in self._in_order:
            namespace = service.namespace
            if service in refused:
                continue
            if namespace in full or not within_share(taken[namespace] + lists, left - lists):
                full.add(namespace)
                refused.add(service)
            else:
                taken[namespace] += lists
                left -= lists
        return frozenset(refused)


def within_limit(rendering: Rendering[Any], service_ports: ServicePorts) -> ServicePorts:
    """Return the ServicePorts of a family as they are rendered (:meth:`SlotLimit.applied`)."""
    services: dict[NamespacedName, list[ServicePortInfo]] = {}
    for info in service_ports.values():
        if info.policy is not NO_POLICY:
            services.setdefault(info.key.service, []).append(info)
    limit = SlotLimit(rendering)
    limit.count(services)
    return {name: limit.applied(info) for name, info in service_ports.items()}
