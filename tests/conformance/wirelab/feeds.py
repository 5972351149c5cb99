# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sources of the cluster state for the proxy: recorded snapshots, or a real control plane."""

from __future__ import annotations

import copy
import socket
from typing import Protocol

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store

from . import sentinel
from .cases import Case, Step
from .controlplane import ControlPlane, Relay
from .namespaces import NetworkNamespace
from .objects import Object, ObjectKey

API_PORT = 6443
_APPLY_ORDER = {"Node": 0, "Service": 1, "EndpointSlice": 2}


class Feed(Protocol):
    """Serves the cluster of one case to the node under test."""

    server: str

    def start(self, namespace: NetworkNamespace) -> None:
        """Serve on 127.0.0.1 of the node."""

    def step(self, number: int, step: Step) -> list[Object]:
        """Serve the objects of a step and return them as served."""

    def touch_sentinel(self, number: int) -> list[Object] | None:
        """Change the sentinel once more, for step *number*; return the objects if a snapshot must follow."""

    def close(self) -> None:
        """Stop serving."""


class RecordedFeed:
    """The test API server, with the objects as a real API server served them when the case was recorded."""

    server = f"http://127.0.0.1:{API_PORT}"

    def __init__(self, snapshots: list[list[Object]]) -> None:
        self._snapshots = snapshots
        self._current: list[Object] = []
        self._store = Store(first_resource_version=1000)
        self._api: ApiServer | None = None

    def start(self, namespace: NetworkNamespace) -> None:
        listener = namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setblocking(True)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", API_PORT))
        listener.listen(64)
        self._api = ApiServer(self._store, None, listener=listener)

    def step(self, number: int, step: Step) -> list[Object]:
        # Put the sentinel last, as in the recordings.
        self._current = sorted(
            self._snapshots[number], key=lambda item: item["metadata"].get("namespace") == sentinel.NAMESPACE
        )
        self._store.replace_all(self._current)
        return self._current

    def touch_sentinel(self, number: int) -> list[Object] | None:
        self._current = sentinel.changed(self._current, sentinel.SECOND + number)
        self._store.replace_all(self._current)
        return self._current

    def close(self) -> None:
        if self._api is not None:
            self._api.close()


class ControlPlaneFeed:
    """A real control plane with the objects of the case. *recorded* collects its answers."""

    server = f"https://127.0.0.1:{API_PORT}"

    def __init__(self, case: Case, control_plane: ControlPlane) -> None:
        self._case = case
        self._control_plane = control_plane
        self._relay: Relay | None = None
        self.recorded: list[list[Object]] = []

    def start(self, namespace: NetworkNamespace) -> None:
        self._relay = Relay(self._control_plane, namespace)

    def step(self, number: int, step: Step) -> list[Object]:
        for text in step.delete:
            kind, _, rest = text.partition("/")
            namespace, _, name = rest.rpartition("/")
            self._control_plane.delete(ObjectKey(kind, namespace, name))
        namespaces = {item["metadata"].get("namespace") for item in step.apply} - {None, "default"}
        for namespace in sorted(namespaces | {sentinel.NAMESPACE}):
            self._control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        for item in sorted(step.apply, key=lambda item: _APPLY_ORDER.get(item["kind"], len(_APPLY_ORDER))):
            self._control_plane.apply(item)
        self._apply_sentinel(number, number)
        self.recorded.append(self._control_plane.snapshot())
        return copy.deepcopy(self.recorded[-1])

    def touch_sentinel(self, number: int) -> list[Object] | None:
        self._apply_sentinel(sentinel.SECOND + number, number)
        return None

    def close(self) -> None:
        if self._relay:
            self._relay.close()

    def _apply_sentinel(self, announced: int, step: int) -> None:
        for item in sentinel.objects(announced, self._case.families, self._case.zone_hint(step).zone):
            self._control_plane.apply(item)
