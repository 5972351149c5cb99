# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what is written by hand beside the libraries and programs that do the same, in one run.

Run as root from the top of the repository; works in its own network namespace and leaves nothing behind:

    .venv/bin/python -m tests.benchmarks.libraries [--runs 3]

Each line has processor milliseconds of the program and of those that it runs, the fastest of several runs, and how many
times more the alternative needs. Each measurement has a process of its own, so that the lines do not share caches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.server
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Callable, Iterator, NamedTuple

import kubernetes
from pyroute2 import IPRoute

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import object_key, parsed_object
from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding.limits import Limits as ForwardingLimits
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink import links
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference
from tests.benchmarks.large_cluster import large_cluster
from tests.benchmarks.nftables_scale import SETTINGS, routes
from tests.unit.agent import http_bench
from tests.unit.forwarding.conftest import Running

DEVICE = "libraries0"
ADDRESSES, SERVICES, ENDPOINTS = 3000, 1000, 10
REQUESTS, IDLE = 2000, 1000
BULK = 1 << 30
HERE = "127.0.0.1"
Work = Callable[[], None]


class Row(NamedTuple):
    """One comparison: what is done, by hand, and by others."""

    what: str
    own: Work
    others: dict[str, Work]


def processor_seconds() -> float:
    """Return the processor time of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _measured(work: Work, result: Connection) -> None:
    started = processor_seconds()
    work()
    result.send(getattr(work, "seconds", None) or processor_seconds() - started)


def milliseconds(work: Work, runs: int) -> float:
    """Return the processor time of the fastest run, each in a process of its own."""
    found = []
    for _run in range(runs):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_measured, args=(work, theirs))
        process.start()
        theirs.close()
        found.append(1000 * ours.recv())
        process.join()
        assert process.exitcode == 0
    return min(found)


# -- netlink and the text of rules -------------------------------------------------------------------------------------


def fill_kernel() -> int:
    """Give the namespace addresses and a table of nftables mode; return the number of the device."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with contextlib.closing(NetlinkSocket(socket.NETLINK_ROUTE)) as sock:
        links.make_device(sock, DEVICE, "bridge")
        wanted = {f"10.96.{number >> 8}.{number & 255}": True for number in range(1, ADDRESSES + 1)}
        links.AddressesResource(sock, "IPv4", DEVICE).apply(Change(added=wanted))
        found = links.find_link(sock, DEVICE)
    assert found is not None
    tables = RENDERING.desired_tables({one.key: one for one in routes(SERVICES, ENDPOINTS)}, SETTINGS)
    with NftablesResource("IPv4") as table:
        table.apply(difference({}, tables["table objects"]))
    return found.number


def own_addresses() -> None:
    """Read the addresses by the project's netlink."""
    with contextlib.closing(NetlinkSocket(socket.NETLINK_ROUTE)) as sock:
        assert len(links.AddressesResource(sock, "IPv4", DEVICE).observe()) == ADDRESSES


def own_table() -> None:
    """Read the table, as the difference needs it."""
    with NftablesResource("IPv4") as table:
        assert len(table.observe()) > SERVICES


def own_text() -> None:
    """Read the table, and write it in the syntax of nft."""
    with NftablesResource("IPv4") as table:
        lines = [line for key, value in table.observe().items() for line in table.describe(key, value)]
    assert len(lines) > SERVICES


def nft(*arguments: str) -> Work:
    """Return work that runs nft, and reads its JSON if that is requested."""

    def work() -> None:
        text = subprocess.run(["nft", *arguments], check=True, capture_output=True).stdout
        if "-j" in arguments:
            assert len(json.loads(text)["nftables"]) > SERVICES / 100

    return work


# -- objects of the API server -----------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What the package's deserializer reads of an HTTP response."""

    data: str


def objects_rows() -> Row:
    """Return the comparison of EndpointSlices from JSON."""
    slices = [item for item in large_cluster(SERVICES, ENDPOINTS) if item["kind"] == "EndpointSlice"]
    text = json.dumps({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "items": slices})

    def own() -> None:
        parsed = [parsed_object(item, object_key(item)) for item in json.loads(text)["items"]]
        assert len(parsed) == len(slices)

    def package() -> None:
        api: Any = kubernetes.client.ApiClient()
        try:
            found = api.deserialize(Answer(text), "V1EndpointSliceList")
        except TypeError:
            found = api.deserialize(text, "V1EndpointSliceList", "application/json")
        assert len(found.items) == len(slices)

    return Row(f"{len(slices)} EndpointSlices from JSON to objects", own, {"kubernetes": package})


# -- health checks -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_server() -> Iterator[int]:
    with http_bench.running() as found:
        yield found.port


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer as the agent does."""
        body = b"GET /healthz"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def _threading_server() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer((HERE, 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n\r\nGET /healthz")
        await writer.drain()
    writer.close()


@contextlib.contextmanager
def _in_asyncio(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(serve, HERE, 0, backlog=1024))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)


def checked(serving: Callable[[], contextlib.AbstractContextManager[int]]) -> Work:
    """Return work that requests the health check often; the client's own share is the same in every column."""

    def work() -> None:
        with serving() as port:
            for _number in range(REQUESTS):
                assert http_bench.ask(port).endswith(b"GET /healthz")

    return work


def idle_clients(serving: Callable[[], contextlib.AbstractContextManager[int]]) -> tuple[int, int]:
    """Return the threads, and the KiB of memory, that clients cost which connect and send nothing."""

    def status(name: str) -> int:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    with serving() as port:
        http_bench.ask(port)
        before = status("Threads"), status("VmRSS")
        clients = [socket.create_connection((HERE, port)) for _number in range(IDLE)]
        time.sleep(1)
        found = status("Threads") - before[0], status("VmRSS") - before[1]
        for client in clients:
            client.close()
    return found


# -- forwarding --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _source() -> Iterator[int]:
    """Run an endpoint in a process of its own, which sends many bytes to each client."""
    listener = socket.create_server((HERE, 0))
    child = os.fork()
    if child == 0:
        block = bytes(1 << 20)
        while True:
            sock, _client = listener.accept()
            with contextlib.suppress(OSError), sock:
                for _number in range(BULK // len(block)):
                    sock.sendall(block)
    try:
        yield listener.getsockname()[1]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@contextlib.contextmanager
def _own_forwarder(endpoint: int) -> Iterator[int]:
    running = Running(ForwardingLimits())
    yield running.listen((HERE, endpoint)).port
    running.close()


@contextlib.contextmanager
def _asyncio_forwarder(endpoint: int) -> Iterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_upstream = await asyncio.open_connection(HERE, endpoint)
        while data := await upstream.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()
        to_upstream.close()

    with _in_asyncio(serve) as port:
        yield port


def forwarded(serving: Callable[[int], contextlib.AbstractContextManager[int]]) -> Work:
    """Return work that receives many bytes through a forwarder, in a process of its own."""

    def work() -> None:
        with _source() as endpoint, serving(endpoint) as port:
            child = os.fork()
            if child == 0:
                buffer, found = bytearray(1 << 20), 0
                with socket.create_connection((HERE, port)) as sock:
                    while more := sock.recv_into(buffer):
                        found += more
                os._exit(0 if found == BULK else 1)
            started = time.process_time()
            _pid, status = os.waitpid(child, 0)
            # Only the forwarder: what the client and the endpoint need is the same for all.
            work.seconds = time.process_time() - started  # type: ignore[attr-defined]
            assert status == 0

    return work


def rows(device: int) -> Iterator[Row]:
    """Yield all comparisons."""

    def oracle() -> None:
        with IPRoute() as route:
            assert len(list(route.get_addr(family=socket.AF_INET, index=device))) == ADDRESSES

    many = f"{SERVICES:,} Services with {ENDPOINTS} endpoints"
    yield Row(f"read {ADDRESSES:,} addresses of a device", own_addresses, {"pyroute2": oracle})
    yield Row(f"read the table of {many}", own_table, {"nft -j": nft("-j", "list", "ruleset")})
    yield Row(f"write the rules of {many} as text", own_text, {"nft": nft("list", "ruleset")})
    yield objects_rows()
    others = {"http.server": _threading_server, "asyncio": lambda: _in_asyncio(_answer)}
    what = f"answer {REQUESTS:,} health checks, client included"
    yield Row(what, checked(_own_server), {name: checked(other) for name, other in others.items()})
    yield Row("forward 1 GiB", forwarded(_own_forwarder), {"asyncio": forwarded(_asyncio_forwarder)})


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    if os.geteuid() != 0:
        raise SystemExit("needs root, for a separate network namespace")
    system.unshare(system.CLONE_NEWNET)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, max(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    print("what | by hand, ms | alternative | ms | times")
    for row in rows(fill_kernel()):
        own = milliseconds(row.own, runs)
        for name, other in row.others.items():
            taken = milliseconds(other, runs)
            print(f"{row.what} | {own:.0f} | {name} | {taken:.0f} | {taken / own:.1f}", flush=True)
    servers: list[tuple[str, Callable[[], contextlib.AbstractContextManager[int]]]] = [
        ("by hand", _own_server),
        ("http.server", _threading_server),
        ("asyncio", lambda: _in_asyncio(_answer)),
    ]
    print(f"{IDLE:,} idle clients | threads | KiB, clients included")
    for name, server in servers:
        ours, theirs = multiprocessing.Pipe()

        def count(server: Any = server, result: Any = theirs) -> None:
            result.send(idle_clients(server))

        process = multiprocessing.get_context("fork").Process(target=count)
        process.start()
        theirs.close()
        threads, memory = ours.recv()
        process.join()
        print(f"{name} | {threads} | {memory}", flush=True)


if __name__ == "__main__":
    main()
