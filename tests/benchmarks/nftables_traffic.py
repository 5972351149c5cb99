# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what nftables mode costs connections and kernel memory, beside no proxy and, if given, beside kube-proxy.

Run as root from the top of the repository; works in its own network namespaces and leaves nothing behind:

    .venv/bin/python -m tests.benchmarks.nftables_traffic [--sizes 100,1000] [--endpoints 1,10] [--seconds 3]

A client and a server are joined by a node with the given number of Services and of endpoints of each; the connections
go to the last of them. Columns: who programmed the node; Services and endpoints of each; seconds from nothing to a
programmed kernel; milliseconds for one endpoint replaced (median of 51; mean of 3 for kube-proxy); memory that the
kernel then holds, in MiB; microseconds until a new connection is established, at the median and at the 99th percentile,
one at a time; connections per second of four clients at once. The row ``none`` connects to the endpoint itself on a
node without rules.

KUBENODE_KUBE_PROXY=/path/to/kube-proxy adds a row for it in mode nftables, run against the test API server in the same
namespace; its seconds and milliseconds are those of its own metric kubeproxy_sync_proxy_rules_duration_seconds.
Memory is what the caches kmalloc-cg-* and vmalloc have grown by, on the whole machine: other work disturbs it.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import manifests, system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo
from tests.benchmarks.kube_proxy import BINARY, KubeProxyNode
from tests.benchmarks.nftables_scale import SETTINGS, address, changed, contribution, percentile, routes

NAMESPACES = {"client": ("198.18.0.1", "198.18.0.2"), "server": ("192.0.2.1", "192.0.2.2")}
# The client is a pod, so nothing is masqueraded.
PODS = "198.18.0.0/24"
ENDPOINTS = "10.128.0.0/9"
CLIENTS = 4
CHANGES = 51
CHANGES_OF_KUBE_PROXY = 3
BACKLOG = 1 << 18
CHOSEN = SETTINGS._replace(local_traffic=LocalTraffic("cidr", PODS))
SYNC = "kubeproxy_sync_proxy_rules_duration_seconds"
PATIENCE_SECONDS = 1800.0


class Row(NamedTuple):
    """One line of the table."""

    proxy: str
    services: int
    endpoints: int
    programmed_s: float
    change_ms: float
    memory_mib: float
    connect_p50_us: int
    connect_p99_us: int
    connections_per_s: int


def full_name(place: str) -> str:
    """Return the name of a namespace beside the node."""
    return f"knbench{os.getpid()}-{place}"


@contextmanager
def network() -> Iterator[dict[str, str]]:
    """Make the process's own namespace the node, and yield the paths of the others."""
    system.unshare(system.CLONE_NEWNET)
    try:
        for place, (ours, theirs) in NAMESPACES.items():
            name = full_name(place)
            lines = [
                f"netns add {name}",
                f"link add {place} type veth peer name eth0 netns {name}",
                f"address add {ours}/24 dev {place}",
                f"link set {place} up",
            ]
            system.ip_batch(lines)
            inside = ["link set lo up", "link set eth0 up", f"address add {theirs}/24 dev eth0"]
            inside.append(f"route add default via {ours}")
            if place == "server":
                inside.append(f"route add local {ENDPOINTS} dev lo")
            system.ip_batch(inside, name)
        system.ip_batch(["link set lo up", f"route add {ENDPOINTS} via {NAMESPACES['server'][1]}"])
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        yield {place: f"/run/netns/{full_name(place)}" for place in NAMESPACES}
    finally:
        for place in NAMESPACES:
            subprocess.run(["ip", "netns", "delete", full_name(place)], check=False)


@contextmanager
def in_namespace(path: str, serve: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """Run a function in a process of a network namespace, and begin once it calls its argument."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        system.enter(path, system.CLONE_NEWNET)
        serve(lambda: os.write(writing, b"x"))
        os._exit(1)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def accept_all(listens: Callable[[], object]) -> None:
    """Accept connections to all endpoints, and leave closing them to the clients."""
    # Clients are faster than this loop; a full queue would make them wait for a second.
    Path("/proc/sys/net/core/somaxconn").write_text(str(BACKLOG))
    listening = socket.create_server(("", 8080), backlog=BACKLOG)
    listens()
    accepted = collections.deque(maxlen=256)  # type: ignore[var-annotated]
    while True:
        accepted.append(listening.accept()[0])


def connections(path: str, target: tuple[str, int], seconds: float) -> list[float]:
    """Return the seconds that each connection took, one after another. Raises OSError if one fails."""
    system.enter(path, system.CLONE_NEWNET)
    taken = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        with socket.socket() as sock:
            # Close with a reset, so that no port stays in TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.settimeout(10)
            started = time.perf_counter()
            sock.connect(target)
            taken.append(time.perf_counter() - started)
    return taken


def traffic(paths: dict[str, str], target: tuple[str, int], seconds: float) -> tuple[int, int, int]:
    """Return the microseconds to connect (p50, p99) and the connections per second."""
    fork = multiprocessing.get_context("fork")
    with in_namespace(paths["server"], accept_all):
        with fork.Pool(1) as pool:
            pool.apply(connections, (paths["client"], target, 0.2))
            alone = pool.apply(connections, (paths["client"], target, seconds))
        with fork.Pool(CLIENTS) as pool:
            started = time.perf_counter()
            together = pool.starmap(connections, [(paths["client"], target, seconds)] * CLIENTS, chunksize=1)
            rate = sum(map(len, together)) / (time.perf_counter() - started)
    return round(percentile(alone, 0.5) * 1e6), round(percentile(alone, 0.99) * 1e6), round(rate)


def kernel_memory() -> float:
    """Return the MiB in the caches that nf_tables allocates from, and in vmalloc."""
    total = 0
    for line in Path("/proc/slabinfo").read_text().splitlines():
        words = line.split()
        if words[0].startswith("kmalloc-cg-"):
            total += int(words[1]) * int(words[3])
    vmalloc = re.search(r"^VmallocUsed:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return total / 2**20 + (int(vmalloc.group(1)) / 1024 if vmalloc else 0.0)


def replace(resource: NftablesResource, one: ServicePortInfo) -> float:
    """Replace the endpoint of a Service and return the seconds."""
    started = time.perf_counter()
    resource.apply(difference(contribution(one), contribution(changed(one, "replace", 1))))
    return time.perf_counter() - started


def measure(paths: dict[str, str], services: int, endpoints: int, seconds: float) -> Row:
    """Measure the project's own nftables mode."""
    all_service_ports = routes(services, endpoints)
    target = (address(services - 1, 96), 80)
    with NftablesResource("IPv4") as resource:
        before = kernel_memory()
        started = time.perf_counter()
        desired = RENDERING.desired_tables({one.key: one for one in all_service_ports}, CHOSEN)["table objects"]
        resource.apply(difference(resource.observe(), desired))
        programmed = time.perf_counter() - started
        memory = kernel_memory() - before
        change_ms = percentile([replace(resource, all_service_ports[number]) for number in range(CHANGES)], 0.5) * 1000
        found = traffic(paths, target, seconds)
        resource.apply(difference(resource.observe(), {}))
    return Row("this project", services, endpoints, round(programmed, 3), round(change_ms, 2), round(memory, 1), *found)


def objects_of(services: int, endpoints: int) -> Iterator[dict[str, Any]]:
    """Yield the same Services for an API server: a Node, Services and EndpointSlices."""
    yield manifests.node("node1", NAMESPACES["client"][0], "10.244.1.0/24")
    for number in range(services):
        name, ports = f"svc{number}", [manifests.port(80, targetPort=8080)]
        policies = {"sessionAffinity": "None", "internalTrafficPolicy": "Cluster"}
        yield manifests.service(name, address(number, 96), ports, namespace="bench", **policies)
        yield endpoint_slice(name, [address(number * endpoints + each, 128) for each in range(endpoints)])


def endpoint_slice(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    """Return the slice of a Service with its endpoints."""
    listed = [manifests.endpoint(each, "node2") for each in endpoints]
    return manifests.endpoint_slice(name, listed, [manifests.port(8080)], name=name, namespace="bench")


def synced(node: KubeProxyNode) -> tuple[int, float]:
    """Return how many syncs of IPv4 kube-proxy has counted, and their seconds; (0, 0.0) before it answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    except OSError:
        return 0, 0.0
    values = {
        name: float(value)
        for name, labels, value in re.findall(rf"^{SYNC}_(count|sum)(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if "IPv6" not in labels
    }
    return int(values.get("count", 0)), values.get("sum", 0.0)


def wait_for_sync(node: KubeProxyNode, count: int) -> tuple[int, float]:
    """Wait until there are more than ``count`` syncs, and none for a second; return the counts."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    found = (0, 0.0)
    while time.monotonic() < deadline:
        node.used()
        latest = synced(node)
        if latest == found and latest[0] > count:
            return latest
        found = latest
        time.sleep(1)
    raise SystemExit(f"{node.program}: no sync within {PATIENCE_SECONDS:g} seconds:\n{node.log[-3000:]}")


def measure_kube_proxy(paths: dict[str, str], services: int, endpoints: int, seconds: float) -> Row:
    """Measure a kube-proxy in the same network."""
    with tempfile.TemporaryDirectory() as name:
        node = KubeProxyNode(Path(name), "nftables")
        node.write_configuration(clusterCIDR=PODS)
        for item in objects_of(services, endpoints):
            node.store.put(item)
        before = kernel_memory()
        try:
            node.start()
            count, programmed = wait_for_sync(node, 0)
            memory = kernel_memory() - before
            latest, seconds_so_far = count, programmed
            for number in range(CHANGES_OF_KUBE_PROXY):
                rest = [address(number * endpoints + each, 128) for each in range(1, endpoints)]
                node.store.put(endpoint_slice(f"svc{number}", [address(1, 250), *rest]))
                latest, seconds_so_far = wait_for_sync(node, latest)
            change_ms = (seconds_so_far - programmed) / (latest - count) * 1000
            found = traffic(paths, (address(services - 1, 96), 80), seconds)
        finally:
            node.close()
        for family in ("ip", "ip6"):
            subprocess.run(["nft", "delete", "table", family, "kube-proxy"], check=False, stderr=subprocess.DEVNULL)
    return Row("kube-proxy", services, endpoints, round(programmed, 3), round(change_ms, 2), round(memory, 1), *found)


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="100,1000,10000,44000")
    parser.add_argument("--endpoints", default="1,10")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long connections are made, for each figure")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root, for separate network namespaces")
    if not os.environ.get(BINARY):
        print(f"no row for kube-proxy: the environment variable {BINARY} is not set", file=sys.stderr)
    print(" | ".join(Row._fields))
    with network() as paths:
        direct = address(0, 128)
        print(" | ".join(map(str, Row("none", 0, 0, 0, 0, 0, *traffic(paths, (direct, 8080), arguments.seconds)))))
        for endpoints, size in itertools.product(
            map(int, arguments.endpoints.split(",")), map(int, arguments.sizes.split(","))
        ):
            print(" | ".join(map(str, measure(paths, size, endpoints, arguments.seconds))), flush=True)
            if os.environ.get(BINARY):
                row = measure_kube_proxy(paths, size, endpoints, arguments.seconds)
                print(" | ".join(map(str, row)), flush=True)


if __name__ == "__main__":
    main()
