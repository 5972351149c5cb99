# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's main loop.

The loop's thread does all the work of the components (see ``components``); other threads only wait for the network or
the disk, and wake the loop through a pipe.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any, Callable, Optional

from ..base.errors import KernelError, ProxyError, defect_text
from ..cluster.api.resource_types import NODES, SERVICE_CIDRS
from ..convergence.defaults import DEFAULT_LOCK_SECONDS
from ..convergence.modes.registry import with_listeners
from ..convergence.runtime.agent_client import RELOAD, error_answer
from ..convergence.runtime.ledger import record_origin
from ..convergence.runtime.lock import AGENT, ConvergenceLock
from ..event_reasons import Reason
from ..kernel.presence import holds_dataplane, holds_policies
from ..preflight.cluster_state import origin_of
from .answers.status import answer, status_text
from .api.events import NORMAL, WARNING
from .checks.prober import VerdictChange
from .components import Components
from .ports.control import ControlRequest, ControlServer
from .readiness import Readiness
from .reload import Reloads
from .settings import AgentOptions
from .source.first_services import FirstObjects
from .source.known import Batch
from .source.static_source import CHECK_SECONDS
from .telemetry.log import Log
from .telemetry.systemd import Systemd
from .threads.collector import COLLECT_SECONDS, begin_loading, collect, end_loading
from .threads.failures import Fatal

CACHE_SECONDS = 30.0
#: How long the loop processes what has arrived before it syncs.
INBOX_SECONDS = 0.5
#: The pause after a step of the loop has failed.
STEP_PAUSE_SECONDS = 0.5
#: How often to check that the path of the control socket exists.
CONTROL_SECONDS = 10.0
#: How often to check whether the cluster is known, since a request that fails wakes nothing.
CLUSTER_PAUSE_SECONDS = 0.05


class Agent:
    """One agent; :meth:`run` returns when it was stopped."""

    def __init__(self, options: AgentOptions, log: Log, systemd: Optional[Systemd] = None) -> None:
        self.options = options
        self.log = log
        self.systemd = systemd or Systemd()
        self.components = components = Components(options, log, self._progress)
        self.source, self.views, self.sync, self.policy = (
            components.source,
            components.views,
            components.sync,
            components.policy,
        )
        self.timers, self.supervisor, self.limited = components.timers, components.supervisor, components.limited
        self._inbox = components.inbox
        self.readiness = Readiness(components, self.systemd)
        components.health.stages = self.readiness.stages
        self._save_timer = self.timers.add("save the cluster state", self._save)
        self._suppressed = self.timers.add("report suppressed lines", self._report_suppressed)
        self._static_timer = self.timers.add("poll static Services", self._poll_static)
        self._collect_timer = self.timers.add("collect reference cycles", self._collect)
        self._control_timer = self.timers.add("keep the control socket", self._keep_control)
        self._control: Optional[ControlServer] = None
        self._stop = False
        self._reloads = Reloads(components, self.systemd)
        # Whether leftovers of other modes have been removed since the mode was last set up.
        self._cleaned_up = False

    # ---- from other threads and signal handlers

    def stop(self) -> None:
        """Ask the loop to end. Programmed rules stay in the kernel."""
        self._stop = True
        self._inbox.wake()

    def reload(self) -> None:
        """Reload the configuration soon."""
        self._reloads.request()
        self._inbox.wake()

    def install_signals(self) -> None:
        """Stop at SIGTERM and SIGINT, reload at SIGHUP. Only the main thread may call this."""
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.stop())
        signal.signal(signal.SIGINT, lambda _number, _frame: self.stop())
        signal.signal(signal.SIGHUP, lambda _number, _frame: self.reload())

    # ---- life

    def run(self) -> int:
        """Serve until stopped. Return 0, or 1 after a failure that requires a restart. Raises ProxyError."""
        begin_loading()
        self._collect_timer.start(COLLECT_SECONDS)
        with contextlib.ExitStack() as stack:
            lock = ConvergenceLock(self.options.state_directory, DEFAULT_LOCK_SECONDS, AGENT, outlasts_agent=True)
            stack.enter_context(lock)
            stack.enter_context(self.components.handles)
            stack.callback(self.components.surface.close)
            self.components.api.start(self.supervisor)
            try:
                if self.options.control:
                    self._keep_control()
                self.components.drain.read()
                self.components.ports.open()
                self.readiness.start()
                self._static_timer.start(CHECK_SECONDS)
                serving = self._is_serving()
                if not serving:
                    self.views.begin_preliminary()
                    self._serve_preliminary()
                settings = self.components.settings
                self.source.start(settings.followed_node, serving, settings.policies, settings.follows_every_node)
                self.components.memory.poll()
                self._await_cluster()
                self._loop()
            except Fatal as error:
                self.log.error("the agent exits", reason=error)
                return 1
            finally:
                self._end()
        return 0

    def _progress(self) -> None:
        """Report the progress of long work, and warn in the middle of it if its memory becomes short."""
        self.systemd.progress()
        self.components.memory.check_meanwhile()

    def _is_serving(self) -> bool:
        """Return whether an earlier process left Services programmed (with networkPolicy.standalone: policies)."""
        standalone = self.components.settings.configuration.node_proxy.network_policy.standalone
        try:
            return holds_policies() if standalone else holds_dataplane()
        except KernelError as error:
            self.log.debug("cannot determine whether the kernel already serves", error=error)
            return False

    def _serve_preliminary(self) -> None:
        """Serve what the preliminary view has so far. The rest follows in :meth:`_serve_cluster`."""
        if not self.views.preliminary or not self.views.current.state.services:
            return
        if self.sync.proxiers is not None:
            self._sync()
            return
        try:
            self._begin()
        except ProxyError as error:
            self.log.warning("cannot serve essential Services yet; waiting for the cluster", error=error)
            self.views.serve_cluster()

    def _serve_first(self, found: FirstObjects) -> None:
        """Serve the essential Services of the cluster, and only then list all of it."""
        self.views.add_first(found)
        self._serve_preliminary()
        self.source.follow_all()

    def _serve_cluster(self) -> None:
        """Serve all Services instead of the preliminary view."""
        self.views.serve_cluster()
        self.sync.rebuild(self.components.request())
        self._sync(first=True)

    def _poll_static(self) -> None:
        self._static_timer.start(CHECK_SECONDS)
        self.views.poll_static()
        if self.sync.proxiers is None:
            self._serve_preliminary()
        self._follow_listeners()

    def _keep_control(self) -> None:
        """Listen for commands. A disk on which no socket can be created is no reason not to serve."""
        self._control_timer.start(CONTROL_SECONDS)
        try:
            if self._control is None:
                self._control = ControlServer(self.options.control, self._inbox.deliver)
                self.supervisor.start("control", self._control.run)
            elif self._control.renew():
                self.log.warning("the control socket was removed by another program; created it again")
        except KernelError as error:
            self.limited.once("control", "the control socket cannot be created, retrying", error=error)

    def _collect(self) -> None:
        self._collect_timer.start(COLLECT_SECONDS)
        collect()

    def _follow_listeners(self) -> None:
        """Set up again if static Services start or stop requiring userspace mode beside the node's mode."""
        proxiers = self.sync.proxiers
        state, configuration = self.views.current.state, self.sync.configuration
        if proxiers is None or with_listeners(proxiers.mode, configuration, state) is proxiers.mode:
            return
        try:
            self.sync.rebuild(self.components.request())
        except ProxyError as error:
            self.limited.warning("listeners", "the mode of static Services cannot be changed, retrying", error=error)
        else:
            # The next sync removes leftover listeners or rules.
            self._cleaned_up = False

    def _await_cluster(self) -> None:
        """Wait until something is served: the cluster, or before it is known the preliminary view.

        If the API server is late, the state kept on disk replaces the lists that are missing.
        """
        self.systemd.status("waiting for the API server")
        while not self._stop and not (self.views.preliminary and self.sync.proxiers is not None):
            if self.views.cluster_known(self.timers.clock()):
                self.views.serve_cluster()
                self._begin()
                return
            self._inbox.wait((), self._cluster_pause())
            self._empty_inbox()
            self._look_after_threads()
            self._attempt("reload the configuration", self._reload_if_requested)
            self._attempt("open the ports", self.components.ports.open)
            self.timers.run(self._attempt)

    def _cluster_pause(self) -> float:
        """Return the seconds after which to check again whether the cluster is known."""
        return 1.0 if self.source.patience_ends() is None else CLUSTER_PAUSE_SECONDS

    def _begin(self) -> None:
        settings = self.components.settings
        self.components.forwarding.configure(settings.configuration)
        self.components.tell_pods_apart()
        proxiers = self.sync.set_up(self.components.request())
        self.policy.configure(settings.configuration, settings.node_name)
        self.components.traffic.configure(settings.configuration.node_proxy.traffic)
        self.components.post(None, NORMAL, Reason.STARTING, "StartKubeProxy", "")
        deprecation = proxiers.mode.deprecation
        if deprecation is not None:
            self.components.post(None, WARNING, deprecation.reason, "StartKubeProxy", deprecation.note)
        self._sync(first=True)

    def _loop(self) -> None:
        while not self._stop:
            self._attempt("show the status", lambda: self.systemd.status(status_text(self.components)))
            self._inbox.wait([*self.sync.watching.filenos(), *self.policy.filenos()], self._delay())
            self._empty_inbox()
            self.components.memory.check()
            self._look_after_threads()
            if self.limited.pending:
                self._suppressed.start(self.limited.seconds)
            self._attempt("reload the configuration", self._reload_if_requested)
            if self.views.preliminary and not self._stop and self.views.cluster_known(self.timers.clock()):
                self._serve_cluster()
            if self._stop or self.sync.proxiers is None:
                continue
            self._attempt("prepare network policies", self.readiness.fill)
            self._attempt("follow Nodes", self.components.follow_nodes)
            self.policy.sync(self.sync.proxiers.node_view.addresses)
            self._attempt("report readiness", self.readiness.poll)
            self.components.check_follower.follow()
            self.sync.watching.poll()
            self.sync.request_if_needed()
            if self.sync.is_due:
                self._attempt("sync", self._sync)
            self.timers.run(self._attempt)

    def _attempt(self, name: str, action: Callable[[], object]) -> bool:
        """Run a step of the loop; return whether it succeeded."""
        succeeded = self.components.steps.run(name, action)
        if not succeeded:
            # What has woken the loop may wake it at once again.
            time.sleep(STEP_PAUSE_SECONDS)
        return succeeded

    def _delay(self) -> float:
        delays = [self.sync.delay(), self.policy.delay(), self.supervisor.delay(), self.timers.delay()]
        if self.views.preliminary:
            delays.append(self._cluster_pause())
        if self.readiness.waits_for_lists:
            delays.append(CLUSTER_PAUSE_SECONDS)
        if self.systemd.watchdog_seconds:
            delays.append(self.systemd.watchdog_seconds / 2)
        return max(0.0, min(delays))

    def _end(self) -> None:
        self.systemd.stopping()
        self._reloads.refuse("the agent is stopping")
        if self._control is not None:
            self._control.close()
        self.components.checks.stop()
        self.sync.watching.close()
        self.policy.close()
        left = self._left_behind()
        self.components.forwarding.stop()
        self.components.api.stop()
        self.source.stop()
        self.limited.report(everything=True)
        self.log.info(f"stopped; {left}", syncs=self.sync.syncer.syncs)

    def _left_behind(self) -> str:
        """Return what serves after the agent has ended: what is in the kernel, but not what it forwards itself."""
        proxiers, listeners = self.sync.proxiers, len(self.components.forwarding.table())
        if proxiers is not None and proxiers.mode.needs_agent:
            return "nothing is forwarded until the next start"
        own = f", but not the {listeners} listeners of the agent, until the next start" if listeners else ""
        return f"the programmed rules are kept{own}"

    # ---- what the loop does

    def _sync(self, first: bool = False) -> None:
        if first:
            self.components.check_follower.follow(everything=True)
        self.sync.sync(first)
        if not self.sync.syncer.last_error:
            self.components.check_follower.end_connections()
        if first and self.sync.proxiers is not None:
            # Before systemd is notified: kubelet does not start until then.
            self.policy.sync(self.sync.proxiers.node_view.addresses)
        if (first or not self._cleaned_up) and (self.views.has_static or not self.views.preliminary):
            # kubelet waits for static Services, or for all.
            self._cleaned_up = True
            self.readiness.served()
            self.sync.clean_up_once_serving()
        if first and not self.views.preliminary:
            self._collect_timer.cancel()
            end_loading()
            self._save_soon()
            self._attempt("record the cluster", self._record_origin)

    def _record_origin(self) -> None:
        record_origin(self.options.state_directory, origin_of(self.source.view.state.services))

    def _empty_inbox(self) -> None:
        changed = False
        until = self.timers.clock() + INBOX_SECONDS
        for item in self._inbox.items():
            if isinstance(item, Batch):
                if self.source.follows(item.kind):
                    self._apply(item)
                    changed = True
            elif isinstance(item, FirstObjects):
                self._serve_first(item)
            elif isinstance(item, VerdictChange):
                self.components.check_follower.changed(item)
            elif isinstance(item, ControlRequest):
                if item.question.get("command") == RELOAD:
                    self._reloads.request(item)
                else:
                    item.reply(self._answer(item.question))
            if self.timers.clock() >= until:
                # Changes that have arrived before are not to wait for all that follow.
                self._inbox.wake()
                break
        if changed:
            self._attempt("report refused objects", self.sync.report_refusals)
        self._attempt("protect the API servers", self._protect_servers)

    def _protect_servers(self) -> None:
        servers = self.components.api.servers
        servers.learn(self.source.view.state)
        self.views.protect(servers.claims())

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return answer(self.components, question)
        except ProxyError as error:
            return error_answer(error)
        except Exception as error:
            # A question must not end the agent.
            self.limited.error("question", "a question cannot be answered", error=defect_text(error))
            return {"error": f"the agent cannot answer because of a defect, please report it: {defect_text(error)}"}

    def _apply(self, batch: Batch) -> None:
        view = self.source.view
        services, slices, families = self.source.apply(batch)
        if services:
            self.components.metrics.service_changes.inc(services)
            self.components.metrics.service_changes_pending.set(view.pending_services)
        if slices:
            self.components.metrics.endpoint_changes.inc(slices)
            self.components.metrics.endpoint_changes_pending.set(view.pending_slices)
        if batch.kind == NODES.kind:
            self.components.tell_pods_apart()
        if self.views.preliminary:
            return
        if batch.kind == NODES.kind:
            components = self.components
            self.sync.node_changed(
                components.node_name, lambda: self.sync.rebuild(components.request(components.configuration))
            )
        elif batch.kind == SERVICE_CIDRS.kind:
            self.sync.refresh_addresses_soon()
        if families:
            self.sync.note_queued(families)
        self._save_soon()

    def _save_soon(self) -> None:
        if self.source.is_unsaved:
            self._save_timer.start(CACHE_SECONDS)

    def _save(self) -> None:
        if self.source.save():
            self._save_timer.start(CACHE_SECONDS)

    def _look_after_threads(self) -> None:
        """Supervise the threads, and feed systemd's watchdog unless one of them is stuck."""
        stuck = self.supervisor.check()
        self.components.health.threads_stuck(stuck)
        if self.systemd.watchdog_seconds and not stuck:
            self.systemd.alive()

    def _report_suppressed(self) -> None:
        self.limited.report()
        if self.limited.pending:
            self._suppressed.start(self.limited.seconds)

    def _reload_if_requested(self) -> None:
        if self._reloads.run():
            self._cleaned_up = False
