# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An agent's sync without kernel, API server and sockets: the tables of a mode in a dictionary, and a manual clock."""

from __future__ import annotations

import io
from types import SimpleNamespace

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift import watch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.other_proxy import OtherProxy
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import ProxyHealth
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import node, stale_flows
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.losses import EndpointLossWatch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.proxier import Proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.setup import Proxiers
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.mode import Mode, Subsystems
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import RESOURCE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Resource, Stage
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext
from tests.lab import manifests
from tests.unit.agent.reports_in_memory import reports_to


class DictResource(Resource):
    """A table held in a dictionary. ``failure``: the error of the next change."""

    kind, atomic = RESOURCE, True

    def __init__(self, family):
        self.family = family
        self.table = {}
        self.failure = ""
        self.observed = 0
        self.seconds = 0.0
        self.clock = lambda _seconds: None

    def observe(self):
        self.observed += 1
        return dict(self.table)

    def is_empty(self):
        return not self.table

    def apply(self, change):
        self.clock(self.seconds)
        if self.failure:
            failure, self.failure = self.failure, ""
            raise KernelError(failure)
        self.table.update(change.added)
        self.table.update({key: new for key, (_old, new) in change.replaced.items()})
        for key in change.removed:
            # What another program has removed is not missed, as in the kernel.
            self.table.pop(key, None)


class DictMode(Mode):
    """nftables mode with the table of each family in a dictionary. ``resource``: that of IPv4."""

    rendering = RENDERING
    subsystems = Subsystems(nftables=True)

    def __init__(self):
        self.resources = {family: DictResource(family) for family in FAMILIES}
        self.resource = self.resources["IPv4"]

    def stages(self, configuration, families, handles):
        return [Stage(self.resources[context.family], tables[RESOURCE]) for context, tables in families]


class Drift:
    """A stand-in for the drift watch that records the arguments of ``synced``."""

    def __init__(self, *_arguments):
        self.syncs = []
        self.closed = False

    def synced(self, changed, observed):
        self.syncs.append((changed, observed))

    def delay(self, _now):
        return 3600.0

    def close(self):
        self.closed = True


def service(name, number):
    """Return a ClusterIP Service with one port."""
    return manifests.service(name, f"10.96.0.{number}", [manifests.port(80)], namespace="d")


class SyncBench:
    """A node that is set up but has not synced yet. ``text``: the log. ``schedulers``: those that the kernel has.

    ``families``: those that the node serves.
    """

    SETTINGS = DataplaneSettings("IPv4", "n1", "192.0.2.1")

    def __init__(self, monkeypatch, configuration=None, schedulers=(), families=("IPv4",)):
        self.now = 1000.0
        self.text = io.StringIO()
        self.events = []
        reports = reports_to(self.text, lambda *event: self.events.append(event))
        self.metrics = reports.metrics
        timers = self.timers = Timers(lambda: self.now)
        self.view = ClusterView()
        self.mode = DictMode()
        self.mode.resource.clock = self.pass_time
        self.failed_ports = []
        self.behind = False
        settings = self.SETTINGS._replace(schedulers=frozenset(schedulers))
        self.contexts = [
            FamilyContext(settings._replace(family=family), NodeContext(family, "n1", ""), None) for family in families
        ]
        self.context = self.contexts[0]
        self.health = ProxyHealth(60.0, lambda: self.now, lambda: self.now)
        surface = SimpleNamespace(
            configure=lambda _configuration: None,
            keep_families=lambda _families: None,
            sync_service_health=lambda _settings, _ports, _counts: [],
        )
        monkeypatch.setattr(node, "set_up", self.set_up)
        monkeypatch.setattr(watch, "DriftWatch", Drift)
        # tests/kernel/test_conntrack_stale.py shows it with a kernel.
        monkeypatch.setattr(stale_flows, "delete_half_open", lambda *_words: 0)
        self.other_proxy = OtherProxy(timers.clock, reports, expected=lambda: False)
        self.sync = node.NodeSync(
            load(configuration or {}, "").configuration,
            view=self.view,
            health=self.health,
            surface=surface,
            ports=SimpleNamespace(report=self.failed_ports.extend),
            handles=KernelHandles(),
            timers=timers,
            is_behind=lambda: self.behind,
            reports=reports,
            losses=EndpointLossWatch(50.0, 0.0, timers.clock),
            other_proxy=self.other_proxy,
        )
        self.sync.set_up(self.request())

    def request(self, configuration=None):
        """Return a request for the configuration in effect, or another one."""
        return Request(self.view.state, configuration or self.sync.configuration)

    def set_up(self, request, handles):
        """Replace the function of that name."""
        configuration = request.configuration
        view = SimpleNamespace(node=None, name="n1", nfacct_counters=())
        proxiers = tuple(Proxier(configuration, self.mode, context, handles) for context in self.contexts)
        return Proxiers(
            configuration=configuration,
            mode=self.mode,
            mode_reason="requested",
            node_view=view,
            families=proxiers,
            warnings=(),
            sysctls={},
        )

    def pass_time(self, seconds):
        self.now += seconds

    def put(self, *objects):
        """Deliver changed objects of one kind; return the families that they concern."""
        return self.view.apply(Batch(objects[0]["kind"], list(objects), [])).families

    def delete(self, *objects):
        """Deliver deleted objects of one kind."""
        self.view.apply(Batch(objects[0]["kind"], [], list(objects)))

    @property
    def table(self):
        return self.mode.resource.table
