# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A continuous client: ``python -m tests.molecule_support.traffic SCENARIO`` sends until it receives SIGTERM.

Through each node it sends request after request to a ClusterIP, a node port and a LoadBalancer address, and keeps one
connection open that it uses at the very end. Then it writes the results to ``traffic.json``. A repeated handshake
shows as a second or more in ``slowest``.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
import sys
import time
from typing import Any, Sequence

from tests.lab import wire
from tests.lab.system import socket_inside
from tests.molecule_support.scenario import Scenario

CLUSTER_IP = "10.96.0.10"
PAUSE = 0.1


def _hold(scenario: Scenario, source: str) -> socket.socket:
    """Return a connection to a pod that waits for a query."""
    client = socket_inside(f"/run/netns/{scenario.client}", socket.AF_INET, socket.SOCK_STREAM)
    client.settimeout(5)
    client.bind((source, 0))
    client.connect((CLUSTER_IP, wire.DNS_PORT))
    return client


def _use(client: socket.socket) -> str:
    query = wire.dns_query(7)
    try:
        client.sendall(struct.pack("!H", len(query)) + query)
        data = client.recv(4096)
        return wire.dns_text(data[2:]).split()[0] if data else "closed"
    except OSError as error:
        return f"error: {error}"


def main(arguments: Sequence[str]) -> int:
    """Send until SIGTERM, then write the report."""
    scenario = Scenario(arguments[0])
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    report: dict[str, dict[str, Any]] = {}
    held = {node.name: _hold(scenario, node.client) for node in scenario.nodes}
    for node in scenario.nodes:
        report[node.name] = {"answered": 0, "lost": [], "slowest": 0.0, "backends": []}
    (scenario.directory / "traffic" / "started").touch()
    while not stopped:
        for node in scenario.nodes:
            entry = report[node.name]
            for address, port in ((CLUSTER_IP, 80), (node.address, 30080), ("198.51.100.20", 80)):
                begin = time.monotonic()
                answer = scenario.ask(node.name, "TCP", address, port, timeout=8)
                entry["slowest"] = max(entry["slowest"], time.monotonic() - begin)
                if answer.outcome == "answer":
                    entry["answered"] += 1
                    entry["backends"] = sorted({*entry["backends"], answer.backend})
                else:
                    entry["lost"].append([f"{address}:{port}", answer.outcome, time.time()])
        time.sleep(PAUSE)
    for name, client in held.items():
        with client:
            report[name]["held"] = _use(client)
    partial = scenario.directory / "traffic.partial"
    partial.write_text(json.dumps(report, indent=1), encoding="utf-8")
    partial.rename(scenario.directory / "traffic.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
