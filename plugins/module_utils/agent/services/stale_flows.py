# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries of connection tracking that lead where no Service of a family leads any more."""

from __future__ import annotations

import time
from typing import AbstractSet, Callable, Iterable, Optional, Sequence

from ...base.progress import Progress
from ...cluster.model import NamespacedName
from ...configuration.node_proxy import BehaviourSettings
from ...kernel.conntrack.socket import ConntrackSocket
from ...kernel.conntrack.stale import delete_half_open, delete_stale
from ...serviceports.flows import FlowChanges
from ...serviceports.info import ServicePortInfo
from ..threads.timers import Pace, monotonic

_SHORT_SECONDS, _PAUSE_FACTOR = 0.05, 9.0

ServicePortsOf = Callable[[NamespacedName], Optional[Sequence[ServicePortInfo]]]


class StaleFlows:
    """Records when entries of one family can have become stale, and deletes those that have.

    ``tracked``: whether traffic passes connection tracking in the mode; if not, there are no entries.
    """

    def __init__(self, family: str, settings: BehaviourSettings, tracked: bool, progress: Progress) -> None:
        self._family = family
        self._behaviour = settings.behaviour
        self._tracked = tracked
        self._progress = progress
        self._changes = FlowChanges(settings.behaviour, settings.end_deleted)
        self._appeared = False
        self._examined = Pace(monotonic, _PAUSE_FACTOR)

    def note(self, service: NamespacedName, ports: Sequence[ServicePortInfo], is_new: bool) -> None:
        """Record the ServicePorts that a Service has from now on, none if it was deleted."""
        self._appeared |= is_new
        self._changes.note(service, ports)

    def suspect(self, services: AbstractSet[NamespacedName]) -> None:
        """Have :meth:`delete` examine Services: their tables were incomplete.

        Meanwhile a flow may have begun without NAT, or to a former endpoint, and keeps it as long as packets come.
        """
        self._changes.repeat(services)

    def delete(self, services: Iterable[NamespacedName], ports_of: ServicePortsOf) -> tuple[int, float]:
        """Delete stale entries, if Services or tables changed since the last call in a way that can make entries stale.

        ``services``: all of the family. Like kube-proxy, examine the entries of all UDP Services after any of them
        changed so: those of addresses that a Service has got since then are found, too. TCP connections to endpoints
        that are gone are examined after Services were added, so when the agent starts. Return how many were deleted and
        the seconds it took (0 if nothing changed, or :attr:`waiting_seconds`). Raises KernelError.
        """
        if self._examined.rest():
            return 0, 0.0
        changed, released = self._changes.pop()
        appeared, self._appeared = self._appeared, False
        if not self._tracked or not (changed or released or appeared):
            return 0, 0.0
        # A machine with much else to do prolongs short work; then the next change must not wait.
        started, used = monotonic(), time.thread_time()

        def ports(names: Iterable[NamespacedName]) -> Iterable[ServicePortInfo]:
            return (port for name in names for port in ports_of(name) or ())

        deleted = 0
        try:
            with ConntrackSocket(self._progress) as sock:
                if changed or released:
                    examined = ports(self._changes.services)
                    deleted = delete_stale(sock, self._family, examined, self._behaviour, released)
                if appeared:
                    deleted += delete_half_open(sock, self._family, ports(services))
        except BaseException:
            self._appeared |= appeared
            self._changes.put_back(changed, released)
            raise
        seconds = monotonic() - started
        if time.thread_time() - used > _SHORT_SECONDS:
            self._examined.worked(seconds)
        return deleted, seconds

    @property
    def waiting_seconds(self) -> float:
        """The seconds until :meth:`delete` will examine entries, because it has done so just now; else 0."""
        waits = self._changes.changed or self._changes.released or self._appeared
        return self._examined.rest() if waits and self._tracked else 0.0
