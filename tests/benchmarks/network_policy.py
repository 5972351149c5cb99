# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure how network policies scale: the first fill, single changes, memory, and what a new connection costs.

Run as root from the top of the repository; works in its own network namespaces and leaves nothing behind:

    .venv/bin/python -m tests.benchmarks.network_policy [--policies 1000] [--pods 10000] [--changes 200]

The pods, of both families, are in 100 namespaces, 100 of them on the node; two policies isolate each of these in both
directions. A policy has two peers by selectors, a range with an exception, a port by name and a range of ports. A
change is measured from the object to the kernel. Seconds are those of this process on a processor, the kernel's work
for it included, so that other work on the machine disturbs them little. The cost of a new connection is the time of a
SYN that is sent, forwarded by the node and discarded behind it, in the fastest of many batches; for the row ``none``
the node only has connection tracking. For rows with ``the source``, the interface of the sender counts as one of pods;
for those with ``ports``, it is the port of a bridge of pods.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource as limits
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.benchmarks.nftables_scale import percentile
from tests.lab import system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.policy_table import PolicyTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import (
    BOUND,
    BRIDGED,
    HERE,
    POD_LINK,
    PORT,
    PORT_BOUND,
    PORT_UNTAGGED,
    Row,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import (
    change_of,
    desired_table,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.sets import Options
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference

Raw = dict[str, Any]
NAMESPACES = 100
OPTIONS = Options()
#: Small enough for a time slice, and few enough not to fill the table of connection tracking.
BATCH, BATCHES = 20, 300
#: The first pod on the node, and a peer that its policies allow.
OWN, PEER = "10.244.1.1", "10.200.2.201"


def pod(number: int, **labels: str) -> Raw:
    """Return a pod; the first of each namespace is on the node."""
    local = number < NAMESPACES
    high, low = divmod(number, 250)
    address = f"10.244.1.{number + 1}" if local else f"10.{200 + high // 250}.{high % 250}.{low + 1}"
    six = f"fd00:{'1' if local else '2'}::{number + 1:x}"
    found = {"app": f"a{number // NAMESPACES % 5}", "tier": f"t{number // NAMESPACES % 7}", **labels}
    return {
        "kind": "Pod",
        "metadata": {"namespace": f"n{number % NAMESPACES}", "name": f"p{number}", "labels": found},
        "spec": {
            "nodeName": "node1" if local else "node2",
            "containers": [{"ports": [{"name": "http", "containerPort": 8000 + number % 3}]}],
        },
        "status": {"phase": "Running", "podIPs": [{"ip": address}, {"ip": six}]},
    }


def policy(number: int, port: int = 0) -> Raw:
    """Return a policy for a fifth of the pods of a namespace."""
    kind = number // NAMESPACES
    peers = [
        {"podSelector": {"matchLabels": {"tier": f"t{kind % 7}"}}},
        {
            "namespaceSelector": {"matchLabels": {"team": f"team{number % 10}"}},
            "podSelector": {"matchLabels": {"app": f"a{(kind + 1) % 5}"}},
        },
        {"ipBlock": {"cidr": f"172.{16 + number % 16}.0.0/16", "except": [f"172.{16 + number % 16}.{kind}.0/24"]}},
    ]
    ports = [{"port": 8000, "endPort": 8100 + kind}, {"port": port or 443}]
    return {
        "kind": "NetworkPolicy",
        "metadata": {"namespace": f"n{number % NAMESPACES}", "name": f"policy{number}"},
        "spec": {
            "podSelector": {"matchLabels": {"app": f"a{kind % 5}"}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers, "ports": ports}],
            "egress": [{"to": peers, "ports": [{"port": "http"}, {"port": 53, "protocol": "UDP"}]}],
        },
    }


def cluster(policies: int, pods: int) -> list[Raw]:
    """Return all objects."""
    names = [
        {"kind": "Namespace", "metadata": {"name": f"n{number}", "labels": {"team": f"team{number % 10}"}}}
        for number in range(NAMESPACES)
    ]
    return [*names, *map(pod, range(pods)), *map(policy, range(policies))]


class Follower:
    """The table of a cluster in the kernel, kept in sync object by object."""

    def __init__(self, objects: list[Raw]) -> None:
        started = time.process_time()
        self.state = ClusterState.from_objects(objects)
        assert not self.state.refusals and not self.state.skipped
        parsed = time.process_time()
        self.policy = NodePolicy("node1", self.state.policy)
        self.state.policy.pop_changes()
        self.policy.table.pop_journal()
        desired = desired_table(self.policy.table.rows, OPTIONS)
        computed = time.process_time()
        self.resource = PolicyTableResource()
        self.resource.apply(difference(self.resource.observe(), desired))
        self.seconds = (parsed - started, computed - parsed, time.process_time() - computed)
        assert not self.policy.too_large
        # As the agent does.
        gc.collect()
        gc.freeze()

    def change(self, *events: tuple[Raw, bool]) -> float:
        """Apply events (object, whether it was deleted) and return the milliseconds."""
        started = time.process_time()
        for item, deleted in events:
            if deleted:
                self.state.delete(item)
            else:
                self.state.upsert(item)
        self.policy.update(self.state.policy.pop_changes())
        self._apply()
        return (time.process_time() - started) * 1000

    def link(self, *rows: Row) -> None:
        """Apply the rows about interfaces of pods."""
        self.policy.set_links(rows)
        self._apply()

    def _apply(self) -> None:
        change = change_of(self.policy.table.pop_journal(), self.policy.table.rows, OPTIONS)
        if change:
            self.resource.apply(change)

    def finish(self) -> list[float]:
        """Program the grants that follow later; return the milliseconds of each transaction."""
        found = []
        while self.policy.pending:
            started = time.process_time()
            self.policy.proceed()
            self._apply()
            found.append((time.process_time() - started) * 1000)
        return found


def changes(follower: Follower, count: int, pods: int) -> Iterator[tuple[str, list[float]]]:
    """Yield each kind of change with the milliseconds of each of them, and what followed later if anything did."""
    remote = [NAMESPACES + 7 * number % (pods - NAMESPACES) for number in range(count)]
    kinds: dict[str, Callable[[int], float]] = {
        "a pod of another node relabelled": lambda at: follower.change((pod(remote[at], tier=f"t{at % 7}"), False)),
        "one deleted": lambda at: follower.change((pod(remote[at]), True)),
        "one added": lambda at: follower.change((pod(remote[at]), False)),
        "a pod of the node deleted": lambda at: follower.change((pod(at % NAMESPACES), True)),
        "one added, until it is isolated and has its grants for known classes": lambda at: follower.change(
            (pod(at % NAMESPACES), False)
        ),
        "a policy changed": lambda at: follower.change((policy(at, port=1000 + at), False)),
    }
    for name, one in kinds.items():
        some = count if "of the node" not in name and "isolated" not in name else min(count, NAMESPACES)
        taken, later = [], []
        for at in range(some):
            taken.append(one(at))
            later.append(follower.finish())
        yield name, taken
        if any(later):
            yield (
                f"  the longest transaction that followed ({max(map(len, later))} at most)",
                [max(map(max, filter(None, later)))],
            )
            yield "  all that followed", list(map(sum, later))


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _syn(port: int, number: int) -> bytes:
    ends = socket.inet_aton(PEER) + socket.inet_aton(OWN)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 40, number & 0xFFFF, 0, 64, 6, 0) + ends
    head = head[:10] + struct.pack("!H", _checksum(head)) + head[12:]
    source = 1024 + number % 60000
    body = struct.pack("!HHIIBBHHH", source, port, number, 0, 0x50, 2, 1024, 0, 0)
    check = _checksum(ends + struct.pack("!BBH", 0, 6, len(body)) + body)
    return head + body[:16] + struct.pack("!H", check) + body[18:]


def connection_cost(path: str, port: int, first: int) -> float:
    """Return the microseconds of a SYN to a port of a pod of the node, from the namespace at ``path``."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        system.enter(path, system.CLONE_NEWNET)
        best = 1.0
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
            for batch in range(BATCHES):
                packets = [_syn(port, first + batch * BATCH + number) for number in range(BATCH)]
                started = time.perf_counter()
                for packet in packets:
                    sock.sendto(packet, (OWN, 0))
                best = min(best, time.perf_counter() - started)
        os.write(writing, struct.pack("d", best / BATCH * 1e6))
        os._exit(0)
    os.waitpid(child, 0)
    (found,) = struct.unpack("d", os.read(reading, 8))
    os.close(reading)
    os.close(writing)
    return float(found)


def network() -> str:
    """Make the process's own namespace the node, between a client and a namespace that discards; return the client."""
    system.unshare(system.CLONE_NEWNET)
    system.ip_batch(["link set lo up"])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for place, ours, theirs in (("client", "198.18.0.1", "198.18.0.2"), ("pods", "192.0.2.1", "192.0.2.2")):
        name = f"knpolicy{os.getpid()}-{place}"
        system.ip_batch(
            [
                f"netns add {name}",
                f"link add {place} type veth peer name eth0 netns {name}",
                f"address add {ours}/24 dev {place}",
                f"link set {place} up",
            ]
        )
        system.ip_batch(
            [
                "link set lo up",
                "link set eth0 up",
                f"address add {theirs}/24 dev eth0",
                f"route add default via {ours}",
            ],
            name,
        )
    for place in ("client", "pods"):
        # Inherited from the machine; with it packets would go round until their time to live ends.
        inside = ["ip", "netns", "exec", f"knpolicy{os.getpid()}-{place}", "sysctl", "-qw", "net.ipv4.ip_forward=0"]
        subprocess.run(inside, check=True)
    system.ip_batch(["route add 10.244.1.0/24 via 192.0.2.2", "route add 10.200.0.0/16 via 198.18.0.2"])
    return f"/run/netns/knpolicy{os.getpid()}-client"


def bridged(follower: Follower, path: str) -> None:
    """Make the client's device the port of a bridge, and print the cost with and without the table of ports."""
    system.ip_batch(["link add cni0 type bridge", "link set cni0 up", "address del 198.18.0.1/24 dev client"])
    system.ip_batch(["link set client master cni0", "address add 198.18.0.1/24 dev cni0"])
    system.ip_batch(["route add 10.200.0.0/16 via 198.18.0.2"])
    peer = socket.inet_aton(PEER)
    known = [(POD_LINK, "cni0"), (HERE, peer), (BOUND, "cni0", peer)]
    port = [(BRIDGED,), *((kind, "client") for kind in (PORT, PORT_UNTAGGED)), (PORT_BOUND, "client", peer)]
    for attempt in range(3):
        for number, (name, rows) in enumerate((("not checked", known), ("checked", [*known, *port]))):
            follower.link(*rows)
            cost = connection_cost(path, 8000, 5_000_000 + 100_000 * number + 10_000 * attempt)
            print(f"SYN on a bridge, ports {name}: {cost:.1f} us")
    follower.link()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policies", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=10000)
    parser.add_argument("--changes", type=int, default=200)
    given = parser.parse_args()
    print("load", " ".join(Path("/proc/loadavg").read_text().split()[:3]))
    path = network()
    try:
        tracking = "table ip t { chain c { type filter hook postrouting priority 0; ct state established accept; }; }"
        subprocess.run(["nft", tracking], check=True)
        connection_cost(path, 8000, 0)
        print(f"SYN, none: {connection_cost(path, 8001, 0):.1f} us")
        for number, policies in enumerate((100, given.policies), 1):
            follower = Follower(cluster(policies, given.pods))
            judge = follower.policy.judge()
            for name, port in (("allowed", 8000), ("denied", 9999)):
                ends = socket.inet_aton(PEER), socket.inet_aton(OWN)
                assert judge.allows(*ends, socket.IPPROTO_TCP, port) == (name == "allowed")
                cost = connection_cost(path, port, number * 1_000_000 + port)
                print(f"SYN, {policies} policies, {name}: {cost:.1f} us")
            known = (POD_LINK, "client"), (HERE, ends[0]), (BOUND, "client", ends[0])
            for name, rows in (("checked by its address", known), ("checked by its route", known[:1])):
                follower.link(*rows)
                cost = connection_cost(path, 8000, number * 1_000_000 + 500_000 + 10_000 * len(rows))
                print(f"SYN, {policies} policies, allowed, the source {name}: {cost:.1f} us")
            follower.link()
        bridged(follower, path)
        parsed, computed, programmed = follower.seconds
        print(f"{given.policies} policies x {given.pods} pods: {len(follower.policy.table.rows)} elements;")
        print(f"  read the objects {parsed:.2f} s, compute {computed:.2f} s, encode and kernel {programmed:.2f} s")
        print(f"  memory of the process {limits.getrusage(limits.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
        for name, taken in changes(follower, given.changes, given.pods):
            print(f"  {name}: p50 {percentile(taken, 0.5):.2f} ms, p99 {percentile(taken, 0.99):.2f} ms")
    finally:
        for place in ("client", "pods"):
            subprocess.run(["ip", "netns", "delete", f"knpolicy{os.getpid()}-{place}"], check=False)


if __name__ == "__main__":
    main()
