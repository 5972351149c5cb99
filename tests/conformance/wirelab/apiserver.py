# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A read-only Kubernetes API (list and watch, JSON) that serves snapshots.

nodes, services, endpointslices, servicecidrs and namespaces, with label and field selectors, streaming lists
(``sendInitialEvents``) included. Events are accepted and forgotten.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from . import http_server as http
from .api_selectors import fields_match, labels_match
from .namespaces import NetworkNamespace
from .objects import RESOURCES, Object, ObjectKey, ResourceType
from .store import Event, Store

WATCH_SECONDS = 1800.0
INITIAL_EVENTS_END = {"k8s.io/initial-events-end": "true"}
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}


class Selection(NamedTuple):
    """What a request asks for: *name* is None for a list or watch."""

    kind: str
    resource: ResourceType
    namespace: str | None
    name: str | None
    query: dict[str, str]

    def contains(self, item: Object) -> bool:
        """Is the object of the kind and namespace, and do the selectors match?"""
        return (
            item["kind"] == self.kind
            and (not self.namespace or item["metadata"].get("namespace") == self.namespace)
            and labels_match(self.query.get("labelSelector"), item["metadata"].get("labels") or {})
            and fields_match(self.query.get("fieldSelector"), item)
        )


def select(path: str, query: dict[str, str]) -> Selection | None:
    """The resources that a path is about; None if the API has no such resource."""
    for kind, resource in RESOURCES.items():
        namespaces = "(?:/namespaces/([^/]+))?" if resource.namespaced else "()"
        match = re.match(rf"^{re.escape(resource.base)}{namespaces}/{resource.plural}(?:/([^/]+))?$", path)
        if match:
            return Selection(kind, resource, match.group(1) or None, match.group(2), query)
    return None


def watch_event(selection: Selection, event: Event) -> str | None:
    """What a watcher is told of an event: a changed object may come into its selection or leave it."""
    inside = selection.contains(event.item)
    if event.what == "DELETED":
        return "DELETED" if inside else None
    before = event.before is not None and selection.contains(event.before)
    if inside:
        return "MODIFIED" if before else "ADDED"
    return "DELETED" if before else None


class ApiServer:
    """Serves one :class:`Store` over plain HTTP."""

    def __init__(self) -> None:
        self.store = Store()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None

    def start(self, namespace: NetworkNamespace, port: int) -> None:
        """Listen on 127.0.0.1 of the namespace."""
        self._socket = namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._socket.listen(64)
        self._task(self._accept(self._socket))

    def close(self) -> None:
        """Stop, and end every connection."""
        for task in list(self._tasks):
            task.cancel()
        if self._socket:
            self._socket.close()

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _peer = await self._loop.sock_accept(server)
            self._task(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            while True:
                await self._answer(writer, await http.read_request(reader))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, ValueError):
            return  # the client closed the connection, or does not speak HTTP
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, request: http.Request) -> None:
        if request.method != "GET":
            _answer_write(writer, request)
        elif request.path in ("/healthz", "/readyz", "/livez"):
            http.write_body(writer, 200, b"ok", "text/plain")
        elif request.path == "/version":
            http.write_json(writer, 200, VERSION)
        else:
            selection = select(request.path, request.query)
            if selection is None:
                _fail(writer, 404, "NotFound", "no such resource: " + request.path)
            elif selection.name:
                self._get(writer, selection, selection.name)
            elif request.query.get("watch") in ("1", "true"):
                await self._watch(writer, selection)
            else:
                self._list(writer, selection)

    def _get(self, writer: asyncio.StreamWriter, selection: Selection, name: str) -> None:
        item = self.store.get(ObjectKey(selection.kind, selection.namespace or "", name))
        if item is None:
            _fail(writer, 404, "NotFound", f'{selection.resource.plural} "{name}" not found')
        else:
            http.write_json(writer, 200, item)

    def _list(self, writer: asyncio.StreamWriter, selection: Selection) -> None:
        http.write_json(
            writer,
            200,
            {
                "kind": selection.kind + "List",
                "apiVersion": selection.resource.api_version,
                "metadata": {"resourceVersion": str(self.store.resource_version)},
                "items": [item for item in self.store.items() if selection.contains(item)],
            },
        )

    async def _watch(self, writer: asyncio.StreamWriter, selection: Selection) -> None:
        http.start_chunked_json(writer)

        def send(what: str, item: Object) -> None:
            http.write_chunk(writer, json.dumps({"type": what, "object": item}).encode() + b"\n")

        since = self._send_initial(send, selection)
        deadline = self._loop.time() + float(selection.query.get("timeoutSeconds", WATCH_SECONDS))
        while True:
            change = self.store.next_change()
            for event in self.store.events_since(since):
                what = watch_event(selection, event)
                if what:
                    send(what, event.item)
            since = self.store.resource_version
            await writer.drain()
            try:
                await asyncio.wait_for(change.wait(), max(0.0, deadline - self._loop.time()))
            except asyncio.TimeoutError:
                http.write_chunk(writer, b"")
                return

    def _send_initial(self, send: Callable[[str, Object], None], selection: Selection) -> int:
        """Existing objects if the watch asks for them; returns the version that the watch goes on from."""
        since = int(selection.query.get("resourceVersion") or 0)
        streaming_list = selection.query.get("sendInitialEvents") == "true"
        if since and not streaming_list:
            return since
        for item in self.store.items():
            if selection.contains(item):
                send("ADDED", item)
        if streaming_list:
            metadata = {"resourceVersion": str(self.store.resource_version), "annotations": INITIAL_EVENTS_END}
            send(
                "BOOKMARK", {"kind": selection.kind, "apiVersion": selection.resource.api_version, "metadata": metadata}
            )
        return self.store.resource_version


def _answer_write(writer: asyncio.StreamWriter, request: http.Request) -> None:
    if request.method != "POST" or not request.path.endswith("/events"):
        _fail(writer, 405, "MethodNotAllowed", "this API is read-only")
        return
    try:
        http.write_json(writer, 201, json.loads(request.body))
    except ValueError:
        _fail(writer, 415, "UnsupportedMediaType", "events are taken as JSON only")


def _fail(writer: asyncio.StreamWriter, code: int, reason: str, message: str) -> None:
    http.write_json(
        writer,
        code,
        {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "code": code,
            "metadata": {},
        },
    )
