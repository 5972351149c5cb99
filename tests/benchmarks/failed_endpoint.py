# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure how long clients with an open connection take to notice that their endpoint fails its health checks.

Run as root from the top of the repository; works in its own network namespace and leaves nothing behind:

    .venv/bin/python -m tests.benchmarks.failed_endpoint [--modes nftables iptables userspace] [--rounds 5]
    python -m tests.lab.uml --memory 1G -- python -m tests.benchmarks.failed_endpoint --modes ipvs

The endpoint refuses its checks from a moment on and keeps the connections open, as a server that hangs. The agent
checks it by TCP with the defaults: interval 1 s, fall 2. Three clients have a connection to it: a program of the node
that waits for data, and behind the node one that sends a byte every 100 ms and one that waits. Columns: seconds until
the endpoint is excluded, and until each client gets an error; the median and the longest of all rounds. A client that
has noticed nothing 10 s after the exclusion counts as "not".
"""

from __future__ import annotations

import argparse
import contextlib
import random
import select
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from tests.kernel.agent_node import AgentNode
from tests.kernel.backends import Backend, Routed, manifests, write_manifests
from tests.waiting import wait_for

WAITING, SENDING, BEHIND = "program of the node, waiting", "client behind it, sending", "client behind it, waiting"
EXCLUDED = "endpoint excluded"
COLUMNS = (EXCLUDED, WAITING, SENDING, BEHIND)
_EXCLUDED_LINE = "an endpoint fails its health checks"
_SEND_SECONDS, _AFTER_SECONDS = 0.1, 10.0
Times = dict[str, float]


def is_over(sock: socket.socket, send: bool) -> bool:
    """Return whether a connection has ended, after a byte was sent if ``send``."""
    try:
        if send:
            sock.send(b"x")
        if select.select([sock], [], [], 0)[0]:
            return not sock.recv(16)
    except OSError:
        return True
    return False


def one_round(node: AgentNode, network: Routed, backend: Backend) -> Times:
    """Let one backend fail its checks; return when each thing happened, in seconds after that."""
    clients = {
        WAITING: network.connection_to("1", local=True),
        SENDING: network.connection_to("1"),
        BEHIND: network.connection_to("1"),
    }
    known = node.log.count(_EXCLUDED_LINE)
    # The fault falls at any moment within the interval of the checks.
    time.sleep(random.random())
    backend.stop()
    fault = sent = time.monotonic()
    found: Times = {}
    while len(found) < len(COLUMNS) and time.monotonic() < fault + found.get(EXCLUDED, 60.0) + _AFTER_SECONDS:
        now = time.monotonic()
        if EXCLUDED not in found and node.log.count(_EXCLUDED_LINE) > known:
            found[EXCLUDED] = now - fault
        send = now >= sent + _SEND_SECONDS
        sent = now if send else sent
        for name, sock in clients.items():
            if name not in found and is_over(sock, send and name == SENDING):
                found[name] = time.monotonic() - fault
        time.sleep(0.005)
    for sock in clients.values():
        sock.close()
    with system.inside(f"/run/netns/{network.servers}"):
        backend.start()
    wait_for(lambda: all(item["passing"] for item in node.status()["checks"]), 60.0)
    return found


def cell(rounds: Sequence[Times], column: str) -> str:
    """Return a cell of the table."""
    values = [item[column] for item in rounds if column in item]
    if len(values) < len(rounds):
        return "not" if not values else f"not in {len(rounds) - len(values)} of {len(rounds)}"
    return f"{statistics.median(values):.2f}, {max(values):.2f}"


def measure(scratch: Path, mode: str, rounds: int) -> None:
    """Measure a mode and print its row."""
    scratch.mkdir()
    found: list[Times] = []
    with contextlib.ExitStack() as stack:
        network = Routed()
        stack.callback(network.close)
        backends = network.backends()
        for backend in backends:
            stack.callback(backend.close)
        node = AgentNode(scratch, mode, variant="legacy" if mode in ("iptables", "ipvs") else "")
        stack.callback(node.close)
        write_manifests(node.services, manifests((1, 2), **{"kubenode.proxy/check": "tcp"}))
        node.start()
        wait_for(lambda: len(node.status()["checks"]) == 2, 30.0)
        for _number in range(rounds):
            found.append(one_round(node, network, backends[0]))
    sys.stdout.write(f"| {mode} mode | {' | '.join(cell(found, column) for column in COLUMNS)} |\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="*", default=["nftables", "iptables", "userspace"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    sys.stdout.write(f"| | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}\n")
    with tempfile.TemporaryDirectory() as directory:
        for mode in options.modes:
            system.unshare(system.CLONE_NEWNET)
            system.forget_host_settings()
            system.ip_batch(["link set lo up"])
            measure(Path(directory) / mode, mode, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
