# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Events (events.k8s.io/v1) about this node and its Services, posted in the background."""

from __future__ import annotations

import datetime
import hashlib
import queue
import urllib.parse
import uuid
from typing import Any, Callable, Dict, Optional

from ...cluster.access.abortable import AbortableClient, Connect
from ...cluster.api_errors import ApiStatusError
from ...errors import ProxyError, Refusal
from ..supervision import Task
from ..surface.log import Log

NORMAL, WARNING = "Normal", "Warning"
_CONTROLLER = "kube-proxy"
#: Reasons of Events that all agents post alike, and of which the cluster needs one.
_COMMON_REASONS = ("ObjectRefused",)
_CONFLICT = 409
# Leaves room for the suffix that makes a name unique: names have at most 253 characters.
_MOST_NAME_CHARACTERS = 236

#: Posts an Event: the object that it regards (None for the node), type, reason, action, note.
Post = Callable[[Optional[Dict[str, str]], str, str, str, str], None]


def node_reference(name: str) -> Dict[str, str]:
    """Return a reference to the node, for the field ``regarding``."""
    return {"kind": "Node", "name": name, "uid": name}


def service_reference(namespace: str, name: str) -> Dict[str, str]:
    """Return a reference to a Service, for the field ``regarding``."""
    return {"kind": "Service", "apiVersion": "v1", "namespace": namespace, "name": name}


def object_reference(refusal: Refusal) -> Dict[str, str]:
    """Return a reference to an object that is skipped, for the field ``regarding``."""
    reference = {"kind": refusal.kind, "name": refusal.name}
    return {**reference, "namespace": refusal.namespace} if refusal.namespace else reference


def make_event(
    host: str,
    regarding: Dict[str, str],
    *,
    kind: str,
    reason: str,
    action: str,
    note: str,
    related: Optional[Dict[str, str]] = None,
) -> Dict[str, Any]:
    """Return an Event object. ``host``: this node's host name; ``kind``: NORMAL or WARNING.

    ``related``: a reference to the node, if the Event regards another object.
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
    namespace = regarding.get("namespace", "default")
    end = _common_end(regarding, note) if reason in _COMMON_REASONS else uuid.uuid4().hex[:16]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{regarding['name'][:_MOST_NAME_CHARACTERS]}.{end}", "namespace": namespace},
        "eventTime": now,
        "reportingController": _CONTROLLER,
        "reportingInstance": f"{_CONTROLLER}-{host}",
        "action": action,
        "reason": reason,
        "regarding": regarding,
        **({"related": related} if related is not None else {}),
        "note": note[:1024],
        "type": kind,
    }


def _common_end(regarding: Dict[str, str], note: str) -> str:
    """Return a name suffix that is equal on all nodes, so that the API server keeps only the first of these Events."""
    text = "\0".join([regarding["kind"], regarding.get("namespace", ""), regarding["name"], note])
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


class EventPoster:
    """Posts events one after the other; an event that the server refuses is logged and dropped.

    :meth:`run` is the body of a supervised thread.
    """

    def __init__(self, connect: Connect, host: str, log: Log) -> None:
        self._client = AbortableClient(connect)
        self._host = host
        self._log = log
        self._waiting: queue.Queue[Optional[Dict[str, Any]]] = queue.Queue(maxsize=100)

    def post(
        self,
        regarding: Dict[str, str],
        *,
        kind: str,
        reason: str,
        action: str,
        note: str,
        related: Optional[Dict[str, str]] = None,
    ) -> None:
        """Queue an event; drop it if the queue is full."""
        try:
            self._waiting.put_nowait(
                make_event(self._host, regarding, kind=kind, reason=reason, action=action, note=note, related=related)
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
        try:
            with self._client.opened(task.busy) as client:
                client.post(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event, "create an event")
        except ApiStatusError as error:
            # Another agent has posted the same Event.
            if error.code != _CONFLICT:
                raise

    def interrupt(self) -> None:
        """Abort the current request; called from the main thread."""
        self._client.interrupt()

    def close(self) -> None:
        """Ask the thread to end after the queued events, without waiting for it."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
