# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Node ports at loopback addresses in nftables mode (KEP-6032): what a reload changes, the metrics, and a registry.

In ipvs mode, with either filter backend, these addresses are left to the programs of the host.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import signal
import socket
import threading
import urllib.request
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode
from tests.kernel.userspace_node import Backend, answering, ask, endpoints_of, service_of, userspace_node
from tests.lab.system import ip_batch
from tests.waiting import wait_for

PORT = 30080
PROTOCOLS = ("TCP", "UDP")
BACKENDS = ("192.0.2.21", "192.0.2.22")
METRICS = "kubeproxy_nftables_localhost_nodeport_"
LOOPBACK = {"IPv4": "127.0.0.1", "IPv6": "::1"}
V6_BACKEND = "2001:db8::21"


@pytest.fixture
def node(request, tmp_path) -> Iterator[AgentNode]:
    ip_batch(
        [
            "link set lo up",
            "link add net0 type veth peer name net1",
            "link set net1 up",
            "link set net0 up",
            "address add 192.0.2.1/24 dev net0",
            "-6 address add 2001:db8::1/64 dev net0 nodad",
        ]
    )
    backends = [Backend(address) for address in (*BACKENDS, V6_BACKEND)]
    mode = getattr(request, "param", "nftables")
    agent_node = userspace_node(tmp_path, mode, variant="" if mode.endswith("nftables") else "legacy")
    dual = {"type": "NodePort", "ipFamilies": ["IPv4", "IPv6"], "clusterIPs": ["10.96.0.1", "fd00:96::1"]}
    served = service_of(1, PROTOCOLS, **dual)
    for port in served["spec"]["ports"]:
        port["nodePort"] = PORT
    agent_node.store.put(served)
    agent_node.store.put(endpoints_of(1, BACKENDS, PROTOCOLS))
    agent_node.store.put(endpoints_of(1, [V6_BACKEND], PROTOCOLS))
    agent_node.write_configuration(nodePortAddresses=["primary"])
    yield agent_node
    agent_node.close()
    for backend in backends:
        backend.close()


def refused(address: str, kind: int = socket.SOCK_STREAM) -> bool:
    """Return whether the node port refuses a request at an address."""
    try:
        ask(address, PORT, kind=kind)
    except ConnectionRefusedError:
        return True
    return False


def values(node: AgentNode, metric: str) -> dict[str, int]:
    """Return the values of a metric by its labels, without their names."""
    found = re.findall(rf"^{METRICS}{metric}\{{(.*)\}} (\S+)$", node.fetch("/metrics"), re.MULTILINE)
    return {" ".join(re.findall(r'"([^"]*)"', labels)): int(float(value)) for labels, value in found}


def reload(node: AgentNode, *addresses: str) -> None:
    node.write_configuration(nodePortAddresses=list(addresses))
    assert node.process is not None
    node.process.send_signal(signal.SIGHUP)


def test_a_reload_adds_and_removes_localhost(node: AgentNode) -> None:
    # A program of the host has the port at a loopback address; preflight names it before it is cut off.
    with socket.create_server(("127.0.0.2", PORT)):
        shown = node.converge("--check")
        assert f"(process {os.getpid()}) listens at 127.0.0.2:{PORT} (TCP), which is refused" in shown.stderr
        node.start()
        wait_for(lambda: refused("127.0.0.2"), 60.0)
    assert all(refused(address) for address in LOOPBACK.values())
    assert all(refused(address, socket.SOCK_DGRAM) for address in LOOPBACK.values())
    counted = values(node, "rejected_packets_total")
    assert set(counted) == {f"{family} {name}" for family in LOOPBACK for name in ("TCP", "UDP", "SCTP")}
    assert all((number > 0) is not name.endswith("SCTP") for name, number in counted.items()), counted
    assert values(node, "listeners") == {"IPv4": 0, "IPv6": 0}
    assert values(node, "listener_creation_failures_total") == {"IPv4": 0, "IPv6": 0}

    # The counters of UDP continue where TCP is served; that of TCP is removed.
    reload(node, "primary", "localhost")
    wait_for(lambda: values(node, "listeners") == {"IPv4": 1, "IPv6": 1}, 60.0)
    assert answering("127.0.0.1", PORT) == set(BACKENDS) and answering("::1", PORT) == {V6_BACKEND}
    assert refused("127.0.0.1", socket.SOCK_DGRAM) and refused("::1", socket.SOCK_DGRAM)
    after = values(node, "rejected_packets_total")
    assert "IPv4 TCP" not in after and after["IPv4 UDP"] > counted["IPv4 UDP"]
    wait_for(lambda: not node.differences()["changed"], 60.0, 0.5)

    # Only one family, and then none: what answered there is refused again.
    reload(node, "primary", "127.0.0.1/32")
    wait_for(lambda: refused("::1"), 60.0)
    assert answering("127.0.0.1", PORT) == set(BACKENDS)
    reload(node, "primary")
    wait_for(lambda: refused("127.0.0.1"), 60.0)
    wait_for(lambda: values(node, "listeners") == {"IPv4": 0, "IPv6": 0}, 60.0)
    assert values(node, "rejected_packets_total")["IPv4 TCP"] > 0
    assert answering("192.0.2.1", PORT) == set(BACKENDS), "other addresses are not concerned"
    wait_for(lambda: not node.differences()["changed"], 60.0, 0.5)
    assert node.stop() == 0


def test_a_port_that_another_program_has_is_counted_and_tried_again(node: AgentNode) -> None:
    node.write_configuration(nodePortAddresses=["localhost"])
    with socket.create_server(("127.0.0.1", PORT)):
        node.start()
        wait_for(lambda: values(node, "listener_creation_failures_total")["IPv4"] > 1, 60.0)
        assert values(node, "listeners") == {"IPv4": 0, "IPv6": 1}
        assert values(node, "listener_creation_failures_total")["IPv6"] == 0
    wait_for(lambda: values(node, "listeners") == {"IPv4": 1, "IPv6": 1}, 60.0)
    assert answering("127.0.0.1", PORT) == set(BACKENDS)


@pytest.mark.parametrize(
    "node",
    [pytest.param("ipvs", marks=pytest.mark.uml), pytest.param("ipvs nftables", marks=pytest.mark.ipvs)],
    indirect=True,
)
def test_ipvs_mode_leaves_loopback_addresses_to_the_host(node: AgentNode) -> None:
    node.write_configuration(nodePortAddresses=["primary", "localhost"])
    node.start()
    assert answering("192.0.2.1", PORT) == set(BACKENDS)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        assert all(refused(address, kind) for address in LOOPBACK.values())
    with socket.create_server(("127.0.0.1", PORT)):
        assert answers(PORT)
    assert not node.differences()["changed"]


def test_a_single_run_says_that_the_agent_is_needed(node: AgentNode) -> None:
    node.write_configuration(nodePortAddresses=["localhost"])
    done = node.converge()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("node ports on loopback addresses need the agent in nftables mode") == 1
    assert refused("127.0.0.1") and refused("127.0.0.1", socket.SOCK_DGRAM)
    places = ("--config", str(node.scratch / "config.yaml"), "--state-directory", str(node.scratch / "run"))
    cleaned = node.run("cleanup", *places)
    assert cleaned.returncode == 0 and "localhost" not in node.kernel_text("")


class Registry(http.server.BaseHTTPRequestHandler):
    """The part of a registry from which a container runtime pulls an image (OCI distribution specification)."""

    protocol_version = "HTTP/1.1"
    blobs = [os.urandom(8 << 20), b'{"architecture":"amd64","os":"linux"}']

    def do_GET(self) -> None:
        content = {"/v2/": b"{}", "/v2/pause/manifests/testing": self.manifest()}
        content.update({f"/v2/pause/blobs/{digest(blob)}": blob for blob in self.blobs})
        body = content.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    @classmethod
    def manifest(cls) -> bytes:
        """Return the manifest of an image of one layer."""
        layer, config = ({"digest": digest(blob), "size": len(blob)} for blob in cls.blobs)
        return json.dumps({"schemaVersion": 2, "config": config, "layers": [layer]}).encode()

    def log_message(self, *_words: object) -> None:
        """Write nothing."""


def digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def pulled(place: str) -> int:
    """Pull an image as a container runtime does; return its size. Raises OSError."""

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"http://{place}/v2/{path}", timeout=20) as answer:
            return bytes(answer.read())

    assert get("") == b"{}"
    manifest = json.loads(get("pause/manifests/testing"))
    items = [manifest["config"], *manifest["layers"]]
    blobs = [get(f"pause/blobs/{item['digest']}") for item in items]
    assert [digest(blob) for blob in blobs] == [item["digest"] for item in items]
    return sum(map(len, blobs))


def test_an_image_is_pulled_from_a_registry_behind_a_node_port_of_localhost(node: AgentNode) -> None:
    """The test of upstream's group LocalhostNodePorts, with the requests of a container runtime in place of one."""
    server = http.server.ThreadingHTTPServer((BACKENDS[0], 5000), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    node.store.put(endpoints_of(1, BACKENDS[:1], ("TCP",), node="node2", port=5000))
    node.write_configuration(nodePortAddresses=["localhost"])
    node.start()
    try:
        for place in (f"localhost:{PORT}", f"127.0.0.1:{PORT}"):
            wait_for(lambda: answers(PORT), 60.0)
            assert pulled(place) > 8 << 20
    finally:
        server.shutdown()
        server.server_close()


def answers(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(5)
        return sock.connect_ex(("127.0.0.1", port)) == 0
