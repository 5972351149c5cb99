# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster as the agent follows it: a reflector for each collection, the view they fill, and the copy on disk.

:class:`Origin` recognizes which cluster the node serves, so that the API server of another one never removes what is
programmed.
"""

from __future__ import annotations

import contextlib
import functools
import random
from typing import AbstractSet, Any, Callable, Mapping, Optional, Sequence, Union

from ...base.errors import ApiError, Refusal
from ...base.progress import Progress, unheeded
from ...cluster.api.client import ApiClient
from ...cluster.api.errors import FORBIDDEN, ApiStatusError
from ...cluster.api.resource_types import ENDPOINT_SLICES, NODES, OPTIONAL, SERVICE_CIDRS, SERVICES, ResourceType
from ...cluster.model import NamespacedName, Service
from ...cluster.parsing.objects import ObjectKey
from ...cluster.parsing.policy_objects import KEPT_KINDS
from ...cluster.parsing.prune import prune
from ...preflight.cluster_state import FIRST_SERVICES, is_first, origin_findings, origin_of
from ..telemetry.log import Log
from ..threads.supervision import Supervisor, Task
from ..threads.timers import monotonic
from .disk_copy import DiskCopy
from .first_services import FirstObjects, FirstServices, usable
from .known import Batch
from .packed import parsed_items
from .reflector import Reflector
from .room import UNLIMITED, Room
from .view import Applied, ClusterView

#: How long the API server may take to answer before the state kept on disk is programmed, counted from the first
#: request: on a node that serves nothing yet (where a request that fails ends the wait), and on one whose kernel may
#: already serve a newer state.
API_PATIENCE_SECONDS = 1.0
SERVING_PATIENCE_SECONDS = 10.0
#: Patience with a server that answered only some lists, and with credentials that are not ready.
PARTIAL_PATIENCE_SECONDS = 60.0
ASKING_PATIENCE_SECONDS = 30.0
#: How long the lists that network policies need may take on a node that enforces none yet, unless a request fails.
POLICY_PATIENCE_SECONDS = 3.0
#: How long the Services wait for a Node that this agent may not be allowed to read.
NODE_PATIENCE_SECONDS = 10.0
#: Agents that are restarted together must not all send requests to the API server at the same moment.
START_JITTER_SECONDS = 1.0
#: The time limit of a request that the main loop waits for.
LOOP_REQUEST_SECONDS = 5.0

_KINDS = frozenset(resource.kind for resource in (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS))
_VITAL_KINDS = frozenset((SERVICES.kind, ENDPOINT_SLICES.kind))
_OPTIONAL_KINDS = frozenset((NODES.kind, SERVICE_CIDRS.kind))


class Origin:
    """Recognizes the cluster that is served. All threads call :meth:`check`, and the main one :meth:`read` before.

    ``services``: those known now. Before any is known, ``recorded`` identifies the cluster whose Services are
    programmed; after a boot, the copy on disk of ``disk_copy`` has those of an earlier start.
    """

    def __init__(
        self,
        services: Callable[[], Mapping[NamespacedName, Service]],
        disk_copy: DiskCopy,
        recorded: Callable[[], Mapping[NamespacedName, str]],
    ) -> None:
        self._services = services
        self._disk_copy = disk_copy
        self._recorded = recorded
        self._before: Mapping[NamespacedName, str] = {}

    def read(self) -> None:
        """Read the record of what is programmed, or without one the first Services of the copy on disk."""
        self._before = self._recorded() or self._kept()

    def _kept(self) -> Mapping[NamespacedName, str]:
        keys = frozenset(ObjectKey(SERVICES.kind, *name) for name in FIRST_SERVICES)
        values = [parsed.value for parsed, _item in parsed_items(self._disk_copy.earlier(keys))]
        return origin_of({value.key: value for value in values if isinstance(value, Service)})

    def check(self, client: ApiClient) -> None:
        """Raise ApiError if the server is of another cluster, or cannot be asked; one request as a rule."""
        known = origin_of(self._services()) or self._before
        now: dict[NamespacedName, str] = {}
        for name in filter(known.__contains__, FIRST_SERVICES):
            try:
                path, field = SERVICES.in_namespace(name.namespace), f"metadata.name={name.name}"
                items = client.list(path, field, "0", lambda raw: usable(raw, SERVICES.kind)).items
            except ApiStatusError as error:
                if error.code == FORBIDDEN:
                    # The lists, which follow, report it.
                    return
                raise
            if items:
                now[name] = str(items[0]["metadata"].get("creationTimestamp"))
            if now.get(name) == known[name]:
                return
        for finding in origin_findings(known, now):
            raise ApiError(f"API server {client.host}: {finding} [{finding.name}]")


class ClusterSource:
    """Follows the API server in separate threads and saves the cluster state to disk.

    Only the main thread calls its methods, except :meth:`leave`. The threads call ``deliver`` with each :class:`Batch`,
    which the main thread applies to the view; on a node that serves nothing, :class:`FirstObjects` come before. The
    main thread calls :meth:`follow_all` when they are served. ``node_required``: whether nothing can be served without
    the Node. ``room``: how much of the cluster may be held. ``progress`` is called while the view is updated.
    ``any_cluster``: follow also the API server of another cluster than the one known so far. ``recorded``
    identifies the cluster whose Services are programmed (see :class:`Origin`). ``connect`` creates a client for one
    thread, as :meth:`.ApiAccess.connect` does.
    """

    def __init__(
        self,
        *,
        connect: Callable[..., ApiClient],
        deliver: Callable[[Union[Batch, FirstObjects]], None],
        supervisor: Supervisor,
        disk_copy: DiskCopy,
        log: Log,
        node_required: Callable[[], bool],
        room: Room = UNLIMITED,
        progress: Progress = unheeded,
        any_cluster: bool = False,
        recorded: Callable[[], Mapping[NamespacedName, str]] = dict,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.view = ClusterView(room, progress)
        self.reflectors: list[Reflector] = []
        self.from_cache = False
        self.disk_copy = disk_copy
        self._connect = connect
        self._deliver = deliver
        self._supervisor = supervisor
        self._log = log
        self._node_required = node_required
        self._room = room
        self._clock = clock
        self._started = clock()
        self._serving = False
        self._first = FirstServices(deliver)
        self._origin = None if any_cluster else Origin(lambda: self.view.state.services, disk_copy, recorded)
        self._found = FirstObjects()
        self._held: list[Reflector] = []
        self._needed = _KINDS
        self._all_nodes = False
        self._has_copy = self._has_policies = False
        self._copy_task: Optional[Task] = None

    @property
    def connected(self) -> bool:
        """Whether every collection is being watched."""
        return bool(self.reflectors) and all(reflector.connected for reflector in self.reflectors)

    @property
    def listed(self) -> bool:
        """Whether the collections that the node needs are completely known."""
        missing = self._needed - self.view.listed
        late = self._clock() - self._started > NODE_PATIENCE_SECONDS and not self._node_required()
        return not missing or (late and missing <= _OPTIONAL_KINDS)

    @property
    def error(self) -> str:
        """Why a collection cannot be read, or empty text."""
        return next((reflector.error for reflector in self.reflectors if reflector.error), "")

    @property
    def unserved(self) -> str:
        """Why collections cannot be read that the API server has in no version that is read here, or empty text."""
        return next((reflector.error for reflector in self.reflectors if reflector.is_unserved), "")

    def start(
        self, node_name: str, serving: bool, others: Sequence[ResourceType] = (), all_nodes: bool = False
    ) -> None:
        """Begin to follow the API server.

        ``node_name``: empty for a host outside the cluster, which has no Node.
        ``all_nodes``: follow every Node, not only this one.
        ``others``: collections that are followed besides those that Services need, whose start does not wait for them.
        ``serving``: whether the kernel already serves Services from before this start. Such a node can wait longer for
        the API server than one that serves nothing, which needs the first Services before all others.
        """
        self._serving = serving
        if self._origin is not None:
            self._origin.read()
        self._has_copy = self._has_policies = self.disk_copy.exists()
        self._copy_task = self._supervisor.start("cache", self.disk_copy.run)
        pause = random.uniform(0.0, START_JITTER_SECONDS) if serving else 0.0
        self._needed = _KINDS if node_name else _KINDS - {NODES.kind}
        self._all_nodes = all_nodes
        self.view.node_name = self._first.node_name = node_name
        self.reflectors = [self._node_reflector(node_name, pause)] if node_name or all_nodes else []
        resources = (SERVICES, ENDPOINT_SLICES, SERVICE_CIDRS, *others)
        self.reflectors += [self._reflector(resource, pause) for resource in resources]
        self._held = list(self.reflectors)
        if serving:
            self.follow_all()
        else:
            self._release(SERVICES)

    def keep_first(self, found: FirstObjects) -> None:
        """Keep the essential Services, which replace those of the copy on disk if it must be used after all."""
        if self._held:
            self._found = found

    def follow_all(self) -> None:
        """Follow every collection from now on, not only read the first Services."""
        self._first.release()
        self._release(*(reflector.resource for reflector in self._held))

    def _release(self, *resources: ResourceType) -> None:
        """Start the threads of these collections."""
        for reflector in [reflector for reflector in self._held if reflector.resource in resources]:
            self._held.remove(reflector)
            self._run(reflector)

    def _reflector(self, resource: ResourceType, pause: float = 0.0, field_selector: str = "") -> Reflector:
        return Reflector(
            resource,
            self._connect,
            self._deliver,
            self._log,
            field_selector=field_selector,
            room=self._room,
            held=self.view.size_of,
            optional=resource in OPTIONAL,
            reduce=functools.partial(prune, node_labels=self._all_nodes),
            first_pause=pause,
            prelude=functools.partial(self._begin, resource),
            vital=self._origin is not None and resource.kind in _VITAL_KINDS,
        )

    def _begin(self, resource: ResourceType, client: ApiClient) -> None:
        """Check a server before anything of it is used, and read the first Services in the thread of Services."""
        if self._origin is not None:
            self._origin.check(client)
        if resource is SERVICES:
            self._first.read(client)

    def follow_others(self, resources: Sequence[ResourceType]) -> None:
        """Follow only these collections in addition to those that Services need."""
        for reflector in list(self.reflectors):
            if reflector.resource.kind not in _KINDS and reflector.resource not in resources:
                reflector.stop()
                self.reflectors.remove(reflector)
                self.view.forget(reflector.resource.kind)
        followed = [reflector.resource for reflector in self.reflectors]
        for resource in resources:
            if resource not in followed:
                # Objects known from the copy on disk may have been deleted meanwhile.
                self._follow(self._reflector(resource))

    def _follow(self, reflector: Reflector) -> None:
        """Follow a collection of which objects are known: those that its first list does not have are removed."""
        reflector.known.assume(self.view.keys(reflector.resource.kind))
        self.reflectors.append(reflector)
        self._run(reflector)

    def follows(self, kind: str) -> bool:
        """Return whether a collection of this kind is followed; a batch of another one was read before it ended."""
        return kind in self._followed

    @property
    def _followed(self) -> frozenset[str]:
        """The kinds of the collections that are followed."""
        return frozenset(reflector.resource.kind for reflector in self.reflectors)

    def apply(self, batch: Batch) -> Applied:
        """Apply a reflector's changes to the view, and return their effect."""
        if batch.listed and batch.kind in KEPT_KINDS and batch.kind not in self.view.known:
            self._restore_earlier(batch)
        return self.view.apply(batch)

    def _restore_earlier(self, first: Batch) -> None:
        """Put the version on disk into the view of each policy whose version in the first list is refused.

        It was in force before this start, and remains so until the policy is deleted or valid again.
        """
        refused = {parsed.key for parsed, _item in parsed_items(first.changed) if isinstance(parsed.value, Refusal)}
        if not refused:
            return
        self.view.apply(Batch(first.kind, self.disk_copy.earlier(refused), []), whole=True)
        for key in sorted(filter(self.view.state.policy.holds, refused)):
            text = "a policy is refused; its version on disk remains in force"
            self._log.warning(text, kind=key.kind, policy=key.full_name)

    def leave(self, url: str) -> None:
        """End the requests to an API server that has failed; the only method that other threads may call."""
        for reflector in tuple(self.reflectors):
            reflector.leave(url)

    def stop(self) -> None:
        """End all threads, and bring the copy on disk up to date."""
        for reflector in self.reflectors:
            reflector.stop()
        self._first.release()
        if self.listed:
            self.disk_copy.write_now(self.view, self._followed, self._copy_task)

    def _run(self, reflector: Reflector) -> None:
        self._supervisor.start(f"watch-{reflector.resource.name}", reflector.run, reflector.interrupt)

    def _node_reflector(self, node_name: str, pause: float = 0.0) -> Reflector:
        return self._reflector(NODES, pause, "" if self._all_nodes else f"metadata.name={node_name}")

    def read_node(self, name: str) -> None:
        """Read the Node of that name into the view; nothing if there is none. Raises ApiError."""
        with contextlib.closing(self._connect(lambda _seconds: None, LOOP_REQUEST_SECONDS)) as client:
            items = client.list(NODES, f"metadata.name={name}", reduce=prune).items
        self.view.apply(Batch(NODES.kind, items, []))

    def follow_node(self, name: str, old_name: str, all_nodes: bool = False) -> None:
        """Watch the Node of this name instead of the old one, or every Node; an empty name: this host has no Node."""
        if (name, all_nodes) == (old_name, self._all_nodes):
            return
        for old in [reflector for reflector in self.reflectors if reflector.resource is NODES]:
            old.stop()
            self.reflectors.remove(old)
        if old_name and old_name != name and not all_nodes:
            self.view.apply(Batch(NODES.kind, [], [{"kind": NODES.kind, "metadata": {"name": old_name}}]))
        self._needed = _KINDS if name else _KINDS - {NODES.kind}
        self._all_nodes = all_nodes
        self.view.node_name = self._first.node_name = name
        if name or all_nodes:
            self._follow(self._node_reflector(name))

    def patience_ends(self) -> Optional[float]:
        """Return when, by the clock, to use the copy on disk for lists that the API server has not answered.

        None if there is no copy. The time counts from the first request that was sent or failed, because the agent may
        have been busy before that.
        """
        if not self._has_copy:
            return None
        first_requests = [each.requested_at for each in self.reflectors if each.requested_at is not None]
        if not first_requests:
            return self._started + ASKING_PATIENCE_SECONDS
        if not self._serving and self._fails:
            return min(first_requests)
        if self.view.listed or self._found.batches:
            return min(first_requests) + PARTIAL_PATIENCE_SECONDS
        return min(first_requests) + (SERVING_PATIENCE_SECONDS if self._serving else API_PATIENCE_SECONDS)

    @property
    def _fails(self) -> bool:
        """Whether a request for Services or EndpointSlices has failed and not succeeded since."""
        return any(each.error and each.resource.kind in _VITAL_KINDS for each in self.reflectors)

    def list_held_back(self, has_room: bool) -> None:
        """List again the collections with objects that were held back, because there is room for them."""
        found = self.view.with_room(has_room)
        for reflector in self.reflectors:
            kind = reflector.resource.kind
            keys = [key for key in found if key.kind == kind]
            if keys:
                reflector.list_again(keys)

    def use_cache(self) -> bool:
        """Fill the view from the copy on disk for collections that the API server has not listed.

        Return False, and do nothing, if the copy turns out to be useless.
        """
        self._has_copy = self._has_policies = False
        cached = self.disk_copy.read(self._room, self._followed, self.view.node_name)
        if not any(cached.values()):
            return False
        self.follow_all()
        for kind, items in cached.items():
            if self._found.batches:
                items = items.without(is_first)
            self._fill(kind, items)
        for batch in self._found.batches:
            self._fill(batch.kind, batch.changed)
        self.from_cache = True
        self._log.warning(
            "starting from the cluster state kept on disk, because the API server has not answered completely",
            services=len(self.view.state.services),
            reason=self.error or "no answer yet",
        )
        return True

    def use_policies_if_late(self, kinds: AbstractSet[str]) -> bool:
        """Fill the view from the copy on disk for these kinds if the API server has not listed all of them in time.

        They are those that network policies need. Return whether there is nothing more to wait for: they are known, or
        the copy on disk has been used or does not exist. What the API server has in no version that is read here then
        counts as known, so that other policies are in force.
        """
        found = self._fill_policies(kinds - self.view.known)
        if found:
            self.view.from_disk |= {each.resource.kind for each in self.reflectors if each.is_unserved} & kinds
        return found

    def _fill_policies(self, missing: AbstractSet[str]) -> bool:
        if not missing or not self._has_policies:
            return True
        late = [each for each in self.reflectors if each.resource.kind in missing]
        asked = [each.requested_at for each in late if each.requested_at is not None]
        due = min(asked) + POLICY_PATIENCE_SECONDS if asked else self._started + ASKING_PATIENCE_SECONDS
        if self._clock() < due and not any(each.error for each in late):
            return False
        self._has_policies = False
        cached = self.disk_copy.read(self._room, missing, self.view.node_name)
        for kind, items in cached.items():
            self._fill(kind, items)
        if cached:
            self._log.warning(
                "using pods and network policies kept on disk, because the API server has not answered completely",
                kinds=", ".join(sorted(cached)),
                reason=next((each.error for each in late if each.error), "no answer yet"),
            )
        return True

    def _fill(self, kind: str, items: Sequence[dict[str, Any]]) -> None:
        """Put objects into the view that the first list of their collection will replace."""
        if kind not in self.view.listed:
            self.view.apply(Batch(kind, items, []), whole=True)
        self.view.from_disk.add(kind)
        if kind == NODES.kind and len(items) > 1:
            # Without need, an agent follows its own Node only.
            self.view.state.policy.set_nodes_known(True)

    @property
    def is_unsaved(self) -> bool:
        """Whether the view has changes that the copy on disk lacks."""
        return self.disk_copy.is_behind(self.view, self._followed)

    def save(self) -> bool:
        """Start writing the copy on disk if it is out of date; return whether to check again later."""
        if not self.listed or not self.is_unsaved:
            return False
        self.disk_copy.write_beside(self.view, self._followed)
        return True
