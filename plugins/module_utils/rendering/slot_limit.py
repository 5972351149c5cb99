# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The limit of stable hashing on a node: the oldest Services that request it are admitted until the limit is reached.

The slots of a ServicePort need hundreds of elements of a map for each of its addresses, so the number of such lists in
the tables of a family is limited (``Rendering.most_lists``). Services above the limit choose at random, as without the
annotation, and a warning names each.

All nodes must agree on which these are; otherwise a client's endpoint would depend on the node. So the limit is a
constant, and only the Services themselves decide. Services are admitted in the order of their age, up to the first that
does not fit: creating one never affects another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set

from ..cluster.model import NO_POLICY, NamespacedName
from ..serviceports.info import ServicePortInfo
from .rendering import Rendering, ServicePorts

#: Sorts after every time.
_YOUNGEST = "~"


class _Request(NamedTuple):
    """What a Service requests. The order of requests is that in which Services are admitted."""

    created: str
    service: NamespacedName
    lists: int


class SlotLimit:
    """The Services of one family that request slots in a mode, kept up to date one Service at a time.

    A change of endpoints costs nothing. A change of requests costs O(Services admitted) while there are more than fit.
    """

    def __init__(self, rendering: Rendering[Any]) -> None:
        self._rendering = rendering
        self._requests: Dict[NamespacedName, _Request] = {}
        self._in_order: List[_Request] = []
        self._lists = 0
        self._first_refused: Optional[_Request] = None

    def count(self, services: Mapping[NamespacedName, Sequence[ServicePortInfo]]) -> Set[NamespacedName]:
        """Replace the ServicePorts of these Services; a Service without any requests nothing.

        Return the Services that are admitted now and were not before, or the other way round.
        """
        changed = False
        for service, ports in services.items():
            changed |= self._replace(service, self._request_of(service, ports))
        if not changed:
            return set()
        before, self._first_refused = self._first_refused, self._first_that_does_not_fit()
        places = sorted((self._place(before), self._place(self._first_refused)))
        return {request.service for request in self._in_order[slice(*places)]}

    def admits(self, service: NamespacedName) -> bool:
        """Return whether a Service has the slots that it requests, if any."""
        request = self._requests.get(service)
        return request is None or self._first_refused is None or request < self._first_refused

    def applied(self, info: ServicePortInfo) -> ServicePortInfo:
        """Return a ServicePort as it is rendered: without its scheduler if the Service is not admitted."""
        if info.policy is NO_POLICY or self.admits(info.key.service) or not self._rendering.lists_of(info):
            return info
        policy = info.policy
        problem = (
            f"scheduler {policy.scheduler} is not used: older Services have the {self._rendering.most_lists} addresses"
            f" and node ports that can be hashed"
        )
        policy = policy._replace(scheduler="", scheduler_flags=(), problems=(*policy.problems, problem))
        return info._replace(policy=policy)

    def _request_of(self, service: NamespacedName, ports: Sequence[ServicePortInfo]) -> Optional[_Request]:
        lists = sum([self._rendering.lists_of(port) for port in ports if port.policy is not NO_POLICY])
        return _Request(ports[0].created or _YOUNGEST, service, lists) if lists else None

    def _replace(self, service: NamespacedName, request: Optional[_Request]) -> bool:
        """Replace the requests of a Service; return whether they changed."""
        before = self._requests.get(service)
        if before == request:
            return False
        if before is not None:
            del self._requests[service]
            del self._in_order[bisect_left(self._in_order, before)]
            self._lists -= before.lists
        if request is not None:
            self._requests[service] = request
            insort(self._in_order, request)
            self._lists += request.lists
        return True

    def _first_that_does_not_fit(self) -> Optional[_Request]:
        left = self._rendering.most_lists
        if self._lists > left:
            for request in self._in_order:
                left -= request.lists
                if left < 0:
                    return request
        return None

    def _place(self, first_refused: Optional[_Request]) -> int:
        return len(self._in_order) if first_refused is None else bisect_left(self._in_order, first_refused)


def within_limit(rendering: Rendering[Any], service_ports: ServicePorts) -> ServicePorts:
    """Return the ServicePorts of a family as they are rendered (:meth:`SlotLimit.applied`)."""
    services: Dict[NamespacedName, List[ServicePortInfo]] = {}
    for info in service_ports.values():
        if info.policy is not NO_POLICY:
            services.setdefault(info.key.service, []).append(info)
    limit = SlotLimit(rendering)
    limit.count(services)
    return {name: limit.applied(info) for name, info in service_ports.items()}
