# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what each mode costs a node and a new connection, all in one guest, at several numbers of Services.

IPVS and nf_tables with NAT are together only in Debian's own kernel, which is emulated:

    python -m tests.lab.qemu --memory 3G --timeout 7200 -- python -m tests.benchmarks.modes_traffic [--sizes 100,1000]

A client and a server are joined by a node with the given number of single-endpoint Services; the connections go to the
last of them. Columns: the mode, and the filter backend of ipvs mode; Services; seconds of processor time of a
convergence from empty, of one without change and of one after an endpoint was replaced, programs and kernel included;
microseconds until a new connection is established, at the median and at the 99th percentile, one at a time; connections
per second of four clients at once. The row ``none`` connects to the endpoint itself on a node without rules; ``of
none`` is the rate in percent of that row's. An emulated processor is slow, and its system calls more than its
arithmetic: compare rows.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.benchmarks import nftables_traffic
from tests.benchmarks.nftables_scale import address

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge

MODES = (("iptables", "auto"), ("ipvs", "iptables"), ("ipvs", "nftables"), ("nftables", "auto"))


class Row(NamedTuple):
    """One line of the table."""

    mode: str
    services: int
    from_empty_s: float
    unchanged_s: float
    one_change_s: float
    connect_p50_us: int
    connect_p99_us: int
    connections_per_s: int
    of_none: int


def processor_seconds() -> float:
    """Return the processor time of this process and its ended children."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


class Node:
    """The process's own network namespace, converged in one mode after the other."""

    def __init__(self, directory: Path, paths: dict[str, str], seconds: float) -> None:
        self._directory = directory
        self._paths = paths
        self._seconds = seconds
        self._rate = 0

    def direct(self) -> Row:
        """Measure connections to the endpoint itself."""
        median, late, self._rate = nftables_traffic.traffic(self._paths, (address(0, 128), 8080), self._seconds)
        return Row("none", 0, 0, 0, 0, median, late, self._rate, 100)

    def measure(self, mode: str, filter_backend: str, services: int) -> Row:
        """Measure one mode, and remove it."""
        objects = list(nftables_traffic.objects_of(services, 1))
        replaced = nftables_traffic.endpoint_slice("svc0", [address(1, 250)])
        document = {"mode": mode, "clusterCIDR": nftables_traffic.PODS, "conntrack": {"maxPerCore": 0, "min": 0}}
        configuration = load(document, node_source={"ipvsFilterBackend": filter_backend}).configuration
        seconds: list[float] = []
        for given in (objects, objects, [*objects, replaced]):
            before = processor_seconds()
            report = converge(self._request(ClusterState.from_objects(given), configuration))
            seconds.append(round(processor_seconds() - before, 2))
            expected = given is not objects or not seconds[1:]
            if report.changed is not expected:
                raise SystemExit(f"{mode}, {filter_backend}: changed is {report.changed}: {report.changes}")
        target = (address(services - 1, 96), 80)
        median, late, rate = nftables_traffic.traffic(self._paths, target, self._seconds)
        converge(self._request(ClusterState(), load({}).configuration, state="absent"))
        name = f"{mode}, filter backend {filter_backend}" if mode == "ipvs" else mode
        empty, unchanged, one = seconds
        return Row(name, services, empty, unchanged, one, median, late, rate, round(100 * rate / self._rate))

    def _request(self, cluster: ClusterState, configuration: Any, **more: Any) -> Request:
        directory = str(self._directory)
        return Request(
            cluster, configuration, node_name="node1", state_directory=directory, whole_cluster=False, **more
        )


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="100,1000,10000")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long connections are made, for each figure")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root, for network namespaces of its own")
    with tempfile.TemporaryDirectory() as scratch, nftables_traffic.network() as paths:
        node = Node(Path(scratch), paths, arguments.seconds)
        print(" | ".join(Row._fields))
        print(" | ".join(map(str, node.direct())), flush=True)
        for size in map(int, arguments.sizes.split(",")):
            for mode, filter_backend in MODES:
                print(" | ".join(map(str, node.measure(mode, filter_backend, size))), flush=True)


if __name__ == "__main__":
    main()
