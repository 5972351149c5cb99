# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The running agent: what comes in from the API server, signals, timers and the kernel, and when a sync follows.

One thread does all the work; the others only wait for the network. Whatever arrives wakes the loop through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any, Callable, Dict, List

from ..cluster.api import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES
from ..cluster.parse import object_key
from ..configuration.model import NODE_CIDR, KubeProxyConfiguration
from ..configuration.validate import in_mode
from ..convergence.lock import ConvergenceLock
from ..errors import ConfigurationError, KernelError, ProxyError
from ..kernel.presence import holds_dataplane
from ..serviceports.node import node_name
from .core import (
    ADDRESS_PAUSE_SECONDS,
    API_PATIENCE_SECONDS,
    ASKING_PATIENCE_SECONDS,
    CACHE_SECONDS,
    LOOP_REQUEST_SECONDS,
    PARTIAL_PATIENCE_SECONDS,
    READY_PATIENCE_SECONDS,
    SERVING_PATIENCE_SECONDS,
    START_JITTER_SECONDS,
    AgentCore,
    Fatal,
)
from .options import read_configuration
from .source.keeper import Names
from .source.reflector import Batch, Reflector
from .source.view import small
from .surface.control import Ask, ControlServer
from .surface.events import NORMAL, WARNING, EventPoster, node_reference
from .surface.log import INFO
from .surface.status import answer
from .surface.surface import RETRY_SECONDS
from .sync.setup import look_again, node_differences

LOCK_SECONDS = 30.0


class Agent(AgentCore):
    """One agent; :meth:`run` lasts until it is told to stop."""

    def run(self) -> int:
        """Serve until stopped. Returns 0, or 1 after a failure that only a new start can cure. Raises ProxyError."""
        with contextlib.ExitStack() as stack:
            holder = "the agent (kubenode-proxy run)"
            stack.enter_context(ConvergenceLock(self.options.state_directory, LOCK_SECONDS, holder))
            stack.enter_context(self._handles)
            stack.callback(self._close_surface)
            if self.options.control:
                control = ControlServer(self.options.control, self._inbox.deliver)
                stack.callback(control.close)
                self.supervisor.start("control", control.run)
            cached, names = self._keeper.read()
            self._open_servers()
            self._serving = self._is_serving()
            self._keeper_task = self.supervisor.start("cache", self._keeper.run)
            self._start_reflectors(names)
            if self.options.token:
                self.supervisor.start("token", self._token.run, self._token.interrupt)
            self._events = EventPoster(self._connect, os.uname().nodename, self.log)
            self.supervisor.start("events", self._events.run, self._events.interrupt)
            try:
                self._await_cluster(cached)
                if not self._stop:
                    self._begin()
                self._loop()
            except Fatal as error:
                self.log.error("the agent ends", reason=error)
                return 1
            finally:
                self._end()
        return 0

    def _end(self) -> None:
        self.systemd.stopping()
        for reflector in self.reflectors:
            reflector.stop()
        self._token.stop()
        self._forget_drift()
        if self._events is not None:
            self._events.close()
        if self._listed:
            self._keeper.write_now(self.view, self._keeper_task)
        self.limited.report(everything=True)
        self.log.info("stopped; what is programmed stays", syncs=self.syncer.syncs)

    # Both are looked up when they are called: a configuration that is read again replaces them.
    def _close_surface(self) -> None:
        self.surface.close()

    def _is_serving(self) -> bool:
        """Whether the kernel serves Services from before this start."""
        try:
            return holds_dataplane()
        except KernelError as error:
            self.log.debug("whether the kernel serves already is not known", error=error)
            return False

    def _start_reflectors(self, known: Names) -> None:
        # A node that serves nothing yet does not wait; all others may have been restarted at the same moment.
        pause = random.uniform(0.0, START_JITTER_SECONDS) if self._serving else 0.0
        self.reflectors.append(self._node_reflector(pause))
        self.reflectors += [
            Reflector(
                resource,
                self._connect,
                self._inbox.deliver,
                self.log,
                optional=resource is SERVICE_CIDRS,
                reduce=small,
                first_pause=pause,
            )
            for resource in (SERVICES, ENDPOINT_SLICES, SERVICE_CIDRS)
        ]
        for reflector in self.reflectors:
            reflector.known.assume(known.get(reflector.resource.kind, ()))
            self._start_reflector(reflector)

    def _start_reflector(self, reflector: Reflector) -> None:
        self.supervisor.start(f"watch-{reflector.resource.name}", reflector.run, reflector.interrupt)

    def _node_reflector(self, pause: float = 0.0) -> Reflector:
        return Reflector(
            NODES,
            self._connect,
            self._inbox.deliver,
            self.log,
            field_selector=f"metadata.name={self.node_name}",
            reduce=small,
            first_pause=pause,
        )

    def _read_node(self, name: str) -> List[Dict[str, Any]]:
        """The Node of that name, or nothing if there is none. Raises ApiError."""
        with contextlib.closing(self._connect(lambda _seconds: None, LOOP_REQUEST_SECONDS)) as client:
            return client.list(NODES, f"metadata.name={name}", reduce=small).items

    def _follow_node(self, old_name: str) -> None:
        """Watch another Node object: this node goes by another name from now on."""
        old = next(reflector for reflector in self.reflectors if reflector.resource is NODES)
        old.stop()
        self.reflectors.remove(old)
        self.view.take(Batch(NODES.kind, [], [{"kind": NODES.kind, "metadata": {"name": old_name}}]))
        self.reflectors.append(self._node_reflector())
        self._start_reflector(self.reflectors[-1])
        self.log.info("this node has another name", node=self.node_name, before=old_name)

    def _await_cluster(self, cached: List[Dict[str, Any]]) -> None:
        """Wait for the lists; where the API server is late, take what is missing from the state kept on disk."""
        began = time.monotonic()
        self.systemd.status("waiting for the API server")
        while not self._stop and not self._listed:
            now = time.monotonic()
            due = self._patience_ends(began)
            if cached and now >= due:
                self._take_cached(cached)
                return
            if now - began >= READY_PATIENCE_SECONDS:
                self._send_ready()
            self._wait(min(0.5, max(0.01, due - now)) if cached else 1.0)
            self._take_inbox()
            self._watchdog()
            self._open_servers()

    def _patience_ends(self, began: float) -> float:
        """Return until when, by the monotonic clock, the API server may answer the first lists.

        It counts from the first request that was sent or failed: the agent may have been busy before that.
        """
        asked = [reflector.asked for reflector in self.reflectors if reflector.asked is not None]
        if not asked:
            return began + ASKING_PATIENCE_SECONDS
        if self.view.listed:
            return min(asked) + PARTIAL_PATIENCE_SECONDS
        return min(asked) + (SERVING_PATIENCE_SECONDS if self._serving else API_PATIENCE_SECONDS)

    def _take_cached(self, cached: List[Dict[str, Any]]) -> None:
        by_kind: Dict[str, List[Dict[str, Any]]] = {}
        for raw in cached:
            by_kind.setdefault(object_key(raw).kind, []).append(raw)
        for kind, items in by_kind.items():
            if kind not in self.view.listed:
                self.view.take(Batch(kind, items, []))
        self.from_cache = True
        errors = [reflector.error for reflector in self.reflectors if reflector.error]
        self.log.warning(
            "starting from the cluster state kept on disk, as the API server has not given all of it",
            path=self.options.cache,
            services=len(self.view.state.services),
            reason=errors[0] if errors else "no answer yet",
        )

    def _begin(self) -> None:
        self.proxy = self._set_up()
        self._tell(node_reference(self.node_name), NORMAL, "Starting", "StartKubeProxy", "")
        deprecation = self.proxy.mode.deprecation
        if deprecation is not None:
            about = node_reference(self.node_name)
            self._tell(about, WARNING, deprecation.reason, "StartKubeProxy", deprecation.note)
        self._sync(first=True)

    def _loop(self) -> None:
        while not self._stop:
            self._wait(self._delay())
            self._take_inbox()
            self._watchdog()
            self._expect_suppressed()
            if self._reload:
                self._reload = False
                self._reload_configuration()
            if self._stop or self.proxy is None:
                continue
            self._look_at_kernel()
            if self.view.dirty or self.syncer.suspects:
                self.schedule.request()
            if self.schedule.delay(time.monotonic()) <= 0:
                self._sync()
            self._run_timers()

    def _delay(self) -> float:
        now = time.monotonic()
        delays = [self.schedule.delay(now), self.supervisor.delay()]
        delays += [due - now for due in self._timers.values()]
        if self.drift is not None:
            delays.append(self.drift.delay(now))
        if self.systemd.watchdog_seconds:
            delays.append(self.systemd.watchdog_seconds / 2)
        return max(0.0, min(delays))

    def _wait(self, seconds: float) -> None:
        self._inbox.wait(self.drift.filenos() if self.drift is not None else (), seconds)

    def _take_inbox(self) -> None:
        for item in self._inbox.items():
            if isinstance(item, Batch):
                self._take_batch(item)
            elif isinstance(item, Ask):
                item.reply(answer(self, item.question))

    def _take_batch(self, batch: Batch) -> None:
        services, slices = self.view.take(batch)
        if services:
            self.metrics.service_changes.inc(services)
            self.metrics.service_changes_pending.set(self.view.pending_services)
        if slices:
            self.metrics.endpoint_changes.inc(slices)
            self.metrics.endpoint_changes_pending.set(self.view.pending_slices)
        if batch.kind == NODES.kind:
            self._node_changed()
        elif batch.kind == SERVICE_CIDRS.kind:
            self._set_timer("addresses", ADDRESS_PAUSE_SECONDS)
        if self.view.dirty:
            self._note_queued()
        if self._keeper.is_behind(self.view):
            self._set_timer("cache", CACHE_SECONDS)

    def _note_queued(self) -> None:
        if self.proxy is None:
            return
        self.schedule.request()
        for family in self.proxy.families:
            self.health.queued(family.family)
            self.metrics.last_queued.labels(family.family).set_to_current_time()

    def _node_changed(self) -> None:
        node = self.view.state.nodes.get(self.node_name)
        if node is None:
            if self._node is not None:
                self.log.warning("this node's Node object is gone; its last version counts", node=self.node_name)
            return
        self.health.node_seen(node)
        if self.proxy is None:
            return
        differences = node_differences(self._node, node)
        if "its podCIDRs changed" in differences and self.configuration.detect_local_mode == NODE_CIDR:
            raise Fatal(f"Node {self.node_name}: its podCIDRs changed, and detectLocalMode is NodeCIDR")
        for difference in differences:
            self.log.warning("Node changed; a restart takes it up", node=self.node_name, change=difference)
        if self._node is None:
            self.log.info("the Node object of this node is known now", node=self.node_name)
            self._rebuild()
        elif node.zone != self._zone():
            self.log.info("the zone of this node changed", zone=node.zone)
            for family in self.proxy.families:
                family.set_zone(node.zone)
                family.needs_full = True
            self.view.dirty |= set(self.view.state.services)

    def _zone(self) -> str:
        return self.proxy.families[0].context.node.zone if self.proxy is not None else ""

    def _rebuild(self) -> None:
        """Make all families anew: who the node is, or its configuration, has changed."""
        self.proxy = self._set_up()
        self.view.dirty |= set(self.view.state.services)
        self.schedule.request()

    def _look_at_kernel(self) -> None:
        if self.drift is None or self.proxy is None:
            return
        found = self.drift.look(time.monotonic())
        if found.addresses:
            self._set_timer("addresses", ADDRESS_PAUSE_SECONDS)
        for family, reason in found.suspects.items():
            self.syncer.suspects.setdefault(family, reason)

    def _run_timers(self) -> None:
        now = time.monotonic()
        tasks: Dict[str, Callable[[], None]] = {
            "cache": self._write_cache,
            "drain": self._drain,
            "leftovers": self._clean_up_again,
            "addresses": self._refresh_addresses,
            "servers": self._open_servers,
            "health ports": self._retry_health_ports,
            "suppressed": self._report_suppressed,
            "gauges": self._refresh_gauges,
            "check": self._check_everything,
            "parameters": self._repair_parameters,
            "held": self.schedule.request,
        }
        for name in [name for name, due in self._timers.items() if due <= now]:
            del self._timers[name]
            tasks[name]()

    def _refresh_addresses(self) -> None:
        """Take up addresses of the node, or ServiceCIDRs, that came or went; only what they concern is programmed."""
        proxy = self.proxy
        if proxy is None:
            return
        try:
            self.proxy, settings = look_again(proxy, self.view.state)
        except ProxyError as error:
            self.limited.warning("addresses", "the node's addresses cannot be read, is tried again", error=error)
            self._set_timer("addresses", RETRY_SECONDS)
            return
        changed = [item.family for item in proxy.families if item.follow(settings[item.family], self.view.state)]
        if changed:
            self.limited.write("changed", INFO, "addresses or ServiceCIDRs changed", families=",".join(changed))
            self.schedule.request()

    def _reload_configuration(self) -> None:
        self.systemd.reloading()
        try:
            configuration, warnings = read_configuration(self.options)
            for warning in warnings:
                self.log.warning(warning)
            self._apply_configuration(configuration)
        except (ConfigurationError, ProxyError) as error:
            self.log.error("the configuration is not taken up; the earlier one stays in effect", error=error)
        finally:
            self.systemd.ready()

    def _apply_configuration(self, configuration: KubeProxyConfiguration) -> None:
        proxy = self.proxy
        if configuration == self._read_configuration:
            self.log.info("the configuration has not changed")
            return
        name = node_name(self.options.node_name or configuration.hostname_override, os.uname().nodename)
        if name != self.node_name:
            self.view.take(Batch(NODES.kind, self._read_node(name), []))
        before, self.configuration = self.configuration, configuration
        old_name, self.node_name = self.node_name, name
        try:
            if proxy is not None:
                self._rebuild()
        except ProxyError:
            self.configuration = before
            self.node_name = old_name
            self.proxy = proxy
            raise
        if name != old_name:
            self._follow_node(old_name)
        self._read_configuration = configuration
        self._configure_log(configuration)
        self.health.timeout = 2 * self.configuration.sync_period
        self.surface.configure(in_mode(configuration, self.configuration.mode))
        self._open_servers()
        self._ready_sent = False
        self.log.info("the configuration has changed and is in effect")
