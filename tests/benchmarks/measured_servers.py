# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API servers of ``many_agents``, each a process of its own: the tests' own, a kube-apiserver, or a given one.

``python -m tests.benchmarks.measured_servers DIRECTORY PORT SERVICES ENDPOINTS [omit]`` is the tests' own. It prints
``ready`` and obeys lines of its input: ``change NUMBER`` replaces the endpoints of a Service. Its objects have managed
fields as a kube-apiserver records them; with ``omit`` it omits them for clients that request it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.packed import text_of
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import ApiStatusError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import ENDPOINT_SLICES, SERVICES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import Certificates, make_certificates, make_client_certificate, write_kubeconfig
from tests.kernel.agent_node import ROOT, endpoint_slice, node_object, service
from tests.lab.background import Background
from tests.lab.ports import free_port

TOKEN = "test-token"
#: The number of the first Service, whose cluster IP follows from it: a kube-apiserver uses some of the first ones.
FIRST = 100
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
#: What a kube-apiserver records for an EndpointSlice of the controller, and for a Service with one port of a client.
_LABELS = {".": {}, "f:endpointslice.kubernetes.io/managed-by": {}, "f:kubernetes.io/service-name": {}}
_OWNER = {".": {}, 'k:{"uid":"bc5d8d26-2910-44a4-a7cd-756ebecb6b52"}': {}}
_TRIGGER = {".": {}, "f:endpoints.kubernetes.io/last-change-trigger-time": {}}
_SLICE_METADATA = {"f:annotations": _TRIGGER, "f:generateName": {}, "f:labels": _LABELS, "f:ownerReferences": _OWNER}
_SLICE_FIELDS = {"f:addressType": {}, "f:endpoints": {}, "f:metadata": _SLICE_METADATA, "f:ports": {}}
_PORT = {".": {}, "f:name": {}, "f:port": {}, "f:protocol": {}, "f:targetPort": {}}
_SERVICE_FIELDS = {
    "f:spec": {
        "f:internalTrafficPolicy": {},
        "f:ports": {".": {}, 'k:{"port":80,"protocol":"TCP"}': _PORT},
        "f:selector": {},
        "f:sessionAffinity": {},
        "f:type": {},
    }
}
_MANAGED = {
    "EndpointSlice": ("kube-controller-manager", _SLICE_FIELDS),
    "Service": ("kubectl-client-side-apply", _SERVICE_FIELDS),
}
_COLLECTIONS = {
    "Node": "/api/v1/nodes",
    "Service": "/api/v1/namespaces/default/services",
    "EndpointSlice": _SLICES,
}


def cluster(services: int, endpoints: int) -> list[dict[str, Any]]:
    """Return the objects that the agents follow."""
    objects = [node_object()]
    for number in range(FIRST, FIRST + services):
        objects += [service(number), endpoint_slice(number, endpoints)]
    return objects


def changed_slice(number: int, endpoints: int, turn: int) -> dict[str, Any]:
    """Return the EndpointSlice of a Service, counted from 0, with another endpoint in each turn."""
    return endpoint_slice(FIRST + number, endpoints, first=turn % 3)


def with_managed_fields(item: dict[str, Any]) -> dict[str, Any]:
    """Return an object with the managed fields that a kube-apiserver adds to it; a Node without."""
    if item["kind"] not in _MANAGED:
        return item
    manager, fields = _MANAGED[item["kind"]]
    entry = {"apiVersion": item["apiVersion"], "fieldsType": "FieldsV1", "fieldsV1": fields, "manager": manager}
    entry.update(operation="Update", time="2026-11-21T06:42:42Z")
    return {**item, "metadata": {**item["metadata"], "managedFields": [entry]}}


class OwnServer:
    """The tests' own API server. ``restart`` keeps its history, as a kube-apiserver's database does.

    ``omits``: whether it leaves managed fields out on request.
    """

    token = TOKEN

    def __init__(self, directory: Path, services: int, endpoints: int, omits: bool = False) -> None:
        self.certificates = make_certificates(directory / "tls")
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self._endpoints = endpoints
        sizes = (str(directory / "tls"), str(self.port), str(services), str(endpoints))
        command = [sys.executable, "-m", "tests.benchmarks.measured_servers", *sizes, *(["omit"] if omits else [])]
        self._process = Background(command, input_pipe=True, cwd=str(ROOT), timeout=300)

    @property
    def pids(self) -> list[int]:
        """The process of the server."""
        return [self._process.pid]

    def _order(self, line: str) -> None:
        assert self._process.process.stdin is not None and self._process.process.stdout is not None
        self._process.process.stdin.write(line + "\n")
        self._process.process.stdin.flush()
        self._process.process.stdout.readline()

    def change(self, number: int, turn: int) -> None:
        """Replace the endpoints of a Service."""
        self._order(f"change {number} {turn}")

    def restart(self) -> bool:
        """End all connections, refuse new ones for a moment, and serve again. Return True."""
        self._order("restart")
        return True

    def close(self) -> None:
        """End it."""
        self._process.close()


class GivenServer:
    """A server that exists. ``pid``: its process, whose processor time is measured; 0 for none."""

    def __init__(self, url: str, authority: Path, token: str, services: int, endpoints: int, pid: int = 0) -> None:
        self.url = url
        self.certificates = Certificates(authority, authority, authority)
        self.token = token
        self.pids = [pid] if pid else []
        self._endpoints = endpoints
        self._client = ApiClient(ApiConnection(host=url, api_key=token, ca_cert=str(authority)))
        for item in cluster(services, endpoints):
            item["metadata"].pop("uid", None)
            try:
                self._client.post(_COLLECTIONS[item["kind"]], item, "create an object")
            except ApiStatusError as error:
                if error.code != http.HTTPStatus.CONFLICT:
                    raise

    def change(self, number: int, turn: int) -> None:
        """Replace the endpoints of a Service."""
        item = changed_slice(number, self._endpoints, turn)
        item["metadata"].pop("uid", None)
        self._client.send("PUT", f"{_SLICES}/{item['metadata']['name']}", item, "replace an object")

    def restart(self) -> bool:
        """Return False: it is not restarted."""
        return False

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class KubeApiServer(GivenServer):
    """A kube-apiserver with an etcd, from a directory of their programs. Only its own processor time counts."""

    def __init__(self, binaries: Path, directory: Path, services: int, endpoints: int) -> None:
        certificates = make_certificates(directory / "tls")
        make_client_certificate(directory / "tls", "accounts")
        (directory / "tokens").write_text(f'{TOKEN},admin,admin,"system:masters"\n', encoding="ascii")
        database, peer, port = free_port(), free_port(), free_port()
        etcd = f"http://127.0.0.1:{database}"
        self._directory = directory
        self._etcd = Background(
            [
                *(str(binaries / "etcd"), f"--data-dir={directory / 'etcd'}", "--unsafe-no-fsync"),
                *(f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}"),
                *(f"--listen-peer-urls=http://127.0.0.1:{peer}", "--log-level=error"),
            ],
            ready=functools.partial(_answers, f"127.0.0.1:{database}", None),
            log=directory / "etcd.log",
        )
        tls = directory / "tls"
        self._command = [
            *(str(binaries / "kube-apiserver"), f"--etcd-servers={etcd}", f"--secure-port={port}"),
            *("--bind-address=127.0.0.1", "--advertise-address=192.0.2.100", "--service-cluster-ip-range=10.96.0.0/12"),
            *(f"--token-auth-file={directory / 'tokens'}", "--authorization-mode=RBAC"),
            *(f"--tls-cert-file={tls / 'server.crt'}", f"--tls-private-key-file={tls / 'server.key'}"),
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={tls / 'accounts.crt'}",
            f"--service-account-signing-key-file={tls / 'accounts.key'}",
        ]
        self._address = f"127.0.0.1:{port}"
        self._server = self._start()
        try:
            super().__init__(f"https://{self._address}", certificates.authority, TOKEN, services, endpoints)
        except BaseException:
            self.close_processes()
            raise
        self.pids = [self._server.pid]

    def _start(self) -> Background:
        ready = functools.partial(_answers, self._address, ssl._create_unverified_context())
        return Background(self._command, ready=ready, log=self._directory / "kube-apiserver.log", timeout=300)

    def restart(self) -> bool:
        """End it, and start it again. Return True."""
        self._server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.process.wait(5)
        self._server.close()
        self._server = self._start()
        self.pids = [self._server.pid]
        return True

    def close_processes(self) -> None:
        """End the server and its database."""
        self._server.close()
        self._etcd.close()

    def close(self) -> None:
        """End everything."""
        super().close()
        self.close_processes()


def _answers(address: str, context: ssl.SSLContext | None, _pid: int) -> bool:
    """Return whether the server is healthy."""
    host, _colon, port = address.partition(":")
    if context is None:
        connection, path = http.client.HTTPConnection(host, int(port), timeout=5), "/health"
    else:
        connection, path = http.client.HTTPSConnection(host, int(port), timeout=5, context=context), "/readyz"
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def processor_seconds(pids: list[int]) -> float:
    """Return the processor time that processes have used so far, user and system."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        total += sum(int(value) for value in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    return total


def list_bytes(server: OwnServer | GivenServer) -> dict[str, int]:
    """Return the bytes of the lists of Services and EndpointSlices, by their encoding."""
    place = server.url.partition("://")[2]
    host, _colon, port = place.rpartition(":")
    context = ssl._create_unverified_context()
    found: dict[str, int] = {}
    for form, media in (("json", "application/json"), ("protobuf", "application/vnd.kubernetes.protobuf")):
        for encoding in ("identity", "gzip"):
            connection = http.client.HTTPSConnection(host, int(port), context=context)
            headers = {"Accept": media, "Accept-Encoding": encoding, "Authorization": f"Bearer {server.token}"}
            with contextlib.closing(connection):
                size = sum(_read(connection, path, headers) for path in (SERVICES.path, ENDPOINT_SLICES.path))
            found[f"{form}, {encoding}"] = size
    with contextlib.closing(
        ApiClient(ApiConnection(host=server.url, api_key=server.token, validate_certs=False))
    ) as client:
        items = [
            *client.list(SERVICES, reduce=text_of_small).items,
            *client.list(ENDPOINT_SLICES, reduce=text_of_small).items,
        ]
    found["json, only what the agent reads"] = sum(map(len, items))
    return found


def text_of_small(raw: Any) -> bytes:
    """Return an object as the agent keeps it."""
    return text_of(prune(raw))


def _read(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> int:
    connection.request("GET", path, headers=headers)
    return len(connection.getresponse().read())


def kubeconfig_of(server: OwnServer | GivenServer, path: Path, compress: bool) -> Path:
    """Write a kubeconfig for agents, with or without compression of answers."""
    write_kubeconfig(path, server.url, server.certificates.authority, server.token)
    if not compress:
        text = path.read_text(encoding="utf-8").replace(
            '"cluster": {\n', '"cluster": {"disable-compression": true,\n', 1
        )
        path.write_text(text, encoding="utf-8")
    return path


def main() -> int:
    """Serve, and obey the orders of the input."""
    directory, port, services, endpoints = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    certificates = Certificates(directory / "ca.crt", directory / "server.crt", directory / "server.key")
    store = Store()
    for item in cluster(services, endpoints):
        store.put(with_managed_fields(item))
    server = ApiServer(store, certificates, address=("127.0.0.1", port))
    server.opts_out = "omit" in sys.argv
    print("ready", flush=True)
    for line in sys.stdin:
        word, *values = line.split()
        if word == "change":
            store.put(with_managed_fields(changed_slice(int(values[0]), endpoints, int(values[1]))))
        else:
            server.close()
            server = ApiServer(store, certificates, address=("127.0.0.1", port))
            server.opts_out = "omit" in sys.argv
        print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
