# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics of the agent's memory limit; none without a limit."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

from ..memory import MemoryUse

# Without it the agent does not start, with an error message: see ``metrics``.
with contextlib.suppress(ImportError):
    import prometheus_client.core

_PREFIX = "kubenode_proxy_"
#: Name and text of the metric for each field.
_GAUGES = {
    "limit": ("memory_limit_bytes", "Memory limit of the agent's control group"),
    "used": ("memory_used_bytes", "Memory in use in that group that the kernel cannot reclaim"),
    "cluster": ("cluster_bytes", "Size of the cluster's objects as the agent keeps them"),
    "capacity": ("cluster_capacity_bytes", "Size of the cluster's objects that fits into the memory limit"),
    "held_back": ("objects_held_back", "Objects whose latest version was not applied because of the memory limit"),
    "refused": ("lists_refused", "Collections whose list does not fit into the memory limit"),
}


class MemoryMetrics:
    """Exposes the most recent measurement of memory and its limit."""

    def __init__(self, use: Callable[[], MemoryUse]) -> None:
        self._use = use

    def collect(self) -> Iterator[Any]:
        """Yield the current values."""
        use = self._use()
        if use.limit:
            for field, (name, text) in _GAUGES.items():
                yield prometheus_client.core.GaugeMetricFamily(_PREFIX + name, text, value=getattr(use, field))
