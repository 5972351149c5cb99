# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What serves the cluster's Services in a run of the suite: this project, or kube-proxy as the control."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Dict, Sequence

from tests.systemd.agent import wait_for_activity
from tests.systemd.node import run_playbook, wait_for

from .addresses import API_SERVER, PODS
from .control_plane import ControlPlane
from .nodes import PROGRAMS, KubernetesNode

_UNIT = """\
[Service]
ExecStart={programs}/kube-proxy --config=/etc/kubernetes/kube-proxy.json
Restart=always
RestartSec=2
"""


def configuration(mode: str) -> Dict[str, Any]:
    """Return the KubeProxyConfiguration of a mode. The size of the connection table is the machine's, and is kept."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "clusterCIDR": ",".join(PODS),
        "conntrack": {"maxPerCore": 0, "min": 0},
    }


class Project:
    """The agent of this project, installed, changed and removed by its playbook ``agent``."""

    def __init__(self, control: ControlPlane, nodes: Sequence[KubernetesNode], *, network_policy: bool = False) -> None:
        self._control = control
        self._nodes = nodes
        self._network_policy = network_policy

    def _play(self, **variables: Any) -> None:
        run_playbook(
            self._nodes,
            "kubenode.proxy.agent",
            {**variables, "agent_admin_kubeconfig": str(self._control.kubeconfig("admin"))},
            {},
            enter=self._control.enter(),
        )

    def start(self, mode: str) -> None:
        """Serve in this mode, whatever the mode was before."""
        self._play(
            agent_configuration=configuration(mode),
            agent_node_configuration={
                "apiVersion": "kubenode.proxy/v1alpha1",
                "kind": "NodeProxyConfiguration",
                "networkPolicy": {"enabled": self._network_policy},
            },
            agent_create_access=True,
            agent_access_network_policy=self._network_policy,
            agent_api_server=API_SERVER,
        )
        for node in self._nodes:
            wait_for_activity(node)

    def stop(self) -> None:
        """Remove the agent and everything that it has programmed."""
        self._play(agent_state="absent", agent_remove_dataplane=True)


class KubeProxy:
    """The real kube-proxy, as a systemd service."""

    def __init__(self, control: ControlPlane, nodes: Sequence[KubernetesNode]) -> None:
        self._control = control
        self._nodes = nodes

    def start(self, mode: str) -> None:
        """Serve in this mode."""
        settings = {**configuration(mode), "clientConnection": {"kubeconfig": "/etc/kubernetes/kube-proxy.kubeconfig"}}
        for node in self._nodes:
            node.copy(self._control.kubeconfig("kube-proxy"), "/etc/kubernetes/kube-proxy.kubeconfig")
            config = {**settings, "hostnameOverride": node.name}
            node.write("/etc/kubernetes/kube-proxy.json", json.dumps(config))
            node.write("/etc/systemd/system/kube-proxy.service", _UNIT.format(programs=PROGRAMS))
            node.run("systemctl", "daemon-reload")
            node.run("systemctl", "start", "kube-proxy.service")
        for node in self._nodes:
            wait_for(f"kube-proxy serves on {node.name}", partial(_is_healthy, node), 120)

    def stop(self) -> None:
        """Stop it and remove its rules."""
        for node in self._nodes:
            node.run("systemctl", "stop", "kube-proxy.service")
            node.run(f"{PROGRAMS}/kube-proxy", "--config=/etc/kubernetes/kube-proxy.json", "--cleanup")


def _is_healthy(node: KubernetesNode) -> bool:
    return node.run("curl", "--silent", "--fail", "http://127.0.0.1:10256/healthz", check=False).returncode == 0
