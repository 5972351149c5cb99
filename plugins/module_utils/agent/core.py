# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of an agent and what it does with them: set the node up, sync, tell systemd, keep timers and servers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Callable, Dict, Iterable, List, Optional, Set

from ..cluster.api import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES, ApiClient
from ..cluster.connection import ApiConnection
from ..cluster.model import NamespacedName, Node
from ..configuration.model import NODE_CIDR, KubeProxyConfiguration
from ..convergence.handles import KernelHandles
from ..convergence.request import Request
from ..errors import ProxyError
from ..kernel.sysctls import SysctlsResource
from ..kernel.xtables.nfacct import nfacct_packets
from ..serviceports.node import node_name
from .drift.parameters import PARAMETERS_SECONDS
from .drift.watch import DriftWatch
from .options import AgentOptions, command_line_flags, read_configuration
from .source.inbox import Inbox
from .source.keeper import CacheKeeper
from .source.reflector import Reflector
from .source.token import TokenKeeper
from .source.view import ClusterView
from .supervision import Supervisor, Task
from .surface.events import WARNING, EventPoster, node_reference, service_reference
from .surface.health import ProxyHealth
from .surface.http_connections import limits_of, raise_open_files
from .surface.log import INFO, LimitedLog, Log
from .surface.metrics import Metrics
from .surface.service_health import FailedPort
from .surface.surface import RETRY_SECONDS, Surface
from .surface.systemd import Systemd
from .sync.losses import LossWatch
from .sync.schedule import Schedule
from .sync.setup import Proxiers, remove_leftovers, set_up
from .sync.syncer import Syncer

# How long the API server may take to answer before the state kept on disk is programmed, from the first request on:
# where nothing is served yet, and where the kernel serves what may well be newer than the state on disk.
API_PATIENCE_SECONDS = 1.0
SERVING_PATIENCE_SECONDS = 10.0
# How long a server that answers some of the lists may take for the others, and the credentials to be ready at all.
PARTIAL_PATIENCE_SECONDS = 60.0
ASKING_PATIENCE_SECONDS = 30.0
# Agents that are restarted together do not ask the API server all at once.
START_JITTER_SECONDS = 1.0
# For a request that the main loop itself waits for.
LOOP_REQUEST_SECONDS = 5.0
READY_PATIENCE_SECONDS = 10.0
NODE_PATIENCE_SECONDS = 10.0
CACHE_SECONDS = 30.0
DRAIN_SECONDS = 60.0
ADDRESS_PAUSE_SECONDS = 0.5
# kube-proxy 1.36 syncs at least so often in iptables and nftables mode.
LONGEST_INTERVAL_SECONDS = 3600.0
# A full check costs O(cluster): it may take a hundredth of a processor, however short the periods are.
CHECK_PAUSE_FACTOR = 100.0


class Fatal(Exception):
    """The agent has to end, and be started anew, for this reason."""


class AgentCore:
    """Everything that an agent consists of; ``daemon.Agent`` adds the loop that drives it."""

    def __init__(self, options: AgentOptions, log: Log, systemd: Optional[Systemd] = None) -> None:
        self.options = options
        self.log = log
        self.limited = LimitedLog(log)
        self.systemd = systemd or Systemd()
        self.configuration, warnings = read_configuration(options)
        self._configure_log(self.configuration)
        for warning in warnings:
            log.warning(warning)
        self._read_configuration = self.configuration
        self.started = time.time()
        self.supervisor = Supervisor(log)
        self._keeper = CacheKeeper(options.cache, log)
        self._keeper_task: Optional[Task] = None
        self._unsupported_selectors: Set[str] = set()
        self._api_warnings: Set[str] = set()
        self._serving = False
        self._token = TokenKeeper(options.token, self._connect, log)
        self.view = ClusterView()
        self.metrics = Metrics()
        self.metrics.api_connected.set_function(lambda: float(self._connected))
        self.metrics.cache_age.set_function(self._cache_age)
        self.health = ProxyHealth(2 * self.configuration.sync_period)
        self.surface = Surface(
            self.configuration,
            self.health,
            self.metrics,
            self.limited,
            limits=limits_of(raise_open_files()),
            flags=command_line_flags(options),
            started=self.started,
        )
        losses = LossWatch(options.max_loss_percent, options.hold_loss, time.monotonic)
        self.syncer = Syncer(self.view, self.health, self.metrics, self.surface, log, self.limited, losses)
        self.schedule = self._make_schedule()
        self.proxy: Optional[Proxiers] = None
        self.drift: Optional[DriftWatch] = None
        self.reflectors: List[Reflector] = []
        self.from_cache = False
        self.node_name = node_name(options.node_name or self.configuration.hostname_override, os.uname().nodename)
        self.last_sync_end = 0.0
        self._events: Optional[EventPoster] = None
        self._failed_services: Set[NamespacedName] = set()
        self._inbox = Inbox()
        self._stop = False
        self._reload = False
        self._handles = KernelHandles(self.systemd.progress)

        self._timers: Dict[str, float] = {}
        self._ready_sent = False
        self._node: Optional[Node] = None

    def stop(self) -> None:
        """End the loop soon; the dataplane stays as it is."""
        self._stop = True
        self._inbox.wake()

    def reload(self) -> None:
        """Read the configuration again soon."""
        self._reload = True
        self._inbox.wake()

    def install_signals(self) -> None:
        """SIGTERM and SIGINT stop, SIGHUP reloads. Only the main thread may do this."""
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.stop())
        signal.signal(signal.SIGINT, lambda _number, _frame: self.stop())
        signal.signal(signal.SIGHUP, lambda _number, _frame: self.reload())

    def _configure_log(self, configuration: KubeProxyConfiguration) -> None:
        """Apply the settings of ``logging``; options of the command line win."""
        self.log.as_json = (self.options.log_format or configuration.logging.format) == "json"
        self.log.verbose = self.options.verbose or configuration.debug_logging

    def _cache_age(self) -> float:
        return self._keeper.age()

    def _connect(self, expect: Callable[[float], None], timeout: float = 30.0) -> ApiClient:
        """Return a client, for use by one thread; ``expect`` learns how long each request may take."""
        kubeconfig = self.options.kubeconfig or self.configuration.client_connection.kubeconfig
        connection = ApiConnection(kubeconfig=kubeconfig or None)
        client = ApiClient(
            connection,
            timeout,
            unsupported=self._unsupported_selectors,
            expect=expect,
            observe=self.metrics.observe_request,
        )
        for warning in client.warnings:
            if warning not in self._api_warnings:
                self._api_warnings.add(warning)
                self.log.warning(warning)
        return client

    @property
    def _connected(self) -> bool:
        """Whether everything is being watched."""
        return bool(self.reflectors) and all(reflector.connected for reflector in self.reflectors)

    @property
    def _listed(self) -> bool:
        wanted = {SERVICES.kind, ENDPOINT_SLICES.kind, NODES.kind, SERVICE_CIDRS.kind}
        missing = wanted - self.view.listed
        # The Services count for more than a Node that this agent may not be allowed to read.
        late = time.time() - self.started > NODE_PATIENCE_SECONDS and self.configuration.detect_local_mode != NODE_CIDR
        return not missing or (late and missing <= {NODES.kind, SERVICE_CIDRS.kind})

    def _request(self) -> Request:
        return Request(
            cluster=self.view.state,
            configuration=self.configuration,
            node_name=self.options.node_name,
            mode=self.options.mode,
            fallback=self.options.fallback,
            state_directory=self.options.state_directory,
            ignore_findings=self.options.ignore_findings,
        )

    def _set_up(self) -> Proxiers:
        proxy = set_up(self._request(), self._handles)
        for warning in proxy.warnings:
            self.log.warning(warning)
        self._node = proxy.view.node
        if self._node is not None:
            self.health.node_seen(self._node)
        self.surface.configure(proxy.configuration)
        self.surface.keep_families([family.family for family in proxy.families])
        self.metrics.packets = nfacct_packets if proxy.view.nfacct_counters else dict
        self.configuration = proxy.configuration
        self.schedule = self._make_schedule()
        for family in proxy.families:
            self.health.updated(family.family)
            self.metrics.expect_repairs(stage.resource for stage in family.stages)
        self.metrics.expect_repairs([SysctlsResource(())])
        self._forget_drift()
        self.log.info(
            "programming this node",
            node=proxy.view.name,
            mode=proxy.configuration.mode,
            reason=proxy.mode_reason,
            families=",".join(family.family for family in proxy.families),
        )
        return proxy

    def _forget_drift(self) -> None:
        """The families will be others; what is watched begins anew with their first sync."""
        if self.drift is not None:
            self.drift.close()
            self.drift = None

    def _make_schedule(self) -> Schedule:
        configuration = self.configuration
        return Schedule(configuration.min_sync_period, configuration.sync_period, LONGEST_INTERVAL_SECONDS)

    def _sync(self, first: bool = False) -> None:
        proxy = self.proxy
        if proxy is None:
            return
        self.schedule.started()
        started = time.monotonic()
        outcome = self.syncer.start(proxy) if first else self.syncer.sync(proxy)
        now = time.monotonic()
        self.schedule.ended(now, outcome.succeeded)
        self.last_sync_end = time.time()
        if self.drift is None:
            # Not before the first sync of a node: it may make more notifications than any buffer holds.
            self.drift = DriftWatch(proxy.mode.subsystems, proxy.families, self._handles, self.log)
        self.drift.settled(outcome.changes > 0, outcome.observed)
        if outcome.observed:
            pause = max(proxy.configuration.check_period, CHECK_PAUSE_FACTOR * (now - started))
            self._timers["check"] = now + pause
            trim_memory()
        self._report_health_ports(outcome.failed_services)
        if outcome.loss:
            self._tell(node_reference(self.node_name), WARNING, "EndpointsLost", "Sync", outcome.loss)
        if outcome.held_until:
            self._set_timer("held", max(0.0, outcome.held_until - now))
        if any(family.draining for family in proxy.families):
            self._set_timer("drain", DRAIN_SECONDS)
        self._set_timer("gauges", CACHE_SECONDS)
        self._set_timer("parameters", PARAMETERS_SECONDS)
        if first or not self._ready_sent:
            self._send_ready()
            self._clean_up(proxy)
        self._show_status()

    def _clean_up(self, proxy: Proxiers) -> None:
        """What other modes left goes once this mode serves; a failure here stops nothing."""
        try:
            found = remove_leftovers(proxy, self.systemd.progress)
            if found.removed:
                self.log.info("removed what another mode had left", entries=found.removed)
            if found.draining:
                self.log.info("what ipvs mode left stays until connections end", real_servers=found.draining)
                self._set_timer("leftovers", DRAIN_SECONDS)
        except ProxyError as error:
            self.log.warning("what another mode left stays", error=error)
        if self.drift is not None:
            self.drift.settled(True, False)
        trim_memory()

    def _check_everything(self) -> None:
        """Have every family compared with the kernel by the next sync, whether or not a change was noticed."""
        for family in self.proxy.families if self.proxy is not None else ():
            self.syncer.suspects.setdefault(family.family, "regular check")
        self.schedule.request()

    def _repair_parameters(self) -> None:
        if self.proxy is not None:
            self.syncer.repair_parameters(self.proxy.sysctls)
            self._set_timer("parameters", PARAMETERS_SECONDS)

    def _clean_up_again(self) -> None:
        if self.proxy is not None:
            self._clean_up(self.proxy)

    def _show_status(self) -> None:
        proxy = self.proxy
        if proxy is None:
            return
        if self.syncer.last_error:
            text = f"last sync failed: {self.syncer.last_error}"
        else:
            services = max((len(family.summaries) for family in proxy.families), default=0)
            endpoints = sum(family.summaries.totals.endpoints for family in proxy.families)
            source = "kept on disk, API server away" if self.from_cache and not self._listed else "of the API server"
            text = f"mode {proxy.configuration.mode}: {services} Services, {endpoints} endpoints (state {source})"
        self.systemd.status(text)

    def _send_ready(self) -> None:
        if not self._ready_sent:
            self._ready_sent = True
            self.systemd.ready()

    def _set_timer(self, name: str, seconds: float) -> None:
        self._timers.setdefault(name, time.monotonic() + seconds)

    def _watchdog(self) -> None:
        """Look after the threads, and tell systemd that the agent is alive unless one of them is stuck."""
        stuck = self.supervisor.check()
        if not self.surface.server.alive:
            stuck = (*stuck, "http")
        self.health.threads_stuck(stuck)
        if self.systemd.watchdog_seconds and not stuck:
            self.systemd.alive()

    def _drain(self) -> None:
        if self.proxy is not None:
            gone, left = self.syncer.drain(self.proxy.families)
            if gone and self.drift is not None:
                self.drift.settled(True, False)
            if left:
                self._set_timer("drain", DRAIN_SECONDS)

    def _refresh_gauges(self) -> None:
        if self.proxy is not None:
            for family in self.proxy.families:
                self.syncer.count_rules(self.proxy, family)

    def _open_servers(self) -> None:
        for listener in self.surface.listeners:
            known = listener.failure
            if listener.open():
                continue
            if listener.failure != known:
                self.log.warning("server not started, is tried again", server=listener.name, error=listener.failure)
            if self.configuration.bind_address_hard_fail:
                what = "ProxierHealthcheck" if listener.name == "healthz" else "MetricServer"
                reason = f"FailedToStart{what}"
                self._tell(node_reference(self.node_name), WARNING, reason, "StartKubeProxy", listener.failure)
                raise Fatal(f"{listener.name}: {listener.failure}")
            self._set_timer("servers", RETRY_SECONDS)

    def _retry_health_ports(self) -> None:
        self._report_health_ports(self.surface.retry_service_health())

    def _report_health_ports(self, failures: Iterable[FailedPort]) -> None:
        """Log and post new failures, and log what failed before and no longer does; what fails is tried again."""
        for service, reason in failures:
            text = "health check node port cannot be served"
            if self.limited.warning(("port", service), text, service=service, reason=reason):
                about = service_reference(service.namespace, service.name)
                self._tell(about, WARNING, "FailedToStartServiceHealthcheck", "Listen", reason)
        before, self._failed_services = self._failed_services, set(self.surface.failed_services)
        for service in before - self._failed_services:
            if self.surface.serves(service):
                text = "health check node port is served now"
                self.limited.write(("port served", service), INFO, text, service=service)
        if self._failed_services:
            self._set_timer("health ports", RETRY_SECONDS)

    def _report_suppressed(self) -> None:
        self.limited.report()
        self._expect_suppressed()

    def _expect_suppressed(self) -> None:
        if self.limited.pending:
            self._set_timer("suppressed", self.limited.seconds)

    def _write_cache(self) -> None:
        if self._listed and self._keeper.is_behind(self.view) and not self._keeper.write_beside(self.view):
            self._set_timer("cache", CACHE_SECONDS)

    def _tell(self, about: Dict[str, str], kind: str, reason: str, action: str, note: str) -> None:
        if self._events is not None:
            self._events.post(about, kind, reason, action, note)


def trim_memory() -> None:
    """Give memory that the start has needed back to the system, where the C library can do that."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
