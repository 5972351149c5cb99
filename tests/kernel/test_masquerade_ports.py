# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Source ports of masqueraded connections: with corrected behaviour none is a node port."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.lab import manifests
from tests.lab.system import ip_batch, socket_inside

FAMILIES = (socket.AF_INET, socket.AF_INET6)
#: The networks in which the client and the endpoint are: the node is .1, and each of them .2.
OUTSIDE = {socket.AF_INET: "192.0.2.", socket.AF_INET6: "2001:db8::"}
PODS = {socket.AF_INET: "10.244.1.", socket.AF_INET6: "fd00:244::"}
NODE_PORT, TARGET = 30080, 8080
#: The ports above those of node ports. The kernel draws a port at random, otherwise from twice as many: that all of
#: these connections get one of these is then less likely than one in a million.
ABOVE, CONNECTIONS = range(32768, 65536), 20
MODES = ["nftables", pytest.param("iptables", marks=pytest.mark.full), pytest.param("ipvs", marks=pytest.mark.uml)]


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    """Yield the namespaces of a client outside and of a pod, both connected with the node."""
    names = (f"knoutside{os.getpid()}", f"knpod{os.getpid()}")
    with contextlib.ExitStack() as stack:
        for name, device, networks in zip(names, ("outside", "pod"), (OUTSIDE, PODS)):
            ip_batch([f"netns add {name}"])
            stack.callback(ip_batch, [f"netns delete {name}"])
            here, there = [f"link add {device} type veth peer name eth0 netns {name}", f"link set {device} up"], []
            for family, prefix in networks.items():
                length = "64" if family == socket.AF_INET6 else "24"
                option = "nodad" if family == socket.AF_INET6 else ""
                here.append(f"address add {prefix}1/{length} dev {device} {option}")
                there.append(f"address add {prefix}2/{length} dev eth0 {option}")
                there.append(f"route add default via {prefix}1")
            ip_batch(here)
            ip_batch(["link set eth0 up", *there], name)
        for parameter in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path("/proc/sys/net", parameter).write_text("1", encoding="ascii")
        yield f"/run/netns/{names[0]}", f"/run/netns/{names[1]}"


def cluster() -> ClusterState:
    """Return a cluster with one Service of type NodePort for both families."""
    port = manifests.port(80, nodePort=NODE_PORT)
    objects = [manifests.service("web", ("10.96.0.7", "fd00:96::7"), [port], type="NodePort")]
    for family, prefix in PODS.items():
        listed = [manifests.endpoint(f"{prefix}2", "node1")]
        objects.append(manifests.endpoint_slice("web", listed, [manifests.port(TARGET)], name=f"web-{family}"))
    return ClusterState.from_objects(objects)


def seen_ports(family: int, client: str, pod: str) -> list[int]:
    """Return the source ports that the endpoint sees of connections to the node port."""
    found = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket_inside(pod, family, socket.SOCK_STREAM))
        server.bind((f"{PODS[family]}2", TARGET))
        server.listen()
        server.settimeout(30)
        for _connection in range(CONNECTIONS):
            connection = stack.enter_context(socket_inside(client, family, socket.SOCK_STREAM))
            connection.settimeout(30)
            connection.connect((f"{OUTSIDE[family]}1", NODE_PORT))
            accepted, peer = server.accept()
            stack.enter_context(accepted)
            assert peer[0] == f"{PODS[family]}1"
            found.append(int(peer[1]))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("behaviour", ["kube-proxy", "corrected"])
def test_masqueraded_connections_use_no_node_port(
    tmp_path: Path, spaces: tuple[str, str], mode: str, behaviour: str
) -> None:
    settings = {"mode": mode, "nodePortAddresses": ["192.0.2.0/24", "2001:db8::/64"]}
    configuration = load(settings, node_source={"behaviour": behaviour}).configuration
    request = Request(cluster(), configuration, node_name="node1", state_directory=str(tmp_path / "state"))
    converge(request._replace(whole_cluster=False))
    for family in FAMILIES:
        found = seen_ports(family, *spaces)
        assert all(port in ABOVE for port in found) is (behaviour == "corrected"), found
