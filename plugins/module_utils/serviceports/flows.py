# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses of ServicePorts whose connection tracking entries can become stale, and when to examine them.

kube-proxy 1.36 examines UDP entries after the serving endpoints of a Service changed, if it has any. With corrected
behaviour entries of UDP and SCTP are examined after every change of the addresses or the endpoints.
"""

from __future__ import annotations

import hashlib
from typing import AbstractSet, Dict, FrozenSet, Iterable, List, NamedTuple, Set, Tuple

from ..cluster.model import NamespacedName
from ..configuration.behaviour import Behaviour
from .info import ServicePortInfo


class Frontend(NamedTuple):
    """An address and port of a ServicePort: protocol (TCP, UDP, SCTP); the address is empty for a node port."""

    protocol: str
    address: str
    port: int


def frontends_of(info: ServicePortInfo) -> List[Frontend]:
    """Return the cluster IP, the external addresses and the node port of a ServicePort."""
    addresses = (info.cluster_ip, *info.load_balancer_ips, *info.external_ips)
    found = [Frontend(info.key.protocol, address, info.port) for address in addresses]
    return [*found, Frontend(info.key.protocol, "", info.node_port)] if info.node_port else found


def serving_digest(service_ports: Iterable[ServicePortInfo]) -> str:
    """Return a digest of the serving endpoints of ServicePorts."""
    serving = sorted(
        (info.family, *info.key, endpoint.ip, endpoint.port)
        for info in service_ports
        for endpoint in info.endpoints
        if endpoint.serving
    )
    return hashlib.sha256(repr(serving).encode()).hexdigest()


def examined_protocols(behaviour: Behaviour) -> Tuple[str, ...]:
    """Return the protocols whose entries are compared with the serving endpoints."""
    return ("UDP", "SCTP") if behaviour.stale_flows_end else ("UDP",)


def released_protocols(behaviour: Behaviour, end_deleted: bool) -> Tuple[str, ...]:
    """Return the protocols whose entries end with their Service; ``end_deleted``: TCP is one of them."""
    if not behaviour.stale_flows_end:
        return ()
    return ("UDP", "SCTP", "TCP") if end_deleted else ("UDP", "SCTP")


class _Known(NamedTuple):
    frontends: FrozenSet[Frontend]
    serving: int


_NOTHING = _Known(frozenset(), 0)


class FlowChanges:
    """Records Services that changed so that their entries can be stale, and addresses that no Service has any more.

    ``protocols``: those of :func:`released_protocols`; without any, nothing is recorded.
    """

    def __init__(self, protocols: Tuple[str, ...]) -> None:
        self._protocols = protocols
        self._known: Dict[NamespacedName, _Known] = {}
        self.changed: Set[NamespacedName] = set()
        self.released: Set[Frontend] = set()

    def note(self, service: NamespacedName, service_ports: Iterable[ServicePortInfo]) -> None:
        """Record the ServicePorts that a Service has from now on, none if it was deleted."""
        if not self._protocols:
            return
        chosen = [info for info in service_ports if info.key.protocol in self._protocols]
        serving = frozenset(
            (info.key, endpoint.ip, endpoint.port) for info in chosen for endpoint in info.endpoints if endpoint.serving
        )
        frontends = frozenset(frontend for info in chosen for frontend in frontends_of(info))
        before, now = self._known.get(service, _NOTHING), _Known(frontends, hash(serving))
        if before == now or not (before.frontends or frontends):
            return
        self.released |= before.frontends - frontends
        self.released -= frontends
        if frontends:
            self._known[service] = now
            self.changed.add(service)
        else:
            del self._known[service]

    def repeat(self, services: AbstractSet[NamespacedName]) -> None:
        """Record Services again that were recorded before all of their ports were programmed."""
        self.changed |= self._known.keys() & services

    def pop(self) -> Tuple[Set[NamespacedName], Set[Frontend]]:
        """Return the records since the last call."""
        found = self.changed, self.released
        self.changed, self.released = set(), set()
        return found

    def put_back(self, changed: Set[NamespacedName], released: Set[Frontend]) -> None:
        """Record again changes that could not be examined."""
        self.changed |= changed
        self.released |= released
