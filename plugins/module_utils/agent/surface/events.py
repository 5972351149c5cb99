# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Events (events.k8s.io/v1) about this node and its Services, posted by a thread of their own."""

from __future__ import annotations

import datetime
import queue
import threading
import urllib.parse
import uuid
from typing import Any, Callable, Dict, Optional, Tuple

from ...cluster.api import ApiClient
from ...errors import ProxyError
from .log import Log

NORMAL, WARNING = "Normal", "Warning"
_CONTROLLER = "kube-proxy"

Event = Tuple[str, Dict[str, Any]]


def node_reference(name: str) -> Dict[str, str]:
    """The object that an event about the node regards."""
    return {"kind": "Node", "name": name, "uid": name}


def service_reference(namespace: str, name: str) -> Dict[str, str]:
    """The object that an event about a Service regards."""
    return {"kind": "Service", "apiVersion": "v1", "namespace": namespace, "name": name}


def make_event(
    host: str, regarding: Dict[str, str], kind: str, reason: str, action: str, note: str
) -> Dict[str, Any]:
    """An Event object. ``host``: this node's host name; ``kind``: NORMAL or WARNING."""
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
    """Posts events one after the other; one that the server does not take is logged and forgotten."""

    def __init__(self, connect: Callable[[], ApiClient], host: str, log: Log) -> None:
        self._connect = connect
        self._host = host
        self._log = log
        self._waiting: queue.Queue[Optional[Dict[str, Any]]] = queue.Queue(maxsize=100)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def post(self, regarding: Dict[str, str], kind: str, reason: str, action: str, note: str) -> None:
        """Have an event posted soon; with too many waiting it is dropped."""
        try:
            self._waiting.put_nowait(make_event(self._host, regarding, kind, reason, action, note))
        except queue.Full:
            self._log.debug("event dropped", reason=reason)

    def _run(self) -> None:
        while True:
            event = self._waiting.get()
            if event is None:
                return
            namespace = urllib.parse.quote(event["metadata"]["namespace"], safe="")
            try:
                client = self._connect()
                try:
                    client.post(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event, "create an event")
                finally:
                    client.close()
            except ProxyError as error:
                self._log.warning("event not posted", reason=event["reason"], error=error)

    def close(self) -> None:
        """End after what is waiting; does not wait for it."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
