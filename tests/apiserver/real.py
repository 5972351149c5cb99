# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real kube-apiserver in place of the tests' own: tests write objects to it, and nodes reach it through a gate.

Tests can close the gate. It ends TLS with their certificates and sends requests to the real server with the
credentials of the given kubeconfig, so that nodes need not know the server's addresses or certificate.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import http.server
import socket
import threading
import urllib.parse
from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection, resolve
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import ApiStatusError

from .listeners import TlsServer
from .store import KINDS, PATH_OF_KIND, Object
from .tls import Certificates

#: The environment variable with the path of an administrator's kubeconfig for a cluster that only tests use.
VARIABLE = "KUBENODE_TEST_KUBECONFIG"
_OF_A_HOP = {"host", "authorization", "connection", "transfer-encoding", "content-length", "keep-alive"}


class RealStore:
    """The objects of a real API server, with the methods of :class:`tests.apiserver.store.Store` that write."""

    def __init__(self, kubeconfig: str) -> None:
        self._client = ApiClient(ApiConnection(kubeconfig=kubeconfig))
        self._lock = threading.Lock()
        self._written: dict[str, None] = {}

    @staticmethod
    def _collection(kind: str, namespace: str) -> str:
        path = PATH_OF_KIND[kind]
        top, plural = path.rsplit("/", 1)
        return f"{top}/namespaces/{namespace}/{plural}" if KINDS[path].namespaced else path

    def put(self, item: Object) -> None:
        """Create or replace an object. Raises ApiError."""
        item = copy.deepcopy(item)
        metadata = item["metadata"]
        # The server sets these.
        for field in ("uid", "resourceVersion"):
            metadata.pop(field, None)
        collection = self._collection(item["kind"], metadata.get("namespace", ""))
        path = f"{collection}/{metadata['name']}"
        with self._lock:
            self._written[path] = None
            try:
                known = self._client.send("GET", path, None, f"read {path}")
            except ApiStatusError as error:
                if error.code != http.HTTPStatus.NOT_FOUND:
                    raise
                self._client.send("POST", collection, item, f"create {path}")
                return
            metadata["resourceVersion"] = known["metadata"]["resourceVersion"]
            self._client.send("PUT", path, item, f"replace {path}")

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object. Raises ApiError, also if it does not exist."""
        self._delete(f"{self._collection(kind, namespace)}/{name}")

    def _delete(self, path: str) -> None:
        with self._lock:
            self._written.pop(path, None)
            self._client.send("DELETE", path, None, f"delete {path}")

    def close(self) -> None:
        """Delete all written objects that still exist."""
        for path in list(self._written):
            try:
                self._delete(path)
            except ApiStatusError as error:
                if error.code != http.HTTPStatus.NOT_FOUND:
                    raise
        self._client.close()


class Gate:
    """A server that passes requests on. ``token``: the bearer token that clients must send."""

    def __init__(self, kubeconfig: str, certificates: Certificates, token: str, address: tuple[str, int]) -> None:
        self.token = token
        self.requests: list[str] = []
        access = resolve(ApiConnection(kubeconfig=kubeconfig))
        self._upstream = urllib.parse.urlsplit(access.server)
        self.headers = dict(access.credentials.headers())
        self._context = access.tls_context()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._server = TlsServer(address, type("Handler", (_Handler,), {"gate": self}), certificates)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection to the real server. Raises OSError."""
        host, port = str(self._upstream.hostname), self._upstream.port
        if self._upstream.scheme == "http":
            return http.client.HTTPConnection(host, port)
        return http.client.HTTPSConnection(host, port, context=self._context)

    @contextlib.contextmanager
    def counted(self, sock: socket.socket) -> Any:
        """Count a connection as open, so that closing the gate ends it."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the gate is closed")
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)

    def drop_watches(self) -> None:
        """End all connections to the real server."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening, and end all connections; once is enough."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self.drop_watches()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    gate: Gate
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing; requests are recorded in Gate.requests."""

    def do_GET(self) -> None:
        """Pass the request on; a watch lasts until one of the two sides, or the gate, ends it."""
        self.gate.requests.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {self.gate.token}":
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_A_HOP}
        upstream = self.gate.connect()
        try:
            upstream.connect()
            with self.gate.counted(upstream.sock):
                upstream.request(self.command, self.path, body, {**headers, **self.gate.headers})
                self._pass_back(upstream.getresponse())
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            upstream.close()

    do_POST = do_GET

    def _pass_back(self, response: http.client.HTTPResponse) -> None:
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _OF_A_HOP:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while data := response.read1(65536):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
