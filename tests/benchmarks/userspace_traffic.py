# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure the agent's forwarding in userspace mode, beside nftables mode, haproxy, and no proxy, in one run.

Run as root from the top of the repository; works in its own network namespace and leaves nothing behind:

    .venv/bin/python -m tests.benchmarks.userspace_traffic [--seconds 5] [--services 1000]

Clients and endpoints are processes on the node; the connections go to a Service with two endpoints, and the agent also
serves the given number of other Services. Columns: requests per second on new connections, of four clients at once;
gigabits per second of one bulk connection, and of four; milliseconds of a small request on an open connection, at the
median and at the 99th percentile, one at a time; the same 99th percentile while every second 1,000 Services change,
which the agent renders meanwhile; processor seconds of the proxy for 1,000 new connections.

KUBENODE_HAPROXY=/path/to/haproxy adds a row for it: mode tcp, one thread, option splice-auto, roundrobin.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Callable, Iterator, Optional, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_slice, service
from tests.kernel.userspace_node import endpoints_of, service_of
from tests.lab import system
from tests.waiting import wait_for

HAPROXY = "KUBENODE_HAPROXY"
ENDPOINTS = ("10.244.1.11", "10.244.1.12")
PORT, BULK_PORT = 8080, 8081
SERVICE, BULK_SERVICE = 1, 2
FIRST_OTHER = 10
CLIENTS = 4
CHANGES = 1000
_CONFIGURATION = """
global
    nbthread 1
    maxconn 2000
defaults
    mode tcp
    option splice-auto
    balance roundrobin
    timeout connect 1s
    timeout client 1h
    timeout server 1h
"""


def _answer(address: str, port: int, bulk: bool) -> None:
    """Run one process of an endpoint: echo small requests, or send without end."""
    listener = socket.create_server((address, port), backlog=4096, reuse_port=True)
    block = bytes(1 << 20)

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            while True:
                data = sock.recv(4096)
                if not data:
                    return
                sock.sendall(data)
                while bulk:
                    sock.sendall(block)

    while True:
        sock, _client = listener.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


def _connect_often(place: tuple[str, int], seconds: float, count: Synchronized[int]) -> None:
    done, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.create_connection(place, 10) as sock:
            sock.sendall(b"ping")
            assert sock.recv(16) == b"ping"
        done += 1
    with count.get_lock():
        count.value += done


def _receive(place: tuple[str, int], seconds: float, count: Synchronized[int]) -> None:
    buffer, done = bytearray(1 << 20), 0
    with socket.create_connection(place, 10) as sock:
        sock.sendall(b"go")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done += sock.recv_into(buffer)
    with count.get_lock():
        count.value += done


def together(
    body: Callable[[tuple[str, int], float, Synchronized[int]], None], place: tuple[str, int], seconds: float, many: int
) -> int:
    """Return the sum of what many client processes count."""
    count: Synchronized[int] = multiprocessing.Value("q", 0)
    clients = [multiprocessing.Process(target=body, args=(place, seconds, count)) for _number in range(many)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
        assert client.exitcode == 0
    return count.value


def latencies(place: tuple[str, int], seconds: float) -> list[float]:
    """Return the milliseconds of small requests on one connection, sorted."""
    found, end = [], time.monotonic() + seconds
    with socket.create_connection(place, 10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while time.monotonic() < end:
            started = time.monotonic()
            sock.sendall(b"ping")
            assert sock.recv(16) == b"ping"
            found.append(1000 * (time.monotonic() - started))
    return sorted(found)


@contextlib.contextmanager
def changing(node: Optional[AgentNode], services: int) -> Iterator[None]:
    """Replace an endpoint of many Services every second."""
    stop = threading.Event()

    def change() -> None:
        first = 0
        while node is not None and not stop.wait(1.0):
            first = 1 - first
            for number in range(FIRST_OTHER, FIRST_OTHER + min(services, CHANGES)):
                node.store.put(endpoint_slice(number, 2, first=first))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def processor_seconds(process: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(int(value) for value in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def measure(
    name: str, places: Sequence[tuple[str, int]], seconds: float, proxy: int, node: Optional[AgentNode], services: int
) -> None:
    """Print one row. ``places``: of the Service for small requests, and of that for bulk."""
    small, bulk = places
    before = processor_seconds(proxy) if proxy else 0.0
    connections = together(_connect_often, small, seconds, CLIENTS)
    used = processor_seconds(proxy) - before if proxy else 0.0
    rates = [8e-9 * together(_receive, bulk, seconds, many) / seconds for many in (1, CLIENTS)]
    alone = latencies(small, seconds)
    with changing(node, services):
        busy = latencies(small, 2 * seconds) if node is not None else alone
    print(
        f"| {name} | {connections / seconds:,.0f} | {rates[0]:.1f} | {rates[1]:.1f} | {alone[len(alone) // 2]:.2f} |"
        f" {alone[len(alone) * 99 // 100]:.2f} | {busy[len(busy) * 99 // 100]:.2f} |"
        f" {1000 * used / max(1, connections):.2f} |",
        flush=True,
    )


@contextlib.contextmanager
def agent(mode: str, services: int) -> Iterator[AgentNode]:
    """Run an agent in a mode, with the two Services and others."""
    with tempfile.TemporaryDirectory() as scratch:
        node = AgentNode(Path(scratch), mode)
        node.store.put(service_of(SERVICE))
        node.store.put(endpoints_of(SERVICE, ENDPOINTS))
        node.store.put(service_of(BULK_SERVICE))
        node.store.put(endpoints_of(BULK_SERVICE, ENDPOINTS, port=BULK_PORT))
        for number in range(FIRST_OTHER, FIRST_OTHER + services):
            node.store.put(service(number))
            node.store.put(endpoint_slice(number))
        try:
            node.start()
            yield node
            node.stop(signal.SIGTERM)
            assert node.run("cleanup", "--state-directory", str(node.scratch / "run")).returncode == 0
        finally:
            node.close()


@contextlib.contextmanager
def haproxy(program: str) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Run haproxy in front of the same endpoints; yield its process and its places."""
    places = [("127.0.0.1", 9080), ("127.0.0.1", 9081)]
    text = _CONFIGURATION
    for (address, port), target in zip(places, (PORT, BULK_PORT)):
        text += f"listen l{port}\n    bind {address}:{port}\n"
        text += "".join(f"    server s{index} {ip}:{target}\n" for index, ip in enumerate(ENDPOINTS))
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
        file.write(text)
        file.flush()
        process = subprocess.Popen([program, "-db", "-f", file.name])
        try:
            wait_for(lambda: socket.socket().connect_ex(places[0]) == 0)
            yield process.pid, places
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Traffic through userspace mode, beside others.")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--services", type=int, default=1000)
    arguments = parser.parse_args()
    seconds, services = arguments.seconds, arguments.services
    system.unshare(system.CLONE_NEWNET)
    system.forget_host_settings()
    system.ip_batch(
        ["link set lo up", "route add 10.96.0.0/12 dev lo", *(f"address add {ip}/32 dev lo" for ip in ENDPOINTS)]
    )
    servers = [
        multiprocessing.Process(target=_answer, args=(address, port, port == BULK_PORT), daemon=True)
        for address in ENDPOINTS
        for port in (PORT, BULK_PORT)
    ]
    for server in servers:
        server.start()
    direct = [(ENDPOINTS[0], PORT), (ENDPOINTS[0], BULK_PORT)]
    wait_for(lambda: all(socket.socket().connect_ex(place) == 0 for place in direct))
    through: dict[str, list[tuple[str, int]]] = {"service": [(cluster_ip(SERVICE), 80), (cluster_ip(BULK_SERVICE), 80)]}
    columns = (
        "requests/s on new connections",
        "Gbit/s, 1 connection",
        f"Gbit/s, {CLIENTS}",
        "ms, median",
        "ms, p99",
        "ms, p99 during changes",
        "CPU s per 1,000 connections",
    )
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    measure("no proxy", direct, seconds, 0, None, services)
    for mode in ("nftables", "userspace"):
        with agent(mode, services) as node:
            assert node.process is not None
            proxy = node.process.pid if mode == "userspace" else 0
            measure(f"{mode} mode", through["service"], seconds, proxy, node, services)
    if HAPROXY in os.environ:
        with haproxy(os.environ[HAPROXY]) as (process, places):
            measure("haproxy", places, seconds, process, None, services)


if __name__ == "__main__":
    main()
