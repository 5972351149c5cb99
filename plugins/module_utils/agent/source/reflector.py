# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Following one collection of the API server: list it, watch it, list again when the watch cannot go on.

A list is compared with what is known already and only the differences are handed on, so that nothing ever looks empty
in between. Each reflector is a thread with a connection of its own; what it finds goes to a callable as
:class:`Batch`.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Tuple

from ...cluster.api import ApiClient, ApiStatusError, Expired, ResourceType
from ...errors import ProxyError

FIRST_PAUSE_SECONDS = 0.8
LONGEST_PAUSE_SECONDS = 30.0
_SHORTEST_WATCH_SECONDS = 1.0
_WATCH_SECONDS = (300, 600)
_NOT_FOUND, _GATEWAY_TIMEOUT = 404, 504

Name = Tuple[str, str]


class Batch(NamedTuple):
    """What changed in a collection: raw objects that are new or different, and those that are gone.

    ``listed``: with this batch the collection is known as a whole. Of a gone object only kind and metadata count.
    """

    kind: str
    changed: List[Dict[str, Any]]
    gone: List[Dict[str, Any]]
    listed: bool = False


class Backoff:
    """Pauses between attempts, in seconds: doubled from 0.8 up to 30, each stretched at random by up to its double."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._next = FIRST_PAUSE_SECONDS

    def pause(self) -> float:
        """The next pause."""
        pause = self._next * (1.0 + self._jitter())
        self._next = min(self._next * 2, LONGEST_PAUSE_SECONDS)
        return min(pause, LONGEST_PAUSE_SECONDS)

    def reset(self) -> None:
        """An attempt was successful."""
        self._next = FIRST_PAUSE_SECONDS


def _name(raw: Dict[str, Any]) -> Name:
    metadata = raw.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _version(raw: Dict[str, Any]) -> str:
    return str((raw.get("metadata") or {}).get("resourceVersion") or "")


def _older(version: str, than: str) -> bool:
    """Whether a resourceVersion is smaller; where one is not a number nothing is concluded."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


class Known:
    """The objects of a collection that have been handed on, by name with their resourceVersion."""

    def __init__(self, kind: str, api_version: str = "") -> None:
        self._kind = kind
        self._api_version = api_version
        self._versions: Dict[Name, str] = {}

    def assume(self, names: Iterable[Name]) -> None:
        """Objects that are known from elsewhere (the state kept on disk), in an unknown version."""
        for name in names:
            self._versions.setdefault(name, "")

    def replace(self, items: Iterable[Dict[str, Any]]) -> Batch:
        """Take a whole list, and tell what differs."""
        before, self._versions = self._versions, {}
        changed = []
        for item in items:
            name, version = _name(item), _version(item)
            self._versions[name] = version
            if not version or before.get(name) != version:
                changed.append(item)
        gone = [self._tombstone(name) for name in before if name not in self._versions]
        return Batch(self._kind, changed, gone, True)

    def put(self, item: Dict[str, Any]) -> Batch:
        """Take an object that was added or modified."""
        self._versions[_name(item)] = _version(item)
        return Batch(self._kind, [item], [])

    def delete(self, item: Dict[str, Any]) -> Batch:
        """Take an object's deletion."""
        self._versions.pop(_name(item), None)
        return Batch(self._kind, [], [item])

    def _tombstone(self, name: Name) -> Dict[str, Any]:
        metadata = {"namespace": name[0], "name": name[1]} if name[0] else {"name": name[1]}
        return {"kind": self._kind, "metadata": metadata}


class Reflector(threading.Thread):
    """Follows one collection until :meth:`stop`.

    ``connect`` makes a client; ``hand_on`` takes each Batch, ``say`` a line of text about failures; both are called
    from this thread. ``reduce`` makes each object small as soon as it has come. ``field_selector`` takes the place of
    the resource's own. ``optional``: a server without the collection (404) has an empty one.
    ``connected`` tells whether a watch is open, ``error`` what kept it from being so.
    """

    def __init__(
        self,
        resource: ResourceType,
        connect: Callable[[], ApiClient],
        hand_on: Callable[[Batch], None],
        say: Callable[[str], None],
        field_selector: str = "",
        optional: bool = False,
        reduce: Callable[[Dict[str, Any]], Dict[str, Any]] = lambda item: item,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        super().__init__(name=f"watch-{resource.name}", daemon=True)
        self.resource = resource
        self.known = Known(resource.kind)
        self.connected = False
        self.error = ""
        self._connect = connect
        self._hand_on = hand_on
        self._say = say
        self._field_selector = field_selector
        self._optional = optional
        self._reduce = reduce
        self._backoff = backoff()
        self._ending = threading.Event()
        self._version = ""
        self._minimum = "0"

    def stop(self) -> None:
        """End as soon as the server says something; the thread does not keep the process alive."""
        self._ending.set()

    def run(self) -> None:
        """List and watch until stopped; no failure of the server or the connection ends it."""
        while not self._ending.is_set():
            try:
                client = self._connect()
            except ProxyError as error:
                self._failed(error)
                continue
            try:
                self._follow(client)
            except ProxyError as error:
                self._failed(error)
            finally:
                self.connected = False
                client.close()

    def _give(self, batch: Batch) -> None:
        """Whoever has stopped this one wants no more of it."""
        if not self._ending.is_set():
            self._hand_on(batch)

    def _failed(self, error: ProxyError) -> None:
        self.connected = False
        pause = self._backoff.pause()
        if str(error) != self.error:
            self._say(str(error))
        self.error = str(error)
        self._ending.wait(pause)

    def _follow(self, client: ApiClient) -> None:
        while not self._ending.is_set():
            try:
                if not self._version:
                    self._list(client)
                self._watch(client)
            except Expired:
                if not self._version:
                    raise
                self._version, self._minimum = "", ""

    def _list(self, client: ApiClient) -> None:
        try:
            found = client.list(self.resource, self._field_selector, self._minimum, self._reduce)
        except ApiStatusError as error:
            if error.code == _NOT_FOUND and self._optional:
                self._give(self.known.replace([]))
            elif error.code == _GATEWAY_TIMEOUT and self._minimum:
                # The server has not got, and may never get, what this node has seen already.
                self._minimum = ""
            raise
        self._version = self._minimum = found.resource_version
        self._give(self.known.replace(found.items))
        self._succeeded()

    def _succeeded(self) -> None:
        self._backoff.reset()
        if self.error:
            self._say(f"{self.resource.name} of the API server can be read again")
        self.error = ""

    def _watch(self, client: ApiClient) -> None:
        started = time.monotonic()
        seconds = random.randint(*_WATCH_SECONDS)
        self.connected = True
        for event in client.watch(self.resource, self._version, self._field_selector, timeout_seconds=seconds):
            version = event.resource_version
            if _older(version, self._version):
                # A server with another history, say one restored from a backup.
                self._version, self._minimum = "", ""
                return
            if event.type in ("ADDED", "MODIFIED"):
                self._give(self.known.put(self._reduce(event.object)))
            elif event.type == "DELETED":
                self._give(self.known.delete(event.object))
            self._version = self._minimum = version or self._version
            if self.error:
                self._succeeded()
            if self._ending.is_set():
                return
        self.connected = False
        self._backoff.reset()
        self._ending.wait(max(0.0, started + _SHORTEST_WATCH_SECONDS - time.monotonic()))
