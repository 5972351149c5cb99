# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Events (events.k8s.io/v1) about this node and its Services, posted in the background."""

from __future__ import annotations

import datetime
import queue
import urllib.parse
import uuid
from typing import Any, Callable, Dict, Optional

from ...errors import ProxyError
from ..supervision import Task
from ..surface.log import Log
from .clients import AbortableClient, Connect

NORMAL, WARNING = "Normal", "Warning"
_CONTROLLER = "kube-proxy"

#: Posts an Event: the object that it regards (None for the node), type, reason, action, note.
Post = Callable[[Optional[Dict[str, str]], str, str, str, str], None]


def node_reference(name: str) -> Dict[str, str]:
    """Return a reference to the node, for the field ``regarding``."""
    return {"kind": "Node", "name": name, "uid": name}


def service_reference(namespace: str, name: str) -> Dict[str, str]:
    """Return a reference to a Service, for the field ``regarding``."""
    return {"kind": "Service", "apiVersion": "v1", "namespace": namespace, "name": name}


def make_event(
    host: str, regarding: Dict[str, str], *, kind: str, reason: str, action: str, note: str
) -> Dict[str, Any]:
    """Return an Event object. ``host``: this node's host name; ``kind``: NORMAL or WARNING."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
    namespace = regarding.get("namespace", "default")
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{regarding['name']}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
        "eventTime": now,
        "reportingController": _CONTROLLER,
        "reportingInstance": f"{_CONTROLLER}-{host}",
        "action": action,
        "reason": reason,
        "regarding": regarding,
        "note": note[:1024],
        "type": kind,
    }


class EventPoster:
    """Posts events one after the other; an event that the server refuses is logged and dropped.

    :meth:`run` is the body of a supervised thread.
    """

    def __init__(self, connect: Connect, host: str, log: Log) -> None:
        self._client = AbortableClient(connect)
        self._host = host
        self._log = log
        self._waiting: queue.Queue[Optional[Dict[str, Any]]] = queue.Queue(maxsize=100)

    def post(self, regarding: Dict[str, str], kind: str, reason: str, action: str, note: str) -> None:
        """Queue an event; drop it if the queue is full."""
        try:
            self._waiting.put_nowait(
                make_event(self._host, regarding, kind=kind, reason=reason, action=action, note=note)
            )
        except queue.Full:
            self._log.debug("event dropped", reason=reason)

    def run(self, task: Task) -> None:
        """Post queued events until :meth:`close`."""
        while True:
            task.idle()
            event = self._waiting.get()
            if event is None:
                return
            try:
                self._send(event, task)
            except ProxyError as error:
                self._log.warning("event not posted", reason=event["reason"], error=error)

    def _send(self, event: Dict[str, Any], task: Task) -> None:
        namespace = urllib.parse.quote(event["metadata"]["namespace"], safe="")
        with self._client.opened(task.busy) as client:
            client.post(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event, "create an event")

    def interrupt(self) -> None:
        """Abort the current request; called from the main thread."""
        self._client.interrupt()

    def close(self) -> None:
        """Have the thread end after the queued events, without waiting for it."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
