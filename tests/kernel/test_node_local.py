# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A DNS server on the node serves the cluster IP of a Service that is left to it, as NodeLocal DNSCache does."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.converged import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from tests.lab import manifests
from tests.lab.background import Background
from tests.lab.system import ip_batch, socket_inside

MODES = ["nftables", pytest.param("iptables", marks=pytest.mark.full), pytest.param("ipvs", marks=pytest.mark.uml)]
ADDRESSES = {socket.AF_INET: "10.96.0.10", socket.AF_INET6: "fd00:96::a"}
PODS = {socket.AF_INET: ("10.244.1.1", "10.244.1.5"), socket.AF_INET6: ("fd00:244::1", "fd00:244::5")}
SPACE = f"knlocal{os.getpid()}"
ROOT = Path(__file__).parents[2]
SERVER = """
import sys, threading
from tests import conftest
from tests.e2e.dns import Found, answer, serve
names = {"web.shop.svc.cluster.local": Found(("192.0.2.77",))}
for address in sys.argv[1:]:
    serve(address, lambda query, longest: answer(query, names.get, longest))
print("ready", flush=True)
threading.Event().wait()
"""
QUERY = struct.pack("!6H", 77, 0x0100, 1, 0, 0, 0) + b"\x03web\x04shop\x03svc\x07cluster\x05local\0" + b"\0\1\0\1"


@pytest.fixture
def pod() -> Iterator[str]:
    """Yield the namespace of a pod, while the node has the addresses of the Service and a DNS server at them."""
    ip_batch([f"netns add {SPACE}"])
    lines, inner = ["link add vpod type veth peer name eth0 netns " + SPACE, "link set vpod up"], ["link set eth0 up"]
    for family, (node, address) in PODS.items():
        bits = "128 nodad" if family == socket.AF_INET6 else "32"
        length, _space, option = bits.partition(" ")
        lines.append(f"address add {node}/{length} dev vpod {option}")
        lines.append(f"route add {address}/{length} dev vpod")
        lines.append(f"address add {ADDRESSES[family]}/{length} dev lo {option}")
        inner.append(f"address add {address}/{length} dev eth0 {option}")
        inner += [f"route add {node}/{length} dev eth0", f"route add default via {node} dev eth0"]
    ip_batch(lines)
    ip_batch(inner, SPACE)
    server = Background(
        [sys.executable, "-c", SERVER, *ADDRESSES.values()], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        yield f"/run/netns/{SPACE}"
    finally:
        server.close()
        ip_batch([f"netns delete {SPACE}"])


def dns(**metadata: Any) -> ClusterState:
    """Return a cluster with the Service of DNS, whose endpoints refuse, and the ServiceCIDRs."""
    kinds = ("UDP", "TCP")
    ports = [manifests.port(53, name=protocol.lower(), protocol=protocol) for protocol in kinds]
    service = manifests.service("kube-dns", tuple(ADDRESSES.values()), ports, namespace="kube-system")
    service["metadata"].update(metadata)
    closed = [manifests.port(5353, name=protocol.lower(), protocol=protocol) for protocol in kinds]
    slices = [
        manifests.endpoint_slice(
            "kube-dns", [manifests.endpoint(node, "node-1")], closed, name=f"dns-{family}", namespace="kube-system"
        )
        for family, (node, _address) in PODS.items()
    ]
    cidrs = {"kind": "ServiceCIDR", "metadata": {"name": "all"}, "spec": {"cidrs": ["10.96.0.0/16", "fd00:96::/112"]}}
    state = ClusterState.from_objects([service, *slices, cidrs])
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


def resolved(space: str, family: int, kind: int) -> bool:
    """Return whether the name server at the cluster IP answers with the address; False if the kernel refuses."""
    with socket_inside(space or None, family, kind) as sock:
        sock.settimeout(10)
        try:
            sock.connect((ADDRESSES[family], 53))
            sock.send(QUERY if kind == socket.SOCK_DGRAM else struct.pack("!H", len(QUERY)) + QUERY)
            reply = sock.recv(1000)
        except ConnectionRefusedError:
            return False
    assert reply.endswith(socket.inet_aton("192.0.2.77"))
    return True


def answers(pod: str) -> set[bool]:
    """Return how the pod and the node are answered, over both families, UDP and TCP."""
    kinds = (socket.SOCK_DGRAM, socket.SOCK_STREAM)
    return {resolved(space, family, kind) for space in (pod, "") for family in ADDRESSES for kind in kinds}


@pytest.mark.parametrize("mode", MODES)
def test_a_service_is_left_to_the_program_on_the_node(tmp_path: Path, pod: str, mode: str) -> None:
    left, labelled = dns(), dns(labels={"kubenode.proxy/node-local": "true"})
    assert programmed(mode, tmp_path, left).counts["services"] == 1
    assert answers(pod) == {False}
    for state, local in ((left, ("kube-system/kube-dns",)), (left, ()), (labelled, ())):
        report = programmed(mode, tmp_path, state, *local)
        served = state is left and not local
        assert report.changed and answers(pod) == {not served}
        assert not programmed(mode, tmp_path, state, *local).changed
        if mode == "ipvs":
            device = subprocess.run(["ip", "address", "show", "kube-ipvs0"], capture_output=True, text=True).stdout
            assert ("10.96.0.10/" in device) is served
