# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The desired tables of one family, kept up to date one Service at a time at a cost of O(change).

What a mode derives from all contributions together (the chains that Services share) is derived again only where a
contribution changed. The tables equal those that :meth:`.rendering.Rendering.desired_tables` returns for the same
ServicePorts.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

from ..base.progress import Progress, unheeded
from ..cluster.model import NamespacedName
from ..resources import ABSENT, Change
from ..serviceports.info import ServicePortInfo, ServicePortName
from .merged import Entry, MergedTables
from .rendering import Rendering
from .settings import DataplaneSettings

#: Owns the static entries; sorts before every real name.
STATIC = ServicePortName("", "", "", "")

_SERVICES_BETWEEN_PROGRESS = 500
_ENTRIES_BETWEEN_PROGRESS = 20_000

Changes = dict[str, Change[Any, Any]]
ServicePortsOf = Callable[[NamespacedName], Sequence[ServicePortInfo]]
Failed = Callable[[NamespacedName, Exception], bool]


def change_of(rows: Mapping[Any, Any], journal: Mapping[Any, Any]) -> Change[Any, Any]:
    """Return the change from the values in a journal to those in the table now."""
    change: Change[Any, Any] = Change()
    for key, before in journal.items():
        now = rows.get(key, ABSENT)
        if before is ABSENT:
            if now is not ABSENT:
                change.added[key] = now
        elif now is ABSENT:
            change.removed[key] = before
        elif before != now:
            change.replaced[key] = (before, now)
    return change


class DesiredTables:
    """The tables of one mode and family. ``progress`` is called at intervals while many Services are rendered.

    ``failed`` is called with each Service whose rendering raises an exception; if it returns True, the Service's
    entries remain as they were. Otherwise, and without it, the exception ends the call.

    ``desired`` has the content that the mode's resources should hold, by table name; the tables change in place.
    """

    def __init__(
        self,
        rendering: Rendering[Any],
        settings: DataplaneSettings,
        progress: Progress = unheeded,
        failed: Optional[Failed] = None,
    ) -> None:
        self.settings = rendering.at_size(settings, 0)
        self.rendering = rendering
        self._progress = progress
        self._failed = failed
        #: Entries since progress was reported.
        self._rendered = 0
        self._endpoints = 0
        self._endpoints_of: dict[NamespacedName, int] = {}
        self._context = rendering.context(self.settings)
        self._merged = MergedTables((*rendering.tables, *rendering.parts))
        self._ports: dict[NamespacedName, tuple[ServicePortName, ...]] = {}
        self._derivation = rendering.derivation(self._context)
        self._put_static()
        self._derivation.update(self._merged, self._merged.journal)
        self.desired: Mapping[str, Mapping[Any, Any]] = {name: self._merged.tables[name] for name in rendering.tables}

    def apply(
        self,
        services: Mapping[NamespacedName, Sequence[ServicePortInfo]],
        others: ServicePortsOf,
        endpoints: Optional[int] = None,
        kept: AbstractSet[ServicePortName] = frozenset(),
    ) -> None:
        """Replace the ServicePorts of these Services; a Service without any is removed.

        Settings that depend on all Services are decided first, so that each ServicePort is rendered once. ``others``
        returns the ServicePorts of a Service that is not in ``services``: it is called for every such known Service if
        a setting changed. ``endpoints``: of all Services that are about to be applied in several calls; None for those
        of the Services applied. ``kept``: those among the ServicePorts whose entries remain as they are, even if there
        are none; unless a setting changed.
        """
        for service, ports in services.items():
            self._count(service, sum(len(port.endpoints) for port in ports))
        settings = self.rendering.at_size(self.settings, self._endpoints if endpoints is None else endpoints)
        if settings != self.settings:
            self.settings, kept = settings, frozenset()
            self._set_context()
            for service in self._with_progress([service for service in self._ports if service not in services]):
                self._render(service, others)
        for service in self._with_progress(services):
            self._render(service, services.__getitem__, kept)

    def follow(self, settings: DataplaneSettings) -> bool:
        """Adopt settings with other addresses of the node or other ServiceCIDRs.

        Return whether Services that can be reached at addresses of the node must be applied again.
        """
        self.settings = settings._replace(endpoint_comments=self.settings.endpoint_comments)
        self._set_context()
        return self.rendering.entries_have_addresses

    def _set_context(self) -> None:
        self._context = self.rendering.context(self.settings)
        self._put_static()

    def _put_static(self) -> None:
        self._merged.replace(STATIC, self.rendering.static_entries(self._context))

    def _with_progress(self, services: Iterable[NamespacedName]) -> Iterator[NamespacedName]:
        self._rendered = 0
        for number, service in enumerate(services):
            if number % _SERVICES_BETWEEN_PROGRESS == 0 or self._rendered >= _ENTRIES_BETWEEN_PROGRESS:
                self._rendered = 0
                self._progress()
            yield service

    def _count(self, service: NamespacedName, endpoints: int) -> None:
        self._endpoints += endpoints - self._endpoints_of.pop(service, 0)
        if endpoints:
            self._endpoints_of[service] = endpoints

    def _render(
        self, service: NamespacedName, ports_of: ServicePortsOf, kept: AbstractSet[ServicePortName] = frozenset()
    ) -> None:
        """Replace the entries of a Service by those of the ServicePorts that ``ports_of`` returns."""
        try:
            ports = ports_of(service)
            entries = {port.key: self.rendering.entries(port, self._context) for port in ports if port.key not in kept}
        except Exception as error:
            if self._failed is None or not self._failed(service, error):
                raise
            return
        now = tuple([port.key for port in ports])
        for key in self._ports.get(service, ()):
            if key not in kept:
                self._merged.add_again(key)
            if key not in now:
                self._merged.replace(key, [])
        if now:
            self._ports[service] = now
        else:
            self._ports.pop(service, None)
        for key, found in entries.items():
            self._rendered += len(found)
            self._merged.replace(key, found)

    def pop_changes(self) -> Changes:
        """Return the changes of the desired tables since the last call, by table."""
        self._derivation.update(self._merged, self._merged.journal)
        journal = self._merged.pop_journal()
        changes = {table: change_of(self._merged.tables[table], rows) for table, rows in journal.items()}
        return {table: change for table, change in changes.items() if change}

    def lose(self, later: Iterable[NamespacedName]) -> None:
        """Have the next :meth:`pop_changes` add everything again, because the kernel has lost it.

        What only the Services of ``later`` make is added when they are applied.
        """
        self._merged.lose([port for service in later for port in self._ports.get(service, ())])

    @property
    def lost(self) -> set[NamespacedName]:
        """The Services of which not everything has been added again."""
        return {service for service, ports in self._ports.items() if not self._merged.lost.isdisjoint(ports)}

    def forget_lost(self) -> None:
        """Assume that the kernel has everything, except what is in the next :meth:`pop_changes`."""
        self._merged.lost.clear()

    def programmed(self, owner: ServicePortName) -> list[Entry]:
        """Return the current desired entries of the tables that a ServicePort owns.

        An entry is omitted if another owner, which sorts first, sets its value: it is not programmed.
        """
        tables = self._merged.tables
        return [entry for entry in self._merged.entries_of(owner) if tables[entry[0]].get(entry[1]) == entry[2]]
