# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Applications of the cluster, and clients whose requests to them are counted."""

from __future__ import annotations

import json
from typing import Any, Sequence

from tests.lab import system
from tests.lab.balancer import LoadBalancer, Target
from tests.lab.load import Endpoint, Flow, Load
from tests.lab.namespaces import ROOT

from .addresses import node_addresses, pod_networks
from .control_plane import BRIDGE, ControlPlane
from .nodes import KubernetesNode

NAMESPACE, NAME, PODS = "shop", "web", 4
#: Addresses of the Service web, its port, and its node port.
ADDRESSES, PORT, NODE_PORT = ("10.96.70.70", "fd00:10:96::7070"), 80, 30080
#: The address of the Service web-lb, whose traffic policy is Local.
BALANCED = "203.0.113.10"
#: The DaemonSet, whose pods no drain moves, and the cluster IP of its Service.
DAEMON, DAEMON_ADDRESS = "daemon", "10.96.70.71"
_TARGET = 8080
_LOCAL_NODE_PORT, _LOCAL_HEALTH_PORT = 30081, 30082
#: Addresses of load balancers outside, for node ports with either traffic policy, and what they check.
BALANCERS = (
    Target("198.51.100.7", PORT, NODE_PORT, 10256, "/healthz"),
    Target("198.51.100.8", PORT, _LOCAL_NODE_PORT, _LOCAL_HEALTH_PORT),
)
_CLIENT = "client"
# A health check may be slow on a busy machine, where every node is one.
_PATIENCE = 15.0


def _listeners() -> str:
    """Return the endpoints of a pod."""
    pairs = [(protocol, address) for protocol in ("tcp", "udp") for address in ("0.0.0.0", "::")]
    return json.dumps([Endpoint("", *pair, _TARGET)._asdict() for pair in pairs])


def _labels(name: str) -> dict[str, str]:
    return {"app": name}


def _controller(kind: str, name: str, pod: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": _labels(name)},
            "template": {"metadata": {"labels": _labels(name)}, "spec": pod},
            **spec,
        },
    }


def _objects(image: str) -> list[dict[str, Any]]:
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
        "labelSelector": {"matchLabels": _labels(NAME)},
    }
    pod = {
        "terminationGracePeriodSeconds": 15,
        "volumes": [{"name": "project", "hostPath": {"path": str(ROOT)}}],
        "containers": [container],
    }
    ports = [{"name": word, "protocol": word.upper(), "port": PORT, "targetPort": _TARGET} for word in ("tcp", "udp")]
    dual = {"ipFamilyPolicy": "RequireDualStack"}

    def service(name: str, of: str = NAME, **spec: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": NAMESPACE}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": _labels(of), "ports": ports, **spec},
        }

    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        _controller("Deployment", NAME, {**pod, "topologySpreadConstraints": [spread]}, replicas=PODS),
        _controller("DaemonSet", DAEMON, pod),
        service(DAEMON, DAEMON, clusterIP=DAEMON_ADDRESS),
        service(NAME, clusterIP=ADDRESSES[0], clusterIPs=list(ADDRESSES), **dual),
        service(
            f"{NAME}-node",
            type="NodePort",
            ports=[{"protocol": "TCP", "port": PORT, "targetPort": _TARGET, "nodePort": NODE_PORT}],
        ),
        service(
            f"{NAME}-lb",
            type="LoadBalancer",
            externalTrafficPolicy="Local",
            healthCheckNodePort=_LOCAL_HEALTH_PORT,
            ports=[{**ports[0], "nodePort": _LOCAL_NODE_PORT}],
        ),
        service(f"{NAME}-headless", clusterIP="None", **dual),
    ]


class Workload:
    """The applications with their Services, and clients in a network of pods, on nodes and outside.

    The clients outside use load balancers, which check the health of the nodes, or send to a node.
    """

    def __init__(self, control: ControlPlane, nodes: Sequence[KubernetesNode], image: str) -> None:
        self._control = control
        self._nodes = nodes
        self._balancers: list[LoadBalancer] = []
        control.create(_objects(image))
        status = json.dumps({"status": {"loadBalancer": {"ingress": [{"ip": BALANCED}]}}})
        of_shop = (f"--namespace={NAMESPACE}",)
        control.kubectl(
            "patch", "service", f"{NAME}-lb", *of_shop, "--subresource=status", "--type=merge", f"--patch={status}"
        )
        for application in (f"deployment/{NAME}", f"daemonset/{DAEMON}"):
            control.kubectl("rollout", "status", application, *of_shop, "--timeout=300s")
        control.run("ip", "route", "add", f"{BALANCED}/32", "via", node_addresses(1)[0])
        self._make_client(nodes[0])
        self._outside = f"/proc/{control.namespaces.holder.pid}/ns/net"
        addresses = {node.number: node_addresses(node.number)[0] for node in nodes}
        for target in BALANCERS:
            control.run("ip", "route", "add", f"{target.address}/32", "dev", BRIDGE)
            with system.inside(self._outside):
                self._balancers.append(LoadBalancer(target, addresses, "output", _PATIENCE))

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

    def _places(self) -> list[str]:
        """Return the network namespaces of the client among the pods and of the nodes."""
        first = self._nodes[0].pid
        return [f"/proc/{first}/root/run/netns/{_CLIENT}", *(f"/proc/{node.pid}/ns/net" for node in self._nodes)]

    def _flows(self, *, moving: bool) -> list[Flow]:
        pod, *nodes = self._places()
        flows = [
            Flow(pod, "new", ADDRESSES[0], PORT, 20),
            Flow(pod, "new", ADDRESSES[1], PORT, 10),
            Flow(pod, "udp", ADDRESSES[0], PORT, 10),
            *(Flow(node, "new", ADDRESSES[0], PORT, 15) for node in nodes),
            *(Flow(self._outside, "new", target.address, target.port, 10) for target in BALANCERS),
        ]
        if moving:
            return flows
        return [
            *flows,
            Flow(pod, "kept", ADDRESSES[0], PORT, 10),
            Flow(self._outside, "new", node_addresses(2)[0], NODE_PORT, 5),
            Flow(self._outside, "new", BALANCED, PORT, 5),
        ]

    def load(self, *, moving: bool = False, settling: bool = True) -> Load:
        """Start about 100 requests a second; with ``settling``, wait until each flow is answered, and count from then.

        ``moving``: pods move to other nodes meanwhile, which ends connections to them that are kept, and what sends
        from outside to a node without asking for its health finds no pod there, so there are no such flows.
        """
        flows = self._flows(moving=moving)
        load = Load(flows, ())
        if settling:
            load.settle(len({(flow.kind, flow.address) for flow in flows}))
        return load

    def keep(self) -> Load:
        """Open connections to the pods of the DaemonSet that are kept from now on, and use each every second."""
        load = Load([Flow(place, "kept", DAEMON_ADDRESS, PORT, 4) for place in self._places()], ())
        load.settle(1)
        return load

    def close(self) -> None:
        """Stop the load balancers."""
        for balancer in self._balancers:
            balancer.close()
