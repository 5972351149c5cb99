# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversion of planned changes to the entries of a report."""

from __future__ import annotations

import contextlib
import math
import time
from itertools import islice
from typing import Any, Collection, Iterable, Iterator, Mapping, Sequence

from ..cluster.claims import Conflicts
from ..cluster.model import NO_POLICY
from ..cluster.parsing.service_policy import REMOVED_ENDPOINTS
from ..configuration.node_proxy import ServicePolicySettings
from ..differences import changed_lines
from ..rendering.rendering import Rendering, ServicePorts
from ..rendering.settings import DataplaneSettings
from ..resources import PlannedChange, Resource
from ..serviceports.info import ServicePortInfo
from .request import TableChange


class Stopwatch:
    """Seconds spent per named stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` statement; times of the same name are added up."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add({name: time.monotonic() - started})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds, by name, that the caller measured."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value


_NAMED_CONFLICTS = 5


def conflict_warnings(conflicts: Conflicts) -> list[str]:
    """Return a line for each of the first few addresses that several Services claim, and one for the others."""
    lines = [str(conflict) for conflict in conflicts.first(_NAMED_CONFLICTS)]
    left = len(conflicts) - len(lines)
    return [*lines, f"{left} more addresses or node ports are claimed by several Services"] if left else lines


_NAMED_ENTRIES = 10
_NAME_CHARACTERS = 120


def _entry_name(resource: Resource[Any, Any], key: Any, value: Any) -> str:
    """Return the name of an entry: the parts of its key if they are text, else the first line that describes it."""
    parts = key if isinstance(key, tuple) else (key,)
    if all(isinstance(part, str) for part in parts):
        return " ".join(parts)[:_NAME_CHARACTERS]
    return next(iter(resource.describe(key, value)), str(key))[:_NAME_CHARACTERS]


def entry_names(planned: PlannedChange) -> tuple[str, ...]:
    """Return the names of the first few entries that differ, the most harmful first.

    Entries with parts, such as a chain of rules, are ordered by how many of them are missing: a chain that another
    program has flushed comes before one with an additional rule. Then come missing entries, and last unexpected ones.
    """
    resource, change = planned.resource, planned.change
    ranked: list[tuple[int, str]] = []
    for key, (old, new) in change.replaced.items():
        name, missing = _entry_name(resource, key, new), 0
        if isinstance(old, tuple) and isinstance(new, tuple) and all(isinstance(part, str) for part in new):
            missing = len(set(new).difference(old))
        ranked.append((-missing, f"{name} ({missing} of {len(new)} missing)" if missing else name))
    ranked.sort(key=lambda item: item[0])
    added = [_entry_name(resource, key, value) for key, value in islice(change.added.items(), _NAMED_ENTRIES)]
    removed = [_entry_name(resource, key, value) for key, value in islice(change.removed.items(), _NAMED_ENTRIES)]
    return tuple([*(name for _rank, name in ranked[:_NAMED_ENTRIES]), *added, *removed][:_NAMED_ENTRIES])


def table_change(planned: PlannedChange, describe: bool) -> TableChange:
    """Return the counts of one planned change, and with ``describe`` the lines of its entries before and after."""
    resource, change = planned.resource, planned.change
    before, after = changed_lines(resource, change) if describe else ([], [])
    return TableChange(
        table=resource.label,
        added=len(change.added),
        replaced=len(change.replaced),
        removed=len(change.removed),
        before=tuple(before),
        after=tuple(after),
        entries=entry_names(planned) if change else (),
    )


def table_changes(
    planned: Sequence[PlannedChange], describe: bool, of_cluster: Collection[Resource[Any, Any]] = ()
) -> tuple[TableChange, ...]:
    """Return the tables that differ. ``of_cluster``: the resources whose content depends on the cluster state."""
    followed = set(map(id, of_cluster))
    return tuple(
        table_change(item, describe)._replace(of_cluster=id(item.resource) in followed)
        for item in planned
        if item.change
    )


def counts(families: Sequence[ServicePorts], changes: Sequence[TableChange]) -> dict[str, int]:
    """Count the Services, ServicePorts and endpoints that are served (over all families), and the changed entries.

    A Service is without endpoints if none of its ServicePorts has one in any family.
    """
    keys = {key for service_ports in families for key in service_ports}
    services = {key.service for key in keys}
    with_endpoints = {
        key.service for service_ports in families for key, port in service_ports.items() if port.endpoints
    }
    return {
        "services": len(services),
        "without_endpoints": len(services) - len(with_endpoints),
        "service_ports": len(keys),
        "endpoints": sum(len(port.endpoints) for service_ports in families for port in service_ports.values()),
        **change_counts(changes),
    }


def change_counts(changes: Sequence[TableChange]) -> dict[str, int]:
    """Count the changed entries."""
    return {
        "added": sum(change.added for change in changes),
        "replaced": sum(change.replaced for change in changes),
        "removed": sum(change.removed for change in changes),
    }


def unserved(rendering: Rendering[Any], service_ports: Iterable[ServicePortInfo]) -> list[str]:
    """Return one line for each ServicePort that a mode cannot serve, with the reason."""
    found = []
    for info in service_ports:
        reason = rendering.serving(info).refusal(info)
        if reason:
            found.append(f"Service {info.key} ({info.port}/{info.key.protocol}) is not served: {reason}")
    return found


def unwaited(service_ports: Iterable[ServicePortInfo], settings: ServicePolicySettings) -> list[str]:
    """Return one line for each ServicePort, and the default, with resets of connections that come later than a run."""
    clause = "reset-after needs the agent; a run without it keeps connections to removed endpoints"
    found = [f"servicePolicy.removedEndpoints: {clause}"] if 0 < settings.removed_endpoints < math.inf else []
    lines = [
        f"Service {info.key} ({info.port}/{info.key.protocol}): {REMOVED_ENDPOINTS}: {clause}"
        for info in service_ports
        if info.policy.reset_after and info.policy.reset_after < math.inf
    ]
    # Both families have most ServicePorts.
    return found + list(dict.fromkeys(lines))


def ignored_annotations(
    rendering: Rendering[Any], service_ports: Iterable[ServicePortInfo], settings: DataplaneSettings
) -> list[str]:
    """Return one line for each part of the policy of a ServicePort that a mode does not support."""
    return [
        f"Service {info.key} ({info.port}/{info.key.protocol}): {clause}"
        for info in service_ports
        if info.policy is not NO_POLICY or info.weighted
        for clause in rendering.serving(info).ignored_annotation(info, settings)
    ]
