# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run network policy cases: for each step a convergence by the conformance lab's runner, then the probes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from . import cases
from .network import Network
from .wire import Wire

RUNNERS = Path(__file__).resolve().parents[1] / "conformance" / "runners"
_CONFIGURATION = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    "clusterCIDR": "10.244.0.0/16,fd00:10:244::/48",
    "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
}


class Node:
    """The node under test, converged by ``oneshot``. ``directory`` keeps the runner's state."""

    def __init__(self, network: Network, directory: Path, mode: str, **environment: str) -> None:
        self.network = network
        self.namespace = network.full_name("node1")
        self.directory = directory
        self.environment = {
            **os.environ,
            "LAB_CONFIG": str(directory / "config.yaml"),
            "LAB_SNAPSHOT": str(directory / "snapshot.json"),
            "LAB_NODE": "node1",
            "LAB_MODE": mode,
            "LAB_DIR": str(directory),
            "LAB_CASE": "netpol",
            "LAB_NETWORK_POLICY": "1",
            "LAB_IPVS_FILTER_BACKEND": os.environ.get("LAB_IPVS_FILTER_BACKEND", "iptables"),
            **environment,
        }
        (directory / "config.yaml").write_text(yaml.safe_dump(_CONFIGURATION), encoding="utf-8")

    def converge(self, objects: Iterable[dict[str, Any]], **environment: str) -> str:
        """Converge to these objects and return the standard error output."""
        snapshot = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        (self.directory / "snapshot.json").write_text(json.dumps(snapshot), encoding="utf-8")
        return self._run("oneshot", environment)

    def clean_up(self) -> str:
        """Remove everything that was programmed."""
        return self._run("cleanup", {})

    def inside(self, *command: str) -> str:
        """Run a command in the node's namespace and return its output."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _run(self, runner: str, environment: dict[str, str]) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, str(RUNNERS / runner)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{runner} failed: {done.stderr}"
        return done.stderr


class BesideAnother(Node):
    """A node whose Services are served by another program: by an earlier convergence, as kube-proxy would."""

    def __init__(self, node: Node) -> None:
        self.__dict__.update(node.__dict__)

    def converge(self, objects: Iterable[dict[str, Any]], **environment: str) -> str:
        """Have the Services served, then enforce only policies; the rules of the Services must not change."""
        found = list(objects)
        super().converge(found, LAB_NETWORK_POLICY="0")
        before = self.inside("iptables-save"), self.inside("ip6tables-save")
        errors = super().converge(found, **environment, LAB_NETWORK_POLICY="standalone")
        after = self.inside("iptables-save"), self.inside("ip6tables-save")
        assert list(map(_rules, after)) == list(map(_rules, before))
        return errors


def _rules(saved: str) -> list[str]:
    """Return the rules out of a dump, without its dates and counters."""
    return [line for line in saved.splitlines() if line.startswith("-A")]


async def run_case(name: str, network: Network, node: Node, families: tuple[str, ...] = cases.FAMILIES) -> list[str]:
    """Run a case; return a line for each unexpected result."""
    wrong: list[str] = []
    wire = Wire(network)
    try:
        for number, step in enumerate(cases.steps(name)):
            await asyncio.to_thread(node.converge, step.objects.values())
            for held in step.held:
                alive = await wire.is_alive(held["name"])
                if alive != (held["expect"] == "alive"):
                    wrong.append(f"step {number}: held {held['name']}: expected {held['expect']}: {held['why']}")
            expected = cases.expectations(step, families)
            answers = await wire.allowed([item.probe for item in expected])
            wrong += [
                f"step {number}: {item.text}: {'allowed' if answers[item.probe] else 'denied'}: {item.why}"
                for item in expected
                if answers[item.probe] != item.allowed
            ]
            for opened in step.open:
                (probe,) = cases.probes_of(opened["flow"], step.objects).values()
                if not await wire.open(opened["name"], probe):
                    wrong.append(f"step {number}: {opened['flow']} cannot be opened")
    finally:
        wire.close()
    return wrong
