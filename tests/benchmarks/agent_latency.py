# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure the agent's time from an event of the API server to the kernel, and its cost while nothing happens.

    unshare -n python -m tests.benchmarks.agent_latency --mode iptables --variant nft --services 100,1000,5000
    python -m tests.lab.uml --memory 2G -- python -m tests.benchmarks.agent_latency --mode ipvs --services 100,1000,5000

The agent is the real process, the API server the test one on the same machine. Each change replaces the endpoints of
one Service; it counts as done when the kernel has notified it (nf_tables) or shows it (IPVS, legacy iptables). Every
Service has ``--endpoints`` endpoints. Prints one line of JSON for each number of Services.
"""

from __future__ import annotations

import os
import random
import select
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import IpvsSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.listener import NetlinkListener
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import NETLINK_NETFILTER
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.attributes import NFNLGRP_NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.legacy_tables import TableReader
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import VirtualServerKey
from tests.benchmarks import agent_runs
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_slice

GIVE_UP_SECONDS = 120.0


def notified() -> Callable[[int], Callable[[], bool]]:
    """Return a function that reports whether nf_tables has notified a change since it was made."""
    events = NetlinkListener(NETLINK_NETFILTER, (NFNLGRP_NFTABLES,), "nf_tables")

    def prepare(_number: int) -> Callable[[], bool]:
        list(events.notifications())

        def done() -> bool:
            select.select([events.fileno()], (), (), 0.05)
            return bool(list(events.notifications()))

        return done

    return prepare


def table_changed() -> Callable[[int], Callable[[], bool]]:
    """Return a function that reports whether the legacy table nat has another number or size of entries."""
    reader = TableReader("IPv4")

    def prepare(_number: int) -> Callable[[], bool]:
        before = reader.info("nat")
        return lambda: reader.info("nat") != before

    return prepare


def servers_changed() -> Callable[[int], Callable[[], bool]]:
    """Return a function that reports whether the Service's virtual server has other real servers."""
    sock = IpvsSocket()

    def prepare(number: int) -> Callable[[], bool]:
        key = VirtualServerKey("tcp", cluster_ip(number), 80)
        before = sock.real_servers_of([key]).servers
        return lambda: sock.real_servers_of([key]).servers != before

    return prepare


def measure(node: AgentNode, services: int, endpoints: int, changes: int) -> dict[str, Any]:
    """Start the agent, and change one Service after the other."""
    began = time.monotonic()
    node.start()
    first_sync = time.monotonic() - began
    if node.mode == "ipvs":
        prepare = servers_changed()
    else:
        prepare = table_changed() if node.kernel_variant == "legacy" else notified()
    time.sleep(1.5)
    seconds = []
    used = node.processor_seconds()
    # No Service twice, so that each change removes an endpoint.
    for change, number in enumerate(random.Random(1).sample(range(1, services + 1), changes)):
        done = prepare(number)
        started = time.monotonic()
        node.store.put(endpoint_slice(number, count=endpoints - 1, first=change % 2, target=9000 + change))
        while not done():
            if time.monotonic() - started > GIVE_UP_SECONDS:
                raise RuntimeError(f"change {change} has not arrived:\n{node.log[-2000:]}")
            if node.mode == "ipvs" or node.kernel_variant == "legacy":
                time.sleep(0.001)
        seconds.append(time.monotonic() - started)
        time.sleep(0.1)
    time.sleep(8.0)
    used = node.processor_seconds() - used
    before = node.processor_seconds()
    time.sleep(20.0)
    idle = (node.processor_seconds() - before) / 20.0
    ordered = sorted(seconds)
    return {
        "mode": node.mode,
        "variant": node.kernel_variant,
        "services": services,
        "endpoints": services * endpoints,
        "first_sync_s": round(first_sync, 2),
        "p50_ms": round(statistics.median(ordered) * 1000, 1),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000, 1),
        "change_processor_ms": round(used / changes * 1000, 1),
        "load": round(os.getloadavg()[0], 1),
        "idle_cpu_percent": round(idle * 100, 2),
        "rss_mib": round(node.resident_mebibytes(), 1),
        "foreign_repairs": node.status()["driftRepaired"],
    }


def main() -> int:
    """Measure as the arguments say."""
    parser = agent_runs.parser(__doc__, "iptables")
    parser.add_argument("--changes", type=int, default=50)
    arguments = parser.parse_args()
    return agent_runs.run(
        arguments,
        arguments.variant,
        lambda node, services: measure(node, services, arguments.endpoints, arguments.changes),
    )


if __name__ == "__main__":
    sys.exit(main())
