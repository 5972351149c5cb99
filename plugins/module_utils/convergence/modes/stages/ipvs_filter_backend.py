# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of ipvs mode beside IPVS: the filter backend of either kind and the devices, and their removal."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Union

from ....base.addresses import FAMILIES
from ....kernel.rtnetlink.links import DummyDeviceResource, MonitoringDeviceResource
from ....rendering.ipvs import model as ipvs
from ....rendering.ipvs.own_servers import server_record
from ....rendering.ipvs.sets import known_definitions
from ....resources import Kind, ObservedOnce, Resource, Stage, UnloadedResource
from ...handles import KernelHandles


class SetResources(NamedTuple):
    """The ipsets of one family and their elements."""

    sets: Resource[Any, Any]
    elements: Resource[Any, Any]


class Together(Resource[Any, Any]):
    """The entries of several resources with distinct keys, for observing them only."""

    kind = Kind.SET_ELEMENTS

    def __init__(self, family: str, resources: Sequence[Resource[Any, Any]]) -> None:
        self.family = family
        self._resources = resources

    def observe(self) -> dict[Any, Any]:
        """Return all entries. Raises KernelError."""
        return {key: value for resource in self._resources for key, value in resource.observe().items()}


class FilterBackendResources(NamedTuple):
    """The filter backends of ipvs mode on this node in one family; None for a part of the kernel that is not loaded."""

    sets: Optional[SetResources]
    table: Optional[Resource[Any, Any]]

    def record(self, family: str) -> Resource[Any, Any]:
        """Return the entries that record which virtual servers are ours."""
        elements = [self.sets.elements] if self.sets is not None else []
        return Together(family, [*elements, *([self.table] if self.table is not None else [])])


def set_resources(handles: KernelHandles, family: str) -> SetResources:
    """Return the ipsets of a family. Raises KernelError."""
    # Imported late: few nodes have ipsets.
    from ....kernel.ipset.sets import SetElementsResource, SetsResource

    known = known_definitions(family)
    return SetResources(SetsResource(handles.ipset, known, family), SetElementsResource(handles.ipset, known, family))


def unloaded_set_resources(family: str) -> SetResources:
    """Return stand-ins that only describe entries, for a check while ipset is not loaded."""
    # Imported late: few nodes have ipsets.
    from ....kernel.ipset.sets import SetElementsResource, SetsResource

    return SetResources(
        UnloadedResource(SetsResource.kind, family, SetsResource.describe),
        UnloadedResource(SetElementsResource.kind, family, SetElementsResource.describe),
    )


def filter_backend_resources(handles: KernelHandles, family: str) -> FilterBackendResources:
    """Return the filter backends that the kernel has loaded, each observed once. Load nothing. Raises KernelError."""
    sets, table = None, None
    if handles.has_ipset():
        found = set_resources(handles, family)
        sets = found._replace(elements=ObservedOnce(found.elements))
    if handles.has_nftables():
        table = ObservedOnce(handles.ipvs_table(family))
    return FilterBackendResources(sets, table)


def device_stage(handles: KernelHandles) -> Stage:
    """Return the stage of the dummy device. Raises KernelError."""
    return Stage(DummyDeviceResource(handles.route), {ipvs.DEVICE: "dummy"})


def unused_filter_backend_stages(handles: KernelHandles, uses_sets: bool, uses_table: bool) -> list[Stage]:
    """Return stages that remove an unused filter backend of ipvs mode, in both families. Raises KernelError."""
    stages: list[Stage] = []
    for family in FAMILIES:
        found = filter_backend_resources(handles, family)
        if found.sets is not None and not uses_sets:
            stages += [Stage(found.sets.sets, {}), Stage(found.sets.elements, {})]
        if found.table is not None and not uses_table:
            stages.append(Stage(found.table, {}))
    return stages


def retiring_stages(handles: KernelHandles) -> list[Stage]:
    """Return stages after which the table beside IPVS no longer affects packets. Raises KernelError.

    The table keeps the entries that identify virtual servers. Until then, new connections to service addresses go
    through IPVS, so the connections that are still open are known only afterwards.
    """
    return [Stage(handles.ipvs_table(family), server_record) for family in FAMILIES if handles.has_nftables()]


def device_removal_stages(
    handles: KernelHandles,
    stages: Sequence[Stage],
    kept: Union[Mapping[str, str], Callable[[Mapping[str, str]], Mapping[str, str]]],
) -> list[Stage]:
    """Return the stages, enclosed by those that remove the devices of ipvs mode except ``kept``. Raises KernelError.

    The dummy device is removed last, because removals are applied in reverse order.
    """
    # An agent that was killed leaves it behind.
    monitoring = Stage(MonitoringDeviceResource(handles.route), {})
    return [Stage(DummyDeviceResource(handles.route), kept), *stages, monitoring]
