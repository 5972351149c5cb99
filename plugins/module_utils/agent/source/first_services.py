# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Services that everything else needs, read before the whole cluster on a node that serves nothing yet.

A few small requests for single objects find them within milliseconds, while the lists of a large cluster take a second.
"""

from __future__ import annotations

import threading
from typing import AbstractSet, Any, Callable, Iterator, NamedTuple, Optional, Sequence

from ...cluster.api.client import ApiClient
from ...cluster.api.errors import ApiStatusError
from ...cluster.api.resource_types import ENDPOINT_SLICES, NODES, SERVICES, ResourceType
from ...cluster.model import NamespacedName
from ...cluster.parsing.prune import prune
from ...cluster.parsing.service import SERVICE_NAME_LABEL
from ...preflight.cluster_state import FIRST_SERVICES
from .known import Batch, check_identity


def cold_batches(
    services: Sequence[NamespacedName], size: int, begun: AbstractSet[NamespacedName] = frozenset()
) -> Iterator[list[NamespacedName]]:
    """Yield all Services in the order in which to program an empty node.

    The first batch contains ``begun`` (by default empty: static entries only). Then come the Services that everything
    else depends on, then the others in batches of ``size``.
    """
    yield sorted(begun & set(services))
    known = set(services) - begun
    first = [service for service in FIRST_SERVICES if service in known]
    if first:
        yield first
    rest = sorted(known.difference(first))
    for start in range(0, len(rest), size):
        yield rest[start : start + size]


class FirstObjects(NamedTuple):
    """The first Services, their EndpointSlices and the Node of this node; nothing if the API server refuses them."""

    batches: tuple[Batch, ...] = ()


class FirstServices:
    """Reads the first Services in a reflector's thread, which then waits until they are served.

    Otherwise decoding the list of a large cluster would compete with programming them. ``deliver`` receives
    :class:`FirstObjects`. ``node_name``: the Node to read with them, empty for a host without one.
    """

    def __init__(self, deliver: Callable[[FirstObjects], None]) -> None:
        self.node_name = ""
        self._deliver = deliver
        self._released = threading.Event()

    def release(self) -> None:
        """Let the reflector continue; from now on nothing is read first. May be called from any thread."""
        self._released.set()

    def read(self, client: ApiClient) -> None:
        """Read and deliver the objects, and wait for :meth:`release`. Raises ApiError if the server does not answer."""
        if self._released.is_set():
            return
        try:
            found = FirstObjects(tuple(self._batches(client)))
        except ApiStatusError:
            # The lists, which follow, report why.
            found = FirstObjects()
        self._deliver(found)
        self._released.wait()

    def _batches(self, client: ApiClient) -> list[Batch]:
        def listed(resource: ResourceType, field_selector: str = "") -> list[dict[str, Any]]:
            # "0": the server answers from its cache.
            return client.list(resource, field_selector, "0", lambda raw: usable(raw, resource.kind)).items

        nodes = listed(NODES, f"metadata.name={self.node_name}") if self.node_name else []
        services: list[dict[str, Any]] = []
        slices: list[dict[str, Any]] = []
        for namespace, name in FIRST_SERVICES:
            found = listed(SERVICES.in_namespace(namespace), f"metadata.name={name}")
            if found:
                services += found
                slices += listed(ENDPOINT_SLICES.in_namespace(namespace).with_label(SERVICE_NAME_LABEL, name))
        return [
            Batch(NODES.kind, nodes, []),
            Batch(SERVICES.kind, services, []),
            Batch(ENDPOINT_SLICES.kind, slices, []),
        ]


def usable(raw: Any, kind: str) -> Optional[dict[str, Any]]:
    """Return an object in small form, or None if it cannot be used; the list of its collection then reports it."""
    try:
        found: dict[str, Any] = prune(check_identity(raw, kind))
        return found
    except Exception:
        return None
