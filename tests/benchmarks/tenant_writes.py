# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what one write of a user of the cluster costs each agent, and the API server by all agents.

    unshare -n python -m tests.benchmarks.tenant_writes [--services 2000] [--pods 2000] [--connections 100000]

The agent is the real process in nftables mode with network policies and ``establishedConnections: cut``, the API server
the test one, and the node tracks a number of connections. ``--writes`` of each kind come within a second, and what
follows in the next seconds counts as well; of two rounds the better counts. The floor is a write of a Service in which
nothing changes that an agent reads. Prints a Markdown table: the processor time of the agent for each write, without
that of an idle agent; how many times the floor that is; and the requests that it sends. Requests of all agents are
those of one times their number, except for the Events that all of them would post alike: the threads that post Events,
of 20 and of 1,000 agents at once, show their number.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.kernel.agent_node import NODE, AgentNode, cluster_ip, endpoint_slice, service
from tests.lab import manifests, system
from tests.waiting import wait_for

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.events import (
    WARNING,
    Content,
    EventPoster,
    node_reference,
    service_reference,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metrics import Metrics
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.event_reasons import Reason
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store

Raw = dict[str, Any]
FEW, MANY = 20, 1000
ROUNDS = 2
PAUSE_SECONDS, SETTLE_SECONDS, IDLE_SECONDS = 0.1, 10.0, 10.0
_LOCAL_PODS = 50


class Write(NamedTuple):
    """A kind of write. ``make`` changes the cluster for the number of the write; ``is_common``: all agents post it."""

    what: str
    make: Callable[[AgentNode, int], None]
    is_common: bool = False


def pod(number: int, **labels: str) -> Raw:
    """Return a pod of the namespace ``shop``; the first ones are on the node."""
    local = number < _LOCAL_PODS
    address = f"10.244.0.{number + 1}" if local else f"10.245.{number // 250}.{number % 250 + 1}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": f"p{number}", "labels": {"app": f"a{number % 20}", **labels}},
        "spec": {"nodeName": NODE if local else "node2", "containers": [{"name": "c", "image": "x"}]},
        "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
    }


def policy(port: int) -> Raw:
    """Return a policy that lets pods with one of two labels in."""
    peers = [{"podSelector": {"matchLabels": labels}} for labels in ({"friend": "yes"}, {"app": "a3"})]
    rule = {"from": peers, "ports": [{"port": port}]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": "friends"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [rule]},
    }


def annotated(number: int, namespace: str, annotations: dict[str, str], **spec: Any) -> Raw:
    """Return a Service with annotations."""
    found = service(number, namespace=namespace, **spec)
    return {**found, "metadata": {**found["metadata"], "annotations": annotations}}


def dns(number: int) -> Raw:
    """Return the EndpointSlice of the UDP Service with an endpoint that no other number has."""
    return endpoint_slice(60000, first=number % 7, ports=(53,), target=53, protocol="UDP")


WRITES = [
    Write("Service: a field that agents do not read", lambda n, i: n.store.put(annotated(1, "default", {"x": str(i)}))),
    Write("Service created", lambda n, i: n.store.put(service(30000 + i))),
    Write("Service changed: another port", lambda n, i: n.store.put(service(30000 + i, (81,)))),
    Write("Service deleted", lambda n, i: n.store.delete("Service", "default", f"svc-{30000 + i}")),
    Write("EndpointSlice: an endpoint replaced", lambda n, i: n.store.put(endpoint_slice(2, 5, first=i % 2))),
    Write("EndpointSlice of a UDP Service: an endpoint replaced", lambda n, i: n.store.put(dns(i))),
    Write(
        "Service created with an annotation that is not valid",
        lambda n, i: n.store.put(annotated(31000 + i, "notes", {"kubenode.proxy/scheduler": "nope"})),
        is_common=True,
    ),
    Write(
        "Service created that is refused",
        lambda n, i: n.store.put(service(32000 + i, namespace="wrong", clusterIP="x", clusterIPs=["x"])),
        is_common=True,
    ),
    Write("Pod: a label that no policy names", lambda n, i: n.store.put(pod(900, other=str(i)))),
    Write("Pod: a label that allows and denies in turn", lambda n, i: n.store.put(pod(900, friend="yn"[i % 2] + "es"))),
    Write("Pod created on the node, isolated by a policy", lambda n, i: n.store.put(_new_pod(i))),
    Write("NetworkPolicy: another port", lambda n, i: n.store.put(policy(8000 + i % 2))),
]


def _new_pod(number: int) -> Raw:
    found = pod(number % _LOCAL_PODS)
    address = f"10.244.0.{100 + number}"
    found["metadata"]["name"] = f"new{number}"
    return {**found, "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}


def processor_seconds(process: int) -> float:
    """Return the processor time of all threads of a process, in nanosecond resolution."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


def connections(count: int) -> str:
    """Return lines for ``conntrack -R``: UDP entries that have nothing to do with the cluster."""
    ends = "-d 203.0.113.1 --sport {0} --dport 53 -r 203.0.113.1 -q {1} --reply-port-src 53 --reply-port-dst {0}"
    clients = ((1024 + number // 250, f"198.18.{number // 65000}.{number % 250 + 1}") for number in range(count))
    return "".join(f"-I -p udp -t 3600 -s {ip} {ends.format(port, ip)}\n" for port, ip in clients)


class Cost(NamedTuple):
    """Seconds of processor time and requests to the API server, for one write."""

    seconds: float
    requests: float


class Bench:
    """The node with its agent."""

    def __init__(self, node: AgentNode, arguments: argparse.Namespace) -> None:
        self.node = node
        self._writes = arguments.writes
        # The state on disk is written every 30 seconds at most, whatever was written to the cluster.
        node.options = ["--cache", ""]
        node.node_configuration["networkPolicy"] = {"enabled": True, "establishedConnections": "cut"}
        node.write_configuration()
        node.store.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})
        node.store.put(policy(8000))
        node.store.put(
            manifests.service("svc-60000", cluster_ip(60000), [manifests.port(53, name="p53", protocol="UDP")])
        )
        node.store.put(dns(0))
        for number in range(1, arguments.services + 1):
            node.store.put(service(number))
            node.store.put(endpoint_slice(number, count=5))
        for number in range(arguments.pods):
            node.store.put(pod(number))
        subprocess.run(["conntrack", "-R", "-"], input=connections(arguments.connections), text=True, check=True)
        node.start()
        wait_for(lambda: (node.status().get("networkPolicy") or {}).get("inForce"), 300, 0.5)
        time.sleep(SETTLE_SECONDS)
        self._idle = self._spent(lambda: time.sleep(IDLE_SECONDS))

    def _spent(self, act: Callable[[], object]) -> Cost:
        """Return the processor seconds and the requests in a second while ``act`` runs, watches not included."""
        assert self.node.process is not None and self.node.api is not None
        began, before, sent = time.monotonic(), processor_seconds(self.node.process.pid), self._requests()
        act()
        seconds = time.monotonic() - began
        used = processor_seconds(self.node.process.pid) - before
        return Cost(used / seconds, (self._requests() - sent) / seconds)

    def _requests(self) -> int:
        assert self.node.api is not None
        return _requests(self.node.api)

    def cost(self, write: Write, first: int) -> Cost:
        """Return what each of some writes costs. ``first``: the number of the first one."""
        lasted = 0.0

        def act() -> None:
            nonlocal lasted
            began = time.monotonic()
            for number in range(first, first + self._writes):
                write.make(self.node, number)
                time.sleep(PAUSE_SECONDS)
            time.sleep(SETTLE_SECONDS)
            lasted = time.monotonic() - began

        found = self._spent(act)
        factor = lasted / self._writes
        return Cost((found.seconds - self._idle.seconds) * factor, (found.requests - self._idle.requests) * factor)


def _requests(server: ApiServer) -> int:
    """Return how many requests a server has got, without watches; it records posted Events separately."""
    return len(server.posted) + sum("watch=" not in path for path in list(server.requests))


class Still:
    """The task of a thread that is not supervised."""

    def idle(self) -> None:
        """Do nothing."""

    def busy(self, seconds: float) -> None:
        """Do nothing."""


def requests_for_an_event(agents: int) -> float:
    """Return the requests for one Event about an object that all of these agents post at once, the mean of ten."""
    server = ApiServer(Store(), None)
    try:
        for number in range(agents):
            server.store.put({"kind": "Node", "metadata": {"name": f"n{number}"}})
        log = Log(io.StringIO())
        posters = [
            EventPoster(
                lambda expect: ApiClient(ApiConnection(host=server.url)),
                f"n{number}",
                log=log,
                limited=LimitedLog(log),
                metrics=Metrics(),
            )
            for number in range(agents)
        ]

        def each(act: Callable[[EventPoster], None], together: int) -> None:
            for start in range(0, agents, together):
                threads = [threading.Thread(target=act, args=(poster,)) for poster in posters[start : start + together]]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        def start(poster: EventPoster) -> None:
            poster.post(Content(node_reference("n"), WARNING, Reason.STARTING, "Start", ""))
            poster.close()
            poster.run(Still())  # type: ignore[arg-type]

        def report(poster: EventPoster) -> None:
            for number in range(10):
                about = service_reference("tenant", f"web-{number}")
                note = "is not valid"
                poster.post(Content(about, WARNING, Reason.OBJECT_REFUSED, "Sync", note, about))
            poster.close()
            poster.run(Still())  # type: ignore[arg-type]

        each(start, FEW)
        before = _requests(server)
        each(report, FEW)
        return (_requests(server) - before) / 10
    finally:
        server.close()


def rows(bench: Bench, writes: int) -> Iterator[str]:
    """Yield the lines of the table."""
    few, many = requests_for_an_event(FEW), requests_for_an_event(MANY)
    yield f"| write | processor, ms | times the floor | requests, 1 agent | {FEW} agents | {MANY:,} agents |"
    yield "|---|---|---|---|---|---|"
    # What the agent does every some seconds belongs to none of them.
    rounds = [[bench.cost(write, first) for write in WRITES] for first in range(0, ROUNDS * writes, writes)]
    best = [min(costs) for costs in zip(*rounds)]
    floor = best[0].seconds
    for write, cost in zip(WRITES, best):
        one = round(cost.requests, 1)
        of_all = (round(few), round(many)) if write.is_common else (round(one * FEW), round(one * MANY))
        ratio = f"{cost.seconds / floor:.1f}"
        yield f"| {write.what} | {cost.seconds * 1000:.1f} | {ratio} | {one:g} | {of_all[0]} | {of_all[1]} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=2000)
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument(
        "--writes", type=int, default=8, help="of each kind in a round; an agent posts 25 Events at once"
    )
    arguments = parser.parse_args()
    system.ip_batch(["link set lo up"])
    with tempfile.TemporaryDirectory() as scratch:
        node = AgentNode(Path(scratch), "nftables")
        try:
            for line in rows(Bench(node, arguments), arguments.writes):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
        finally:
            node.close()
    sys.stdout.write(f"load {os.getloadavg()[0]:.1f}\n")


if __name__ == "__main__":
    main()
