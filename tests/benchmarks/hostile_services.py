# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure an agent at its memory limit while users create Services that make as many entries as they can.

    python -m tests.benchmarks.hostile_services --seconds 30
    python -m tests.benchmarks.hostile_services --sets weights maglev --limit 890

For each set of Services, in a network namespace and a control group of its own, one line of JSON: the size of the
objects in KiB, how often the kernel has killed the agent, the peak of the group and what the agent accounts at the end
(MiB), how many objects and parts are refused by name, the entries programmed, and the seconds until an ordinary Service
that is created meanwhile accepts a connection (the median and the longest of all): while the set arrives, while one
endpoint of each of its Services changes, while everything programmed is compared because another program has changed a
chain, and after all of it was removed and is repaired. The repair takes most memory.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)

# isort: split

from tests.benchmarks.agent_memory import FLUSH
from tests.kernel.agent_node import AgentNode
from tests.lab import manifests
from tests.lab.manifests import Object
from tests.lab.memory_group import MemoryGroup

MIB = 1 << 20
WEIGHT, SCHEDULER = "kubenode.proxy/weight", "kubenode.proxy/scheduler"
SERVER = ("10.244.200.1", 8080)
PATIENCE = 60.0


def made(
    number: int,
    ports: int,
    external: int = 0,
    endpoints: int = 1,
    *,
    namespace: str = "tenant",
    weights: tuple[int, ...] = (),
    annotations: dict[str, str] | None = None,
    **spec: Any,
) -> list[Object]:
    """Return a Service of both families, and its slices: one of each weight, or one without."""
    name, high, low = f"s{number}", number >> 8, number & 255
    listed = [manifests.port(1000 + each, name=f"p{each}") for each in range(ports)]
    addresses = [f"198.{18 + high}.{low}.{each}" for each in range(1, external + 1)]
    addresses += [f"2001:db8:{number:x}::{each:x}" for each in range(1, external + 1)]
    metadata: Object = {"creationTimestamp": "2026-01-01T00:00:00Z", "annotations": annotations or {}}
    found = [
        manifests.service(
            name,
            [f"10.97.{high}.{low}", f"fd96::{number:x}"],
            listed,
            namespace=namespace,
            metadata=metadata,
            externalIPs=addresses,
            **spec,
        )
    ]
    for family in ("10.{}.{}.{}", "fd80::{:x}:{:x}:{:x}"):
        for block, weight in enumerate(weights or (1,)):
            places = [
                manifests.endpoint(family.format(100 + high, low, block * endpoints + each + 1), "node1")
                for each in range(endpoints)
            ]
            found.append(
                manifests.endpoint_slice(
                    name,
                    places,
                    [manifests.port(8080, name=port["name"]) for port in listed],
                    name=f"{name}-{'v6' if ':' in family else 'v4'}-{block}",
                    namespace=namespace,
                    metadata={"annotations": {WEIGHT: str(weight)} if weights else {}},
                )
            )
    return found


def several(count: int, *numbers: int, namespaces: int = 1, **more: Any) -> list[list[Object]]:
    """Return numbered Services that are alike, spread over some namespaces."""
    return [made(number, *numbers, namespace=f"tenant{number % namespaces}", **more) for number in range(count)]


#: What changes one object of the agent, so that it compares all of them.
TOUCH = {
    "nftables": ["nft", "add chain ip kube-proxy of-another-program; add chain ip6 kube-proxy of-another-program"],
    "iptables": ["iptables", "-t", "nat", "-A", "KUBE-MARK-MASQ", "-j", "RETURN"],
}
MAGLEV = {SCHEDULER: "mh"}
SOURCES = {"kubenode.proxy/allowed-sources": ",".join(f"10.{each >> 8}.{each & 255}.0/24" for each in range(1000))}
#: The Services of each set, each with its EndpointSlices.
SETS: dict[str, Callable[[], list[list[Object]]]] = {
    "weights": lambda: several(8, 100, 60, weights=(255, 1)),
    "maglev": lambda: several(14, 40, 15, annotations=MAGLEV),
    "maglev and plain": lambda: (
        several(16, 40, 15, annotations=MAGLEV) + [made(100 + each, 40, 15) for each in range(14)]
    ),
    "small weighted": lambda: several(1000, 1, 0, weights=(255, 1)),
    "small maglev": lambda: several(1500, 1, 0, annotations=MAGLEV),
    "slow start": lambda: several(20, 10, 10, 31, annotations={"kubenode.proxy/slow-start": "60m"}, weights=(7, 11)),
    "weighted affinity": lambda: several(60, 20, 1, 30, weights=(97, 89), sessionAffinity="ClientIP"),
    "affinity": lambda: several(150, 10, 0, 8, namespaces=50, sessionAffinity="ClientIP"),
    "sources": lambda: several(10, 50, 10, annotations=SOURCES),
    "sources in many namespaces": lambda: several(40, 50, 10, namespaces=20, annotations=SOURCES),
    "many namespaces": lambda: several(60, 20, 15, namespaces=30, weights=(255, 1)),
    "ports and addresses": lambda: several(60, 100, 60),
}


class Ordinary:
    """Ordinary Services, created one after the other, and the seconds until each accepts a connection."""

    def __init__(self, node: AgentNode) -> None:
        self._node = node
        self._number = 0
        self._server = socket.create_server(SERVER)

    def create(self) -> float:
        """Create a Service, and return the seconds until it accepts a connection; PATIENCE if it does not."""
        self._number += 1
        address = f"10.96.1.{self._number}"
        store = self._node.store
        began = time.monotonic()
        store.put(
            manifests.endpoint_slice(
                f"web-{self._number}", [manifests.endpoint(SERVER[0])], [manifests.port(SERVER[1])]
            )
        )
        store.put(manifests.service(f"web-{self._number}", address, [manifests.port(80)]))
        while time.monotonic() - began < PATIENCE:
            with socket.socket() as sock:
                sock.settimeout(0.05)
                if sock.connect_ex((address, 80)) == 0:
                    self._server.accept()[0].close()
                    return time.monotonic() - began
        return PATIENCE

    def during(self, seconds: float) -> list[float]:
        """Create Services for some time."""
        found = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found.append(self.create())
            time.sleep(0.3)
        return found


def isolated() -> None:
    """Give this process a network with routes, but without anybody else."""
    for command in (
        "link set lo up",
        "link add d0 type veth peer name d1",
        "link set d1 up",
        "addr add 192.0.2.1/24 dev d0",
        f"addr add {SERVER[0]}/32 dev d0",
        "-6 addr add fd07::1/64 dev d0 nodad",
        "link set d0 up",
        "route add default dev d0",
    ):
        subprocess.run(["ip", *command.split()], check=True)


def changed(services: list[list[Object]]) -> Iterator[Object]:
    """Yield one slice of each Service with another endpoint."""
    for service in services:
        item = json.loads(json.dumps(service[1]))
        first = item["endpoints"][0]["addresses"]
        first[0] = first[0].replace("10.1", "10.2", 1)
        yield item


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median and the longest of some times."""
    return {"median": round(statistics.median(seconds), 2), "longest": round(max(seconds), 2), "count": len(seconds)}


def measure(name: str, mode: str, limit: int, seconds: float) -> dict[str, Any]:
    """Return what one set does to an agent."""
    isolated()
    services = SETS[name]()
    with tempfile.TemporaryDirectory() as scratch, MemoryGroup.made() as group:
        if group is None:
            raise SystemExit("this machine permits no control group with a memory limit")
        group.limit(limit * MIB)
        node = AgentNode(Path(scratch), mode, min_sync="1s")
        node.before_exec = group.enter
        ordinary = Ordinary(node)
        deaths = 0
        try:
            node.start()
            ordinary.create()
            for service in services:
                for item in service:
                    node.store.put(item)
            arriving = ordinary.during(seconds)
            for item in changed(services):
                node.store.put(item)
            changing = ordinary.during(seconds)
            subprocess.run(TOUCH[mode], check=True)
            comparing = ordinary.during(seconds)
            subprocess.run(FLUSH.get(mode, ["iptables", "-t", "nat", "-F"]), check=True)
            repairing = ordinary.during(seconds)
            assert node.process is not None
            deaths = group.kills() or int(node.process.poll() is not None)
            status = node.status()
            memory = status.get("memory", {})
            log = node.log
            rates = {"nftables": 9.0, "iptables": 32.0}[mode]
            return {
                "set": name,
                "mode": mode,
                "objects_kib": len(json.dumps(services)) >> 10,
                "kills": deaths,
                "peak_mib": group.peak() >> 20,
                "used_mib": memory.get("used", 0) >> 20,
                "accounted_mib": 50 + (int(memory.get("cluster", 0) * rates) >> 20),
                "refused": len(status.get("refused", ())) + len(status.get("skipped", ())),
                "service_annotations_ignored": int(node.metric("kubenode_proxy_service_annotations_ignored")),
                "held_back": memory.get("heldBack"),
                "memory_low": "close to its memory limit" in log,
                "arriving": summary(arriving),
                "changing": summary(changing),
                "comparing": summary(comparing),
                "repairing": summary(repairing),
                "load": round(os.getloadavg()[0], 1),
            }
        finally:
            node.close()


def main() -> int:
    """Print one line of JSON for each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--mode", default="nftables", choices=["nftables", "iptables"])
    parser.add_argument("--limit", type=int, default=890, help="of the control group, in MiB")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each of the four phases")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.sets[0], options.mode, options.limit, options.seconds)), flush=True)
        return 0
    for name in options.sets:
        command = ["unshare", "-n", sys.executable, "-m", "tests.benchmarks.hostile_services", "--here"]
        numbers = ["--limit", str(options.limit), "--seconds", str(options.seconds), "--mode", options.mode]
        subprocess.run([*command, *numbers, "--sets", name], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
