# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Events of agents in a cluster, as small dictionaries for Event-Driven Ansible.

The API server keeps Events for an hour by default. After the first list, each Event is delivered once, and again when
its count rises. When a watch cannot continue, the Events are listed again, so none that still exists is lost.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Callable, Collection, Iterator, Optional

from ..base.errors import ProxyError
from ..cluster.api.answers import InvalidAnswer
from ..cluster.api.client import ApiClient
from ..cluster.api.errors import FORBIDDEN, ApiStatusError, Expired, WatchFailed, unless_absent
from ..cluster.api.resource_types import NODES, ResourceType
from ..cluster.fields import is_dns_subdomain
from ..event_reasons import OTHER, Reason, Subject
from .border import harmless, other_meaning

REPORTER = "kube-proxy"
EVENTS = ResourceType(
    "/apis/events.k8s.io/v1/events", "events", "Event", field_selector=f"reportingController={REPORTER}"
)
#: The kind of an Event by its reason; others are OTHER.
KIND_OF_REASON = {reason.value: reason.kind for reason in Reason}
KINDS = tuple(dict.fromkeys(KIND_OF_REASON.values()))
_REASONS_OF_NODES = {reason.value for reason in Reason if reason.subject is Subject.NODE}
#: The namespace of Events about what is in none, such as a Node.
_CLUSTER_NAMESPACE = "default"
_WATCH_SECONDS = (300, 600)
_SHORTEST_WATCH_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
#: How long it is known whether the cluster has a Node, so that many Events about one cost one request.
_NODE_SECONDS = 10.0


def described(raw: dict[str, Any], is_node: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Return an Event as the dictionary that docs/automation.md describes.

    All of it is what its creator claims, but a Node that is named is one for which ``is_node`` returns true.
    """
    regarding = _mapping(raw.get("regarding"))
    claimed = _node(raw, regarding)
    node = claimed if claimed and is_node(claimed) else ""
    if regarding.get("kind") == NODES.kind:
        regarding = {**regarding, "name": node}
    found = {
        "kind": _kind(raw),
        "reason": _text(raw.get("reason")),
        "type": _text(raw.get("type")),
        "action": _text(raw.get("action")),
        "note": _text(raw.get("note")),
        "node": node,
        "object": {name: _text(regarding.get(name)) for name in ("kind", "namespace", "name")},
        "count": _count(raw),
        "first_seen": _first_seen(raw),
        "last_seen": _last_seen(raw),
        "uid": _text(_mapping(raw.get("metadata")).get("uid")),
    }
    return {"agent_event": found}


def is_where_agents_post(raw: dict[str, Any]) -> bool:
    """Return whether an Event is in the namespace in which an agent posts those about this object.

    The API server admits an Event about any Node or object to any namespace, but nobody to a namespace without the
    right to write there. So this is all that is certain about the creator of an Event.
    """
    regarding = _mapping(raw.get("regarding"))
    about_node = regarding.get("kind") == NODES.kind or _text(raw.get("reason")) in _REASONS_OF_NODES
    namespace = "" if about_node else regarding.get("namespace")
    return _mapping(raw.get("metadata")).get("namespace") == (namespace or _CLUSTER_NAMESPACE)


def _kind(raw: dict[str, Any]) -> str:
    return KIND_OF_REASON.get(_text(raw.get("reason")), OTHER)


def _last_seen(raw: dict[str, Any]) -> str:
    last = _text(_mapping(raw.get("series")).get("lastObservedTime")) or _text(raw.get("deprecatedLastTimestamp"))
    return last or _first_seen(raw)


def _first_seen(raw: dict[str, Any]) -> str:
    return _text(raw.get("eventTime")) or _text(raw.get("deprecatedFirstTimestamp"))


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    """Return a text as ansible-rulebook may have it, empty for another type."""
    return harmless(value) if isinstance(value, str) else ""


def _node_name(value: object) -> str:
    """Return the name of a Node, empty if it is not valid or means something else to Ansible.

    ansible-rulebook limits playbooks to it as a pattern.
    """
    is_name = isinstance(value, str) and is_dns_subdomain(value) and not other_meaning(value)
    return str(value) if is_name else ""


def _count(raw: dict[str, Any]) -> int:
    """Return how often the Event has occurred: the count of its series, or that of an older client."""
    counts = (_mapping(raw.get("series")).get("count"), raw.get("deprecatedCount"), 1)
    return next(count for count in counts if isinstance(count, int) and count > 0)


def _node(raw: dict[str, Any], regarding: dict[str, Any]) -> str:
    """Return the name of the node whose agent seems to have posted the Event.

    It is that of the Node which the Event regards or to which it is related; otherwise the host name of the agent;
    empty if that is not a valid name of a Node.
    """
    for reference in (regarding, _mapping(raw.get("related"))):
        if reference.get("kind") == NODES.kind:
            return _node_name(reference.get("name"))
    instance = _text(raw.get("reportingInstance"))
    return _node_name(instance[len(REPORTER) + 1 :]) if instance.startswith(f"{REPORTER}-") else ""


class EventFollower:
    """Follows the Events of agents. :meth:`events` runs in one thread; any other may call :meth:`stop`.

    ``connect`` returns a new client. ``kinds``: which ones to deliver, all if empty. ``replay``: also deliver the
    Events that exist at the start. ``failed`` is called with each new reason why Events, or the Nodes that they name,
    cannot be read.
    """

    def __init__(
        self,
        connect: Callable[[], ApiClient],
        *,
        kinds: Collection[str] = (),
        replay: bool = False,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._connect = connect
        self._kinds = kinds
        #: How often each Event had occurred when it was seen last.
        self._known: dict[str, int] = {}
        self._silent = not replay
        self._failed = failed
        self._ending = threading.Event()
        self._client: Optional[ApiClient] = None
        #: Reads Nodes while the other client watches.
        self._lookups: Optional[ApiClient] = None
        self._may_read_nodes = True
        #: Whether the cluster has a Node of this name, and since when this is being collected.
        self._nodes: dict[str, bool] = {}
        self._nodes_since = 0.0
        #: Namespaces with Events that no agent can have posted there.
        self._forging: set[str] = set()
        self._version = ""
        self._error = ""
        self._pause = _FIRST_PAUSE_SECONDS

    def stop(self) -> None:
        """End :meth:`events` soon."""
        self._ending.set()
        for client in (self._client, self._lookups):
            if client is not None:
                client.interrupt()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield Events until :meth:`stop`, despite failures of the server or the connection.

        Raises ConfigurationError or ApiError if the first connection cannot be configured.
        """
        self._client = self._connect()
        try:
            while not self._ending.is_set():
                try:
                    yield from self._cycle()
                except ProxyError as error:
                    self._rest(str(error))
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        clients, self._client, self._lookups = (self._client, self._lookups), None, None
        for client in clients:
            if client is not None:
                client.close()

    def _rest(self, reason: str) -> None:
        """Report a new failure, and pause. The next client reads kubeconfig and certificates again."""
        self._disconnect()
        if self._ending.is_set():
            return
        if reason != self._error:
            self._failed(f"Events cannot be read, trying again: {reason}")
        self._error = reason
        self._ending.wait(self._pause * (1.0 + random.random()))
        self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)

    def _succeeded(self) -> None:
        self._error, self._pause = "", _FIRST_PAUSE_SECONDS

    def _cycle(self) -> Iterator[dict[str, Any]]:
        """List if no version is known, then watch once. Raises ProxyError."""
        if self._client is None:
            self._client = self._connect()
        if not self._version:
            found = self._client.list(EVENTS)
            yield from self._listed(found.items)
            self._version = found.resource_version
            self._succeeded()
        yield from self._watch(self._client)

    def _listed(self, items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the Events of a list that are new, the oldest first; of the first list none, except with ``replay``."""
        silent, self._silent = self._silent, False
        if silent:
            self._known = {_identity(raw): _count(raw) for raw in items}
        existing = {_identity(raw) for raw in items}
        self._known = {name: count for name, count in self._known.items() if name in existing}
        for raw in sorted(items, key=_last_seen):
            yield from self._changed(raw)

    def _watch(self, client: ApiClient) -> Iterator[dict[str, Any]]:
        started = time.monotonic()
        try:
            stream = client.watch(EVENTS, self._version, timeout_seconds=random.randint(*_WATCH_SECONDS))
            for event in stream:
                if event.type == "DELETED":
                    self._known.pop(_identity(event.object), None)
                elif event.type in ("ADDED", "MODIFIED"):
                    yield from self._changed(event.object)
                self._version = event.resource_version or self._version
                if self._ending.is_set():
                    return
        except Expired:
            # 410 Gone: list again, and deliver what the watch has missed.
            self._version = ""
        except (InvalidAnswer, WatchFailed):
            self._version = ""
            raise
        if time.monotonic() - started < _SHORTEST_WATCH_SECONDS:
            self._ending.wait(_SHORTEST_WATCH_SECONDS)

    def _changed(self, raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an Event unless it was delivered with this count. Raises ProxyError if its Node cannot be read now."""
        name, count = _identity(raw), _count(raw)
        if self._known.get(name, 0) < count:
            selected = self._selected(raw)
            self._known[name] = count
            yield from selected

    def _selected(self, raw: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the Event as it is delivered, or nothing."""
        # A server that cannot select by this field returns the Events of all programs.
        if raw.get("reportingController") != REPORTER or (self._kinds and _kind(raw) not in self._kinds):
            return []
        if not is_where_agents_post(raw):
            namespace = str(_mapping(raw.get("metadata")).get("namespace"))
            if namespace not in self._forging:
                self._forging.add(namespace)
                self._failed(f"Events in namespace {namespace} are ignored: agents post those in another one")
            return []
        return [described(raw, self._is_node)]

    def _is_node(self, name: str) -> bool:
        """Return whether the cluster has a Node of this name; false if the account may not read Nodes."""
        if not self._may_read_nodes:
            return False
        now = time.monotonic()
        if now - self._nodes_since > _NODE_SECONDS:
            self._nodes, self._nodes_since = {}, now
        if name not in self._nodes:
            self._nodes[name] = self._has_node(name)
        return self._nodes[name]

    def _has_node(self, name: str) -> bool:
        if self._lookups is None:
            self._lookups = self._connect()
        client = self._lookups
        try:
            return unless_absent(lambda: client.get(NODES, name)) is not None
        except ApiStatusError as error:
            if error.code != FORBIDDEN:
                raise
            self._may_read_nodes = False
            self._failed(f"No event names a node: {error}")
            return False


def _identity(raw: dict[str, Any]) -> str:
    metadata = _mapping(raw.get("metadata"))
    return _text(metadata.get("uid")) or f"{metadata.get('namespace')}/{metadata.get('name')}"
