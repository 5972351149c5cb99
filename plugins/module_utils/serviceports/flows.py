# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses of ServicePorts whose connection tracking entries can become stale, and when to examine them.

kube-proxy 1.38 examines the entries of all UDP Services after the serving endpoints of one of them changed, or a port
was removed (pkg/proxy/conntrack). With corrected behaviour those of UDP and SCTP are examined after every change of the
addresses, too.
"""

from __future__ import annotations

import hashlib
from typing import AbstractSet, Iterable, NamedTuple

from ..cluster.model import NamespacedName
from ..configuration.behaviour import Behaviour
from .info import ServicePortInfo


class Frontend(NamedTuple):
    """An address and port of a ServicePort: protocol (TCP, UDP, SCTP); the address is empty for a node port."""

    protocol: str
    address: str
    port: int


def frontends_of(info: ServicePortInfo) -> list[Frontend]:
    """Return the cluster IP, the external addresses and the node port of a ServicePort."""
    addresses = (info.cluster_ip, *info.load_balancer_ips, *info.external_ips)
    found = [Frontend(info.key.protocol, address, info.port) for address in addresses]
    return [*found, Frontend(info.key.protocol, "", info.node_port)] if info.node_port else found


def serving_digest(service_ports: Iterable[ServicePortInfo]) -> str:
    """Return a digest of the serving endpoints of ServicePorts, empty if there are none."""
    serving = sorted(
        (info.family, *info.key, endpoint.ip, endpoint.port)
        for info in service_ports
        for endpoint in info.endpoints
        if endpoint.serving
    )
    return hashlib.sha256(repr(serving).encode()).hexdigest() if serving else ""


def examined_protocols(behaviour: Behaviour) -> tuple[str, ...]:
    """Return the protocols whose entries are compared with the serving endpoints."""
    return ("UDP", "SCTP") if behaviour.stale_flows_end else ("UDP",)


def released_protocols(behaviour: Behaviour, end_deleted: bool) -> tuple[str, ...]:
    """Return the protocols whose entries end with their Service; ``end_deleted``: TCP is one of them."""
    examined = examined_protocols(behaviour)
    return (*examined, "TCP") if end_deleted and behaviour.stale_flows_end else examined


class _Known(NamedTuple):
    frontends: frozenset[Frontend]
    #: The hash of what makes entries stale when it changes.
    examined: int


_NOTHING = _Known(frozenset(), hash(frozenset()))


class FlowChanges:
    """Records whether Services changed so that entries can be stale, and addresses that no Service has any more.

    ``services``: those whose entries are examined then. ``end_deleted``: see :func:`released_protocols`.
    """

    def __init__(self, behaviour: Behaviour, end_deleted: bool) -> None:
        self._examined = examined_protocols(behaviour)
        self._released = released_protocols(behaviour, end_deleted)
        self._addresses_matter = behaviour.stale_flows_end
        self._known: dict[NamespacedName, _Known] = {}
        self.services: set[NamespacedName] = set()
        self.changed = False
        self.released: set[Frontend] = set()

    def note(self, service: NamespacedName, service_ports: Iterable[ServicePortInfo]) -> None:
        """Record the ServicePorts that a Service has from now on, none if it was deleted."""
        chosen = [info for info in service_ports if info.key.protocol in self._released]
        before = self._known.pop(service, _NOTHING)
        if chosen or before.frontends:
            frontends = frozenset(frontend for info in chosen for frontend in frontends_of(info))
            examined = [info for info in chosen if info.key.protocol in self._examined]
            state: set[tuple[object, ...]] = {
                (info.key, item.ip, item.port) for info in examined for item in info.endpoints if item.serving
            }
            if self._addresses_matter:
                state.update(frontend for info in examined for frontend in frontends_of(info))
            now = _Known(frontends, hash(frozenset(state)))
            self.changed |= before.examined != now.examined
            self.released |= before.frontends - frontends
            self.released -= frontends
            if frontends:
                self._known[service] = now
            (self.services.add if examined else self.services.discard)(service)

    def repeat(self, services: AbstractSet[NamespacedName]) -> None:
        """Record Services again that were recorded before all of their ports were programmed."""
        self.changed |= not self.services.isdisjoint(services)

    def pop(self) -> tuple[bool, set[Frontend]]:
        """Return whether entries can be stale since the last call, and the addresses."""
        found = self.changed, self.released
        self.changed, self.released = False, set()
        return found

    def put_back(self, changed: bool, released: set[Frontend]) -> None:
        """Record again changes that could not be examined."""
        self.changed |= changed
        self.released |= released
