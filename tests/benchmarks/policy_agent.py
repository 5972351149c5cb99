# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what following the pods of a large cluster costs an agent that enforces network policies.

    unshare -n python -m tests.benchmarks.policy_agent [--pods 10000,25000,50000] [--policies 1000] [--events 5000]

The agent is the real process, the API server the test one on the same machine. A pod is about 3 kB of JSON, as an API
server sends it; a thousandth of the pods is on the node. Prints one line of JSON for each number of pods: the size of a
pod, the bytes of all lists, the agent's processor seconds and memory until the policies are in force and at its peak,
and for each event of a pod of another node, in which only the status changes, or a label as well, its bytes and the
agent's processor time. Bytes are those on the wire, in both directions, without compression.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.kernel.agent_node import NODE, AgentNode
from tests.lab import system
from tests.waiting import wait_for

Raw = dict[str, Any]
NAMESPACES = 1000
_PODS_ON_A_NODE = 1000
#: In place of managed fields, volumes and conditions, whose text no agent keeps.
_PADDING = "x" * 2200
_LONGEST_SECONDS = 1800.0


def pod(number: int, step: int = 0, **labels: str) -> Raw:
    """Return a pod; one in a thousand is on the node. ``step``: of a status that no policy depends on."""
    local = number % _PODS_ON_A_NODE == 0
    node = number % _PODS_ON_A_NODE
    name = f"app-{number % 97}-{number:07x}-{number * 2654435761 % 2**25:05x}"
    address = f"10.{128 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"
    found = {
        "app.kubernetes.io/name": f"app-{number % 97}",
        "app.kubernetes.io/instance": f"app-{number % 97}-{number % NAMESPACES}",
        "pod-template-hash": f"{number % 1009:08x}",
        "tier": f"t{number // NAMESPACES % 7}",
        **labels,
    }
    container = {
        "name": "app",
        "image": f"registry.example/team/app-{number % 97}:1.2.3",
        "ports": [{"name": "http", "containerPort": 8000 + number % 3, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": f"team-{number % NAMESPACES}",
            "name": name,
            "uid": f"6b7c1f0e-0000-4000-8000-{number:012x}",
            "creationTimestamp": "2026-01-07T08:15:30Z",
            "labels": found,
            "annotations": {"example.com/padding": _PADDING},
        },
        "spec": {"nodeName": NODE if local else f"worker-{node}", "containers": [container]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": f"step {step}"}],
        },
    }


def policy(number: int) -> Raw:
    """Return a policy for the pods of a namespace, with peers in it, in others, and outside."""
    peers = [
        {"podSelector": {"matchLabels": {"tier": f"t{number % 7}"}}},
        {
            "namespaceSelector": {"matchLabels": {"team": f"{number % 10}"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": f"app-{number % 97}"}},
        },
        {"ipBlock": {"cidr": f"172.{16 + number % 16}.0.0/16"}},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"namespace": f"team-{number % NAMESPACES}", "name": f"policy-{number}"},
        "spec": {
            "podSelector": {},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers, "ports": [{"port": 8000, "endPort": 8100}]}],
            "egress": [{"to": peers, "ports": [{"port": "http"}, {"port": 53, "protocol": "UDP"}]}],
        },
    }


def _on_the_wire() -> int:
    """Return the bytes that the loopback device of this network namespace has carried."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def _peak(node: AgentNode) -> float:
    assert node.process is not None
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{node.process.pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) / 1024


def _policies(node: AgentNode) -> Raw:
    return dict(node.status().get("networkPolicy") or {})


def _events(node: AgentNode, pods: int, count: int, marker: int, **labels: str) -> tuple[float, float]:
    """Change a number of pods of other nodes; return the agent's processor seconds and the bytes of all of it.

    A last event, a pod of the node that the agent must count, shows that it has processed them.
    """
    others = [number for number in range(pods) if number % _PODS_ON_A_NODE]
    before, seconds, sent = _policies(node)["pods"], node.processor_seconds(), _on_the_wire()
    for number in range(count):
        node.store.put(pod(others[number * 7 % len(others)], 1 + marker + number, **labels))
    node.store.put(pod(pods + marker * _PODS_ON_A_NODE))
    wait_for(lambda: _policies(node)["pods"] > before, _LONGEST_SECONDS, 0.2)
    return node.processor_seconds() - seconds, _on_the_wire() - sent


def measure(scratch: Path, pods: int, policies: int, events: int) -> dict[str, Any]:
    """Follow a number of pods, then events."""
    node = AgentNode(scratch, "nftables")
    node.node_configuration["networkPolicy"] = {"enabled": True}
    node.write_configuration()
    try:
        for number in range(NAMESPACES):
            labels = {"team": str(number % 10), "kubernetes.io/metadata.name": f"team-{number}"}
            node.store.put(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"team-{number}", "labels": labels}}
            )
        for number in range(policies):
            node.store.put(policy(number))
        for number in range(pods):
            node.store.put(pod(number))
        sent = _on_the_wire()
        node.start(wait=False)
        wait_for(lambda: _policies(node).get("inForce"), _LONGEST_SECONDS, 0.5)
        listed, seconds, resident = _on_the_wire() - sent, node.processor_seconds(), node.resident_mebibytes()
        found: dict[str, Any] = {
            "pods": pods,
            "bytes_of_a_pod": len(json.dumps(pod(1), separators=(",", ":"))),
            "list_mb": round(listed / 1e6, 1),
            "start_cpu_s": round(seconds, 1),
            "rss_mib": round(resident),
            "elements": _policies(node)["elements"],
        }
        for name, marker, labels in (
            ("status", 0, {}),
            ("label", 1, {"tier": "t6", "app.kubernetes.io/name": "app-5"}),
        ):
            taken, sent = _events(node, pods, events, marker, **labels)
            found[f"{name}_event_bytes"] = round(sent / events)
            found[f"{name}_event_cpu_us"] = round(taken / events * 1e6)
        return {**found, "rss_after_mib": round(node.resident_mebibytes()), "peak_mib": round(_peak(node))}
    finally:
        node.close()


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", default="10000,25000,50000")
    parser.add_argument("--policies", type=int, default=1000)
    parser.add_argument("--events", type=int, default=5000)
    given = parser.parse_args()
    system.ip_batch(["link set lo up"])
    for pods in map(int, given.pods.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            sys.stdout.write(json.dumps(measure(Path(scratch), pods, given.policies, given.events)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
