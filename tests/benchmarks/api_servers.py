# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what a client notices when one of three API servers behind a static Service fails, beside haproxy.

Run as root from the top of the repository; works in its own network namespace and leaves nothing behind:

    KUBENODE_HAPROXY=/usr/sbin/haproxy .venv/bin/python -m tests.benchmarks.api_servers [--modes nftables iptables]
    python -m tests.lab.uml --memory 1G -- python -m tests.benchmarks.api_servers --modes ipvs

Three processes answer HTTP requests; a client sends 100 requests a second to the address, each on a new connection, and
gives up after a second. After three seconds one server fails: it is killed (SIGKILL), frozen (SIGSTOP), its packets are
dropped, or it answers /readyz with 500 and all else as before. The agent and haproxy make the same checks: /readyz by
HTTP, interval 1 s, timeout 1 s, fall 2, rise 2, and with --fast-interval also that. Columns: failed requests of all
that were sent after the fault, and seconds from the fault until the last of them began; with --rounds their means.
A mode NAME+userspace is the mode NAME in which the Service of the servers has userspace mode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from tests.kernel.agent_node import AgentNode
from tests.kernel.backends import ADDRESS, PORT, endpoint, make_network, manifests, write_manifests
from tests.waiting import wait_for

HAPROXY = "KUBENODE_HAPROXY"
HAPROXY_ADDRESS = "192.0.2.9"
RATE, BEFORE_SECONDS, AFTER_SECONDS, TIMEOUT_SECONDS = 100, 3.0, 7.0, 1.0
SERVERS = (1, 2, 3)
CHECK = {"kubenode.proxy/check": "http", "kubenode.proxy/check-path": "/readyz"}
_IPTABLES = ("iptables-legacy", "-t", "mangle")
_DROP = ("INPUT", "-d", endpoint(1), "-j", "DROP")
_ANSWER = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_CONFIGURATION = """
defaults
    mode tcp
    balance roundrobin
    timeout connect 1s
    timeout client 1h
    timeout server 1h
    timeout check 1s
    {redispatch}
listen api
    bind {address}:{port}
    option httpchk GET /readyz
    default-server check inter 1s {fast}fall 2 rise 2 on-marked-down shutdown-sessions
"""


class Outcome(NamedTuple):
    """Requests sent after the fault, those that failed, and when the last of them began, in seconds after it."""

    sent: int
    failed: int
    last: float


async def serve(address: str) -> None:
    """Answer every request with 200; after SIGUSR1 those for /readyz with 500."""
    ready = True

    def fail() -> None:
        nonlocal ready
        ready = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            bad = head.startswith(b"GET /readyz ") and not ready
            writer.write(_ANSWER % (b"500 Internal Server Error" if bad else b"200 OK"))
            await writer.drain()
        writer.close()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, fail)
    server = await asyncio.start_server(answer, address, PORT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


@contextlib.contextmanager
def servers() -> Iterator[dict[int, subprocess.Popen[str]]]:
    """Run the three servers."""
    command = [sys.executable, "-m", "tests.benchmarks.api_servers", "--serve"]
    found = {
        number: subprocess.Popen([*command, endpoint(number)], stdout=subprocess.PIPE, text=True) for number in SERVERS
    }
    try:
        for process in found.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield found
    finally:
        for process in found.values():
            process.kill()
            process.wait()
        for undo in (["nft", "delete", "table", "inet", "fault"], [*_IPTABLES, "-D", *_DROP]):
            subprocess.run(undo, capture_output=True, check=False)


def drop_packets(_process: subprocess.Popen[str]) -> None:
    """Drop all packets to the first server, by iptables where the kernel has no nftables."""
    chain = f"chain input {{ type filter hook input priority -300; ip daddr {endpoint(1)} drop; }}"
    rules = f"table inet fault {{ {chain}; }}"
    if subprocess.run(["nft", "-f", "-"], input=rules, text=True, capture_output=True, check=False).returncode:
        subprocess.run([*_IPTABLES, "-I", *_DROP], check=True)


FAULTS: dict[str, Callable[[subprocess.Popen[str]], None]] = {
    "killed": lambda process: process.send_signal(signal.SIGKILL),
    "frozen": lambda process: process.send_signal(signal.SIGSTOP),
    "packets dropped": drop_packets,
    "500 on /readyz": lambda process: process.send_signal(signal.SIGUSR1),
}


async def request(address: str) -> bool:
    """Return whether a request on a new connection is answered with 200 in time."""

    async def ask() -> bool:
        reader, writer = await asyncio.open_connection(address, PORT)
        try:
            writer.write(b"GET /version HTTP/1.1\r\nHost: api\r\n\r\n")
            return (await reader.readline()).startswith(b"HTTP/1.1 200")
        finally:
            writer.close()

    try:
        return await asyncio.wait_for(ask(), TIMEOUT_SECONDS)
    except (OSError, asyncio.TimeoutError):
        return False


async def measure(address: str, inflict: Callable[[], None]) -> Outcome:
    """Send requests, inflict the fault, and return what failed afterwards."""
    results: list[asyncio.Task[bool]] = []
    begun: list[float] = []
    start = time.monotonic()
    fault = 0.0
    while time.monotonic() - start < BEFORE_SECONDS + AFTER_SECONDS:
        if not fault and time.monotonic() - start >= BEFORE_SECONDS:
            inflict()
            fault = time.monotonic()
        begun.append(time.monotonic())
        results.append(asyncio.create_task(request(address)))
        await asyncio.sleep(max(0.0, start + len(begun) / RATE - time.monotonic()))
    good = await asyncio.gather(*results)
    after = [(moment - fault, ok) for moment, ok in zip(begun, good) if moment >= fault]
    failed = [moment for moment, ok in after if not ok]
    return Outcome(len(after), len(failed), max(failed, default=0.0))


def healthy(address: str) -> bool:
    """Return whether many requests in a row succeed."""
    return all(asyncio.run(request(address)) for _request in range(30))


class Plan(NamedTuple):
    """The faults to measure, how often, and the fast interval of the checks; empty for none."""

    faults: Sequence[str]
    rounds: int
    fast_interval: str


def report(subject: str, address: str, chosen: Plan) -> None:
    """Measure the faults and print a row of the table."""
    cells = []
    for inflict in (FAULTS[name] for name in chosen.faults):
        found = []
        for _round in range(chosen.rounds):
            with servers() as processes:
                wait_for(lambda: healthy(address), 60.0, 1.0)
                # The checks of all servers have passed again as well, and the fault comes at any moment of an interval.
                time.sleep(3.5 + random.random())
                found.append(asyncio.run(measure(address, lambda inflict=inflict, one=processes[1]: inflict(one))))
        sent, failed, last = (statistics.fmean(values) for values in zip(*found))
        cells.append(f"{failed:.0f} of {sent:.0f}, {last:.1f} s" if failed else "none")
    sys.stdout.write(f"| {subject} | {' | '.join(cells)} |\n")
    sys.stdout.flush()


def run_agent(scratch: Path, mode: str, chosen: Plan) -> None:
    """Measure the agent in a mode."""
    scratch.mkdir()
    name, _plus, beside = mode.partition("+")
    node = AgentNode(scratch, name, variant="" if name == "nftables" else "legacy", min_sync="1s")
    own = {"kubenode.proxy/mode": beside} if beside else {}
    fast = {"kubenode.proxy/check-fast-interval": chosen.fast_interval} if chosen.fast_interval else {}
    write_manifests(node.services, manifests(SERVERS, **CHECK, **fast, **own))
    try:
        node.start()
        report(f"{name} mode, the Service in {beside} mode" if beside else f"{name} mode", ADDRESS, chosen)
    finally:
        node.stop()
        node.run("cleanup", "--config", str(scratch / "config.yaml"), "--state-directory", str(scratch / "run"))
        node.close()


def run_haproxy(scratch: Path, program: str, redispatch: str, chosen: Plan) -> None:
    """Measure haproxy with an option of its configuration."""
    path = scratch / "haproxy.cfg"
    fast = f"fastinter {chosen.fast_interval} " if chosen.fast_interval else ""
    text = _CONFIGURATION.format(redispatch=redispatch, address=HAPROXY_ADDRESS, port=PORT, fast=fast)
    text += "".join(f"    server api{number} {endpoint(number)}:{PORT}\n" for number in SERVERS)
    path.write_text(text)
    process = subprocess.Popen([program, "-q", "-db", "-f", str(path)], stderr=subprocess.DEVNULL)
    try:
        subject = "haproxy, redispatch" if redispatch.startswith("option") else "haproxy, no redispatch"
        report(subject, HAPROXY_ADDRESS, chosen)
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", default="", metavar="ADDRESS", help="be one of the servers")
    parser.add_argument("--modes", nargs="*", default=["nftables", "iptables"])
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--fast-interval", default="", metavar="500ms")
    options = parser.parse_args(arguments)
    if options.serve:
        asyncio.run(serve(options.serve))
        return 0
    system.unshare(system.CLONE_NEWNET)
    system.ip_batch(["link set lo up"])
    make_network()
    system.ip_batch([f"address add {HAPROXY_ADDRESS}/24 dev backends"])
    chosen = Plan(options.faults, options.rounds, options.fast_interval)
    sys.stdout.write(f"| | {' | '.join(chosen.faults)} |\n|---|{'---|' * len(chosen.faults)}\n")
    with tempfile.TemporaryDirectory() as directory:
        for mode in options.modes:
            run_agent(Path(directory) / mode, mode, chosen)
        program = os.environ.get(HAPROXY, "")
        for redispatch in ("no option redispatch", "option redispatch 1") if program else ():
            run_haproxy(Path(directory), program, redispatch, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
