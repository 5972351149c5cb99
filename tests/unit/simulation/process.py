# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One process of the agent: the whole of its loop, with an inbox, threads, sockets and a kernel that are simulated."""

from __future__ import annotations

import contextlib
import io
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Optional, Sequence
from unittest import mock

from ansible_collections.kubenode.proxy.plugins.module_utils.agent import agent as loop
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.agent import Agent
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.access import ApiAccess
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift import notifications, watch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.memory import MemoryBudget
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import inputs, policy, policy_table
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import settings as policy_settings
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.surface import PortKeeper
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import (
    followups,
    node,
    other_modes,
    stale_flows,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.proxier import Proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.setup import Proxiers
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.settings import AgentOptions
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.reflector import Reflector
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import NetworkPolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.iptables import IPTABLES_MODE
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.nftables import NFTABLES_MODE
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext
from tests.unit.transitions.iptables import variant_of
from tests.unit.transitions.states import Node

from .judge import Dataplane, Judge
from .kernel import LegacyWatch, Monitor, NoAddresses, PoliciesTable, ServicesTable, SimulatedKernel
from .policies import ADDRESSES, find_links
from .server import Client

HEAD = (
    "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: {}\n{}: {{masqueradeAll: {}}}\n"
)
NODE_HEAD = "---\napiVersion: kubenode.proxy/v1alpha1\nkind: NodeProxyConfiguration\n"
#: The time until which a thread waits that has nothing to do.
NEVER = math.inf


class Paused(BaseException):
    """A thread waits, for this many seconds."""


class Released:
    """In the place of an event for which a thread waits until the loop sets it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._process.threads:
            if thread.reflector is not None and thread.reflector.resource.kind == "Service":
                thread.due = self._process.world.clock.now

    def wait(self) -> None:
        raise Paused(NEVER)


class Thread:
    """A thread that the agent has started. ``due``: when it continues; ``rests``: not before this time."""

    def __init__(self, name: str, body: Callable[[Any], None], now: float) -> None:
        self.name = name
        self.body = body
        self.due = self.rests = now
        owner = getattr(body, "__self__", None)
        self.reflector: Optional[Reflector] = owner if isinstance(owner, Reflector) else None

    ended = False

    def busy(self, _seconds: float) -> None:
        """Take the place of the method of a task."""

    idle = join = lambda _self, *_arguments: None


class Process:
    """The agent from its start to its end.

    ``world``: has the clock, the API server, the kernel and the files. ``wait`` is called where the loop waits: with
    the descriptors that it waits for, and the seconds.
    """

    def __init__(self, world: Any, wait: Callable[[Sequence[int], float], None]) -> None:
        self.world = world
        self.log = io.StringIO()
        self.threads: list[Thread] = []
        self._copies: list[Any] = []
        options = AgentOptions(
            configuration=str(world.configuration), node_name="node1", state_directory=str(world.directory),
            cache=str(world.directory / "cluster.json"), control="", token="",
            drain_file=str(world.directory / "drain"),
        )  # fmt: skip
        self.agent = Agent(options, Log(self.log))
        components = self.agent.components
        self.judge: Judge = world.judge
        components.supervisor.start = self._start  # type: ignore[method-assign]
        self.agent._inbox.wait = wait  # type: ignore[method-assign]
        self._follow(components)
        world.policy_judge.follow(components.policy)

    def _start(self, name: str, body: Callable[[Any], None], _interrupt: Any = None) -> Thread:
        thread = Thread(name, body, self.world.clock.now)
        if thread.reflector is not None:
            thread.reflector._clock = self.world.clock
            thread.reflector._wait = _pause
            thread.due += self.world.chosen.random()
        self.threads.append(thread)
        return thread

    def _follow(self, components: Any) -> None:
        """Tell the judge what the agent knows, and what it has programmed."""
        agent, source = self.agent, components.source
        syncer = agent.sync.syncer
        fill, apply, finish, sync = syncer._fill, source.apply, syncer._finish, syncer._sync
        components.source.disk_copy._waiting = SimpleNamespace(put=self._copies.append, get=self._next_copy)

        def applied(batch: Any) -> Any:
            effect = apply(batch)
            self.note_known()
            return effect

        def synced(*arguments: Any, **named: Any) -> Any:
            self.note_known()
            return sync(*arguments, **named)

        def filled(*arguments: Any) -> Any:
            self.note_known()
            return fill(*arguments)

        def finished(found: Any, succeeded: bool) -> None:
            finish(found, succeeded)
            if succeeded and not syncer.is_waiting and not syncer.view.dirty:
                self.note_known()
                self.judge.synced(next(iter(found.families[0].tables.desired.values())))

        source.apply, syncer._fill, syncer._finish, syncer._sync = applied, filled, finished, synced
        components.source._first._released = Released(self)

    def _next_copy(self) -> Any:
        if not self._copies:
            raise Paused(NEVER)
        return self._copies.pop(0)

    def note_known(self) -> None:
        proxiers = self.agent.sync.proxiers
        if proxiers is not None:
            self.judge.knows(self.agent.views.current, self.world.node_of(proxiers.configuration))

    def run(self) -> None:
        """Do what :meth:`.Agent.run` does; return when the agent was stopped."""
        agent, components = self.agent, self.agent.components
        components.drain.read()
        agent.readiness.start()
        serving = agent._is_serving()
        if not serving:
            agent.views.begin_preliminary()
            agent._serve_preliminary()
        settings = components.settings
        agent.source.start(settings.followed_node, serving, settings.policies, settings.follows_every_node)
        agent._await_cluster()
        agent._loop()
        agent._end()

    def turn(self, thread: Thread) -> None:
        """Let a thread run until it waits."""
        now = self.world.clock.now
        try:
            thread.body(thread)
            thread.due = NEVER
            thread.ended = True
        except Paused as paused:
            thread.rests = now + paused.args[0]
            thread.due = thread.rests
        if thread.reflector is not None and not thread.ended:
            self._await_events(thread, thread.reflector)

    def _await_events(self, thread: Thread, reflector: Reflector) -> None:
        if not reflector.error and reflector._version:
            more = self.world.server.since(int(reflector._version))
            if not any(entry.item["kind"] == reflector.resource.kind for entry in more):
                thread.due = NEVER

    def changed(self, kind: str) -> None:
        """Let the threads that watch objects of a kind notice a change, after some time."""
        for thread in self.threads:
            if thread.reflector is not None and thread.reflector.resource.kind == kind:
                latency = self.world.chosen.choice((0.0, 0.01, 0.3, 2.0))
                thread.due = min(thread.due, max(thread.rests, self.world.clock.now + latency))

    def close(self) -> None:
        """Free what a process that has ended holds."""
        for descriptor in (self.agent._inbox._read, self.agent._inbox._write):
            os.close(descriptor)
        self.agent.sync.watching.close()
        self.agent.components.policy._table.stop_watching()
        self.world.kernel.monitors.clear()


def _pause(seconds: float) -> None:
    raise Paused(seconds)


def write_configuration(
    path: Path, plane: Dataplane, node_now: Node, policies: Optional[NetworkPolicySettings]
) -> None:
    """Write the configuration by which a node serves in this mode, with these settings and those of policies."""
    mode = "iptables" if plane.variant else "nftables"
    masquerade = str(dict(node_now.changes).get("masquerade_all", False)).lower()
    # Not those of this machine.
    more = f"staticServices: {{directory: {path.parent / 'services.d'}}}\n"
    more += f"behaviour: {node_now.behaviour}\n" if node_now.behaviour != "kube-proxy" else ""
    if policies is not None:
        tiers, checks = (str(each).lower() for each in (policies.cluster_policies, policies.check_sources))
        more += f"networkPolicy: {{enabled: true, clusterNetworkPolicies: {tiers}, checkSources: {checks}}}\n"
    path.write_text(HEAD.format(mode, mode, masquerade) + NODE_HEAD + more, encoding="utf-8")


@contextlib.contextmanager
def replaced(world: Any) -> Any:
    """Replace what the agent uses of the machine by what a world has of it."""
    kernel: SimulatedKernel = world.kernel

    def set_up(request: Any, handles: KernelHandles) -> Proxiers:
        return made(world, request.configuration, request.cluster, handles)

    def idle(*_arguments: Any, **_named: Any) -> int:
        return 0

    def readable(families: Any) -> Monitor:
        return Monitor(kernel, set(families))

    patches: dict[Any, dict[str, Any]] = {
        node: {"set_up": set_up, "with_current_addresses": _same_addresses, "trim_memory": idle},
        other_modes: {"remove_leftovers": lambda *_all: SimpleNamespace(removed=0, draining=0)},
        stale_flows: {"delete_stale": idle, "delete_half_open": idle, "ConntrackSocket": contextlib.nullcontext},
        loop: {"holds_dataplane": lambda: not kernel.is_empty, "holds_policies": bool, "collect": idle},
        watch: {"LegacyWatch": lambda _resources: LegacyWatch(kernel, kernel.family)},
        notifications: {
            "TableMonitor": lambda _ports, _table: readable([kernel.family]),
            "ChainMonitor": lambda families, *_rest: readable(families),
            "AddressMonitor": NoAddresses,
        },
        policy_table: {"TableMonitor": lambda _ports, _table: readable(["inet", "bridge"])},
        policy: {"gc": SimpleNamespace(freeze=idle, unfreeze=idle, collect=idle)},
        policy_settings: {"policy_findings": lambda *_all: []},
        inputs: {"find_links": find_links, "AddressMonitor": NoAddresses},
    }
    with contextlib.ExitStack() as stack:
        for module, changes in patches.items():
            stack.enter_context(mock.patch.multiple(module, **changes))
        stack.enter_context(mock.patch.multiple(MemoryBudget, poll=idle, check=idle, check_meanwhile=idle))
        stack.enter_context(mock.patch.object(PortKeeper, "open", idle))
        stack.enter_context(mock.patch.object(ApiAccess, "connect", lambda *_all, **_named: Client(world.server)))
        stack.enter_context(mock.patch.object(loop, "end_loading", idle))
        stack.enter_context(mock.patch.object(followups.Followups, "_repair_parameters", idle))
        for name, table in (
            ("nftables", lambda _self, family: ServicesTable(kernel, family)),
            ("network_policy", lambda _self: PoliciesTable(kernel)),
        ):
            stack.enter_context(mock.patch.object(KernelHandles, name, table))
        stack.enter_context(kernel.programs.used())
        yield


def _same_addresses(found: Proxiers, _cluster: Any) -> Any:
    return found, {proxier.family: proxier.settings for proxier in found.families}


def made(world: Any, configuration: KubeProxyConfiguration, cluster: Any, handles: KernelHandles) -> Proxiers:
    """Return the node as the agent serves it, with the settings of the simulated one."""
    plane, here = world.plane, world.node_of(configuration)
    changes = {"node_port_cidrs": (), "schedulers": frozenset()} if plane.variant else {}
    variant = variant_of(here.family, plane.variant) if plane.variant else None
    context = FamilyContext(
        here.settings(**changes), NodeContext(here.family, "node1", behaviour=here.settings().behaviour), variant
    )
    mode = IPTABLES_MODE if plane.variant else NFTABLES_MODE
    return Proxiers(
        configuration=configuration,
        mode=mode,
        mode_reason="requested",
        node_view=SimpleNamespace(  # type: ignore[arg-type]
            node=cluster.nodes.get("node1"),
            name="node1",
            nfacct_counters=(),
            addresses=ADDRESSES,
            families=(here.family,),
        ),
        families=(Proxier(configuration, mode, context, handles),),
        warnings=(),
        sysctls={},
    )
