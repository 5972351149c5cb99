# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what the counters of nftables mode cost (traffic.countConnections, traffic.countBytes).

Run as root from the top of the repository; works in its own network namespaces and leaves nothing behind:

    .venv/bin/python -m tests.benchmarks.traffic_counters [--count connections|bytes] [--services 1000] [--endpoints 2]
        [--connections 4000] [--requests 20000] [--large-requests 5000] [--pairs 10]

Each pair is measured without and with counters, in alternating order: microseconds until a new connection is
established, at the 10th percentile and at the median, one connection at a time; new connections per second by the
clock; in one connection microseconds of a request of 8 bytes and its answer of one, to the Service and, beside it, to
the endpoint itself; microseconds of a request of 64 KiB, which offloading makes a packet or two; and processor seconds
to program the table and to read it back. The 10th percentile is that of what no other work of the machine interrupts;
the kernel handles the packets in that time. For each figure, the medians of the values without and with counters are
printed, and of the differences of the pairs in percent the median, the quartiles and the range. Memory is what per-CPU
memory and the caches of the kernel have grown by.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import socket
import statistics
import struct
import time
from pathlib import Path
from typing import Callable, NamedTuple

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.benchmarks.nftables_scale import address, percentile, routes
from tests.benchmarks.nftables_traffic import CHOSEN, accept_all, in_namespace, kernel_memory, network


class Figures(NamedTuple):
    """The result of one measurement."""

    connect_p10_us: float
    connect_p50_us: float
    connections_per_s: float
    request_p10_us: float
    request_p50_us: float
    request_to_endpoint_p10_us: float
    large_request_p10_us: float
    large_request_p50_us: float
    program_s: float
    read_s: float
    memory_mib: float


#: Printed with their differences in percent.
_COMPARED = Figures._fields[:10]
_LENGTH = struct.Struct(">Q")
_LARGE = bytes(1 << 16)


def per_cpu_memory() -> float:
    """Return the MiB of per-CPU memory, where the kernel keeps the counters."""
    found = re.search(r"^Percpu:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found.group(1)) / 1024 if found else 0.0


def connect(path: str, target: tuple[str, int], count: int) -> list[float]:
    """Open connections one after another; return the seconds that each of them took."""
    system.enter(path, system.CLONE_NEWNET)
    taken = []
    # The first ones warm up the caches.
    for _number in range(count + count // 10):
        with socket.socket() as sock:
            # Close with a reset, so that no port stays in TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.settimeout(30)
            started = time.perf_counter()
            sock.connect(target)
            taken.append(time.perf_counter() - started)
    return taken[count // 10 :]


def answer_all(listens: Callable[[], object]) -> None:
    """Read requests, a length and the bytes that follow, and answer each with one byte; one connection at a time."""
    with socket.create_server(("", 8080)) as listening:
        listens()
        while True:
            connection, _client = listening.accept()
            with connection, contextlib.suppress(ConnectionError):
                answer(connection)


def answer(connection: socket.socket) -> None:
    """Answer all requests of a connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    space = memoryview(bytearray(len(_LARGE)))
    while connection.recv_into(space, _LENGTH.size, socket.MSG_WAITALL) == _LENGTH.size:
        (left,) = _LENGTH.unpack_from(space)
        while left:
            left -= connection.recv_into(space, min(left, len(space)))
        connection.sendall(b"x")


def request(path: str, target: tuple[str, int], data: bytes, count: int) -> list[float]:
    """Send requests in one connection, one after another; return the seconds that each of them took."""
    system.enter(path, system.CLONE_NEWNET)
    message = _LENGTH.pack(len(data)) + data
    taken = []
    with socket.create_connection(target, 30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _number in range(count + count // 10):
            started = time.perf_counter()
            sock.sendall(message)
            sock.recv(1)
            taken.append(time.perf_counter() - started)
    return taken[count // 10 :]


def requests(paths: dict[str, str], target: tuple[str, int], endpoint: str, options: argparse.Namespace) -> list[float]:
    """Return the figures of open connections, in microseconds."""
    with (
        in_namespace(paths["server"], answer_all),
        multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool,
    ):
        small = pool.apply(request, (paths["client"], target, b"", options.requests))
        direct = pool.apply(request, (paths["client"], (endpoint, 8080), b"", options.requests))
        large = pool.apply(request, (paths["client"], target, _LARGE, options.large_requests))
    shares = ((small, 0.1), (small, 0.5), (direct, 0.1), (large, 0.1), (large, 0.5))
    return [percentile(taken, share) * 1e6 for taken, share in shares]


def measure(paths: dict[str, str], counted: bool, options: argparse.Namespace) -> Figures:
    """Program a node with or without counters, and connect to its last Service."""
    ports = {one.key: one for one in routes(options.services, options.endpoints)}
    chosen = CHOSEN._replace(**{f"count_{options.count}": counted})
    desired = RENDERING.desired_tables(ports, chosen)["table objects"]
    with NftablesResource("IPv4") as resource:
        memory = kernel_memory() + per_cpu_memory()
        started = time.process_time()
        resource.apply(difference({}, desired))
        programmed = time.process_time() - started
        memory = kernel_memory() + per_cpu_memory() - memory
        started = time.process_time()
        observed = resource.observe()
        read = time.process_time() - started
        target = (address(options.services - 1, 96), 80)
        with in_namespace(paths["server"], accept_all), multiprocessing.get_context("fork").Pool(1) as pool:
            taken = pool.apply(connect, (paths["client"], target, options.connections))
        endpoint = next(reversed(ports.values())).endpoints[0].ip
        open_connections = requests(paths, target, endpoint, options)
        resource.apply(difference(observed, {}))
    tenth, median = (percentile(taken, share) * 1e6 for share in (0.1, 0.5))
    return Figures(tenth, median, len(taken) / sum(taken), *open_connections, programmed, read, memory)


def show(pairs: list[tuple[Figures, Figures]]) -> None:
    """Print the medians, and the differences of the pairs."""
    print("figure | without | with | difference in %: median, quartiles, range")
    for name in _COMPARED:
        without, counted = ([getattr(pair[place], name) for pair in pairs] for place in (0, 1))
        percent = sorted(100 * (after / before - 1) for before, after in zip(without, counted))
        low, middle, high = statistics.quantiles(percent, n=4)
        medians = f"{statistics.median(without):.4g} | {statistics.median(counted):.4g}"
        print(f"{name} | {medians} | {middle:+.1f}, {low:+.1f} to {high:+.1f}, {percent[0]:+.1f} to {percent[-1]:+.1f}")
    without, counted = (statistics.median(pair[place].memory_mib for pair in pairs) for place in (0, 1))
    print(f"memory_mib | {without:.1f} | {counted:.1f} |")
    print("load average:", " ".join(f"{value:.1f}" for value in os.getloadavg()))


def main() -> None:
    """Measure all pairs and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", choices=("connections", "bytes"), default="connections")
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--endpoints", type=int, default=2)
    parser.add_argument("--connections", type=int, default=4000, help="in each measurement")
    parser.add_argument("--requests", type=int, default=20_000, help="in each measurement")
    parser.add_argument("--large-requests", type=int, default=5_000, help="in each measurement")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root, for separate network namespaces")
    pairs = []
    with network() as paths:
        for number in range(options.pairs):
            order = (False, True) if number % 2 == 0 else (True, False)
            found = {counted: measure(paths, counted, options) for counted in order}
            pairs.append((found[False], found[True]))
    show(pairs)


if __name__ == "__main__":
    main()
