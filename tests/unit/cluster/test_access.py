# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kubeconfigs of every kind against a TLS server, and proxies."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError, ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.proxies import (
    environment_proxy,
    is_excepted,
    parse_proxy,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection, resolve
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import NODES, SERVICES
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, make_client_certificate, write_kubeconfig

ROOT = Path(__file__).resolve().parents[3]
EXEC_VERSION = "client.authentication.k8s.io/v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def certificates(folder):
    return make_certificates(folder)


@pytest.fixture(scope="module")
def client_certificate(folder, certificates):
    return make_client_certificate(folder)


@pytest.fixture
def server(certificates):
    api = ApiServer(Store(), certificates, bookmark_seconds=0.2)
    api.store.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}})
    yield api
    api.close()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def write(path, server, user, /, **cluster):
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": server.url, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(document))
    return ApiConnection(kubeconfig=str(path))


def read(connection):
    client = ApiClient(connection, timeout=5.0)
    try:
        return [item["metadata"]["name"] for item in client.list(NODES).items]
    finally:
        client.close()


def encoded(path):
    return base64.b64encode(Path(path).read_bytes()).decode()


def test_a_token_and_an_authority_as_data(server, certificates, tmp_path):
    authority = {"certificate-authority-data": encoded(certificates.authority)}
    assert read(write(tmp_path / "k", server, {"token": server.token}, **authority)) == ["node-a"]


def test_relative_paths_are_relative_to_the_kubeconfig(server, certificates, tmp_path):
    (tmp_path / "ca.pem").write_bytes(certificates.authority.read_bytes())
    (tmp_path / "token").write_text(f"{server.token}\n")
    connection = write(tmp_path / "k", server, {"tokenFile": "token"}, **{"certificate-authority": "ca.pem"})
    assert read(connection) == ["node-a"]


@pytest.mark.parametrize("as_data", [True, False])
def test_a_client_certificate_as_data_or_files(server, certificates, client_certificate, tmp_path, as_data):
    certificate, key = client_certificate
    user = {"client-certificate": str(certificate), "client-key": str(key)}
    if as_data:
        user = {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)}
    authority = {"certificate-authority": str(certificates.authority)}
    assert read(write(tmp_path / "k", server, user, **authority)) == ["node-a"]


def test_a_client_certificate_as_data_needs_no_file_system(
    server, certificates, client_certificate, tmp_path, monkeypatch
):
    """The disk of a node may be full or read-only."""
    certificate, key = client_certificate
    user = {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)}
    connection = write(tmp_path / "k", server, user, **{"certificate-authority": str(certificates.authority)})
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    assert read(connection) == ["node-a"]


@pytest.mark.parametrize("memory", [True, False])
def test_a_client_certificate_that_cannot_be_kept_is_an_error_of_the_configuration(
    server, client_certificate, tmp_path, monkeypatch, memory
):
    certificate, key = client_certificate
    user = {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)}
    connection = write(tmp_path / "k", server, user)
    if memory:
        monkeypatch.setattr(os, "memfd_create", lambda *_given: os.open("/nonexistent/memory", os.O_RDONLY))
    else:
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(ConfigurationError, match="the client certificate cannot be used: No such file"):
        read(connection)


def test_yaml_several_files_and_the_name_of_a_context(server, certificates, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("contexts:\n- {name: other, context: {cluster: test, user: proxy}}\n")
    write_kubeconfig(second, server.url, certificates.authority, server.token)
    assert read(ApiConnection(kubeconfig=f"{first}:{second}", context="other")) == ["node-a"]


def test_skipping_verification_works_and_is_warned_of(server, tmp_path):
    connection = write(tmp_path / "k", server, {"token": server.token}, **{"insecure-skip-tls-verify": True})
    assert read(connection) == ["node-a"]
    (warning,) = ApiClient(connection).warnings
    assert "insecure-skip-tls-verify" in warning and server.url in warning


def test_another_name_in_the_certificate_is_refused_unless_it_is_expected(server, certificates, tmp_path):
    cluster = {"certificate-authority": str(certificates.authority), "tls-server-name": "localhost"}
    assert read(write(tmp_path / "k", server, {"token": server.token}, **cluster)) == ["node-a"]
    cluster["tls-server-name"] = "elsewhere.example"
    with pytest.raises(ApiError, match=r"TLS: .*Hostname mismatch"):
        read(write(tmp_path / "k", server, {"token": server.token}, **cluster))


@pytest.mark.parametrize(
    ("user", "cluster", "reason"),
    [
        ({"token": "a\nb"}, {}, "characters that are not allowed in an HTTP header"),
        ({"token": 5}, {}, "token is not a string"),
        ({"tokenFile": "/nonexistent/token"}, {}, "/nonexistent/token: the token file cannot be read: No such file"),
        ({"client-certificate-data": "AAAA"}, {}, "a client certificate and its key must be set together"),
        ({"client-certificate-data": "%"}, {}, "client-certificate-data is not base64"),
        ({"exec": {"command": "x"}}, {}, "exec.apiVersion is not one of"),
        ({"exec": {"apiVersion": EXEC_VERSION}}, {}, "exec.command is missing"),
        ({"exec": {"apiVersion": EXEC_VERSION, "command": "x", "env": 5}}, {}, "exec.env is not a list"),
        ({"exec": {"apiVersion": EXEC_VERSION, "command": "x", "interactiveMode": "Always"}}, {}, "terminal"),
        ({"token": "t"}, {"server": "ftp://x"}, "'ftp://x' is not an http or https URL"),
        ({"token": "t"}, {"server": "https://a b"}, "is not an http or https URL"),
        (
            {"token": "t"},
            {"proxy-url": "socks4://127.0.0.1:1"},
            "proxy-url: is not the URL of a proxy of the kinds",
        ),
        (
            {"token": "t"},
            {"certificate-authority-data": "AAAA"},
            "certificate-authority-data: contains no PEM certificates",
        ),
        ({}, {"insecure-skip-tls-verify": "yes"}, "insecure-skip-tls-verify is not true or false"),
        ({}, {"insecure-skip-tls-verify": True, "certificate-authority": "x"}, "are mutually exclusive"),
    ],
)
def test_unusable_fields_are_named(server, tmp_path, user, cluster, reason):
    with pytest.raises((ConfigurationError, ApiError), match=reason) as caught:
        read(write(tmp_path / "k", server, user, **cluster))
    assert "\n" not in str(caught.value)


def test_a_certificate_and_key_that_do_not_belong_together_are_named(server, certificates, tmp_path):
    user = {"client-certificate": str(certificates.certificate), "client-key": str(certificates.authority)}
    cluster = {"certificate-authority": str(certificates.authority)}
    with pytest.raises(ConfigurationError, match=f"{certificates.certificate}: the client certificate cannot be used"):
        read(write(tmp_path / "k", server, user, **cluster))


def test_neither_kubernetes_nor_urllib3_is_imported(server, certificates, tmp_path):
    path = write_kubeconfig(tmp_path / "k", server.url, certificates.authority, server.token)
    script = f"""
        import sys
        from module_utils.cluster.api.client import ApiClient
        from module_utils.cluster.api.resource_types import NODES
        from module_utils.cluster.api.connection import ApiConnection
        print(len(ApiClient(ApiConnection(kubeconfig={str(path)!r})).list(NODES).items))
        print(sorted({{"kubernetes", "urllib3", "requests", "yaml"}} & set(sys.modules)))
    """
    words = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'plugins')!r})\n"]
    words[-1] += textwrap.dedent(script)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["1", "[]"]


def test_a_server_before_1_31_is_queried_without_the_field_selector(server, certificates, tmp_path):
    server.unknown_fields = {"spec.clusterIP"}
    path = write_kubeconfig(tmp_path / "k", server.url, certificates.authority, server.token)
    unsupported = set()
    for _client in range(2):
        client = ApiClient(ApiConnection(kubeconfig=str(path)), timeout=5.0, unsupported=unsupported)
        found = client.list(SERVICES)
        events = client.watch(SERVICES, found.resource_version, timeout_seconds=5)
        assert next(events).type == "BOOKMARK"
        events.close()
        client.close()
    assert sum("fieldSelector" in request for request in server.requests) == 1
    assert unsupported == {SERVICES.path}


def test_a_connection_is_used_again_and_a_closed_one_replaced(server, certificates, tmp_path):
    path = write_kubeconfig(tmp_path / "k", server.url, certificates.authority, server.token)
    client = ApiClient(ApiConnection(kubeconfig=str(path)), timeout=5.0)
    client.list(NODES)
    first = client._transport._connection
    client.list(NODES)
    assert client._transport._connection is first
    first.sock.shutdown(socket.SHUT_RDWR)
    assert len(client.list(NODES).items) == 1
    assert client._transport._connection is not first
    client.close()


def test_waiting_for_an_answer_can_be_interrupted(server, certificates, tmp_path):
    server.bookmark_seconds = 60.0
    path = write_kubeconfig(tmp_path / "k", server.url, certificates.authority, server.token)
    client = ApiClient(ApiConnection(kubeconfig=str(path)), timeout=30.0)
    version = client.list(SERVICES).resource_version
    timer = threading.Timer(0.3, client.interrupt)
    timer.start()
    with pytest.raises(ApiError, match="the connection broke"):
        list(client.watch(SERVICES, version, timeout_seconds=60))
    timer.join()
    client.close()


def test_a_real_plugin_gets_its_environment_and_the_requested_cluster_fields(server, certificates, tmp_path):
    program = tmp_path / "plugin"
    program.write_text(
        textwrap.dedent(
            f"""\
            #!{sys.executable}
            import json, os, sys
            information = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
            assert information["spec"]["cluster"]["server"] == {server.url!r}
            status = {{"token": os.environ["GIVEN"] + sys.argv[1]}}
            print(json.dumps({{**information, "status": status}}))
            """
        )
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    user = {
        "exec": {
            "apiVersion": EXEC_VERSION,
            "command": "./plugin",
            "args": [server.token[4:]],
            "env": [{"name": "GIVEN", "value": server.token[:4]}],
            "interactiveMode": "Never",
            "provideClusterInfo": True,
        }
    }
    cluster = {"certificate-authority": str(certificates.authority)}
    assert read(write(tmp_path / "k", server, user, **cluster)) == ["node-a"]


@pytest.mark.parametrize(
    ("excepted", "host", "port", "direct"),
    [
        ("", "api.example", 443, False),
        ("", "localhost", 443, True),
        ("", "127.8.0.1", 443, True),
        ("", "::1", 443, True),
        ("*", "api.example", 443, True),
        ("example", "api.example", 443, True),
        (".example", "api.example", 443, True),
        ("*.example", "api.example", 443, True),
        (".api.example", "api.example", 443, False),
        ("pi.example", "api.example", 443, False),
        ("api.example:6443", "api.example", 443, False),
        ("api.example:6443", "api.example", 6443, True),
        ("10.0.0.0/8", "10.1.2.3", 6443, True),
        ("10.0.0.0/8", "11.1.2.3", 6443, False),
        ("10.0.0.0/8", "10.example", 6443, False),
        ("a, 10.1.2.3 ,b", "10.1.2.3", 6443, True),
        ("10.1.2.3:6443", "10.1.2.3", 6443, True),
        ("fd00::/8", "fd00::1", 443, True),
        ("fd00:0::1", "fd00::1", 443, True),
        ("300.0.0.0/8,:", "10.1.2.3", 443, False),
    ],
)
def test_no_proxy_follows_go(excepted, host, port, direct):
    assert is_excepted(host, port, excepted) is direct
    environment = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": excepted}
    assert (environment_proxy("https", host, port, environment) is None) is direct


def test_proxy_urls_are_parsed():
    assert parse_proxy("http://proxy.example:3128", "x")[:2] == ("proxy.example", 3128)
    assert parse_proxy("https://proxy", "x")[:2] == ("proxy", 443)
    assert parse_proxy("socks5://proxy", "x")[:2] == ("proxy", 1080)
    found = parse_proxy("http://me:p%40ss@proxy", "x")
    assert found.headers == [("Proxy-Authorization", "Basic " + base64.b64encode(b"me:p@ss").decode())]
    assert environment_proxy("https", "api", 443, {"HTTP_PROXY": "http://x"}) is None
    assert environment_proxy("https", "api", 443, {"https_proxy": "http://x"}).host == "x"


class Tunnel(threading.Thread):
    """An HTTP proxy for one CONNECT; ``head`` is what the client has sent to it."""

    def __init__(self, target):
        super().__init__(daemon=True)
        self.target = target
        self.head = b""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self):
        client, _address = self.listener.accept()
        while b"\r\n\r\n" not in self.head:
            self.head += client.recv(4096)
        upstream = socket.create_connection(self.target)
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        back = threading.Thread(target=self.copy, args=(upstream, client), daemon=True)
        back.start()
        self.copy(client, upstream)
        back.join()
        for sock in (client, upstream, self.listener):
            sock.close()

    @staticmethod
    def copy(source, sink):
        try:
            while True:
                data = source.recv(65536)
                if not data:
                    break
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


def test_a_proxy_of_the_kubeconfig_tunnels_to_the_server(server, certificates, tmp_path):
    tunnel = Tunnel(server._server.server_address[:2])
    tunnel.start()
    cluster = {
        "certificate-authority": str(certificates.authority),
        "proxy-url": f"http://user:secret@127.0.0.1:{tunnel.port}",
    }
    assert read(write(tmp_path / "k", server, {"token": server.token}, **cluster)) == ["node-a"]
    tunnel.join(10)
    assert tunnel.head.startswith(f"CONNECT {server.url[8:]} HTTP/1.".encode())
    assert b"Proxy-Authorization: Basic" in tunnel.head and b"Bearer" not in tunnel.head


def test_the_pods_own_account_is_the_default(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    access = resolve(ApiConnection())
    assert access.server == "https://[fd00::1]:6443" and access.address() == ("https", "fd00::1", 6443)


def test_impersonation_is_passed_on(server, tmp_path):
    user = {"token": "t", "as": "jane", "as-uid": "7", "as-groups": ["a", "b"]}
    assert resolve(write(tmp_path / "k", server, user)).headers == (
        ("Impersonate-User", "jane"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
    )
