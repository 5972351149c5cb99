# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real control plane, for recording: etcd and kube-apiserver in a separate network namespace."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from typing import Any

from tests.lab.system import ip_batch

from .addressing import SERVICE_CIDR
from .namespaces import NamespaceSet, NetworkNamespace
from .objects import RESOURCES, SNAPSHOT_KINDS, Object, ObjectKey, key_of, normalise
from .web import parse_response

PORT = 6443
TOKEN = "lab"
START_SECONDS = 120
STOP_SECONDS = 10
CLIENT_URL, PEER_URL = "http://127.0.0.1:2379", "http://127.0.0.1:2380"


class ControlPlane:
    """A real control plane (etcd and kube-apiserver) that applies objects and returns them as the API stored them."""

    def __init__(self, instance: str, etcd: str, kube_apiserver: str) -> None:
        self._namespaces = NamespaceSet(f"kpl{instance}-", ["ctl"])
        self._etcd, self._kube_apiserver = etcd, kube_apiserver
        self._directory = tempfile.mkdtemp(prefix="kplab-ctl-")
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def namespace(self) -> NetworkNamespace:
        """The namespace in which the API listens, from :meth:`start` to :meth:`stop`."""
        return self._namespaces.namespaces["ctl"]

    def start(self) -> None:
        """Start both programs and wait until the API serves; raise RuntimeError if it does not within two minutes."""
        self._namespaces.create()
        ip_batch(["link set lo up"], self._namespaces.full_name("ctl"))
        self._write_credentials()
        self._spawn("etcd", self._etcd_command())
        self._spawn("apiserver", self._apiserver_command())
        self._wait_for("/readyz")
        self._wait_for("/api/v1/namespaces/default")
        self._wait_for("/api/v1/namespaces/default/services/kubernetes")

    def stop(self) -> None:
        """End both programs and remove everything."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._namespaces.destroy()
        shutil.rmtree(self._directory, ignore_errors=True)

    def apply(self, item: Object) -> None:
        """Apply an object on the server's side, then its status. Raises RuntimeError with the API's message."""
        key = key_of(item)
        item = copy.deepcopy(item)
        status = item.pop("status", None)
        path = _path(*key)
        self._change("PATCH", path + "?fieldManager=lab&force=true", item, "application/apply-patch+yaml", key)
        if status is not None:
            names = {name: item["metadata"][name] for name in ("name", "namespace") if name in item["metadata"]}
            body = {"apiVersion": item["apiVersion"], "kind": key.kind, "metadata": names, "status": status}
            self._change("PATCH", path + "/status", body, "application/merge-patch+json", key)

    def delete(self, key: ObjectKey) -> None:
        """Delete an object that may be gone already."""
        code, answer = self._request("DELETE", _path(*key))
        if code >= 300 and code != 404:
            raise RuntimeError(f"delete {'/'.join(key)}: {answer}")

    def wipe(self) -> None:
        """Delete what the last case left."""
        for kind in ("Service", "EndpointSlice", "Node"):
            for item in self._items(kind):
                metadata = item["metadata"]
                if (metadata.get("namespace"), metadata["name"]) != ("default", "kubernetes"):
                    self.delete(ObjectKey(kind, metadata.get("namespace", ""), metadata["name"]))

    def snapshot(self) -> list[Object]:
        """Return all objects as the API serves them, normalised."""
        found = []
        for kind in SNAPSHOT_KINDS:
            for item in self._items(kind):
                item["apiVersion"], item["kind"] = RESOURCES[kind].api_version, kind
                found.append(normalise(item))
        return found

    def _items(self, kind: str) -> list[Object]:
        items: list[Object] = self._request("GET", _path(kind))[1]["items"]
        return items

    def _change(self, method: str, path: str, body: Object, content_type: str, key: ObjectKey) -> None:
        code, answer = self._request(method, path, body, content_type)
        if code >= 300:
            message = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise RuntimeError(f"apply {'/'.join(key)}: {message}")

    def _request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        data = json.dumps(body).encode() if body is not None else b""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: lab\r\nAuthorization: Bearer {TOKEN}\r\nAccept: application/json\r\n"
            f"Connection: close\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        context = ssl.create_default_context()
        # The server creates its certificate at every start, in a namespace that no other program reaches.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        plain = self.namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
        plain.settimeout(30)
        plain.connect(("127.0.0.1", PORT))
        parts = []
        with context.wrap_socket(plain) as connection:
            connection.sendall(head.encode() + data)
            while part := connection.recv(1 << 16):
                parts.append(part)
        response = parse_response(b"".join(parts))
        try:
            return response.status, json.loads(response.body)
        except ValueError:
            return response.status, response.body

    def _wait_for(self, path: str) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            try:
                if self._request("GET", path)[0] == 200:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.2)
        raise RuntimeError(f"the control plane does not serve {path}, see {self._directory}")

    def _spawn(self, name: str, command: list[str]) -> None:
        with open(f"{self._directory}/{name}.log", "wb") as log:
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self._namespaces.full_name("ctl"), *command],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            )

    def _write_credentials(self) -> None:
        for command in (
            ["openssl", "genrsa", "-out", "sa.key", "2048"],
            ["openssl", "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"],
        ):
            subprocess.run(command, cwd=self._directory, check=True, capture_output=True)
        with open(self._directory + "/tokens.csv", "w", encoding="ascii") as tokens:
            tokens.write(f"{TOKEN},admin,1,system:masters\n")

    def _etcd_command(self) -> list[str]:
        return [
            self._etcd,
            "--data-dir",
            self._directory + "/etcd",
            "--listen-client-urls",
            CLIENT_URL,
            "--advertise-client-urls",
            CLIENT_URL,
            "--listen-peer-urls",
            PEER_URL,
            "--initial-advertise-peer-urls",
            PEER_URL,
            "--initial-cluster",
            "default=" + PEER_URL,
            "--unsafe-no-fsync",
            "--log-level",
            "error",
        ]

    def _apiserver_command(self) -> list[str]:
        d = self._directory
        return [
            self._kube_apiserver,
            "--etcd-servers=" + CLIENT_URL,
            f"--secure-port={PORT}",
            "--bind-address=127.0.0.1",
            "--advertise-address=192.0.2.250",
            "--cert-dir=" + d,
            "--service-cluster-ip-range=" + ",".join(SERVICE_CIDR.values()),
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={d}/sa.pub",
            f"--service-account-signing-key-file={d}/sa.key",
            f"--token-auth-file={d}/tokens.csv",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
        ]


def _path(kind: str, namespace: str = "", name: str = "") -> str:
    resource = RESOURCES[kind]
    inside = f"/namespaces/{namespace}" if resource.namespaced and namespace else ""
    return f"{resource.base}{inside}/{resource.plural}" + (f"/{name}" if name else "")


class Relay:
    """127.0.0.1:PORT inside the node's namespace, connected to the control plane in its own."""

    def __init__(self, control_plane: ControlPlane, namespace: NetworkNamespace) -> None:
        self._control_plane = control_plane
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", PORT))
        self._socket.listen(64)
        self._task(self._accept())

    def close(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        self._socket.close()

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            connection, _peer = await self._loop.sock_accept(self._socket)
            connection.setblocking(False)
            self._task(self._pair(connection))

    async def _pair(self, connection: socket.socket) -> None:
        upstream = self._control_plane.namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            await self._loop.sock_connect(upstream, ("127.0.0.1", PORT))
            await asyncio.gather(self._pump(connection, upstream), self._pump(upstream, connection))
        except OSError:
            return  # one side is gone, and so the pair
        finally:
            connection.close()
            upstream.close()

    async def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        while data := await self._loop.sock_recv(source, 1 << 16):
            await self._loop.sock_sendall(sink, data)
        sink.shutdown(socket.SHUT_WR)
