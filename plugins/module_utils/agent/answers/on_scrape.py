# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics that are read when they are requested: of the traffic of Services, and of the memory limit."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

from ...convergence.traffic.account import COUNTERS, GAUGES
from ..memory import MemoryUse
from ..traffic import Measured

# Without it the agent does not start, with an error message: see ``metrics``.
with contextlib.suppress(ImportError):
    import prometheus_client.core

_PREFIX = "kubenode_proxy_service_"
_LABELS = ("namespace", "service", "port", "protocol", "ip_family")
#: Name and text of the metric for each counter; ``direction`` is a label where it is not empty.
_COUNTERS = {
    "connections": ("connections", "Connections to Services that were opened", ""),
    "packetsIn": ("packets", "Packets of connections to Services", "in"),
    "packetsOut": ("packets", "Packets of connections to Services", "out"),
    "bytesIn": ("bytes", "Bytes of connections to Services", "in"),
    "bytesOut": ("bytes", "Bytes of connections to Services", "out"),
}

_MEMORY_PREFIX = "kubenode_proxy_"
#: Name and text of the metric for each field.
_MEMORY_GAUGES = {
    "limit": ("memory_limit_bytes", "Memory limit of the agent's control group"),
    "used": ("memory_used_bytes", "Memory in use in that group that the kernel cannot reclaim"),
    "cluster": ("cluster_bytes", "Size of the cluster's objects as the agent keeps them"),
    "capacity": ("cluster_capacity_bytes", "Size of the cluster's objects that fits into the memory limit"),
    "held_back": ("objects_held_back", "Objects whose latest version was not applied because of the memory limit"),
    "refused": ("lists_refused", "Collections whose list does not fit into the memory limit"),
}


class TrafficMetrics:
    """Exposes what the agent's loop has read last."""

    def __init__(self, measured: Callable[[], Measured]) -> None:
        self._measured = measured

    def collect(self) -> Iterator[Any]:
        """Yield the current values; nothing while no ServicePort has metrics."""
        measured = self._measured()
        if not measured.ports and not measured.omitted:
            return
        counters = {}
        for name, text, direction in _COUNTERS.values():
            labels = (*_LABELS, "direction") if direction else _LABELS
            counters[name] = prometheus_client.core.CounterMetricFamily(f"{_PREFIX}{name}_total", text, labels=labels)
        open_now = prometheus_client.core.GaugeMetricFamily(
            f"{_PREFIX}open_connections", "Connections to Services that IPVS has", labels=(*_LABELS, "state")
        )
        for item in measured.ports:
            labels = (*item.port[:4], item.family)
            for key, value in zip(COUNTERS, item.counters):
                name, _text, direction = _COUNTERS[key]
                if value is not None:
                    counters[name].add_metric((*labels, direction) if direction else labels, value)
            for state, value in zip(GAUGES, item.gauges):
                if value is not None:
                    open_now.add_metric((*labels, state), value)
        yield from counters.values()
        yield open_now
        yield prometheus_client.core.GaugeMetricFamily(
            f"{_PREFIX}ports_without_metrics", "Ports of Services that have no such metrics", value=measured.omitted
        )


class MemoryMetrics:
    """Exposes the most recent measurement of memory and its limit."""

    def __init__(self, use: Callable[[], MemoryUse]) -> None:
        self._use = use

    def collect(self) -> Iterator[Any]:
        """Yield the current values."""
        use = self._use()
        if use.limit:
            for field, (name, text) in _MEMORY_GAUGES.items():
                yield prometheus_client.core.GaugeMetricFamily(_MEMORY_PREFIX + name, text, value=getattr(use, field))
