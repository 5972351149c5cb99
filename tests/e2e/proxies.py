# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What serves the cluster's Services in a run of the suite: this project, or kube-proxy as the control."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Sequence

from tests.systemd.agent import wait_for_activity
from tests.systemd.node import run_playbook
from tests.waiting import wait_for

from .addresses import API_SERVER, PODS
from .control_plane import ControlPlane
from .nodes import PROGRAMS, KubernetesNode

_UNIT = """\
[Service]
ExecStart={programs}/kube-proxy --config=/etc/kubernetes/kube-proxy.json
Restart=always
RestartSec=2
"""


def configuration(mode: str) -> dict[str, Any]:
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

    def start(self, mode: str, startup_taint: str = "") -> None:
        """Serve in this mode, whatever the mode was before, and then remove this taint from the Nodes."""
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
            agent_startup_taint=startup_taint,
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
            wait_for(partial(_is_healthy, node), 120, what=f"kube-proxy serves on {node.name}")

    def stop(self) -> None:
        """Stop it and remove its rules."""
        for node in self._nodes:
            node.run("systemctl", "stop", "kube-proxy.service")
            node.run(f"{PROGRAMS}/kube-proxy", "--config=/etc/kubernetes/kube-proxy.json", "--cleanup")


_CONFIGURATION_PLACE = "/var/lib/kube-proxy"
_KUBECONFIG = f"""\
apiVersion: v1
kind: Config
clusters:
- name: default
  cluster:
    certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
    server: {API_SERVER}
contexts:
- name: default
  context:
    cluster: default
    namespace: default
    user: default
current-context: default
users:
- name: default
  user:
    tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
"""


def kubeadm_objects(mode: str, image: str) -> list[dict[str, Any]]:
    """Return kube-proxy as kubeadm installs it: an account, a ConfigMap with its configuration, and a DaemonSet.

    The image has what kube-proxy needs; the program itself is the nodes'.
    """
    metadata = {"name": "kube-proxy", "namespace": "kube-system", "labels": {"k8s-app": "kube-proxy"}}
    kubeconfig = {"kubeconfig": f"{_CONFIGURATION_PLACE}/kubeconfig.conf"}
    subject = {"kind": "ServiceAccount", "name": "kube-proxy", "namespace": "kube-system"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node-proxier"}
    volumes = {_CONFIGURATION_PLACE: {"configMap": {"name": "kube-proxy"}}}
    volumes.update({path: {"hostPath": {"path": path}} for path in ("/run", "/lib/modules", PROGRAMS)})
    container = {
        "name": "kube-proxy",
        "image": image,
        "command": [
            f"{PROGRAMS}/kube-proxy",
            f"--config={_CONFIGURATION_PLACE}/config.conf",
            "--hostname-override=$(NODE_NAME)",
        ],
        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": f"v{n}", "mountPath": path} for n, path in enumerate(volumes)],
    }
    pod = {
        "hostNetwork": True,
        "serviceAccountName": "kube-proxy",
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "volumes": [{"name": f"v{n}", **source} for n, source in enumerate(volumes.values())],
        "containers": [container],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "kubeadm:node-proxier"},
            "subjects": [subject],
            "roleRef": role,
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {
                "config.conf": json.dumps({**configuration(mode), "clientConnection": kubeconfig}),
                "kubeconfig.conf": _KUBECONFIG,
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": metadata,
            "spec": {
                "selector": {"matchLabels": metadata["labels"]},
                "template": {"metadata": {"labels": metadata["labels"]}, "spec": pod},
            },
        },
    ]


def _is_healthy(node: KubernetesNode) -> bool:
    return node.run("curl", "--silent", "--fail", "http://127.0.0.1:10256/healthz", check=False).returncode == 0
