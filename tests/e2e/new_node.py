# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node joins with a start-up taint: no pod runs on it before its network policies are in force (docs/agent.md)."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any, Iterator

from tests.lab.system import LabError
from tests.waiting import wait_for

from .cluster import Cluster
from .images import image_of
from .nodes import KubernetesNode
from .proxies import Project

_MODE = "nftables"
_NAMESPACE, _NAME, _PORT = "closed", "closed", 8080
TAINT = "kubenode.proxy/not-ready"
#: For how long a Node without an agent must stay without pods.
_SECONDS_WITHOUT_AGENT = 15.0


def _objects(image: str) -> list[dict[str, Any]]:
    """Return a DaemonSet that nobody may connect to."""
    labels = {"app": _NAME}
    container = {"name": _NAME, "image": image, "args": ["netexec", f"--http-port={_PORT}"]}
    pod = {"terminationGracePeriodSeconds": 1, "containers": [container]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}},
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "nobody", "namespace": _NAMESPACE},
            "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": _NAME, "namespace": _NAMESPACE},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
    ]


class Watcher:
    """Looks several times a second whether the agent is ready, which pods the node has, and whether they answer.

    ``ready``, ``bound``: when the agent was ready, and when a pod was bound to the node, for the first time, by the
    monotonic clock; 0 before. ``answers``: the addresses of pods that accepted a connection. ``probes``: how many were
    attempted.
    """

    def __init__(self, cluster: Cluster, node: KubernetesNode) -> None:
        self.ready = self.bound = 0.0
        self.answers: list[str] = []
        self.probes = 0
        self._cluster = cluster
        self._node = node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch meanwhile."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods of the DaemonSet that are bound to the node."""
        only = f"--field-selector=spec.nodeName={self._node.name}"
        text = self._cluster.control.kubectl("get", "pods", f"--namespace={_NAMESPACE}", only, "--output=json")
        return list(json.loads(text)["items"])

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            pods = self.pods()
            # In this order: a pod that is bound in between would otherwise seem to be bound before.
            if pods and not self.bound:
                self.bound = time.monotonic()
            code = self._node.run("curl", "--silent", "--fail", "http://127.0.0.1:10256/readyz", check=False).returncode
            if code == 0 and not self.ready:
                self.ready = time.monotonic()
            for address in (item["status"].get("podIP") for item in pods):
                if address:
                    self._probe(address)

    def _probe(self, address: str) -> None:
        """Connect from beside the control plane, which is outside the node."""
        self.probes += 1
        with contextlib.suppress(LabError):
            self._cluster.control.run("curl", "--silent", "--max-time", "0.5", f"http://{address}:{_PORT}/hostname")
            self.answers.append(address)


def run_new_node(cluster: Cluster) -> str:
    """Let the last node join as a new one, and return what was seen. Raises LabError if a pod was exposed."""
    *_others, node = cluster.nodes
    control = cluster.control
    project = Project(control, cluster.nodes, network_policy=True)
    project.start(_MODE)
    Project(control, [node]).stop()
    node.run("systemctl", "stop", "kubelet.service")
    control.kubectl("delete", "node", node.name)
    control.create(_objects(image_of("agnhost", cluster.images)))
    node.register_with_taint(TAINT)
    get_node = ("get", "node", node.name, "--ignore-not-found", "--output=yaml")
    wait_for(lambda: TAINT in control.kubectl(*get_node), 60, what="the taint")
    watcher = Watcher(cluster, node)
    with watcher.watching():
        time.sleep(_SECONDS_WITHOUT_AGENT)
        if watcher.bound or watcher.ready:
            raise LabError("a pod was bound, or an agent ready, before there was an agent")
        project.start(_MODE, startup_taint=TAINT)
        running = ("rollout", "status", f"daemonset/{_NAME}", f"--namespace={_NAMESPACE}", "--timeout=120s")
        control.kubectl(*running)
        time.sleep(2)
    if TAINT in control.kubectl(*get_node):
        raise LabError("the role has not removed the taint")
    if watcher.answers or not watcher.probes:
        raise LabError(f"{len(watcher.answers)} of {watcher.probes} connections to an isolated pod were accepted")
    if not 0 < watcher.ready <= watcher.bound:
        raise LabError(f"a pod was bound at {watcher.bound:.1f}, and the agent was ready at {watcher.ready:.1f}")
    project.stop()
    control.kubectl("delete", "namespace", _NAMESPACE)
    seconds = watcher.bound - watcher.ready
    return f"the pod was bound {seconds:.1f} s after the agent was ready; 0 of {watcher.probes} connections accepted"
