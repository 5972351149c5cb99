# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test which probes are sent to the cluster IPs of chosen Services, and what their results mean for a Service."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext, FamilyServices
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.probing.probe import Probe
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.probing.traffic import (
    Target,
    chosen_services,
    probe_targets,
    traffic_targets,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports

Objects = list[dict[str, Any]]


def service(path: str, addresses: list[str], ports: Objects, **spec: Any) -> Objects:
    """Return a Service with an endpoint on the node ``other`` for each of its addresses."""
    namespace, name = path.split("/")
    metadata = {"namespace": namespace, "name": name}
    ready = spec.pop("ready", True)
    spec = {"type": "ClusterIP", "clusterIP": addresses[0], "clusterIPs": addresses, "ports": ports, **spec}
    objects = [{"kind": "Service", "metadata": metadata, "spec": spec}]
    for number, address in enumerate(addresses):
        labels = {"kubernetes.io/service-name": name}
        objects.append(
            {
                "kind": "EndpointSlice",
                "metadata": {"namespace": namespace, "name": f"{name}-{number}", "labels": labels},
                "addressType": "IPv6" if ":" in address else "IPv4",
                "ports": ports,
                "endpoints": [
                    {
                        "addresses": ["fd00::9" if ":" in address else "10.244.0.9"],
                        "nodeName": "other",
                        "conditions": {"ready": ready},
                    }
                ],
            }
        )
    return objects


def port(number: int, protocol: str = "TCP", name: str = "") -> dict[str, Any]:
    return {"name": name or f"p{number}-{protocol.lower()}", "port": number, "protocol": protocol}


CLUSTER = ClusterState.from_objects(
    [
        *service("default/kubernetes", ["10.96.0.1"], [port(443, name="main")]),
        *service("kube-system/kube-dns", ["10.96.0.10"], [port(53, "UDP"), port(53), port(9153)]),
        *service("shop/web", ["10.96.0.20", "fd00:96::20"], [port(80), port(443, name="https")]),
        *service("shop/stats", ["10.96.0.30"], [port(8125, "UDP"), port(5000, "SCTP")]),
        *service("shop/near", ["10.96.0.40"], [port(80)], internalTrafficPolicy="Local"),
        *service("shop/empty", ["10.96.0.50"], [port(80)], ready=False),
        *service("shop/six", ["fd00:96::60"], [port(80)]),
    ]
)


def targets(*names: str, families: Any = (IPV4, IPV6)) -> dict[str, Target]:
    items = []
    for family in families:
        context = FamilyContext(DataplaneSettings(family), NodeContext(family, "node"), None)
        items.append(FamilyServices(context, all_service_ports(CLUSTER, context.node)))
    return {item.service: item for item in traffic_targets(chosen_services(CLUSTER, names), items)}


def urls(target: Target) -> list[str]:
    return sorted(map(str, target.probes))


def test_by_default_the_api_server_and_dns_are_probed():
    found = targets()
    assert {name: urls(target) for name, target in found.items()} == {
        "default/kubernetes": ["tls://10.96.0.1:443"],
        "kube-system/kube-dns": [
            "dns://10.96.0.10:53/kubernetes.default.svc.cluster.local",
            "tcp://10.96.0.10:53",
            "tcp://10.96.0.10:9153",
        ],
    }


def test_every_port_is_probed_in_every_family_that_the_node_serves():
    assert urls(targets("shop/web")["shop/web"]) == [
        "tcp://10.96.0.20:80",
        "tcp://[fd00:96::20]:80",
        "tls://10.96.0.20:443",
        "tls://[fd00:96::20]:443",
    ]
    assert urls(targets("shop/web", families=(IPV4,))["shop/web"]) == ["tcp://10.96.0.20:80", "tls://10.96.0.20:443"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("shop/stats", "it has no port that can be probed, only UDP or SCTP"),
        ("shop/near", "it has no endpoint on this host"),
        ("shop/empty", "it has no ready endpoint"),
        ("shop/six", "this host does not serve it"),
    ],
)
def test_what_no_proxy_can_make_answer_is_not_probed(name, reason):
    found = targets(name, families=(IPV4,))[name]
    assert (found.probes, found.reason) == ((), reason)
    (reach,) = probe_targets([found], 1.0)
    assert (reach.reached, reach.reason) == (None, reason)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("shop/wbe", "traffic_services: the cluster has no Service shop/wbe with a cluster IP"),
        ("web", "traffic_services: 'web' is not of the form NAMESPACE/NAME"),
        ("a/b/c", "traffic_services: 'a/b/c' is not of the form NAMESPACE/NAME"),
    ],
)
def test_an_unknown_service_is_an_error(name, reason):
    with pytest.raises(ConfigurationError, match=reason):
        chosen_services(CLUSTER, ["shop/web", name])


def test_a_service_is_reached_if_all_its_probes_succeed():
    with socket.socket() as listening, socket.socket() as closed:
        for sock in (listening, closed):
            sock.bind(("127.0.0.1", 0))
        listening.listen(4)
        good = Probe("tcp", "127.0.0.1", listening.getsockname()[1])
        bad = Probe("tcp", "127.0.0.1", closed.getsockname()[1])
        found = probe_targets([Target("a/both", (good, bad)), Target("a/good", (good,))], 0.5)
    assert [(item.service, item.reached) for item in found] == [("a/both", False), ("a/good", True)]
    assert found[0].reason == f"{bad}: the connection was refused" and found[1].reason == ""
    assert [item.answered for item in found[0].probes] == [True, False]
