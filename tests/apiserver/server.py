# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP side of the test API server: lists with pages, watches with bookmarks, errors as a real server's."""

from __future__ import annotations

import base64
import http.server
import json
import re
import socket
import ssl
import struct
import threading
import time
import urllib.parse
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from .accounts import Accounts
from .selectors import Predicate, field_predicate, label_predicate
from .store import KINDS, Compacted, Event, Kind, Object, Store
from .tls import Certificates
from .wire import Answer
from .writes import place_of, write

_EXPIRED = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)

#: What the zero value of a kind looks like beside its metadata: the object of a bookmark.
_EMPTY: Dict[str, Object] = {
    "Service": {"spec": {}, "status": {"loadBalancer": {}}},
    "EndpointSlice": {"addressType": "", "endpoints": None, "ports": None},
}


_NAMESPACED = re.compile(r"(/api/v1|/apis/[^/]+/[^/]+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?\Z")


def merged(item: Object, patch: Object) -> Object:
    """The object with a merge patch applied."""
    result = dict(item)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(result[key] if isinstance(result.get(key), dict) else {}, value)
        else:
            result[key] = value
    return result


class Failure(Exception):
    """An answer of kind Status."""

    def __init__(self, code: int, reason: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": more.pop("metadata", {}),
            "status": "Failure",
            "message": message,
            "reason": reason,
            **more,
            "code": code,
        }


def _decoded(content: bytes) -> Any:
    """Return the JSON document that is the body of a request."""
    try:
        return json.loads(content or b"{}")
    except ValueError as error:
        raise Failure(415, "UnsupportedMediaType", "the body of the request was in an unknown format") from error


def _encode_token(version: int, start: str) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start + "\0"}, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode_token(token: str) -> Tuple[int, str]:
    try:
        decoded = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(decoded["rv"]), str(decoded["start"]).rstrip("\0").lstrip("/")
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(400, "BadRequest", f"invalid continue token: continue key is not valid: {error}") from error


def _path_key(item: Object) -> str:
    namespace, name = item["metadata"].get("namespace"), item["metadata"]["name"]
    return f"{namespace}/{name}" if namespace else str(name)


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
    they may do to these objects. ``unknown_fields``: fields by which this server cannot select, like an older version.
    """

    def __init__(
        self,
        store: Store,
        certificates: Optional[Certificates],
        token: str = "test-token",
        address: Tuple[str, int] = ("127.0.0.1", 0),
        bookmark_seconds: float = 60.0,
        *,
        listener: Optional[socket.socket] = None,
    ) -> None:
        self.store = store
        self.token = token
        self.bookmark_seconds = bookmark_seconds
        self.down = False
        self.failing: Dict[str, int] = {}
        self.unknown_fields: Set[str] = set()
        self.wrong: Optional[Callable[[str], Optional[Answer]]] = None
        self.requests: List[str] = []
        self.posted: List[Object] = []
        self.patched: List[Tuple[str, Object]] = []
        self.accounts = Accounts(self._node_uid)
        self.controllers: List[Callable[[Store], None]] = []
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


class PlainServer(http.server.ThreadingHTTPServer):
    """Answers each connection in a thread of its own, on an address or an existing listening socket."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: Tuple[str, int], handler: type, listener: Optional[socket.socket] = None) -> None:
        super().__init__(address, handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self.server_address = listener.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close their connection."""


class TlsServer(PlainServer):
    """Answers each connection over TLS."""

    def __init__(
        self,
        address: Tuple[str, int],
        handler: type,
        certificates: Certificates,
        listener: Optional[socket.socket] = None,
    ) -> None:
        super().__init__(address, handler, listener)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.certificate, certificates.key)
        # Client certificates are asked for, not required, as a real server does it.
        self._context.load_verify_locations(certificates.authority)
        self._context.verify_mode = ssl.CERT_OPTIONAL

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands in the connection's own thread, so that a slow client blocks nobody."""
        with self._context.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are recorded in ApiServer.requests."""

    def do_GET(self) -> None:
        """Answer a list, a watch, a single object or an error."""
        if self.api.down:
            self.close_connection = True
            return
        self.api.requests.append(self.path)
        wrong = self.api.wrong(self.path) if self.api.wrong is not None else None
        if wrong is not None:
            self._send_wrong(wrong)
            return
        try:
            self._authorize()
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            if url.path in ("/healthz", "/livez", "/readyz"):
                self._send_text(200, b"ok", "text/plain")
                return
            if url.path == "/version":
                self._send(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2"})
                return
            if url.path in self.api.failing:
                raise Failure(self.api.failing[url.path], "InternalError", "an injected failure")
            if self._answer_accounts(url.path, None):
                return
            kind = KINDS.get(url.path)
            namespaced = _NAMESPACED.match(url.path)
            if namespaced:
                path, namespace, name = f"{namespaced[1]}/{namespaced[3]}", namespaced[2], namespaced[4]
                if name is None and path in KINDS:
                    query["fieldSelector"] = ",".join(
                        filter(None, [query.get("fieldSelector"), f"metadata.namespace={namespace}"])
                    )
                    self._send(200, self._list(KINDS[path], query))
                else:
                    self._send(200, self._single(f"{path}/{name}", namespace))
            elif kind is None:
                self._send(200, self._single(url.path))
            elif query.get("watch") in ("true", "1"):
                self._watch(kind, query)
            else:
                self._send(200, self._list(kind, query))
        except Failure as failure:
            headers = {"Retry-After": "1"} if failure.code == 504 else {}
            self._send(failure.code, failure.body, headers)

    def do_POST(self) -> None:
        """Write an object of a kind that the store has; anything else, an event say, is kept for the test to see."""
        content = self.rfile.read(int(self.headers.get("Content-Length") or "0"))
        try:
            self._authorize()
            body = _decoded(content)
        except Failure as failure:
            self._send(failure.code, failure.body)
            return
        if self._answer_accounts(urllib.parse.urlsplit(self.path).path, body):
            return
        place = place_of(urllib.parse.urlsplit(self.path).path)
        if place is not None:
            self._send(*write(self.api.store, self.command, place, body))
            return
        self.api.posted.append(body)
        self._send(201, body)

    do_PUT = do_DELETE = do_POST

    def do_PATCH(self) -> None:
        """Apply a merge patch (RFC 7386), with the resourceVersion in it as a precondition."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if self.api.down:
            self.close_connection = True
            return
        self.api.requests.append(self.path)
        url = urllib.parse.urlsplit(self.path)
        try:
            self._authorize()
            if self.headers.get("Content-Type") != "application/merge-patch+json":
                raise Failure(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
            if url.path in self.api.failing:
                raise Failure(self.api.failing[url.path], "InternalError", "an injected failure")
            with self.api.store.changed:
                namespaced = _NAMESPACED.match(url.path)
                if namespaced:
                    found = self._single(f"{namespaced[1]}/{namespaced[3]}/{namespaced[4]}", namespaced[2])
                else:
                    found = self._single(url.path)
                version = (body.get("metadata") or {}).get("resourceVersion")
                if version is not None and version != found["metadata"]["resourceVersion"]:
                    raise Failure(409, "Conflict", "the object has been modified; please apply your changes to it")
                changed = merged(found, body)
                if changed.get("spec") != found.get("spec"):
                    changed["metadata"]["generation"] = changed["metadata"].get("generation", 1) + 1
                stored = self.api.store.put(changed)
            self.api.patched.append((url.path, body))
            self.api.run_controllers()
            self._send(200, stored)
        except Failure as failure:
            self._send(failure.code, failure.body)

    def _send_wrong(self, answer: Answer) -> None:
        """Send bytes as they are, and end the connection: with a reset where an exception stands among them."""
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

    def _authorize(self) -> None:
        if self.api.is_open or (isinstance(self.connection, ssl.SSLSocket) and self.connection.getpeercert()):
            return
        given = self.headers.get("Authorization", "")
        if not given:
            resource = urllib.parse.urlsplit(self.path).path.rsplit("/", 1)[-1]
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
            path = urllib.parse.urlsplit(self.path).path
            if self.api.accounts.owns(path) and not self.api.accounts.allowed(account, self.command, path):
                raise Failure(403, "Forbidden", f"{path} is forbidden: {account} may not {self.command}")

    def _answer_accounts(self, path: str, body: Optional[Object]) -> bool:
        """Answer if the path is one of ServiceAccounts, their roles, Secrets or tokens."""
        if not self.api.accounts.owns(path):
            return False
        self._send(*self.api.accounts.answer(self.command, path, body))
        return True

    def _send(self, code: int, body: Object, headers: Optional[Dict[str, str]] = None) -> None:
        self._send_text(code, json.dumps(body, separators=(",", ":")).encode() + b"\n", "application/json", headers)

    def _send_text(self, code: int, text: bytes, content_type: str, headers: Optional[Dict[str, str]] = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Cache-Control", "no-cache, private")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _single(self, path: str, namespace: Optional[str] = None) -> Object:
        collection, _, name = path.rpartition("/")
        if collection in KINDS:
            for item in self.api.store.list(collection)[0]:
                if item["metadata"]["name"] == name and namespace in (None, item["metadata"].get("namespace")):
                    return item
            kind = KINDS[collection].path.rsplit("/", 1)[-1]
            raise Failure(404, "NotFound", f'{kind} "{name}" not found', details={"name": name, "kind": kind})
        raise Failure(404, "NotFound", "the server could not find the requested resource", details={})

    def _predicate(self, query: Dict[str, str]) -> Predicate:
        by_label = label_predicate(query.get("labelSelector", ""))
        try:
            selector = query.get("fieldSelector", "")
            for field in self.api.unknown_fields:
                if selector.startswith(field):
                    raise ValueError(
                        f'Unable to find "/v1, Resource=services" that match label selector "", field selector '
                        f'"{selector}": field label not supported: {field}'
                    )
            by_field = field_predicate(selector)
        except ValueError as error:
            raise Failure(400, "BadRequest", str(error)) from error
        return lambda item: by_label(item) and by_field(item)

    def _list(self, kind: Kind, query: Dict[str, str]) -> Object:
        store = self.api.store
        asked = int(query.get("resourceVersion") or 0)
        if asked > store.resource_version:
            raise Failure(
                504,
                "Timeout",
                f"Timeout: Too large resource version: {asked}, current: {store.resource_version}",
                details={
                    "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
                    "retryAfterSeconds": 1,
                },
            )
        matches = self._predicate(query)
        start, at = "", None
        if query.get("continue"):
            at, start = _decode_token(query["continue"])
            at = None if at < 0 else at
        try:
            items, version = store.list(kind.path, at)
        except Compacted as error:
            token = _encode_token(-1, start)
            raise Failure(410, "Expired", _EXPIRED, metadata={"continue": token}) from error
        remaining = [item for item in items if matches(item) and _path_key(item) > start]
        limit = int(query.get("limit") or 0)
        page = remaining[:limit] if limit else remaining
        metadata: Object = {"resourceVersion": str(version)}
        if len(page) < len(remaining):
            metadata["continue"] = _encode_token(version, "/" + _path_key(page[-1]))
            if not (query.get("labelSelector") or query.get("fieldSelector")):
                metadata["remainingItemCount"] = len(remaining) - len(page)
        bare = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in page]
        return {"kind": kind.kind + "List", "apiVersion": kind.api_version, "metadata": metadata, "items": bare}

    def _watch(self, kind: Kind, query: Dict[str, str]) -> None:
        matches = self._predicate(query)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Cache-Control", "no-cache, private")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event_type, item in self._watch_events(kind, query, matches):
                line = json.dumps({"type": event_type, "object": item}, separators=(",", ":")).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _watch_events(self, kind: Kind, query: Dict[str, str], matches: Predicate) -> Iterator[Tuple[str, Object]]:
        store, generation = self.api.store, self.api.generation
        bookmarks = query.get("allowWatchBookmarks") == "true"
        end = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
        version = int(query.get("resourceVersion") or 0)
        if query.get("sendInitialEvents") == "true" or version == 0:
            items, version = store.list(kind.path)
            for item in items:
                if matches(item):
                    yield "ADDED", item
            if bookmarks and query.get("sendInitialEvents") == "true":
                yield "BOOKMARK", _bookmark(kind, version, {"k8s.io/initial-events-end": "true"})
        next_bookmark = time.monotonic() + self.api.bookmark_seconds
        while True:
            try:
                with store.changed:
                    events, current = store.events(kind.path, version), store.resource_version
            except Compacted as error:
                message = f"too old resource version: {version} ({error.oldest})"
                yield "ERROR", Failure(410, "Expired", message).body
                return
            for event in events:
                yield from _translate(event, matches)
            version = current
            now = time.monotonic()
            if now >= end or self.api.down or self.api.generation != generation:
                return
            if bookmarks and now >= next_bookmark:
                next_bookmark = now + self.api.bookmark_seconds
                yield "BOOKMARK", _bookmark(kind, version, {})
            with store.changed:
                if store.resource_version == version and self.api.generation == generation:
                    store.changed.wait(min(end, next_bookmark if bookmarks else end, now + 5.0) - now)


def _bookmark(kind: Kind, version: int, annotations: Dict[str, str]) -> Object:
    metadata: Object = {"resourceVersion": str(version)}
    if annotations:
        metadata["annotations"] = annotations
    return {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata, **_EMPTY.get(kind.kind, {})}


def _translate(event: Event, matches: Predicate) -> Iterator[Tuple[str, Object]]:
    """What a watch with a selector sees of a write: leaving the selection is DELETED, entering it is ADDED."""
    was = event.before is not None and matches(event.before)
    now = event.after is not None and matches(event.after)
    if now and event.after is not None:
        yield ("MODIFIED" if was else "ADDED"), event.after
    elif was and event.before is not None:
        metadata = {**event.before["metadata"], "resourceVersion": str(event.resource_version)}
        yield "DELETED", {**event.before, "metadata": metadata}
