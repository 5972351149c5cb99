# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One convergence of this node: observe, compare, apply, report."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from ..base.addresses import family_of
from ..base.errors import KernelError
from ..configuration.model import KubeProxyConfiguration
from ..configuration.node_proxy import CUT
from ..configuration.validate import in_mode
from ..kernel.facts import capabilities
from ..preflight.cluster_state import origin_of
from ..preflight.features import rights_findings
from ..preflight.findings import judge
from ..preflight.kubelet import address_findings
from ..rendering.slot_limit import within_limit
from ..resources import Kind, PlannedChange, Resource, Stage, apply_plan, plan
from ..serviceports.flows import released_protocols
from ..serviceports.policy import reset_after
from . import removal
from .family import FamilyContext, FamilyServices, FamilyTables, removal_contexts
from .guard import Guard
from .handles import KernelHandles
from .loss import EndpointLossGuard
from .modes.choose import ChosenMode, choose_mode
from .modes.mode import Mode
from .modes.stages.sysctls import sysctl_stage
from .node import NodeView, family_services, view_node
from .prepare import check_cluster, check_node, check_policies, check_removal, node_modules, wanted_node_sysctls
from .probing.probe import default_probes
from .probing.traffic import traffic_targets
from .report import Stopwatch, conflict_warnings, counts, ignored_annotations, table_changes, unserved, unwaited
from .request import Report, Request
from .runtime.ledger import flows_of, forget, read_ledger, record_origin, write_ledger
from .runtime.listeners import AskedListeners
from .runtime.lock import ConvergenceLock
from .runtime.state_directory import control_socket
from .schedulers import with_schedulers
from .unchanged.record import forget_record
from .witness import Observed, Witness

if TYPE_CHECKING:
    from ..networkpolicy.node_policy import NodePolicy


def run_convergence(
    request: Request, make_guard: Callable[[Request, KernelHandles], Guard] = Guard, witness: Optional[Witness] = None
) -> Report:
    """Converge the node to the request, or with ``request.check`` only report what would change.

    ``make_guard``: creates the rollback hooks; see ``history.converged`` for those that save states. ``witness``:
    records on what the result depends; an earlier record of that is removed before anything else. A check changes
    nothing at all: no module is loaded, no file or lock is created. Raises ProxyError: PreflightError, before anything
    is changed, if the node lacks something or another program conflicts; KernelError if the kernel refuses a change;
    ConfigurationError.
    """
    # Before anything else, including the lock: a missing permission looks like a missing feature.
    found = rights_findings(capabilities()) or (address_findings(request.check) if request.state == "absent" else [])
    warnings = judge(found, request.ignore_findings)
    with contextlib.ExitStack() as stack:
        lock = ConvergenceLock(request.state_directory, request.lock_timeout)
        if not request.check:
            stack.enter_context(lock)
            forget_record(request.state_directory)
        listeners = AskedListeners(control_socket(request.state_directory))
        watched = witness is not None and not request.check
        commits: Optional[list[int]] = [] if watched else None
        handles = stack.enter_context(KernelHandles(listeners=listeners, commits=commits, loads=not request.check))
        convergence = _Convergence(request, handles, make_guard(request, handles))
        convergence.warnings += warnings
        if request.state == "handed_over":
            return convergence.release()
        if request.state != "absent":
            return convergence.converge(witness if witness is not None and watched else Witness())
        report = convergence.remove()
        if not request.check:
            forget(request.state_directory)
            lock.remove()
        return report


class _Convergence:
    """The steps of one convergence, and their common data."""

    def __init__(self, request: Request, handles: KernelHandles, guard: Guard) -> None:
        self.request = request
        self.handles = handles
        self.watch = Stopwatch()
        self.warnings: list[str] = []
        self.planned: list[PlannedChange] = []
        self.of_cluster: list[Resource[Any, Any]] = []
        self.programmed: dict[str, int] = {}
        self.conntrack_deleted = 0
        self.policy: Optional[NodePolicy] = None
        self.sysctls: dict[str, Optional[str]] = {}
        self.complete = True
        self.guard = guard
        self.loss = EndpointLossGuard(request)

    def converge(self, witness: Witness) -> Report:
        """Program the node with the cluster's Services."""
        request = self.request
        witness.begin()
        self._note(self.guard.begin())
        with self.watch.stage("facts"):
            chosen = choose_mode(request)
            mode = chosen.mode
            configuration = in_mode(request.configuration, mode.name)
            view = view_node(request, configuration, mode)
        self.warnings += [*chosen.warnings, *view.warnings, *check_cluster(request, view)]
        if mode.serves:
            self.warnings += conflict_warnings(request.cluster.conflicts)
        with self.watch.stage("service_ports"):
            families = family_services(request.cluster, configuration, view)
        for item in families:
            self.warnings += unserved(mode.rendering, item.service_ports.values())
        with self.watch.stage("preflight"):
            self.warnings += check_node(configuration, mode, families, request.ignore_findings, request.compare)
            self.warnings += check_policies(request, view)
        self._run([node_modules(mode, configuration, view)])
        families = self._with_schedulers(mode, families)
        contexts = [item.context for item in families]
        with self.watch.stage("render"):
            stages = self._stages(mode, configuration, families)
            stages += self._policy_stages(configuration, view)
            others = removal.leftover_contexts(mode, contexts)
        self.guard.target(configuration)

        def allowed(planned: Sequence[PlannedChange]) -> None:
            self.loss.judge(planned, removal.leftover_stages(mode, self.handles, others), families)

        self._run([self._sysctls(configuration, view, contexts), *stages], allowed)
        self._note(self.loss.warnings)
        if not request.check:
            self._run(removal.leaving_stages(mode, self.handles))
        self._run(removal.leftover_stages(mode, self.handles, others))
        if not request.check:
            self._record_origin()
            if mode.serves:
                self._delete_stale_conntrack(configuration, families)
                self._end_removed(configuration, families)
            self._cut_connections(configuration)
            self._note(self.guard.after_change(mode.name, mode.filter_backend, view.name, view.addresses))
        witness.end(self._observed(mode, view))
        return self._report(chosen, view.name, contexts, families)

    def _note(self, warnings: Sequence[str]) -> None:
        """Add warnings that the next run may not have."""
        self.complete = self.complete and not warnings
        self.warnings += warnings

    def _observed(self, mode: Mode, view: NodeView) -> Observed:
        policies = self.request.configuration.node_proxy.network_policy.enabled
        return Observed(
            counted=mode.subsystems.counted and not policies,
            complete=self.complete,
            commits=tuple(self.handles.commits or ()),
            facts=view.facts,
            addresses=view.addresses,
            sysctls=self.sysctls,
        )

    def _with_schedulers(self, mode: Mode, families: Sequence[FamilyServices]) -> list[FamilyServices]:
        """Return the families with those schedulers that annotations request, the kernel has, and the mode can use."""
        found = []
        for context, ports in families:
            ports = within_limit(mode.rendering, ports)
            context = with_schedulers(context, mode.rendering, ports.values(), load=not self.request.check)
            self.warnings += ignored_annotations(mode.rendering, ports.values(), context.settings)
            found.append(FamilyServices(context, ports))
        every = [info for item in found for info in item.service_ports.values()]
        self.warnings += unwaited(every, self.request.configuration.node_proxy.service_policy)
        return found

    def _stages(
        self, mode: Mode, configuration: KubeProxyConfiguration, families: Sequence[FamilyServices]
    ) -> list[Stage]:
        """Return the stages of the mode; in a check, subsystems that are not loaded count as empty."""
        desired = mode.rendering.desired_tables
        tables = [FamilyTables(item.context, desired(item.service_ports, item.context.settings)) for item in families]
        stages = mode.stages(configuration, tables, self.handles)
        self.of_cluster += [stage.resource for stage in stages]
        return [*stages, *mode.extra_stages([item.context for item in families])]

    def _policy_stages(self, configuration: KubeProxyConfiguration, view: NodeView) -> list[Stage]:
        """Return the stage of network policies, or the one that removes those of an earlier run."""
        settings = configuration.node_proxy.network_policy
        if not settings.enabled:
            return removal.policy_removal_stages(self.handles)
        from .policy import annotation_warnings, find_links, node_policy, policy_stage

        policy = self.policy = node_policy(self.request.cluster, settings, view.name, view.addresses)
        find_links(policy, settings)
        self.warnings += annotation_warnings(policy)
        stage = policy_stage(policy, settings, self.handles, self.request.check)
        self.of_cluster.append(stage.resource)
        return [stage]

    def _cut_connections(self, configuration: KubeProxyConfiguration) -> None:
        """Cut connections that a change of policies no longer allows, if so configured.

        The policies are in force without it, so a failure only causes a warning.
        """
        cuts = configuration.node_proxy.network_policy.established_connections == CUT
        changed = any(item.change and item.resource.kind == Kind.POLICY_OBJECTS for item in self.planned)
        if self.policy is None or not cuts or not changed:
            return
        from ..kernel.conntrack.socket import finished
        from .policy import cutting_denied

        try:
            self.conntrack_deleted += finished(cutting_denied(self.policy, progress=self.handles.progress))
        except KernelError as error:
            self.warnings.append(str(error))

    def _policy_coverage(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if self.policy is None:
            return (), ()
        from .policy import policy_coverage

        return policy_coverage(self.policy, self.request.cluster)

    def remove(self) -> Report:
        """Remove everything that any mode programmed; only the policies where another program serves the Services."""
        self.warnings += self.guard.begin()
        standalone = self.request.configuration.node_proxy.network_policy.standalone
        with self.watch.stage("preflight"):
            self.warnings += check_removal(self.request, standalone, self.handles)
        if standalone:
            return self._removed(removal.policy_removal_stages(self.handles))
        with self.watch.stage("facts"):
            contexts = removal_contexts()
        if not self.request.check:
            self._run(removal.server_removal_stages(self.handles))
        return self._removed(removal.removal_stages(contexts, self.handles), contexts)

    def release(self) -> Report:
        """Remove objects that were left for kube-proxy and that it does not use.

        Network policies are among them, unless they stay enabled here: without an agent no program would keep them up
        to date, so that new pods would be isolated by policies of others that had their addresses.
        """
        self.warnings += self.guard.begin()
        from .modes.stages.release import release_stages

        stages = release_stages(self.handles)
        if not self.request.configuration.node_proxy.network_policy.enabled:
            stages += removal.policy_removal_stages(self.handles)
        return self._removed(stages)

    def _removed(self, stages: Sequence[Stage], contexts: Sequence[FamilyContext] = ()) -> Report:
        """Apply the stages of a removal, the last ones, and return the report."""
        self._run(stages)
        if not self.request.check:
            self._note(self.guard.after_change("", "", "", ()))
        return self._report(None, "", contexts, ())

    def _sysctls(
        self, configuration: KubeProxyConfiguration, view: NodeView, contexts: Sequence[FamilyContext]
    ) -> Stage:
        wanted = wanted_node_sysctls(configuration, view, contexts)
        stage, warnings = sysctl_stage(wanted)
        self.warnings += warnings
        self.sysctls = {**dict.fromkeys(wanted), **({} if callable(stage.desired) else stage.desired)}
        return stage

    def _run(
        self, stages: Sequence[Stage], judge_plan: Callable[[Sequence[PlannedChange]], None] = lambda _planned: None
    ) -> None:
        """Plan the stages, apply the plan unless this is a check, and record it for the report.

        ``judge_plan`` is called with the plan before it is applied, and raises if it must not be applied.
        """
        with self.watch.stage("observe"):
            planned = plan(stages)
            judge_plan(planned)
        self._note(removal.ended_isolation(planned))
        if not self.request.check:
            if any(item.change for item in planned):
                with self.watch.stage("save"):
                    self._note(self.guard.before_change())
            with self.watch.stage("apply"), self.guard.explained():
                self.watch.add(apply_plan(planned))
        self.planned += planned
        for item in planned:
            growth = 0 if self.request.check else len(item.change.added) - len(item.change.removed)
            self.programmed[item.resource.label] = item.entries + growth

    def _delete_stale_conntrack(
        self, configuration: KubeProxyConfiguration, families: Sequence[FamilyServices]
    ) -> None:
        """Delete stale entries if a UDP Service changed since the last convergence so that there can be any.

        Entries of addresses that no Service has any more are deleted, too. So they are if something was missing:
        meanwhile a flow to a Service may have begun without NAT.

        The Services work without it, so a failure, including one to write the ledger, only causes a warning. The next
        run tries again, because the ledger is updated only after success.
        """
        directory = self.request.state_directory
        settings = configuration.node_proxy.behaviour
        protocols = released_protocols(settings.behaviour, settings.end_deleted)
        before, now = read_ledger(directory), flows_of(families, protocols)
        if now == before and not any(
            item.resource in self.of_cluster and (item.change.added or item.change.replaced) for item in self.planned
        ):
            return
        released = [item for item in before.frontends - now.frontends if item.protocol in protocols]
        # A new Service without endpoints changes tables, too, but kube-proxy deletes no entry then.
        every = settings.behaviour.stale_flows_end or released or now.serving != before.serving
        with self.watch.stage("conntrack"):
            try:
                from ..kernel.conntrack.socket import ConntrackSocket
                from ..kernel.conntrack.stale import delete_half_open, delete_stale

                with ConntrackSocket() as sock:
                    for context, ports in families:
                        family = context.family
                        own = [item for item in released if not item.address or family_of(item.address) == family]
                        chosen = [info for info in ports.values() if every or any(e.serving for e in info.endpoints)]
                        self.conntrack_deleted += delete_stale(sock, family, chosen, settings.behaviour, own)
                        self.conntrack_deleted += delete_half_open(sock, family, ports.values())
                write_ledger(directory, now)
            except KernelError as error:
                self._note([str(error)])

    def _record_origin(self) -> None:
        """Record whose Services are programmed; they are served without it, so a failure only causes a warning."""
        try:
            record_origin(self.request.state_directory, origin_of(self.request.cluster.services))
        except KernelError as error:
            self._note([str(error)])

    def _end_removed(self, configuration: KubeProxyConfiguration, families: Sequence[FamilyServices]) -> None:
        """Reset TCP connections to endpoints that this run may have removed, of Services that request it.

        New connections lead elsewhere without it, so a failure only causes a warning.
        """
        settings = configuration.node_proxy.service_policy
        if not any(item.change and item.resource in self.of_cluster for item in self.planned):
            return
        for context, ports in families:
            chosen = [
                info for info in ports.values() if info.protocol == "tcp" and not reset_after(info.policy, settings)
            ]
            if chosen:
                from .removed_endpoints import end_removed

                try:
                    self.conntrack_deleted += end_removed(context.family, chosen, self.handles.progress)
                except KernelError as error:
                    self._note([str(error)])

    def _report(
        self,
        chosen: Optional[ChosenMode],
        node_name: str,
        contexts: Sequence[FamilyContext],
        families: Sequence[FamilyServices],
    ) -> Report:
        changes = table_changes(self.planned, self.request.describe, self.of_cluster)
        unselected_pods, unused_policies = self._policy_coverage()
        variant = next((context.variant for context in contexts if context.variant is not None), None)
        return Report(
            mode=chosen.mode.name if chosen is not None else "",
            mode_reason=chosen.reason if chosen is not None else "",
            node_name=node_name,
            families=tuple(dict.fromkeys(context.family for context in contexts)),
            xtables_variant=variant,
            changed=bool(changes),
            changes=changes,
            counts=counts([item.service_ports for item in families], changes),
            programmed=self.programmed,
            refused=self.request.cluster.refusals,
            skipped=self.request.cluster.skipped,
            warnings=tuple(dict.fromkeys(self.warnings)),
            durations=self.watch.seconds,
            conntrack_deleted=self.conntrack_deleted,
            saved_state=self.guard.saved_state,
            confirm_until=self.guard.confirm_until,
            probes=default_probes(self.request.cluster),
            behaviour=self.request.configuration.behaviour.name,
            ipvs_filter_backend=chosen.mode.filter_backend if chosen is not None else "",
            unselected_pods=unselected_pods,
            unused_policies=unused_policies,
            targets=traffic_targets(self.request.traffic, families),
        )
