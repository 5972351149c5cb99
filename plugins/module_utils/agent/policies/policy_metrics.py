# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics of network policies; none while they are not enforced."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Mapping, Tuple

from ...base.errors import KernelError
from ...cluster.model import NamespacedName
from ...kernel.nftables.traffic.denied import denied_packets, forged_packets
from ...networkpolicy.matching.owners import Address

# Without it the agent does not start, with an error message: see ``metrics``.
with contextlib.suppress(ImportError):
    import prometheus_client.core

_PREFIX = "kubenode_proxy_network_policy_"
#: A node has a few hundred pods. With more of them than this, packets are counted by direction only.
_MOST_PODS = 1_000
_DIRECTIONS = {"in": "ingress", "out": "egress"}
_GAUGES = (
    ("inForce", "in_force", "1 while the table in the kernel is that of the known policies"),
    ("policies", "policies", "Policies of the cluster that are known"),
    ("pods", "pods", "Pods of this node that policies can select"),
    ("elements", "elements", "Elements of the table"),
    ("refusedPolicies", "refused", "Policies that allow nothing in a direction, because of their size"),
    ("lastSync", "last_sync_timestamp_seconds", "Time when the table was last brought up to date"),
)
_COUNTERS = (
    ("failures", "sync_failures", "Attempts to change the table that failed"),
    ("repaired", "repaired", "Entries of the table found modified or missing and repaired"),
)


class PolicyMetrics:
    """Reads the state of network policies when the metrics are requested.

    ``status``: see :meth:`.PolicySync.status`. ``pods``: of this node, by address.
    """

    def __init__(
        self, status: Callable[[], Mapping[str, Any]], pods: Callable[[], Mapping[Address, NamespacedName]]
    ) -> None:
        self._status = status
        self._pods = pods

    def collect(self) -> Iterator[Any]:
        """Yield the current values."""
        status = self._status()
        if not status:
            return
        for key, name, text in _GAUGES:
            yield prometheus_client.core.GaugeMetricFamily(_PREFIX + name, text, value=float(status[key]))
        for key, name, text in _COUNTERS:
            yield prometheus_client.core.CounterMetricFamily(f"{_PREFIX}{name}_total", text, value=status[key])
        yield self._denied()
        yield self._forged()

    def _denied(self) -> Any:
        labels = ["direction", "namespace", "pod"]
        text = "Packets of pods of this node that policies denied; starts at 0 for each new pod"
        found = prometheus_client.core.CounterMetricFamily(f"{_PREFIX}denied_packets_total", text, labels=labels)
        for (side, key), packets in sorted(self._by_pod().items()):
            found.add_metric([_DIRECTIONS[side], key.namespace, key.name], packets)
        return found

    @staticmethod
    def _forged() -> Any:
        text = "Packets from an interface of pods whose source is of none of them; starts at 0 for each new interface"
        found = prometheus_client.core.CounterMetricFamily(f"{_PREFIX}forged_packets_total", text, labels=["interface"])
        # As with denied packets.
        with contextlib.suppress(KernelError):
            for interface, packets in sorted(forged_packets().items()):
                found.add_metric([interface], packets)
        return found

    def _by_pod(self) -> Mapping[Tuple[str, NamespacedName], int]:
        pods = self._pods()
        nobody = NamespacedName("", "")
        every: Dict[Tuple[str, NamespacedName], int] = {}
        try:
            counted = denied_packets()
        except KernelError:
            # The table cannot be read. The code that writes it reports that; other metrics are served.
            return every
        for (side, address), packets in counted.items():
            owner = nobody if len(pods) > _MOST_PODS else pods.get(address)
            if owner is not None:
                every[side, owner] = every.get((side, owner), 0) + packets
        return every
