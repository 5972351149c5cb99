# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The test API server: requests over HTTP against a store, with faults that tests inject."""

from __future__ import annotations

import http.server
import json
import socket
import ssl
import struct
import threading
import urllib.parse
from typing import Any, Callable, Optional

from .accept import omits_managed_fields, without_managed_fields
from .accounts import Accounts
from .discovery import discovery
from .failures import Failure
from .listeners import PlainServer, TlsServer
from .listing import page, predicate
from .places import Place, get, place_of
from .selectors import Predicate
from .store import Object, Store
from .tls import Certificates
from .watching import watch_events
from .wire import Answer
from .writes import patch, write


class ApiServer:
    """A test API server over a store.

    Without ``certificates`` it speaks plain HTTP and accepts every request. ``token``: the only bearer token accepted.
    ``listener``: a listening socket to use instead of ``address``. ``bookmark_seconds``: how often an idle watch gets a
    bookmark.

    ``wrong`` may answer a GET instead of the server, in bytes; see ``wire``. Other faults can be injected: ``down``
    answers nothing (connections are closed immediately), ``drop_watches()`` ends every open watch, ``failing`` maps a
    collection path to an HTTP status returned instead of an answer. ``requests`` records paths, ``posted`` the bodies
    of events, ``patched`` paths and bodies of patches. ``controllers`` are called with the store after each patch.
    ``accounts``: ServiceAccounts and their tokens, which are accepted in addition to ``token``; Roles determine what
    they may do to these objects. ``absent``: paths of collections that this server does not have, and
    ``unknown_fields``: fields by which it cannot select, like an older version. ``opts_out``: whether clients may
    request objects without managed fields, by the feature gate ManagedFieldsOptOut; an older version ignores that.
    """

    def __init__(
        self,
        store: Store,
        certificates: Optional[Certificates],
        token: str = "test-token",
        address: tuple[str, int] = ("127.0.0.1", 0),
        bookmark_seconds: float = 60.0,
        *,
        listener: Optional[socket.socket] = None,
    ) -> None:
        self.store = store
        self.token = token
        self.bookmark_seconds = bookmark_seconds
        self.down = False
        self.failing: dict[str, int] = {}
        self.absent: set[str] = set()
        self.unknown_fields: set[str] = set()
        self.opts_out = False
        self.wrong: Optional[Callable[[str], Optional[Answer]]] = None
        self.requests: list[str] = []
        self.posted: list[Object] = []
        self.patched: list[tuple[str, Object]] = []
        self.accounts = Accounts(self._node_uid)
        self.controllers: list[Callable[[Store], None]] = []
        self.generation = 0
        self._controlling = threading.Lock()
        handler = type("Handler", (_Handler,), {"api": self})
        self.is_open = certificates is None
        if certificates is None:
            self._server = PlainServer(address, handler, listener)
        else:
            self._server = TlsServer(address, handler, certificates, listener)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def _node_uid(self, name: str) -> str:
        for item in self.store.list("/api/v1/nodes")[0]:
            if item["metadata"]["name"] == name:
                return str(item["metadata"].get("uid") or "")
        return ""

    @property
    def url(self) -> str:
        """The URL of the server."""
        host, port = self._server.server_address[:2]
        return f"{'http' if self.is_open else 'https'}://{host!s}:{port}"

    def run_controllers(self) -> None:
        """Call the controllers, one after the other, and not for two patches at the same time."""
        with self._controlling:
            for controller in self.controllers:
                controller(self.store)

    def drop_watches(self) -> None:
        """End every open watch, as a load balancer or a restarted server does."""
        with self.store.changed:
            self.generation += 1
            self.store.changed.notify_all()

    def close(self) -> None:
        """Stop the server and its watches."""
        self.down = True
        self.drop_watches()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing; requests are recorded in ApiServer.requests."""

    def do_GET(self) -> None:
        """Answer a list, a watch, a single object or an error."""
        if self._is_down():
            return
        wrong = self.api.wrong(self.path) if self.api.wrong is not None else None
        if wrong is not None:
            self._send_wrong(wrong)
        else:
            self._answer(self._read)

    def do_POST(self) -> None:
        """Write an object of a kind that the store has; keep any other object, and each Event, for the test."""
        content = self._content()
        self._answer(lambda: self._write(_decoded(content)))

    do_PUT = do_DELETE = do_POST

    def do_PATCH(self) -> None:
        """Apply a merge patch."""
        content = self._content()
        if not self._is_down():
            self._answer(lambda: self._patch(_decoded(content)))

    @property
    def _url(self) -> urllib.parse.SplitResult:
        return urllib.parse.urlsplit(self.path)

    def _content(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or "0"))

    def _is_down(self) -> bool:
        """Close the connection of a server that is down; otherwise record the request."""
        if self.api.down:
            self.close_connection = True
        else:
            self.api.requests.append(self.path)
        return self.api.down

    def _answer(self, respond: Callable[[], None]) -> None:
        """Let ``respond`` answer a client that is authorized, and send its failure if it raises one."""
        try:
            self._authorize()
            respond()
        except Failure as failure:
            headers = {"Retry-After": "1"} if failure.code == 504 else {}
            self._send(failure.code, failure.body, headers)

    def _read(self) -> None:
        path, query = self._url.path, dict(urllib.parse.parse_qsl(self._url.query, keep_blank_values=True))
        if path in ("/healthz", "/livez", "/readyz"):
            self._send_text(200, b"ok", "text/plain")
            return
        if path == "/version":
            self._send(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2"})
            return
        self._fail_if_injected()
        if self._answer_accounts(None):
            return
        document = discovery(path, self.api.absent)
        if document is not None:
            self._send(200, document)
            return
        if path in self.api.absent and discovery(path.rpartition("/")[0], self.api.absent) is None:
            # What the server does not even have the group of is not answered by the API.
            self._send_text(404, b"404 page not found\n", "text/plain; charset=utf-8")
            return
        place = None if path in self.api.absent else place_of(path)
        if place is None or place.name:
            self._send(200, self._shown(get(self.api.store, place)))
            return
        matches = predicate(place, query, self.api.unknown_fields)
        if query.get("watch") in ("true", "1"):
            self._watch(place, query, matches)
        else:
            self._send(200, self._shown(page(self.api.store, place, query, matches)))

    def _shown(self, body: Object) -> Object:
        """Return an object or a list as the client has requested it. Raises Failure."""
        if self.api.opts_out and omits_managed_fields(self.headers.get("Accept", "")):
            return without_managed_fields(body)
        return body

    def _write(self, body: Object) -> None:
        if self._answer_accounts(body):
            return
        place = place_of(self._url.path)
        if self.command == "POST" and (place is None or place.kind.kind == "Event"):
            self.api.posted.append(body)
        if place is not None:
            self._send(*write(self.api.store, self.command, place, body))
            return
        self._send(201, body)

    def _patch(self, body: Object) -> None:
        if self.headers.get("Content-Type") != "application/merge-patch+json":
            raise _unknown_format()
        self._fail_if_injected()
        stored = patch(self.api.store, place_of(self._url.path), body)
        self.api.patched.append((self._url.path, body))
        self.api.run_controllers()
        self._send(200, stored)

    def _watch(self, place: Place, query: dict[str, str], matches: Predicate) -> None:
        api, generation = self.api, self.api.generation
        events = watch_events(
            api.store,
            place.kind,
            query,
            matches,
            is_ended=lambda: api.down or api.generation != generation,
            bookmark_seconds=api.bookmark_seconds,
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Cache-Control", "no-cache, private")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event_type, item in events:
                if place.kind.others:
                    item = {**item, "apiVersion": place.kind.api_version}
                event = {"type": event_type, "object": self._shown(item)}
                line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _authorize(self) -> None:
        if self.api.is_open or (isinstance(self.connection, ssl.SSLSocket) and self.connection.getpeercert()):
            return
        path = self._url.path
        given = self.headers.get("Authorization", "")
        if not given:
            resource = path.rsplit("/", 1)[-1]
            raise Failure(
                403,
                "Forbidden",
                f'{resource} is forbidden: User "system:anonymous" cannot list resource "{resource}" '
                'in API group "" at the cluster scope',
                details={"kind": resource},
            )
        if given != f"Bearer {self.api.token}":
            account = self.api.accounts.review(given[len("Bearer ") :])
            if not account:
                raise Failure(401, "Unauthorized", "Unauthorized")
            if self.api.accounts.owns(path) and not self.api.accounts.allowed(account, self.command, path):
                raise Failure(403, "Forbidden", f"{path} is forbidden: {account} may not {self.command}")

    def _fail_if_injected(self) -> None:
        code = self.api.failing.get(self._url.path)
        if code is not None:
            raise Failure(code, "InternalError", "an injected failure")

    def _answer_accounts(self, body: Optional[Object]) -> bool:
        """Answer if the path is one of ServiceAccounts, their roles, Secrets or tokens."""
        path = self._url.path
        if not self.api.accounts.owns(path):
            return False
        self._send(*self.api.accounts.answer(self.command, self.path, body))
        return True

    def _send(self, code: int, body: Object, headers: Optional[dict[str, str]] = None) -> None:
        self._send_text(code, json.dumps(body, separators=(",", ":")).encode() + b"\n", "application/json", headers)

    def _send_text(self, code: int, text: bytes, content_type: str, headers: Optional[dict[str, str]] = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Cache-Control", "no-cache, private")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _send_wrong(self, answer: Answer) -> None:
        """Send bytes unchanged and end the connection: with a reset if there is an exception among them."""
        self.close_connection = True
        try:
            for part in answer.parts:
                if isinstance(part, bytes):
                    self.wfile.write(part)
                elif isinstance(part, BaseException):
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        except OSError:
            return


def _decoded(content: bytes) -> Any:
    """Return the JSON document that is the body of a request. Raises Failure."""
    try:
        return json.loads(content or b"{}")
    except ValueError as error:
        raise _unknown_format() from error


def _unknown_format() -> Failure:
    return Failure(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
