# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Events (events.k8s.io/v1) about this node and its Services, posted in the background."""

from __future__ import annotations

import datetime
import hashlib
import queue
import random
import time
import urllib.parse
import uuid
from typing import Any, Callable, NamedTuple, Optional

from ...base.errors import ApiError, ProxyError, Refusal
from ...cluster.api.access.abortable import AbortableClient, Connect
from ...cluster.api.client import ApiClient
from ...cluster.api.errors import ApiStatusError
from ...cluster.api.resource_types import NODES
from ...event_reasons import Reason, Subject
from ..telemetry.log import LimitedLog, Log
from ..telemetry.metrics import Metrics
from ..threads.supervision import Task

NORMAL, WARNING = "Normal", "Warning"
_CONTROLLER = "kube-proxy"
_CONFLICT = 409
# Leaves room for the suffix that makes a name unique: names have at most 253 characters.
_MOST_NAME_CHARACTERS = 236
#: What the API server accepts.
MOST_NOTE_BYTES = 1024
_CUT = "..."
#: How many of the nodes, about, post an Event that all of them would post alike.
POSTERS = 10
#: For how long the number of nodes is used.
COUNT_SECONDS = 21600.0
#: Events that wait, those about the node and all.
_MOST_WAITING, _MOST_WAITING_OF_NODE = 100, 200
#: The fields in which an Event of another agent is equal.
_COMMON_FIELDS = ("reportingController", "regarding", "reason", "action", "note", "type")
BURST, SECONDS_OF_ONE = 25, 300.0
#: All namespaces together, which users may be able to create.
BURST_OF_ALL, SECONDS_OF_ONE_OF_ALL = 100, 60.0
_MOST_KEYS = 1000

#: Posts an Event: the object that it regards (None for the node), type, reason, action, note.
Post = Callable[[Optional[dict[str, str]], str, Reason, str, str], None]


def node_reference(name: str) -> dict[str, str]:
    """Return a reference to the node, for the field ``regarding``."""
    return {"kind": "Node", "name": name, "uid": name}


def service_reference(namespace: str, name: str) -> dict[str, str]:
    """Return a reference to a Service, for the field ``regarding``."""
    return {"kind": "Service", "apiVersion": "v1", "namespace": namespace, "name": name}


def object_reference(refusal: Refusal) -> dict[str, str]:
    """Return a reference to an object that is skipped, for the field ``regarding``."""
    reference = {"kind": refusal.kind, "name": refusal.name}
    return {**reference, "namespace": refusal.namespace} if refusal.namespace else reference


class Content(NamedTuple):
    """What an Event says. ``regarding``: a reference to its object; ``kind``: NORMAL or WARNING.

    ``related``: a reference to the node, if the Event regards another object.
    """

    regarding: dict[str, str]
    kind: str
    reason: Reason
    action: str
    note: str
    related: Optional[dict[str, str]] = None


def make_event(host: str, content: Content) -> dict[str, Any]:
    """Return an Event object. ``host``: this node's host name."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
    found = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": content.regarding.get("namespace", "default")},
        "eventTime": now,
        "reportingController": _CONTROLLER,
        "reportingInstance": f"{_CONTROLLER}-{host}",
        "action": content.action,
        "reason": content.reason.value,
        "regarding": content.regarding,
        **({"related": content.related} if content.related is not None else {}),
        "note": _fitting(content.note),
        "type": content.kind,
    }
    return _named(found, _common_end(found) if content.reason.subject is Subject.OBJECT else _unique_end())


def _fitting(note: str) -> str:
    """Return a note without what the API server does not accept: it counts bytes."""
    raw = note.encode("utf-8", "backslashreplace")
    if len(raw) <= MOST_NOTE_BYTES:
        return raw.decode()
    return raw[: MOST_NOTE_BYTES - len(_CUT)].decode("utf-8", "ignore") + _CUT


def _named(event: dict[str, Any], end: str) -> dict[str, Any]:
    # Each part of a name must end with a letter or a digit.
    start = event["regarding"]["name"][:_MOST_NAME_CHARACTERS].rstrip("-.")
    return {**event, "metadata": {**event["metadata"], "name": f"{start}.{end}"}}


def _unique_end() -> str:
    return uuid.uuid4().hex[:16]


def _common_end(event: dict[str, Any]) -> str:
    """Return a name suffix that is equal on all nodes, so that the API server keeps only the first of these Events."""
    about = event["regarding"]
    text = "\0".join([about["kind"], about.get("namespace", ""), about["name"], event["reason"], event["note"]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Waiting(NamedTuple):
    """An Event in the queue: those about the node come first, and none with the lowest order ends the thread.

    ``is_common``: all agents would post it alike.
    """

    order: int
    number: int
    event: Optional[dict[str, Any]] = None
    is_common: bool = False


_NODE_FIRST, _THEN_OBJECTS, _END = range(3)


class EventPoster:
    """Posts Events one after the other, within an :class:`.EventBudget`; one that the server refuses is logged.

    An Event that all agents would post alike is posted by about ``POSTERS`` of them, and has the same name on each, so
    that the API server keeps the first one. :meth:`run` is the body of a supervised thread, and the main thread calls
    the other methods. ``may_count`` returns whether the account may read Nodes. ``chance`` returns a random number from
    0 to 1.
    """

    def __init__(
        self,
        connect: Connect,
        host: str,
        *,
        log: Log,
        limited: LimitedLog,
        metrics: Metrics,
        may_count: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._client = AbortableClient(connect)
        self._host = host
        self._log = log
        self._limited = limited
        self._metrics = metrics
        self._may_count = may_count
        self._clock = clock
        self._chance = chance
        self._budget = EventBudget(clock())
        self._waiting: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._number = 0
        # The number of nodes, and when it was counted.
        self._nodes = 0
        self._counted = float("-inf")

    def post(self, content: Content) -> None:
        """Queue an Event, or drop it: if the queue is full, or there were too many of its kind."""
        about_node, reason = content.related is None, content.reason
        full = self._waiting.qsize() >= (_MOST_WAITING_OF_NODE if about_node else _MOST_WAITING)
        namespace = content.regarding.get("namespace", "")
        if full or not self._budget.admits(reason, namespace, self._clock(), about_node=about_node):
            self._metrics.events_dropped.labels(reason.value).inc()
            text = "Events are dropped, because there are too many of them"
            self._limited.once("events", text, reason=reason.value, namespace=namespace)
            return
        is_common = not about_node and reason.subject is Subject.OBJECT
        self._put(_NODE_FIRST if about_node else _THEN_OBJECTS, make_event(self._host, content), is_common)

    def _put(self, order: int, event: Optional[dict[str, Any]] = None, is_common: bool = False) -> None:
        self._number += 1
        self._waiting.put(_Waiting(order, self._number, event, is_common))

    def run(self, task: Task) -> None:
        """Post queued events until :meth:`close`."""
        while True:
            task.idle()
            _order, _number, event, is_common = self._waiting.get()
            if event is None:
                return
            try:
                self._count_nodes(task)
                if not is_common or self._chance() * self._nodes < POSTERS:
                    self._send(event, task)
            except ProxyError as error:
                self._log.warning("event not posted", reason=event["reason"], error=error)

    def _send(self, event: dict[str, Any], task: Task) -> None:
        path = f"/apis/events.k8s.io/v1/namespaces/{urllib.parse.quote(event['metadata']['namespace'], safe='')}/events"
        with self._client.opened(task.busy) as client:
            try:
                client.post(path, event, "create an event")
            except ApiStatusError as error:
                if error.code != _CONFLICT:
                    raise
                # Anyone who may create Events may have taken the name before any agent.
                if not _is_posted(client, path, event):
                    client.post(path, _named(event, _unique_end()), "create an event")

    def _count_nodes(self, task: Task) -> None:
        """Count the nodes of the cluster with the first Event and some hours later, not with that of each object."""
        now = self._clock()
        if now - self._counted < COUNT_SECONDS or not self._may_count():
            return
        self._counted = now
        try:
            with self._client.opened(task.busy) as client:
                metadata = client.send("GET", f"{NODES.path}?limit=1", None, "count the nodes").get("metadata")
        except ApiError as error:
            # Each agent then posts the Events of all.
            self._log.debug("the nodes cannot be counted", error=error)
            metadata = None
        others = metadata.get("remainingItemCount") if isinstance(metadata, dict) else None
        self._nodes = others + 1 if isinstance(others, int) else 1

    def interrupt(self) -> None:
        """Abort the current request; called from the main thread."""
        self._client.interrupt()

    def close(self) -> None:
        """Ask the thread to end after the queued events, without waiting for it."""
        self._put(_END)


def _is_posted(client: ApiClient, path: str, event: dict[str, Any]) -> bool:
    """Return whether the Event of the same name says the same, so that it is that of another agent."""
    name = urllib.parse.quote(event["metadata"]["name"], safe="")
    try:
        found = client.send("GET", f"{path}/{name}", None, "get an event")
    except ApiStatusError:
        # It is gone, or the account does not have the right to read it yet.
        return False
    return all(found.get(field) == event[field] for field in _COMMON_FIELDS)


class _Bucket:
    """A token bucket: full with ``burst`` tokens, and one more after each ``seconds``."""

    def __init__(self, burst: int, seconds: float, now: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._tokens = float(burst)
        self._at = now

    def left(self, now: float) -> float:
        """Return the tokens in the bucket."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) / self._seconds)
        self._at = now
        return self._tokens

    def take(self) -> None:
        """Remove a token; :meth:`left` must have returned at least one."""
        self._tokens -= 1


class EventBudget:
    """Decides which Events are posted, whatever users of the cluster write. Only one thread may use it.

    Like client-go's filter: BURST at once, then one in SECONDS_OF_ONE, for each reason about the node and for each
    namespace of other objects. So the objects of one namespace take no Event from others, and none from the node.
    """

    def __init__(self, now: float) -> None:
        self._of_all = _Bucket(BURST_OF_ALL, SECONDS_OF_ONE_OF_ALL, now)
        self._buckets: dict[tuple[Subject, str], _Bucket] = {}

    def admits(self, reason: Reason, namespace: str, now: float, *, about_node: bool) -> bool:
        """Return whether an Event may be posted, and count it. ``namespace``: of the object that it is about."""
        key = (Subject.NODE, reason.value) if about_node else (Subject.OBJECT, namespace)
        bucket = self._buckets.pop(key, None) or _Bucket(BURST, SECONDS_OF_ONE, now)
        # The one that was used last comes last.
        self._buckets[key] = bucket
        if len(self._buckets) > _MOST_KEYS:
            del self._buckets[next(iter(self._buckets))]
        needed = [bucket] if about_node else [bucket, self._of_all]
        if any(each.left(now) < 1 for each in needed):
            return False
        for each in needed:
            each.take()
        return True
