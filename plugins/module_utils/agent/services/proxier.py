# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One IP family on this node: its desired tables, and the resources that hold them."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Optional, Sequence, TypeVar

from ...base.addresses import family_of
from ...base.errors import KernelError
from ...cluster.model import NO_POLICY, NamespacedName, Service
from ...cluster.parsing.objects import ObjectKey
from ...cluster.state import ClusterState
from ...configuration.model import KubeProxyConfiguration
from ...convergence.family import FamilyContext, FamilyTables
from ...convergence.handles import KernelHandles
from ...convergence.modes.mode import Mode
from ...convergence.report import ignored_annotations, unserved
from ...convergence.schedulers import requested, with_schedulers
from ...kernel.nftables.parts import ELEMENTS_OF_PART
from ...kernel.xtables.variant import XtablesVariant
from ...rendering.desired import DesiredTables
from ...rendering.served import served_cluster_ips
from ...rendering.settings import DataplaneSettings
from ...rendering.slot_limit import SlotLimit
from ...resources import NO_CHANGE, Change, Kind, PlannedChange, Stage, plan
from ...serviceports.info import Endpoint, ServicePortInfo
from ...serviceports.table import count_endpoints, service_ports_of
from ..sync.tables import SyncedTables, SyncResult, applied
from ..threads.failures import NOT_OF_ONE_OBJECT, Failures
from ..threads.timers import monotonic
from .portions import NO_STEPS, WHOLE, PortSteps, Steps
from .removed_endpoints import RemovedEndpoints
from .stale_flows import StaleFlows
from .summaries import Summaries

_SERVICES_BETWEEN_PROGRESS = 500
_ENDPOINTS_BETWEEN_PROGRESS = 20_000
# Any user may change the endpoints of a UDP Service. So where reading the connections takes longer than this, it takes
# a tenth of the time at most.
_T = TypeVar("_T")


def _is_external(service: Service) -> bool:
    """Return whether a Service has node ports, external IPs or load balancer addresses."""
    return bool(service.external_ips or service.load_balancer_ips or any(port.node_port for port in service.ports))


def _key_of(service: NamespacedName) -> ObjectKey:
    return ObjectKey("Service", service.namespace, service.name)


def _note(known: dict[NamespacedName, list[str]], service: NamespacedName, lines: list[str]) -> bool:
    """Record the lines about a Service, and return whether they changed."""
    if lines == known.get(service, []):
        return False
    if lines:
        known[service] = lines
    else:
        del known[service]
    return True


class Proxier(SyncedTables):
    """Keeps one family in sync.

    ``rendered``: whether the desired tables have been brought up to date since they were created. ``failures``:
    Services that are served as before, because a defect of the agent prevents that they are brought up to date.
    """

    def __init__(
        self, configuration: KubeProxyConfiguration, mode: Mode, context: FamilyContext, handles: KernelHandles
    ) -> None:
        super().__init__(context.family)
        self.mode = mode
        self.context = context
        self.rendered = False
        self.summaries = Summaries(mode.counts_ports)
        self.failures = Failures()
        self.tables = DesiredTables(mode.rendering, context.settings, handles.progress, self._failed)
        self.slot_limit = SlotLimit(mode.rendering)
        self._steps = PortSteps()
        self.stages: list[Stage] = mode.stages(configuration, [FamilyTables(context, self.tables.desired)], handles)
        for stage in self.stages:
            stage.resource.report_to(handles.progress)
        self._adjustments = mode.adjustments(context, self.stages, handles)
        self._handles = handles
        self.progress = handles.progress
        settings = configuration.node_proxy.behaviour
        self.stale_flows = StaleFlows(self.family, settings, mode.tracks_connections, handles.progress)
        self.removed = RemovedEndpoints(configuration.node_proxy.service_policy, monotonic)
        #: Services with ports that the mode cannot serve, and why.
        self.unserved: dict[NamespacedName, list[str]] = {}
        #: Services whose policy the mode supports only in part, and what it does not support.
        self.ignored: dict[NamespacedName, list[str]] = {}
        #: How often that changed.
        self.ignored_changes = 0
        self._asked: set[str] = set()
        # The keys of what partial syncs of the first stage could not apply.
        self._unapplied: Change[Any, Any] = NO_CHANGE
        self._found: Optional[set[str]] = None

    @property
    def has_observed(self) -> bool:
        """See the base class."""
        return self._found is not None

    @property
    def settings(self) -> DataplaneSettings:
        """The settings that rendering uses."""
        return self.context.settings

    @property
    def variant(self) -> Optional[XtablesVariant]:
        """The iptables in use, None where the mode needs none."""
        return self.context.variant

    @property
    def kept_chains(self) -> list[str]:
        """The chains that are kept, empty, because rules of other programs jump to them, as ``table chain``."""
        used = {key for stage in self.stages for key in getattr(stage.resource, "referenced", ())}
        return sorted(f"{key.table} {key.chain}" for key in used if key not in self.tables.desired[Kind.CHAINS])

    @property
    def draining(self) -> int:
        """The number of entries that are kept until their connections have ended."""
        return self._adjustments.draining

    def set_zone(self, zone: str) -> None:
        """Change the zone of the node. The caller must apply the Services that depend on it again."""
        self.context = self.context._replace(node=self.context.node._replace(zone=zone))

    def follow(self, settings: DataplaneSettings, state: ClusterState) -> bool:
        """Adopt settings with new addresses or ServiceCIDRs; return whether this changed desired tables.

        Only entries that depend on them are rendered again, and the next sync applies the difference. The kernel is not
        changed.
        """
        before = self.context.settings
        settings = settings._replace(schedulers=before.schedulers)
        self.context = self.context._replace(settings=settings)
        in_use = self.mode.rendering.settings_in_use
        if in_use(before) == in_use(settings):
            return False
        if self.tables.follow(settings):
            self.apply_services(state, [name for name, service in state.services.items() if _is_external(service)])
        return True

    def apply_services(
        self,
        state: ClusterState,
        services: Iterable[NamespacedName],
        size: Optional[int] = None,
        steps: Steps = NO_STEPS,
    ) -> None:
        """Bring the desired tables up to date with these Services, and those that failed; the kernel is not changed.

        ``size``: the ``endpoints`` of :meth:`.rendering.desired.DesiredTables.apply`. ``steps``: of the Services of
        which only some ports are brought up to date.
        """
        chosen = list(services)
        if self.failures:
            failed = [NamespacedName(key.namespace, key.name) for key in self.failures]
            chosen += set(failed).difference(chosen)
        try:
            self._apply(state, chosen, size, steps)
        except NOT_OF_ONE_OBJECT:
            raise
        except Exception:
            self._apply_each(state, chosen, size)
        self.rendered = True

    def _apply_each(self, state: ClusterState, services: Sequence[NamespacedName], size: Optional[int]) -> None:
        """Apply Services one after the other, because one of them raises an exception."""
        for number, service in enumerate(services):
            if number % _SERVICES_BETWEEN_PROGRESS == 0:
                self.progress()
            try:
                self._apply(state, [service], size, NO_STEPS)
            except Exception as error:
                if not self._failed(service, error):
                    raise

    def _apply(
        self, state: ClusterState, services: Iterable[NamespacedName], size: Optional[int], steps: Steps
    ) -> None:
        ports: dict[NamespacedName, Sequence[ServicePortInfo]] = {}
        endpoints = 0
        for number, service in enumerate(services):
            if number % _SERVICES_BETWEEN_PROGRESS == 0 or endpoints >= _ENDPOINTS_BETWEEN_PROGRESS:
                endpoints = 0
                self.progress()
            now = self._steps.computed(service, steps.get(service, WHOLE)) or self.service_ports(state, service)
            if now is None:
                continue
            endpoints += sum([len(info.endpoints) for info in now])
            # Nothing is known of a Service that never had any, as most in a second family.
            had_failed = bool(self.failures) and self.failures.discard(_key_of(service))
            if now or had_failed or service in self.summaries:
                ports[service] = now
        for service in self.slot_limit.count(ports) - ports.keys():
            now = self.service_ports(state, service)
            if now is not None:
                ports[service] = now
        applied = self.slot_limit.applied
        ports = {service: tuple([applied(info) for info in found]) for service, found in ports.items()}
        self._find_schedulers([info for found in ports.values() for info in found])
        context = self.context.node
        kept = self._steps.kept(ports, steps, self.summaries)
        self.tables.apply(ports, lambda name: tuple(map(applied, service_ports_of(state, name, context))), size, kept)
        for service, found in ports.items():
            step = steps.get(service, WHOLE)
            if not step.begins:
                if step.ends:
                    self.stale_flows.suspect({service})
                continue
            if self.failures and _key_of(service) in self.failures:
                continue
            _note(self.unserved, service, unserved(self.mode.rendering, found))
            self.ignored_changes += _note(
                self.ignored, service, ignored_annotations(self.mode.rendering, found, self.settings)
            )
            self.removed.note(service, found)
            self.stale_flows.note(service, found, is_new=service not in self.summaries)
            self.summaries.put(service, found)

    def request_slots(self, state: ClusterState, services: Iterable[NamespacedName]) -> set[NamespacedName]:
        """Count what these Services request of stable hashing now; return others whose admission this changes."""
        found: dict[NamespacedName, Sequence[ServicePortInfo]] = {}
        for service in services if self.mode.rendering.most_lists else ():
            item = state.services.get(service)
            asks = item is not None and not (item.policy is NO_POLICY and item.aliases is NO_POLICY)
            if asks or self.slot_limit.has(service):
                now = self.service_ports(state, service)
                if now is not None:
                    found[service] = now
        return self.slot_limit.count(found)

    def service_ports(self, state: ClusterState, service: NamespacedName) -> Optional[Sequence[ServicePortInfo]]:
        """Return the ServicePorts of a Service in this family; None if that fails, which is recorded."""
        return self._attempt(service, lambda: service_ports_of(state, service, self.context.node))

    def _attempt(self, service: NamespacedName, compute: Callable[[], _T]) -> Optional[_T]:
        """Return what is computed for a Service; None if that raises an exception, which is recorded."""
        try:
            return compute()
        except Exception as error:
            if not self._failed(service, error):
                raise
            return None

    def _failed(self, service: NamespacedName, error: Exception) -> bool:
        """Record the failure of a Service; return whether the exception can be about this Service alone."""
        if isinstance(error, NOT_OF_ONE_OBJECT):
            return False
        self.failures.add(_key_of(service), error)
        return True

    def _find_schedulers(self, infos: Sequence[ServicePortInfo]) -> None:
        """Load the kernel modules of schedulers that no ServicePort has requested before."""
        new = requested(self.mode.rendering, infos, self.settings) - self._asked
        if not new:
            return
        self.context = with_schedulers(self.context, self.mode.rendering, infos, load=True)
        self._asked |= new
        self.tables.follow(self.settings)

    def size(self, state: ClusterState) -> int:
        """Return the number of endpoints of all Services of the family, without computing any ServicePort.

        In a mode that does not depend on it nothing is counted.
        """
        if not self.mode.rendering.counts_endpoints:
            return 0
        return sum(self._count_endpoints(state, service) or 0 for service in state.services)

    def _count_endpoints(self, state: ClusterState, service: NamespacedName) -> Optional[int]:
        node = self.context.node
        return self._attempt(service, lambda: count_endpoints(state, service, self.family, node.outside, node.policy))

    def take_found_served(self) -> set[str]:
        """Return the cluster IPs of the family that had endpoints when the kernel was first observed; forget them."""
        found, self._found = self._found, set()
        return {address for address in found or () if family_of(address) == self.family}

    def would_serve(self, state: ClusterState, service: NamespacedName) -> bool:
        """Return whether a Service would have an endpoint to choose after :meth:`apply_services`."""
        ports = self.service_ports(state, service)
        return self.summaries.serves(service) if ports is None else any(info.reachable for info in ports)

    def is_cold(self) -> bool:
        """See the base class."""
        return all(stage.resource.is_empty() for stage in self.stages if stage.resource.family)

    def awaits_portions(self) -> bool:
        """See the base class."""
        return bool(self.tables.lost) and not self.is_cold()

    def full(self) -> SyncResult:
        """See the base class."""
        self.needs_full = True
        self.tables.pop_changes()
        planned = plan(self.stages)
        if self._found is None:
            self._found = served_cluster_ips(item.observed for item in planned)
        result = applied(planned)
        self._adjustments.observed(self.tables.desired)
        self.needs_full, self._unapplied = False, NO_CHANGE
        self.tables.forget_lost()
        return result

    @property
    def is_divisible(self) -> bool:
        """Whether :meth:`compare` takes steps: there is one resource, whose desired table does not depend on it.

        Packets may meet the state between two steps, so a table that is compared in no time is compared in one.
        """
        desired = self.stages[0].desired
        return len(self.stages) == 1 and not callable(desired) and len(desired) > ELEMENTS_OF_PART

    def compare(self, later: Callable[[], Iterable[NamespacedName]]) -> Iterator[SyncResult]:
        """See the base class.

        What partial syncs could not apply comes early. Most modes cannot be divided, and do it in one step.
        """
        resource, desired = self.stages[0].resource, self.stages[0].desired
        if not self.is_divisible or callable(desired):
            yield self.full()
            return
        urgent = self._unapplied.with_keys_of(self.tables.pop_changes().get(resource.kind, NO_CHANGE))
        self.needs_full, self._unapplied = False, NO_CHANGE
        self.tables.forget_lost()
        try:
            if resource.is_empty():
                self.tables.lose(later())
                yield self.partial()
                return
            for part in resource.parts(desired, urgent):
                planned = [PlannedChange(resource, part.difference(desired))]
                yield applied(planned)
        except KernelError:
            self.needs_full = True
            raise
        self._adjustments.observed(self.tables.desired)

    def partial(self) -> SyncResult:
        """See the base class."""
        changes = self.tables.pop_changes()
        self.needs_full = True
        self._adjustments.adjust(changes)
        planned = [PlannedChange(stage.resource, changes.get(stage.resource.kind, NO_CHANGE)) for stage in self.stages]
        try:
            result = applied(planned)
        except KernelError:
            self._unapplied = self._unapplied.with_keys_of(planned[0].change)
            raise
        self.needs_full = False
        return result

    def drain(self) -> int:
        """Remove draining entries whose last connection has ended; return their number. Raises KernelError."""
        return self._adjustments.drain()

    def drop(self, port: ServicePortInfo, endpoint: Endpoint) -> int:
        """End the connections of a ServicePort to an endpoint that connection tracking does not end.

        Returns how many were reset at once. Raises KernelError.
        """
        serving, used = self.mode.serving(port), self._adjustments
        if serving is not self.mode:
            used = serving.adjustments(self.context, self.stages, self._handles)
        return used.drop(port, endpoint)
