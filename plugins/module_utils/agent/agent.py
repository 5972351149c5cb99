# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent: a loop that owns timers and four parts, which know nothing of each other's work.

``source`` follows the API server, ``sync`` keeps the node in sync with what the source delivered, ``drift`` detects
changes by other programs, ``surface`` serves health, metrics and questions. The loop's thread does all the work; other
threads only wait for the network or the disk, and wake the loop through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Dict, Optional, Tuple

from ..cluster.resource_types import NODES, SERVICE_CIDRS
from ..configuration.load import load_given
from ..configuration.model import NODE_CIDR, KubeProxyConfiguration
from ..configuration.sections.network_policy import policy_resources
from ..configuration.validate import in_mode
from ..convergence.handles import KernelHandles
from ..convergence.modes.registry import with_listeners
from ..convergence.request import Request
from ..convergence.runtime.lock import AGENT, ConvergenceLock
from ..errors import KernelError, ProxyError
from ..kernel.presence import holds_dataplane, holds_policies
from ..serviceports.node import node_name
from .api.access import ApiAccess
from .api.events import NORMAL, WARNING, node_reference
from .checks.checks import Checks
from .checks.prober import VerdictChange
from .fatal import Fatal
from .forwarding import Forwarding
from .options import AgentOptions, command_line_flags
from .source.cluster_source import ClusterSource
from .source.inbox import Inbox
from .source.keeper import CacheKeeper
from .source.reflector import Batch
from .source.static_source import CHECK_SECONDS, StaticSource
from .supervision import Supervisor
from .surface.control import ControlRequest, ControlServer
from .surface.health import ProxyHealth
from .surface.http.connections import limits_of, raise_open_files
from .surface.log import LimitedLog, Log
from .surface.metrics import Metrics
from .surface.policy_metrics import PolicyMetrics
from .surface.ports import PortKeeper
from .surface.status import AgentState, answer, status_text
from .surface.surface import Surface
from .surface.systemd import Systemd
from .sync.losses import LossWatch
from .sync.node import NodeSync
from .sync.policy import PolicySync
from .timers import Timers
from .views import Views

LOCK_SECONDS = 30.0
#: When to report to the service manager that the agent is ready although the API server has not answered.
READY_PATIENCE_SECONDS = 10.0
CACHE_SECONDS = 30.0
#: How often to look whether the cluster is known while only static Services are served.
CLUSTER_PAUSE_SECONDS = 0.5


class Agent:
    """One agent; :meth:`run` returns when it was stopped."""

    def __init__(self, options: AgentOptions, log: Log, systemd: Optional[Systemd] = None) -> None:
        self.options = options
        self.log = log
        self.limited = LimitedLog(log)
        self.systemd = systemd or Systemd()
        # As it was read; ``sync`` has the configuration of the mode in effect.
        self._configuration, warnings = load_given(options.configuration, options.mode)
        self._configure_log(self._configuration)
        for warning in warnings:
            log.warning(warning)
        self.started = time.time()
        self.node_name = self._name_node(self._configuration)
        self.supervisor = Supervisor(log)
        self.timers = Timers()
        self.metrics = Metrics()
        self.health = ProxyHealth(2 * self._configuration.sync_period)
        self._inbox = Inbox()
        files = raise_open_files()
        self.forwarding = Forwarding(self.supervisor, self.timers, self.limited, files)
        self._handles = KernelHandles(self.systemd.progress, self.forwarding)
        self.api = ApiAccess(self._kubeconfig, options.token, leave=self._leave_server, metrics=self.metrics, log=log)
        self.api.configure(self._configuration.node_proxy.api_servers)
        self.source = ClusterSource(
            connect=self.api.connect,
            deliver=self._inbox.deliver,
            supervisor=self.supervisor,
            keeper=CacheKeeper(options.cache, log),
            log=log,
            node_required=lambda: self.configuration.detect_local_mode == NODE_CIDR,
        )
        self.surface = Surface(
            self._configuration,
            self.health,
            self.metrics,
            self.limited,
            self.supervisor,
            limits=limits_of(files),
            flags=command_line_flags(options),
            started=self.started,
        )
        self.ports = PortKeeper(
            self.surface,
            self.limited,
            self.timers,
            self._post,
            must_bind=lambda: self.configuration.bind_address_hard_fail,
        )
        self.sync = NodeSync(
            self._configuration,
            view=self.source.view,
            health=self.health,
            metrics=self.metrics,
            surface=self.surface,
            ports=self.ports,
            handles=self._handles,
            timers=self.timers,
            log=log,
            limited=self.limited,
            losses=LossWatch(options.max_loss_percent, options.hold_loss, self.timers.clock),
            post=self._post,
        )
        self.policy = PolicySync(
            self.source.view, self._handles, self.timers, log=log, limited=self.limited, health=self.health
        )
        self.metrics.registry.register(PolicyMetrics(self.policy.status, lambda: self.policy.pods))
        static = StaticSource(self._configuration.node_proxy.static_services.directory, log)
        self.views = Views(self.source, static, self.sync)
        self.metrics.forwarding = self.forwarding.status
        self.checks = Checks(
            self._configuration.node_proxy.health_checks,
            deliver=self._inbox.deliver,
            supervisor=self.supervisor,
            log=log,
            metrics=self.metrics,
            post=self._post,
        )
        self.metrics.api_connected.set_function(lambda: float(self.source.connected))
        self.metrics.cache_age.set_function(self.source.keeper.age)
        self._save_timer = self.timers.add("save the cluster state", self._save)
        self._suppressed = self.timers.add("report suppressed lines", self._report_suppressed)
        self._static_timer = self.timers.add("look for static Services", self._look_for_static)
        self._checked_addresses: Tuple[Tuple[str, str], ...] = ()
        self._stop = False
        self._reload = False
        self._ready_sent = False

    @property
    def configuration(self) -> KubeProxyConfiguration:
        """The configuration of the mode in effect."""
        return self.sync.configuration

    # ---- from other threads and signal handlers

    def stop(self) -> None:
        """End the loop soon; what the kernel was programmed with is kept."""
        self._stop = True
        self._inbox.wake()

    def reload(self) -> None:
        """Reload the configuration soon."""
        self._reload = True
        self._inbox.wake()

    def install_signals(self) -> None:
        """Stop at SIGTERM and SIGINT, reload at SIGHUP. Only the main thread may call this."""
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.stop())
        signal.signal(signal.SIGINT, lambda _number, _frame: self.stop())
        signal.signal(signal.SIGHUP, lambda _number, _frame: self.reload())

    # ---- life

    def run(self) -> int:
        """Serve until stopped. Return 0, or 1 after a failure that requires a restart. Raises ProxyError."""
        with contextlib.ExitStack() as stack:
            lock = ConvergenceLock(self.options.state_directory, LOCK_SECONDS, AGENT, outlasts_agent=True)
            stack.enter_context(lock)
            stack.enter_context(self._handles)
            stack.callback(self.surface.close)
            if self.options.control:
                control = ControlServer(self.options.control, self._inbox.deliver)
                stack.callback(control.close)
                self.supervisor.start("control", control.run)
            self.api.start(self.supervisor)
            try:
                self.ports.open()
                serving = self._is_serving()
                policies = policy_resources(self._configuration.node_proxy.network_policy)
                followed = self._followed_node(self._configuration, self.node_name)
                every = self._configuration.node_proxy.service_policy.node_weights
                self.source.start(followed, serving, policies, every)
                self._static_timer.start(CHECK_SECONDS)
                if serving or not self._serve_static_first():
                    self._await_cluster()
                    if not self._stop:
                        self._begin()
                self._loop()
            except Fatal as error:
                self.log.error("the agent exits", reason=error)
                return 1
            finally:
                self._end()
        return 0

    def _is_serving(self) -> bool:
        """Return whether the kernel serves Services from before this start, or enforces policies if that is all."""
        only = self._configuration.node_proxy.network_policy.only
        try:
            return holds_policies() if only else holds_dataplane()
        except KernelError as error:
            self.log.debug("cannot determine whether the kernel already serves", error=error)
            return False

    def _serve_static_first(self) -> bool:
        """Serve static Services on a node that serves nothing, before the cluster is known; return whether it does.

        They may be the way to the API servers. The rest follows in :meth:`_serve_cluster`.
        """
        if not self.views.serve_static():
            return False
        try:
            self._begin()
        except ProxyError as error:
            self.log.warning("static Services have to wait for the cluster", error=error)
            self.views.serve_cluster()
            return False
        return True

    def _serve_cluster(self) -> None:
        """Go over from static Services only to all Services."""
        self.views.serve_cluster()
        self.sync.rebuild(self._request(self._configuration))
        self._sync(first=True)

    def _look_for_static(self) -> None:
        self._static_timer.start(CHECK_SECONDS)
        self.views.look_for_static()
        self._follow_listeners()

    def _follow_listeners(self) -> None:
        """Set up again if static Services begin or cease to ask for userspace mode beside the node's mode."""
        proxiers = self.sync.proxiers
        if proxiers is None or with_listeners(proxiers.mode, self.views.current.state) is proxiers.mode:
            return
        try:
            self.sync.rebuild(self._request(self._configuration))
        except ProxyError as error:
            self.limited.warning("listeners", "the mode of static Services cannot change, retrying", error=error)
        else:
            # The next sync removes what is left of listeners, or of rules.
            self._ready_sent = False

    def _await_cluster(self) -> None:
        """Wait for the lists; if the API server is late, use the state kept on disk for the missing ones."""
        began = self.timers.clock()
        self.systemd.status("waiting for the API server")
        while not self._stop and not self.views.cluster_known(self.timers.clock()):
            now, due = self.timers.clock(), self.source.patience_ends()
            if now - began >= READY_PATIENCE_SECONDS:
                self._send_ready()
            self._inbox.wait((), 1.0 if due is None else min(0.5, max(0.01, due - now)))
            self._empty_inbox()
            self._look_after_threads()
            self.ports.open()

    def _begin(self) -> None:
        self.forwarding.configure(self._configuration)
        proxiers = self.sync.set_up(self._request(self._configuration))
        self.policy.configure(self._configuration.node_proxy.network_policy, self.node_name)
        self._post(None, NORMAL, "Starting", "StartKubeProxy", "")
        deprecation = proxiers.mode.deprecation
        if deprecation is not None:
            self._post(None, WARNING, deprecation.reason, "StartKubeProxy", deprecation.note)
        self._sync(first=True)

    def _loop(self) -> None:
        while not self._stop:
            drift = self.sync.drift
            watched = drift.filenos() if drift is not None else []
            self._inbox.wait([*watched, *self.policy.filenos()], self._delay())
            self._empty_inbox()
            self._look_after_threads()
            if self.limited.pending:
                self._suppressed.start(self.limited.seconds)
            if self._reload:
                self._reload = False
                self._reload_configuration()
            if self.views.static_only and not self._stop and self.views.cluster_known(self.timers.clock()):
                self._serve_cluster()
            if self._stop or self.sync.proxiers is None:
                continue
            self.policy.sync(self.sync.proxiers.view.addresses)
            # An endpoint at an address that the node has got is not checked any more; a new tuple is rare.
            moved = self.sync.proxiers.view.addresses is not self._checked_addresses
            if moved or self.views.current.dirty:
                self._follow_checks(everything=moved)
            self.sync.look()
            self.sync.request_if_needed()
            if self.sync.is_due:
                self._sync()
            self.timers.run()

    def _delay(self) -> float:
        delays = [self.sync.delay(), self.supervisor.delay(), self.timers.delay()]
        if self.views.static_only:
            delays.append(CLUSTER_PAUSE_SECONDS)
        if self.systemd.watchdog_seconds:
            delays.append(self.systemd.watchdog_seconds / 2)
        return max(0.0, min(delays))

    def _end(self) -> None:
        self.systemd.stopping()
        self.checks.stop()
        self.sync.stop_watching()
        self.policy.close()
        forwarded = bool(self.forwarding.table())
        self.forwarding.stop()
        self.api.stop()
        self.source.stop()
        self.limited.report(everything=True)
        left = "nothing is forwarded until the next start" if forwarded else "the programmed rules are kept"
        self.log.info(f"stopped; {left}", syncs=self.sync.syncer.syncs)

    # ---- what the loop does

    def _sync(self, first: bool = False) -> None:
        if first:
            self._follow_checks(everything=True)
        self.sync.sync(first)
        if self.sync.proxiers is not None and not self.sync.syncer.last_error:
            self.checks.end_connections(self.views.current, self.sync.proxiers.families)
        if first and self.sync.proxiers is not None:
            # Before systemd is notified, for which the start of kubelet waits.
            self.policy.sync(self.sync.proxiers.view.addresses)
        if first or not self._ready_sent:
            self._send_ready()
            self.sync.clean_up()
        self._show_status()

    def _follow_checks(self, everything: bool = False) -> None:
        proxiers = self.sync.proxiers
        addresses = proxiers.view.addresses if proxiers is not None else ()
        self._checked_addresses = addresses
        self.checks.follow(self.views.current, lambda: {address for _interface, address in addresses}, everything)

    def _empty_inbox(self) -> None:
        for item in self._inbox.items():
            if isinstance(item, Batch):
                self._apply(item)
            elif isinstance(item, VerdictChange):
                self.checks.changed(self.views.current, item)
            elif isinstance(item, ControlRequest):
                item.reply(answer(self._state(), item.question))
        self.api.servers.learn(self.source.view.state)

    def _apply(self, batch: Batch) -> None:
        view = self.source.view
        services, slices = view.apply(batch)
        if services:
            self.metrics.service_changes.inc(services)
            self.metrics.service_changes_pending.set(view.pending_services)
        if slices:
            self.metrics.endpoint_changes.inc(slices)
            self.metrics.endpoint_changes_pending.set(view.pending_slices)
        if self.views.static_only:
            return
        if batch.kind == NODES.kind:
            self.sync.node_changed(self.node_name, lambda: self.sync.rebuild(self._request(self.configuration)))
        elif batch.kind == SERVICE_CIDRS.kind:
            self.sync.refresh_addresses_soon()
        if view.dirty:
            self.sync.note_queued()
        if self.source.is_unsaved:
            self._save_timer.start(CACHE_SECONDS)

    def _save(self) -> None:
        if not self.source.save():
            self._save_timer.start(CACHE_SECONDS)

    def _look_after_threads(self) -> None:
        """Supervise the threads, and feed systemd's watchdog unless one of them is stuck."""
        stuck = self.supervisor.check()
        if not self.surface.server.alive:
            stuck = (*stuck, "http")
        self.health.threads_stuck(stuck)
        if self.systemd.watchdog_seconds and not stuck:
            self.systemd.alive()

    def _report_suppressed(self) -> None:
        self.limited.report()
        if self.limited.pending:
            self._suppressed.start(self.limited.seconds)

    def _leave_server(self, url: str) -> None:
        self.source.leave(url)

    def _post(self, about: Optional[Dict[str, str]], kind: str, reason: str, action: str, note: str) -> None:
        self.api.events.post(about or node_reference(self.node_name), kind, reason, action, note)

    def _state(self) -> AgentState:
        return AgentState(
            node=self.node_name,
            started=self.started,
            healthy=self.health.healthy,
            source=self.source,
            sync=self.sync,
            view=self.views.current,
            forwarding=self.forwarding,
            checks=self.checks,
            policy=self.policy,
            servers=self.api.servers,
            handles=self._handles,
        )

    def _send_ready(self) -> None:
        if not self._ready_sent:
            self._ready_sent = True
            self.systemd.ready()

    def _show_status(self) -> None:
        if self.sync.proxiers is not None:
            self.systemd.status(status_text(self._state()))

    # ---- configuration

    def _configure_log(self, configuration: KubeProxyConfiguration) -> None:
        """Apply the settings of ``logging``; command line options take precedence."""
        self.log.as_json = (self.options.log_format or configuration.logging.format) == "json"
        self.log.verbose = self.options.verbose or configuration.debug_logging

    def _kubeconfig(self) -> str:
        return self.options.kubeconfig or self.configuration.client_connection.kubeconfig

    def _name_node(self, configuration: KubeProxyConfiguration) -> str:
        return node_name(self.options.node_name or configuration.hostname_override, os.uname().nodename)

    @staticmethod
    def _followed_node(configuration: KubeProxyConfiguration, name: str) -> str:
        """Return the name of the Node to follow, empty for a host outside the cluster."""
        return "" if configuration.node_proxy.outside_host.enabled else name

    def _request(self, configuration: KubeProxyConfiguration) -> Request:
        return Request(
            cluster=self.views.current.state,
            configuration=configuration,
            node_name=self.options.node_name,
            mode=self.options.mode,
            fallback=self.options.fallback,
            state_directory=self.options.state_directory,
            ignore_findings=self.options.ignore_findings,
            agent=True,
        )

    def _reload_configuration(self) -> None:
        self.systemd.reloading()
        try:
            configuration, warnings = load_given(self.options.configuration, self.options.mode)
            for warning in warnings:
                self.log.warning(warning)
            self._apply_configuration(configuration)
        except ProxyError as error:
            self.log.error("reload failed; keeping the previous configuration", error=error)
        finally:
            self.systemd.ready()

    def _apply_configuration(self, configuration: KubeProxyConfiguration) -> None:
        """Apply a reloaded configuration. Raises ProxyError; nothing is changed in that case."""
        self.views.look_for_static()
        if configuration == self._configuration:
            self.log.info("the configuration has not changed")
            return
        name, old_name = self._name_node(configuration), self.node_name
        followed = self._followed_node(configuration, name)
        followed_before = self._followed_node(self._configuration, old_name)
        if followed and followed != followed_before:
            self.source.read_node(followed)
        self.forwarding.configure(configuration)
        if self.sync.proxiers is not None:
            self.sync.rebuild(self._request(configuration))
        else:
            self.sync.configuration = configuration
        self.node_name = name
        every = configuration.node_proxy.service_policy.node_weights
        if followed != followed_before or every != self._configuration.node_proxy.service_policy.node_weights:
            self.source.follow_node(followed, followed_before, every)
        if name != old_name:
            self.log.info("the name of this node has changed", node=name, before=old_name)
        self.policy.configure(configuration.node_proxy.network_policy, name)
        self.source.follow_others(policy_resources(configuration.node_proxy.network_policy))
        self._configuration = configuration
        self.api.configure(configuration.node_proxy.api_servers)
        self._configure_log(configuration)
        self.checks.settings = configuration.node_proxy.health_checks
        self._follow_checks(everything=True)
        self.views.look_for_static(configuration.node_proxy.static_services.directory)
        self.health.timeout = 2 * self.configuration.sync_period
        self.surface.configure(in_mode(configuration, self.configuration.mode))
        self.ports.open()
        self._ready_sent = False
        self.log.info("the configuration has changed and is in effect")
