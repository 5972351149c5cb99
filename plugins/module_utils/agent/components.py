# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The components of an agent, and how they are connected.

``source`` follows the API server, ``sync`` keeps the node in sync with what the source delivered and repairs changes by
other programs, ``surface`` serves health, metrics and questions. Components do not know each other's work; each
receives callables for what it needs from others.
"""

from __future__ import annotations

import time
from typing import Callable, Optional, Union

from ..clients import ClientRule
from ..cluster.account import BYTES_OF_SLOTS, rates_of
from ..configuration.model import NODE_CIDR, KubeProxyConfiguration
from ..convergence.handles import KernelHandles
from ..convergence.request import Request
from ..convergence.runtime.ledger import read_origin
from ..event_reasons import Reason
from ..preflight.findings import KUBE_PROXY, OTHER_CLUSTER
from .api.access import ApiAccess
from .api.events import Content, node_reference
from .checks.checks import CheckFollower, Checks
from .checks.prober import VerdictChange
from .drain import Drain
from .forwarding import Forwarding
from .http.connections import limits_of, raise_open_files
from .memory import MemoryBudget
from .other_proxy import OtherProxy
from .policies.policy import PolicySync
from .policies.policy_metrics import policy_values
from .ports.control import ControlRequest
from .ports.health import ProxyHealth
from .ports.surface import PortKeeper, Surface
from .reports import Reports
from .services.losses import EndpointLossWatch
from .services.node import NodeSync
from .settings import AgentOptions, Settings, command_line_flags, configure_log, load_settings
from .source.cluster_source import ClusterSource
from .source.disk_copy import DiskCopy
from .source.first_services import FirstObjects
from .source.known import Batch
from .source.static_source import StaticSource
from .telemetry.log import LimitedLog, Log
from .telemetry.metric_tables import DRAIN, FORWARDING, MEMORY, POLICIES, SOURCE, TRAFFIC
from .telemetry.metrics import Metrics
from .threads.failures import Steps
from .threads.inbox import Inbox
from .threads.supervision import Supervisor
from .threads.timers import Timers
from .traffic import Traffic
from .views import Views

#: What other threads deliver to the loop.
Delivered = Union[Batch, FirstObjects, VerdictChange, ControlRequest]


class Components:
    """The components of one agent. ``progress`` is called repeatedly during long work."""

    def __init__(self, options: AgentOptions, log: Log, progress: Callable[[], None]) -> None:
        self.options = options
        self.log = log
        self.limited = LimitedLog(log)
        self.steps = Steps(self.limited)
        # As loaded; ``sync`` has the configuration of the mode in effect.
        self.settings, self.configuration_warnings = load_settings(options)
        loaded = self.settings.configuration
        configure_log(log, options, loaded)
        for warning in self.configuration_warnings:
            log.warning(warning)
        # By the monotonic clock.
        self.started = time.monotonic()
        # Why the configuration on disk is not in effect; empty if it is.
        self.reload_error = ""
        self.supervisor = Supervisor(log)
        self.timers = Timers()
        self.metrics = Metrics()
        self.reports = Reports(log, self.limited, self.metrics, self.post)
        self.health = ProxyHealth(2 * loaded.sync_period)
        self.drain = Drain(options.drain_file, self.timers, self.reports)
        self.health.drained = lambda: self.drain.active
        self.metrics.on_scrape(DRAIN, lambda: {"drained": self.drain.active})
        self.inbox: Inbox[Delivered] = Inbox()
        files = raise_open_files()
        self.clients = ClientRule()
        self.forwarding = Forwarding(self.supervisor, self.timers, self.limited, self.clients, files)
        self.handles = KernelHandles(progress, self.forwarding)
        self.api = ApiAccess(
            self._kubeconfig,
            options.token,
            of_node=lambda: bool(self.settings.followed_node),
            leave=self._leave,
            renamed=self.inbox.wake,
            metrics=self.metrics,
            log=log,
            limited=self.limited,
        )
        self.api.configure(loaded.node_proxy.api_servers)
        self.memory = MemoryBudget(
            timers=self.timers,
            reports=self.reports,
            health=self.health,
            size=self._size,
            held_back=lambda: len(self.source.view.held_back) - self.source.view.withheld,
            factor=lambda: self.source.view.state.rates.bytes_of_object,
            list_held_back=self._list_held_back,
            reserves=lambda: self.policy.enabled,
        )
        self.metrics.on_scrape(MEMORY, self.memory.values)
        self.source = ClusterSource(
            connect=self.api.connect,
            deliver=self.inbox.deliver,
            supervisor=self.supervisor,
            disk_copy=DiskCopy(options.cache, log),
            log=log,
            node_required=lambda: self.configuration.detect_local_mode == NODE_CIDR,
            room=self.memory,
            progress=progress,
            any_cluster=OTHER_CLUSTER in options.ignore_findings,
            recorded=lambda: read_origin(options.state_directory),
        )
        self.source.view.set_rates(rates_of(loaded.mode))
        self.surface = Surface(
            loaded,
            self.health,
            self.metrics,
            self.limited,
            self.supervisor,
            clients=self.clients,
            limits=limits_of(files),
            flags=command_line_flags(options),
            started=self.started,
        )
        self.other_proxy = OtherProxy(self.timers.clock, self.reports, expected=self._expects_other_proxy)
        self.health.other_proxy = lambda: self.other_proxy.text
        self.ports = PortKeeper(
            self.surface,
            self.limited,
            self.timers,
            self.post,
            must_bind=lambda: self.configuration.bind_address_hard_fail,
            other_proxy=self.other_proxy,
        )
        self.sync = NodeSync(
            loaded,
            view=self.source.view,
            health=self.health,
            surface=self.surface,
            ports=self.ports,
            handles=self.handles,
            timers=self.timers,
            is_behind=lambda: not self.inbox.is_empty,
            reports=self.reports,
            losses=EndpointLossWatch(options.max_unserved_percent, options.hold_loss, self.timers.clock),
            other_proxy=self.other_proxy,
        )
        self.policy = PolicySync(
            self.source.view,
            self.handles,
            self.timers,
            reports=self.reports,
            health=self.health,
            unserved=lambda: self.source.unserved,
        )
        self.metrics.on_scrape(POLICIES, lambda: policy_values(self.policy.status(), self.policy.pods))
        static = StaticSource(loaded.node_proxy.static_services.directory, log)
        self.views = Views(self.source, static, self.sync, progress)
        self.views.confine(loaded.node_proxy.service_policy.external_ranges)
        self.health.preliminary = lambda: self.views.preliminary or self.sync.proxiers is None
        self.traffic = Traffic(
            self.sync, lambda: self.views.current, self.handles, timers=self.timers, limited=self.limited
        )
        self.metrics.on_scrape(TRAFFIC, self.traffic.values)
        self.metrics.on_scrape(FORWARDING, self.forwarding.status)
        self.checks = Checks(
            loaded.node_proxy.health_checks,
            deliver=self.inbox.deliver,
            supervisor=self.supervisor,
            reports=self.reports,
        )
        self.check_follower = CheckFollower(self.checks, self.views, self.sync, timers=self.timers, steps=self.steps)
        self.metrics.on_scrape(SOURCE, lambda: {"connected": self.source.connected, "age": self.source.disk_copy.age()})

    @property
    def configuration(self) -> KubeProxyConfiguration:
        """The configuration of the mode in effect."""
        return self.sync.configuration

    @property
    def node_name(self) -> str:
        """The name of this node's Node object."""
        return self.settings.node_name

    def post(self, about: Optional[dict[str, str]], kind: str, reason: Reason, action: str, note: str) -> None:
        """Post an Event about an object, by default about this node."""
        node = node_reference(self.node_name)
        self.api.events.post(Content(about or node, kind, reason, action, note, related=node if about else None))

    def request(self, configuration: Optional[KubeProxyConfiguration] = None) -> Request:
        """Return the request to converge the node with a configuration, by default the one that was loaded."""
        return Request(
            cluster=self.views.current.state,
            configuration=configuration or self.settings.configuration,
            node_name=self.options.node_name,
            mode=self.options.mode,
            fallback=self.options.fallback,
            state_directory=self.options.state_directory,
            ignore_findings=self.options.ignore_findings,
            agent=True,
        )

    def tell_pods_apart(self) -> None:
        """Let each pod in a known range be one client, by the configuration and the Node as they are now."""
        loaded = self.settings.configuration
        node = self.source.view.state.nodes.get(self.node_name)
        of_node = node.pod_cidrs if node is not None else ()
        self.clients.set_pods((*loaded.cluster_cidrs, *loaded.node_proxy.network_policy.pod_cidrs, *of_node))

    def follow_nodes(self, before: Optional[str] = None, settings: Optional[Settings] = None) -> None:
        """Follow the Node of these settings, by default those in effect, and every Node while policies select them.

        ``before``: the name of the Node that is followed; by default it is the same.
        """
        settings = settings or self.settings
        name = settings.followed_node
        every = settings.follows_every_node or self.policy.selects_nodes
        self.source.follow_node(name, name if before is None else before, every)

    def _expects_other_proxy(self) -> bool:
        """Return whether another program is meant to serve the Services, or was accepted beside the agent."""
        standalone = self.settings.configuration.node_proxy.network_policy.standalone
        return standalone or KUBE_PROXY in self.options.ignore_findings

    def _size(self) -> int:
        """Return the bytes of the cluster's objects, with as many as take the memory of what else is programmed."""
        view, proxiers = self.source.view, self.sync.proxiers
        slots = proxiers.lists_of_slots * BYTES_OF_SLOTS if proxiers is not None else 0
        return view.size + int((slots + self.policy.bytes) / view.state.rates.bytes_of_object)

    def _list_held_back(self, has_room: bool) -> None:
        """List again what was held back. The source is made after the memory budget, which it asks."""
        self.source.list_held_back(has_room)

    def _leave(self, url: str) -> None:
        """End the watches at an API server that no longer answers. The source is made after the API it reads."""
        self.source.leave(url)

    def _kubeconfig(self) -> str:
        return self.options.kubeconfig or self.configuration.client_connection.kubeconfig
