# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test probes: which answers count as success, and the default probes of a cluster."""

from __future__ import annotations

import contextlib
import http.server
import socket
import struct
import threading
from typing import Any, Callable, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.probing.attempts import parse_probe, run_probes
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.probing.probe import Probe, default_probes

HOST = "127.0.0.1"


@contextlib.contextmanager
def udp_server(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((HOST, 0))
        port = sock.getsockname()[1]

        def serve() -> None:
            while True:
                data, peer = sock.recvfrom(4096)
                if data == b"end":
                    return
                reply = answer(data)
                if reply:
                    sock.sendto(reply, peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield port
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"end", (HOST, port))
            thread.join(30)


@contextlib.contextmanager
def http_server(status: int) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def dns(code: int) -> Callable[[bytes], bytes]:
    def answer(question: bytes) -> bytes:
        return question[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, 0, 0, 0) + question[12:]

    return answer


def only(text: str, seconds: float = 20.0):
    (result,) = run_probes([parse_probe(text)], seconds)
    return result


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Provide a bound port that refuses connections and that no other program can use."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        yield sock.getsockname()[1]


def test_a_tcp_probe_succeeds_if_a_program_listens():
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        sock.listen(4)
        result = only(f"tcp://{HOST}:{sock.getsockname()[1]}")
    assert result.answered and result.attempts == 1 and result.reason == ""


def test_a_refused_probe_is_retried_until_the_timeout(closed_port):
    result = only(f"tcp://{HOST}:{closed_port}", 1.0)
    assert not result.answered and result.attempts >= 1
    assert result.reason == "the connection was refused"


def test_udp_and_dns_answer():
    with udp_server(lambda data: data) as port:
        assert only(f"udp://{HOST}:{port}").answered
    with udp_server(dns(0)) as port:
        assert only(f"dns://{HOST}:{port}/kubernetes.default.svc.cluster.local").answered
    # A name that does not exist was looked up nevertheless.
    with udp_server(dns(3)) as port:
        assert only(f"dns://{HOST}:{port}").answered


def test_a_dns_server_that_fails_does_not_count():
    with udp_server(dns(2)) as port:
        assert only(f"dns://{HOST}:{port}", 1.5).reason == "the server answered with code 2"
    with udp_server(lambda data: b"nonsense") as port:
        assert only(f"dns://{HOST}:{port}", 1.5).reason == "the reply does not answer the query"


@pytest.mark.parametrize(("status", "answered"), [(200, True), (302, True), (404, False), (503, False)])
def test_http_answers_with_its_status(status, answered):
    with http_server(status) as port:
        result = only(f"http://{HOST}:{port}/ready", 30.0 if answered else 1.5)
    assert result.answered is answered
    assert answered or result.reason == f"the server answered with status {status}"


def test_a_tls_probe_needs_an_answer_of_the_server_and_not_only_a_connection(closed_port):
    with http_server(200) as port:
        # It answers the handshake, though not by TLS.
        assert only(f"tls://{HOST}:{port}", 20.0).answered
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        sock.listen(4)
        # The kernel accepts connections, and no program answers: a listener of userspace mode without its endpoint.
        result = only(f"tls://{HOST}:{sock.getsockname()[1]}", 0.5)
    assert not result.answered and result.reason.startswith("no answer within")
    assert only(f"tls://{HOST}:{closed_port}", 0.5).reason == "the connection was refused"


def test_results_are_in_order_without_duplicates(closed_port):
    with udp_server(lambda data: data) as port:
        probes = [Probe("tcp", HOST, closed_port), Probe("udp", HOST, port), Probe("tcp", HOST, closed_port)]
        results = run_probes(probes, 1.5)
    assert [(item.probe, item.answered) for item in results] == [(probes[0], False), (probes[1], True)]


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("tcp://10.96.0.1:443", "tcp://10.96.0.1:443"),
        ("tcp://[FD00::1]:443", "tcp://[fd00::1]:443"),
        ("http://10.96.0.1", "http://10.96.0.1:80/"),
        ("https://10.96.0.1/a?b=c", "https://10.96.0.1:443/a?b=c"),
        ("tls://10.96.0.1:443", "tls://10.96.0.1:443"),
        ("dns://10.96.0.10", "dns://10.96.0.10:53/kubernetes.default.svc.cluster.local"),
        ("dns://10.96.0.10/example.test", "dns://10.96.0.10:53/example.test"),
    ],
)
def test_a_probe_is_a_url(text, again):
    assert str(parse_probe(text)) == again
    assert parse_probe(again) == parse_probe(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10.96.0.1:443", "does not begin with one of"),
        ("ftp://10.96.0.1", "does not begin with one of"),
        ("tcp://10.96.0.1", "is not of the form tcp://HOST:PORT"),
        ("tcp://10.96.0.1:99999", "Port out of range"),
        ("udp://10.96.0.1:53/x", "udp has no path"),
        ("tls://10.96.0.1:443/x", "tls has no path"),
        ("tls://10.96.0.1", "is not of the form tls://HOST:PORT"),
        ("tcp://user@10.96.0.1:443", "is not of the form"),
        ("http://10.96.0.1/a b", "a space, a control character"),
        ("http://10.96.0.1/caf\u00e9", "a non-ASCII character"),
        ("tcp://a\0b:80", "is not the name of a host"),
        ("tcp://a..b:80", "'a..b' is not the name of a host"),
        ("http://" + "a" * 64 + "/", "is not the name of a host"),
        ("dns://10.96.0.1/..", "is not a name"),
        ("dns://10.96.0.1/" + "a" * 64, "is not a name"),
    ],
)
def test_invalid_probes_give_one_line_errors(text, reason):
    with pytest.raises(ConfigurationError, match=reason):
        parse_probe(text)


def cluster(*names: str, ready: bool = True) -> ClusterState:
    objects: list[dict[str, Any]] = []
    for number, path in enumerate(names, 1):
        namespace, name = path.split("/")
        metadata = {"namespace": namespace, "name": name}
        protocol = "TCP" if name == "kubernetes" else "UDP"
        ports = [{"name": "main", "port": 443 if protocol == "TCP" else 53, "protocol": protocol}]
        address = f"10.96.0.{number}"
        spec = {"type": "ClusterIP", "clusterIP": address, "clusterIPs": [address], "ports": ports}
        objects.append({"kind": "Service", "metadata": metadata, "spec": spec})
        objects.append(
            {
                "kind": "EndpointSlice",
                "metadata": {**metadata, "labels": {"kubernetes.io/service-name": name}},
                "addressType": "IPv4",
                "ports": ports,
                "endpoints": [{"addresses": ["10.244.0.9"], "conditions": {"ready": ready}}],
            }
        )
    return ClusterState.from_objects(objects)


def test_the_default_probes_are_the_api_server_and_dns():
    found = default_probes(cluster("default/kubernetes", "kube-system/kube-dns", "shop/web"))
    assert found == ("tcp://10.96.0.1:443", "dns://10.96.0.2:53/kubernetes.default.svc.cluster.local")
    assert all(str(parse_probe(text)) == text for text in found)


def test_services_without_endpoints_are_not_probed():
    assert default_probes(cluster("default/kubernetes", "kube-system/kube-dns", ready=False)) == ()
    assert default_probes(ClusterState()) == ()
