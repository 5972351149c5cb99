# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Summaries of the Services, which gauges and health check node ports need."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from ...cluster.model import NamespacedName
from ...serviceports.info import ServicePortInfo


class ServiceSummary(NamedTuple):
    """One Service in one family.

    ``no_local_internal`` and ``no_local_external`` count its ports whose traffic policy is Local and that have
    endpoints, but none on this node; where Services are counted, the number is at most 1. ``local_ready``: distinct
    addresses of ready endpoints on this node. ``served``: its ports that have an endpoint to choose.
    """

    ports: int
    endpoints: int
    no_local_internal: int
    no_local_external: int
    health_check_node_port: int
    local_ready: int
    served: int


class SummaryTotals(NamedTuple):
    """Sums over all Services of a family, of the fields of :class:`ServiceSummary` with these names."""

    ports: int
    endpoints: int
    no_local_internal: int
    no_local_external: int


def summarize(service_ports: Sequence[ServicePortInfo], counts_ports: bool = True) -> ServiceSummary:
    """Return the summary of the ServicePorts of one Service, of which there is at least one.

    ``counts_ports``: see :class:`Summaries`.
    """
    # One loop: a first load summarizes all Services.
    endpoints = no_local_internal = no_local_external = health_check_node_port = served = 0
    local = set()
    for info in service_ports:
        endpoints += len(info.endpoints)
        if info.has_any and not info.local:
            no_local_internal += info.internal_local
            no_local_external += info.external_local
        health_check_node_port = max(health_check_node_port, info.health_check_node_port)
        served += bool(info.reachable)
        for endpoint in info.endpoints:
            if endpoint.is_local and endpoint.ready and endpoint.weight:
                local.add(endpoint.ip)
    if not counts_ports:
        no_local_internal, no_local_external = min(no_local_internal, 1), min(no_local_external, 1)
    return ServiceSummary(
        ports=len(service_ports),
        endpoints=endpoints,
        no_local_internal=no_local_internal,
        no_local_external=no_local_external,
        health_check_node_port=health_check_node_port,
        local_ready=len(local),
        served=served,
    )


class Summaries:
    """The summaries of all Services of a family and their sums, kept up to date one Service at a time.

    ``counts_ports``: whether a Service without local endpoints counts once for each of its ports, or once.
    """

    def __init__(self, counts_ports: bool = True) -> None:
        self._counts_ports = counts_ports
        self._services: dict[NamespacedName, ServiceSummary] = {}
        self.totals = SummaryTotals(0, 0, 0, 0)
        #: Health check node ports by Service, and how many ready endpoints each of these Services has on this node.
        self.health_ports: dict[NamespacedName, int] = {}
        self.health_counts: dict[NamespacedName, int] = {}

    def __len__(self) -> int:
        return len(self._services)

    def __contains__(self, service: NamespacedName) -> bool:
        return service in self._services

    def serves(self, service: NamespacedName) -> bool:
        """Return whether a Service has an endpoint to choose."""
        summary = self._services.get(service)
        return summary is not None and summary.served > 0

    def put(self, service: NamespacedName, service_ports: Sequence[ServicePortInfo]) -> None:
        """Replace the ServicePorts of a Service."""
        before = self._services.pop(service, None)
        now = summarize(service_ports, self._counts_ports) if service_ports else None
        if now is not None:
            self._services[service] = now
        if now is not None and now.health_check_node_port:
            self.health_ports[service] = now.health_check_node_port
            self.health_counts[service] = now.local_ready
        else:
            self.health_ports.pop(service, None)
            self.health_counts.pop(service, None)
        self._count(before, -1)
        self._count(now, 1)

    def _count(self, summary: ServiceSummary | None, sign: int) -> None:
        if summary is not None:
            totals = self.totals._asdict().items()
            self.totals = SummaryTotals(**{name: sum_ + sign * getattr(summary, name) for name, sum_ in totals})
