# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A DNS cache on the node serves the cluster IP of a Service that is left to it, as NodeLocal DNSCache does.

Cache and cluster DNS are both dnsmasq. The cache reaches the cluster DNS through another Service with the same pod.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any, Iterator, Optional

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.lab import manifests
from tests.lab.background import Background
from tests.lab.system import ip_batch, socket_inside

MODES = ["nftables", pytest.param("iptables", marks=pytest.mark.full), pytest.param("ipvs", marks=pytest.mark.uml)]
FAMILIES = (socket.AF_INET, socket.AF_INET6)
KINDS = (socket.SOCK_DGRAM, socket.SOCK_STREAM)
#: The node's own address, by which the network outside is reached.
NODE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
OUTSIDE = {socket.AF_INET: "192.0.2.254", socket.AF_INET6: "2001:db8::fe"}
SERVICE = {socket.AF_INET: "10.96.0.10", socket.AF_INET6: "fd00:96::a"}
UPSTREAM = {socket.AF_INET: "10.96.0.11", socket.AF_INET6: "fd00:96::b"}
GATEWAY = {socket.AF_INET: "10.244.1.1", socket.AF_INET6: "fd00:244::1"}
CLIENT = {socket.AF_INET: "10.244.1.5", socket.AF_INET6: "fd00:244::5"}
DNS = {socket.AF_INET: "10.244.1.6", socket.AF_INET6: "fd00:244::6"}
CLIENT_SPACE, DNS_SPACE = f"knclient{os.getpid()}", f"kndns{os.getpid()}"
#: A name of the cluster, and one that each server answers with a different address.
NAME, WHO = "web.shop.svc.cluster.local", "who.test"
CACHE_SAYS, CLUSTER_SAYS, ADDRESS = "192.0.2.71", "192.0.2.72", "192.0.2.77"
QUIET = ("--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root", "--no-hosts", "--no-resolv")


def attach_pod(space: str, device: str, addresses: dict[int, str]) -> None:
    """Connect the namespace of a pod with the node."""
    lines = [f"link add {device} type veth peer name eth0 netns {space}", f"link set {device} up"]
    inner = ["link set lo up", "link set eth0 up"]
    for family, address in addresses.items():
        bits, option = ("128", "nodad") if family == socket.AF_INET6 else ("32", "")
        lines += [
            f"address add {GATEWAY[family]}/{bits} dev {device} {option}",
            f"route add {address}/{bits} dev {device}",
        ]
        inner += [
            f"address add {address}/{bits} dev eth0 {option}",
            f"route add {GATEWAY[family]}/{bits} dev eth0",
            f"route add default via {GATEWAY[family]} dev eth0",
        ]
    ip_batch(lines)
    ip_batch(inner, space)


def dnsmasq(ask_at: tuple[str, str], *options: str, space: str = "") -> Background:
    """Start a DNS server, and wait until it answers at an address, for a namespace."""
    address, path = ask_at
    inside = ["ip", "netns", "exec", space] if space else []
    command = [*inside, "dnsmasq", *QUIET, "--bind-interfaces", f"--listen-address={address}", *options]
    return Background(command, ready=lambda _pid: asked(path, socket.AF_INET, socket.SOCK_STREAM, address) is not None)


@pytest.fixture
def client() -> Iterator[str]:
    """Yield the namespace of a pod, in a cluster whose DNS server is in another pod; the node has the cache."""
    with contextlib.ExitStack() as stack:
        for space in (CLIENT_SPACE, DNS_SPACE):
            ip_batch([f"netns add {space}"])
            stack.callback(ip_batch, [f"netns delete {space}"])
        lines = ["link add outside type veth peer name unused", "link set unused up", "link set outside up"]
        for family in FAMILIES:
            length, bits, option = (64, 128, "nodad") if family == socket.AF_INET6 else (24, 32, "")
            lines += [
                f"address add {NODE[family]}/{length} dev outside {option}",
                f"route add default via {OUTSIDE[family]} dev outside",
                f"address add {SERVICE[family]}/{bits} dev lo {option}",
            ]
        ip_batch(lines)
        attach_pod(CLIENT_SPACE, "vclient", CLIENT)
        attach_pod(DNS_SPACE, "vdns", DNS)
        for parameter in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path("/proc/sys/net", parameter).write_text("1", encoding="ascii")
        names = (f"--address=/{NAME}/{ADDRESS}", f"--address=/{WHO}/{CLUSTER_SAYS}")
        others = (f"--listen-address={DNS[socket.AF_INET6]}", *names)
        server = dnsmasq((DNS[socket.AF_INET], ""), *others, space=DNS_SPACE)
        stack.callback(server.close)
        upstream = [f"--server={address}" for address in UPSTREAM.values()]
        others = (f"--listen-address={SERVICE[socket.AF_INET6]}", f"--address=/{WHO}/{CACHE_SAYS}", *upstream)
        cache = dnsmasq((SERVICE[socket.AF_INET], ""), *others)
        stack.callback(cache.close)
        yield f"/run/netns/{CLIENT_SPACE}"


def cluster(**metadata: Any) -> ClusterState:
    """Return a cluster with the Service of DNS, which has the metadata, that of the cache, and the ServiceCIDRs."""
    ports = [manifests.port(53, name=protocol.lower(), protocol=protocol) for protocol in ("UDP", "TCP")]
    objects = []
    for name, addresses in (("kube-dns", SERVICE), ("kube-dns-upstream", UPSTREAM)):
        objects.append(manifests.service(name, tuple(addresses.values()), ports, namespace="kube-system"))
        objects += [
            manifests.endpoint_slice(
                name, [manifests.endpoint(address, "node-1")], ports, name=f"{name}-{family}", namespace="kube-system"
            )
            for family, address in DNS.items()
        ]
    objects[0]["metadata"].update(metadata)
    cidrs = {"kind": "ServiceCIDR", "metadata": {"name": "all"}, "spec": {"cidrs": ["10.96.0.0/16", "fd00:96::/112"]}}
    state = ClusterState.from_objects([*objects, cidrs])
    assert state.refusals == ()
    return state


def programmed(mode: str, directory: Path, state: ClusterState, *local: str) -> Report:
    policy = {"servicePolicy": {"localServices": list(local)}}
    configuration = load({"mode": mode}, node_source=policy).configuration
    return converge(
        Request(
            cluster=state,
            configuration=configuration,
            whole_cluster=False,
            node_name="node-1",
            state_directory=str(directory / "state"),
        )
    )


def asked(space: str, family: int, kind: int, server: str, name: str = WHO) -> Optional[str]:
    """Return the address that a name server gives for a name; None if the kernel refuses."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    query = struct.pack("!6H", 77, 0x0100, 1, 0, 0, 0) + labels + b"\0\0\1\0\1"
    with socket_inside(space or None, family, kind) as sock:
        sock.settimeout(20)
        try:
            sock.connect((server, 53))
            sock.send(query if kind == socket.SOCK_DGRAM else struct.pack("!H", len(query)) + query)
            reply = sock.recv(1000)
        except ConnectionRefusedError:
            return None
    return socket.inet_ntoa(reply[-4:])


def answers(client: str, name: str) -> set[Optional[str]]:
    """Return how the pod and the node are answered at the cluster IPs, over both families, UDP and TCP."""
    return {
        asked(space, family, kind, SERVICE[family], name)
        for space in (client, "")
        for family in FAMILIES
        for kind in KINDS
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_service_is_left_to_the_program_on_the_node(tmp_path: Path, client: str, mode: str) -> None:
    plain, labelled = cluster(), cluster(labels={"kubenode.proxy/node-local": "true"})
    assert programmed(mode, tmp_path, plain).counts["services"] == 2
    assert answers(client, WHO) == {CLUSTER_SAYS}
    for state, local in ((plain, ("kube-system/kube-dns",)), (plain, ()), (labelled, ())):
        report = programmed(mode, tmp_path, state, *local)
        served = state is plain and not local
        assert report.changed and answers(client, WHO) == {CLUSTER_SAYS if served else CACHE_SAYS}
        # The cache asks the cluster's server through the other Service.
        assert answers(client, NAME) == {ADDRESS}
        assert not programmed(mode, tmp_path, state, *local).changed
        if mode == "ipvs":
            device = subprocess.run(["ip", "address", "show", "kube-ipvs0"], capture_output=True, text=True).stdout
            assert ("10.96.0.10/" in device) is served and "10.96.0.11/" in device
