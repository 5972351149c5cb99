# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Following one collection of the API server: list it, watch it, list again when the watch cannot continue.

A list is compared with the known objects and only the differences are delivered, so the agent never acts on a partial
list. Each reflector is the body of a thread with its own connection, and delivers what it finds to a callable as
:class:`Batch`. Objects without a usable identity are skipped here, with a warning; all other checks of an object are
made by ``cluster.parsing``.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Callable, Iterable, Optional

from ...base.errors import ApiError, ProxyError, Refusal, defect_text
from ...cluster.api.answers import InvalidAnswer, WatchEvent
from ...cluster.api.client import ApiClient
from ...cluster.api.discovery import served_version
from ...cluster.api.errors import NOT_FOUND, UNAUTHORIZED, ApiStatusError, Expired, NotServed, WatchFailed
from ...cluster.api.resource_types import ResourceType
from ...cluster.fields import Invalid, shown
from ...cluster.parsing.objects import ObjectKey, object_key
from ..telemetry.log import Log
from ..threads.supervision import Backoff, Task
from .known import Batch, Known, Listed, check_identity
from .room import UNLIMITED, NoRoom, Room

#: A watch that has lasted this long ends a series of failures.
STEADY_SECONDS = 10.0
_SHORTEST_WATCH_SECONDS = 1.0
_WATCH_SECONDS = (300, 600)
_GATEWAY_TIMEOUT = 504
#: After these answers a watch can resume from its last version: the server is overloaded, restarting, or throttling the
#: client.
_RESUMABLE = frozenset((UNAUTHORIZED, 403, 429, 500, 502, 503))
#: How often to request an optional collection that the server does not have; the server may be upgraded.
_ABSENT_SECONDS = 300.0
#: How often to retry a list that did not fit: each attempt costs the server nearly as much as a complete list.
_NO_ROOM_SECONDS = 300.0
#: How many bytes of a list to read between checks for room.
_ROOM_BYTES = 1 << 16
_MOST_REPORTED = 100


def _older(version: str, than: str) -> bool:
    """Return whether a resourceVersion is smaller (KEP-5504); False if one of them is not a number."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


class Reflector:
    """Follows one collection until :meth:`stop`; :meth:`run` is the body of a supervised thread.

    ``connect`` creates a client, which announces its requests to its argument; ``hand_on`` receives each Batch; both
    are called from this thread. ``reduce`` makes each object small as soon as it is received. ``field_selector``
    replaces the resource's own. ``room``: how much may be held. ``held``: as for :meth:`Known.listed`. ``optional``:
    treat a collection that the server, by its own documents, does not have as empty. ``first_pause``: seconds before
    the first request. ``prelude`` makes requests of its own at the start of each connection, and is tried again when
    one of them fails. ``vital``: every cluster has an object of this collection that outlasts the others, so a list
    that shares none with those known is of another cluster. ``clock`` and ``wait`` replace the time in tests.

    ``connected``: whether a watch is open. ``error``: why it is not. ``is_unserved``: because the server has the
    collection in no version that is read here. ``requested_at``: when the first request was sent or could not be sent,
    by ``clock``; None before.
    """

    def __init__(
        self,
        resource: ResourceType,
        connect: Callable[[Callable[[float], None]], ApiClient],
        hand_on: Callable[[Batch], None],
        log: Log,
        *,
        field_selector: str = "",
        room: Room = UNLIMITED,
        held: Callable[[ObjectKey], int] = lambda key: 1,
        optional: bool = False,
        reduce: Callable[[dict[str, Any]], dict[str, Any]] = lambda item: item,
        backoff: Callable[[], Backoff] = Backoff,
        first_pause: float = 0.0,
        prelude: Callable[[ApiClient], None] = lambda client: None,
        vital: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wait: Optional[Callable[[float], object]] = None,
    ) -> None:
        self.resource = resource
        self.known = Known(resource.kind, bool(field_selector))
        self.connected = False
        self.error = ""
        self.is_unserved = False
        self.requested_at: Optional[float] = None
        self._lost_since: Optional[float] = clock()
        # In the version that the server has.
        self._served = resource
        self._connect = connect
        self._hand_on = hand_on
        self._log = log
        self._field_selector = field_selector
        self._room = room
        self._bytes_held = held
        self._growth = self._checked = 0
        self._lists_again = False
        self._optional = optional
        self._reduce = reduce
        self._backoff = backoff()
        self._first_pause = first_pause
        self._prelude = prelude
        self._begun = False
        self._vital = vital
        self._clock = clock
        self._ending = threading.Event()
        self._wait = wait or self._ending.wait
        self._client: Optional[ApiClient] = None
        self._version = ""
        self._minimum = "0"
        self._reported: set[str] = set()
        self._left_out = 0

    @property
    def lost_for(self) -> float:
        """Return the seconds for which the collection could not be read; 0 while a watch is open or between watches."""
        since = self._lost_since
        return 0.0 if since is None or self.connected else max(0.0, self._clock() - since)

    def stop(self) -> None:
        """Stop the thread; may be called from any thread."""
        self._ending.set()
        self.interrupt()

    def list_again(self, keys: Iterable[ObjectKey]) -> None:
        """List the collection when the current watch ends, and deliver these objects; may be called from any thread."""
        self.known.forget(keys)
        self._lists_again = True

    def interrupt(self) -> None:
        """Abort the request that the thread waits for; may be called from any thread."""
        client = self._client
        if client is not None:
            client.interrupt()

    def run(self, task: Task) -> None:
        """List and watch until stopped, despite failures of the server or the connection."""
        pause, self._first_pause = self._first_pause, 0.0
        if pause:
            self._rest(task, pause)
        try:
            while not self._ending.is_set():
                try:
                    self._cycle(task)
                except ProxyError as error:
                    self._failed(task, error)
        except Exception:
            # List again, so that the event that caused the exception does not cause it again.
            self._forget_version()
            raise
        finally:
            self._disconnect()

    def _rest(self, task: Task, seconds: float) -> None:
        task.busy(seconds)
        self._wait(seconds)

    def _disconnect(self) -> None:
        self.connected = False
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _forget_version(self) -> None:
        """Have the next cycle list the most recent state of the collection, without a resourceVersion."""
        self._version = self._minimum = ""

    def _give(self, batch: Batch) -> None:
        """Deliver a batch unless the reflector was stopped."""
        if not self._ending.is_set():
            self._hand_on(batch)

    def leave(self, server: str) -> None:
        """Abort a request to this server (URL), which has failed; may be called from any thread."""
        client = self._client
        if client is not None and client.host == server:
            client.interrupt()

    def _failed(self, task: Task, error: ProxyError) -> None:
        elsewhere = self._client is not None and not self._ending.is_set() and self._client.report(error)
        if elsewhere or not isinstance(error, ApiStatusError) or error.code == UNAUTHORIZED:
            # Read kubeconfig and certificates again, because they may be the cause.
            self._disconnect()
        self.connected = False
        if self._lost_since is None:
            self._lost_since = self._clock()
        if str(error) != self.error and not self._ending.is_set():
            self._log.warning(str(error))
        self.error, self.is_unserved = str(error), isinstance(error, NotServed)
        self._rest(task, _NO_ROOM_SECONDS if isinstance(error, NoRoom) else self._backoff.pause())

    def _succeeded(self) -> None:
        if self.error:
            self._log.info(f"{self.resource.name} of the API server can be read again")
        self.error, self.is_unserved = "", False
        self._lost_since = None

    def _cycle(self, task: Task) -> None:
        """List if necessary, then watch once; pause if the watch delivered nothing. Raises ProxyError."""
        if self._lists_again:
            self._lists_again, self._version = False, ""
        if self._begun and not self._version:
            # What answers now may be another server than the one that the connection was made to.
            self._disconnect()
        if self._client is None:
            self._begun = False
            try:
                self._client = self._connect(task.busy)
            finally:
                if self.requested_at is None:
                    self.requested_at = self._clock()
        if not self._begun:
            self._prelude(self._client)
            self._begun = True
        if not self._version and not self._list(self._client):
            self.connected = True
            self._rest(task, _ABSENT_SECONDS)
            return
        before, started = self._version, self._clock()
        try:
            self._watch(self._client)
        finally:
            self.connected = False
            lasted = self._clock() - started
            if lasted >= STEADY_SECONDS:
                self._backoff.reset()
        if lasted < STEADY_SECONDS and not self._ending.is_set():
            progressed = self._version not in ("", before)
            self._rest(task, max(0.0, _SHORTEST_WATCH_SECONDS - lasted) if progressed else self._backoff.pause())

    def _list(self, client: ApiClient) -> bool:
        """List the collection and deliver the differences; return whether the server has it. Raises ProxyError."""
        self._left_out = self._growth = self._checked = 0
        try:
            found = client.list(self._served, self._field_selector, self._minimum, self._listed)
            if self._left_out and not found.items:
                raise ApiError(f"list {self.resource.name}: none of the {self._left_out} objects is usable")
            if self._vital and self.known.shares_none(found.items):
                raise ApiError(
                    f"list {self.resource.name}: none of the known objects is in it: that of another cluster"
                )
            self._room.admit(self.resource.kind, self._growth)
        except ApiStatusError as error:
            self._room.release(self.resource.kind)
            if self._optional and error.code == NOT_FOUND:
                return self._list_as_served(client, error)
            if self._minimum and (error.code == _GATEWAY_TIMEOUT or error.refuses_version):
                # The server does not have the version that this node has already seen, and may never have it.
                self._minimum = ""
            raise
        except BaseException:
            self._room.release(self.resource.kind)
            raise
        self._room.admitted(self.resource.kind)
        self._version = self._minimum = found.resource_version
        self._give(self.known.replace(found.items))
        self._succeeded()
        return True

    def _list_as_served(self, client: ApiClient, failure: ApiStatusError) -> bool:
        """List the collection in another version, after a failure in this one; return whether the server has it."""
        served = served_version(client, self.resource, failure, self.known.has_objects)
        if served is None:
            self._give(self.known.replace([]))
            self._succeeded()
            return False
        if served == self._served:
            raise failure
        self._log.info(f"{self.resource.name} are read in version {served.group_version}")
        self._served = served
        return self._list(client)

    def _listed(self, raw: Any) -> Optional[Listed]:
        """Return what must be held of an object of a list, None if it is skipped. Raises NoRoom."""
        received = self._received(raw)
        if received is None:
            return None
        listed = self.known.listed(received, self._bytes_held)
        self._growth += listed.growth
        if self._growth >= self._checked + _ROOM_BYTES:
            self._checked = self._growth
            self._room.admit(self.resource.kind, self._growth)
        return listed

    def _received(self, raw: Any) -> Optional[dict[str, Any]]:
        """Return an object in small form, or None if it has no identity or cannot be read."""
        try:
            return self._reduce(check_identity(raw, self.resource.kind))
        except Invalid as error:
            self._skip(raw, error.field, error.reason)
        except Exception as error:
            # A defect that one object triggers must affect only this object.
            self._skip(raw, "", defect_text(error))
        return None

    def _skip(self, raw: object, field: str, reason: str) -> None:
        """Log a warning about an unusable object, once for each name and reason."""
        self._left_out += 1
        key = object_key(raw)
        refusal = str(Refusal(self.resource.kind, key.namespace, key.name, field, reason))
        if refusal in self._reported:
            return
        if len(self._reported) >= _MOST_REPORTED:
            self._reported.clear()
        self._reported.add(refusal)
        self._log.warning("skipped an object of the API server", object=refusal)

    def _watch(self, client: ApiClient) -> None:
        """Follow a watch until it ends. If no version is known afterwards, the collection must be listed again."""
        seconds = random.randint(*_WATCH_SECONDS)
        try:
            events = client.watch(self._served, self._version, self._field_selector, timeout_seconds=seconds)
            self.connected = True
            for event in events:
                if _older(event.resource_version, self._version):
                    # The server has another history; it was restored from a backup, for example.
                    self._forget_version()
                    return
                self._apply(event)
                self._version = self._minimum = event.resource_version or self._version
                self._succeeded()
                if self._ending.is_set():
                    return
        except Expired:
            # 410 Gone. The client itself handles it in lists, which it restarts.
            self._forget_version()
        except (InvalidAnswer, WatchFailed):
            self._forget_version()
            raise
        except ApiStatusError as error:
            if error.refuses_version or error.code not in _RESUMABLE:
                self._forget_version()
            raise

    def _apply(self, event: WatchEvent) -> None:
        if event.type == "BOOKMARK":
            return
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            self._skip(event.object, "type", f"{shown(event.type)} is not a type of event")
            return
        item = self._received(event.object)
        if item is None:
            return
        self._give(self.known.delete(item) if event.type == "DELETED" else self.known.put(item))
