# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An application of the cluster, and clients whose requests to it are counted."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Sequence

from tests.lab.load import Endpoint, Flow, Load
from tests.lab.namespaces import ROOT

from .addresses import node_addresses, pod_networks
from .control_plane import ControlPlane
from .nodes import KubernetesNode

NAMESPACE, NAME, PODS = "shop", "web", 4
#: Addresses of the Service web, its port, and its node port.
ADDRESSES, PORT, NODE_PORT = ("10.96.70.70", "fd00:10:96::7070"), 80, 30080
#: The address of the Service web-lb, whose traffic policy is Local.
BALANCED = "203.0.113.10"
_TARGET = 8080
_CLIENT = "client"


def _listeners() -> str:
    """Return the endpoints of a pod."""
    pairs = [(protocol, address) for protocol in ("tcp", "udp") for address in ("0.0.0.0", "::")]
    return json.dumps([Endpoint("", *pair, _TARGET)._asdict() for pair in pairs])


def _objects(image: str) -> List[Dict[str, Any]]:
    labels = {"app": NAME}
    # As process 1 the shell ignores SIGTERM, so the pod answers until its grace period ends, like a program that
    # ends in an orderly way: what is lost is the service proxy's.
    container = {
        "name": NAME,
        "image": image,
        "command": ["sh", "-c", f"sleep infinity | python3 -m tests.lab.load serve '{_listeners()}'"],
        "workingDir": str(ROOT),
        "readinessProbe": {"tcpSocket": {"port": _TARGET}, "periodSeconds": 1},
        "volumeMounts": [{"name": "project", "mountPath": str(ROOT), "readOnly": True}],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    pod = {
        "terminationGracePeriodSeconds": 15,
        "topologySpreadConstraints": [spread],
        "volumes": [{"name": "project", "hostPath": {"path": str(ROOT)}}],
        "containers": [container],
    }
    ports = [{"name": word, "protocol": word.upper(), "port": PORT, "targetPort": _TARGET} for word in ("tcp", "udp")]
    dual = {"ipFamilyPolicy": "RequireDualStack"}

    def service(name: str, **spec: Any) -> Dict[str, Any]:
        metadata = {"name": name, "namespace": NAMESPACE}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": ports, **spec},
        }

    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": NAME, "namespace": NAMESPACE},
            "spec": {
                "replicas": PODS,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        service(NAME, clusterIP=ADDRESSES[0], clusterIPs=list(ADDRESSES), **dual),
        service(
            f"{NAME}-node",
            type="NodePort",
            ports=[{"protocol": "TCP", "port": PORT, "targetPort": _TARGET, "nodePort": NODE_PORT}],
        ),
        service(f"{NAME}-lb", type="LoadBalancer", externalTrafficPolicy="Local", ports=ports[:1]),
        service(f"{NAME}-headless", clusterIP="None", **dual),
    ]


class Workload:
    """The Deployment ``shop/web`` with its Services, and clients in a network of pods, on nodes and outside."""

    def __init__(self, control: ControlPlane, nodes: Sequence[KubernetesNode], image: str) -> None:
        self._control = control
        self._nodes = nodes
        control.create(_objects(image))
        status = json.dumps({"status": {"loadBalancer": {"ingress": [{"ip": BALANCED}]}}})
        of_shop = (f"--namespace={NAMESPACE}",)
        control.kubectl(
            "patch", "service", f"{NAME}-lb", *of_shop, "--subresource=status", "--type=merge", f"--patch={status}"
        )
        self.wait()
        control.run("ip", "route", "add", f"{BALANCED}/32", "via", node_addresses(1)[0])
        self._make_client(nodes[0])

    def wait(self) -> None:
        """Wait until all pods are ready."""
        self._control.kubectl("rollout", "status", f"deployment/{NAME}", f"--namespace={NAMESPACE}", "--timeout=300s")

    @staticmethod
    def _make_client(node: KubernetesNode) -> None:
        """Make a network namespace on the bridge of the node's pods."""
        lines = [f"netns add {_CLIENT}", f"link add {_CLIENT} type veth peer name eth0 netns {_CLIENT}"]
        lines += [f"link set {_CLIENT} master cni0", f"link set {_CLIENT} up"]
        node.run("ip", "-batch", "-", text="\n".join(lines) + "\n")
        inside = ["link set lo up", "link set eth0 up"]
        for network, last in zip(pod_networks(node.number), ("250", "fa")):
            start, length = network.removesuffix("0/24").split("/")[0], network.rpartition("/")[2]
            inside.append(f"address add {start}{last}/{length} dev eth0 nodad")
            inside.append(f"route add default via {start}1")
        node.run("ip", "-netns", _CLIENT, "-batch", "-", text="\n".join(inside) + "\n")

    def _flows(self, *, moving: bool) -> List[Flow]:
        first, second = self._nodes
        pod = f"/proc/{first.pid}/root/run/netns/{_CLIENT}"
        flows = [
            Flow(pod, "new", ADDRESSES[0], PORT, 20),
            Flow(pod, "new", ADDRESSES[1], PORT, 10),
            Flow(pod, "udp", ADDRESSES[0], PORT, 10),
            Flow(f"/proc/{first.pid}/ns/net", "new", ADDRESSES[0], PORT, 15),
            Flow(f"/proc/{second.pid}/ns/net", "new", ADDRESSES[0], PORT, 15),
        ]
        if moving:
            return flows
        outside = f"/proc/{self._control.namespaces.holder.pid}/ns/net"
        return [
            *flows,
            Flow(pod, "kept", ADDRESSES[0], PORT, 10),
            Flow(outside, "new", node_addresses(2)[0], NODE_PORT, 15),
            Flow(outside, "new", BALANCED, PORT, 10),
        ]

    def load(self, *, moving: bool = False) -> Load:
        """Start about 100 requests a second and wait until each flow is answered.

        ``moving``: pods move to other nodes meanwhile, which ends kept connections, and load balancers send nothing to
        a drained node, so there are no such flows.
        """
        flows = self._flows(moving=moving)
        load = Load(flows, ())
        load.settle(len({(flow.kind, flow.address) for flow in flows}))
        return load
