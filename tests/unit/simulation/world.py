# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One seed is one world: a node, its API server, and a schedule of what happens to both until all is quiet."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence
from unittest import mock

from tests.lab.clock import Clock
from tests.unit.transitions.policies import SETTINGS
from tests.unit.transitions.states import NETS, TRAITS, Node, _combined, _service, _slices

from . import policies
from .judge import SERVICES, Dataplane, Judge
from .kernel import Killed, SimulatedKernel
from .policies import PolicyJudge
from .process import Process, replaced, write_configuration
from .server import ApiServer

#: After the last event: longer than any pause before another attempt, and shorter than the regular check.
QUIET_SECONDS = 400.0
_MASKS = (0, 1, 2, 3, 5, 7)
#: The most elements of one transaction, as a rule more than there are.
_ELEMENTS = (2, 10, 1 << 30, 1 << 30)
_HERE = ("kube-proxy", "corrected")


class Planned(NamedTuple):
    """Something that happens at a time."""

    at: float
    order: int
    name: str
    action: Callable[[], None]


class World:
    """A node with all that can happen to it.

    ``trace``: what has happened, a line for each event; ``logs``: those of each process of the agent. ``last``: how the
    kernel differs in the end from what it should hold.
    """

    def __init__(self, seed: int, directory: Path, events: int = 30) -> None:
        self.seed = seed
        self.directory = directory
        self.chosen = random.Random(seed)
        self.clock = Clock()
        self.wall = 1.8e9
        self.trace: list[str] = []
        self.logs: list[str] = []
        self.last: list[str] = []
        self.plane = Dataplane(self.chosen.choice(("", "", "legacy", "nft")))
        self.node = Node(self.chosen.choice(tuple(NETS)), self.chosen.choice(_HERE))
        self.server = ApiServer(self.chosen, self._changed)
        self.kernel = SimulatedKernel(self.node.family, self.chosen.choice(_ELEMENTS), self.chosen, self.clock)
        self.judge = Judge(self.kernel, self.plane, self.node, self.chosen)
        self.judge.where = lambda: f"{self.clock.now:.3f}, step {self.kernel.steps}, after {self.trace[-1]!r}"
        self.kernel.is_watched = lambda: self.process.agent.sync.watching.drift is not None
        self.kernel.judge, self.kernel.others_changed = self.judge, self.judge.others_changed
        #: Of network policies; None on a node that enforces none.
        self.policies = SETTINGS if seed % 3 == 2 else None
        self.policy_judge = PolicyJudge(self.kernel)
        self.policy_judge.where, self.kernel.judge_policies = self.judge.where, self.policy_judge
        self.configuration = directory / "config.conf"
        self.process: Any = None
        self.starts = 0
        self._planned: list[Planned] = []
        self._plan(events)

    # ---- the schedule

    def _plan(self, events: int) -> None:
        """Make the schedule. The cluster has some objects before the agent starts."""
        chosen, at = self.chosen, self.clock.now
        self._write()
        for item in self._base():
            self.server.put(item)
        for number in range(1, SERVICES + 1):
            for change in self._service_changes(number):
                change()
        for change in policies.changes(self.server, chosen) if self.policies else ():
            change()
        actions: dict[tuple[str, int], Callable[[], list[Callable[[], None]]]] = {
            ("a Service changes", 8): lambda: self._service_changes(chosen.randint(1, SERVICES)),
            ("endpoints change", 8): lambda: self._slice_changes(chosen.randint(1, SERVICES)),
            ("pods and policies change", 8 if self.policies else 0): lambda: policies.changes(self.server, chosen),
            ("the API server is away", 1): lambda: [lambda: self._away(True)],
            ("the API server answers", 2): lambda: [lambda: self._away(False)],
            ("requests fail", 1): lambda: [lambda: setattr(self.server, "trouble", 0.5)],
            ("the history is compacted", 2): lambda: [self.server.compact],
            ("the agent is killed", 1): lambda: [lambda: self._end(kill=True)],
            ("the agent is stopped", 1): lambda: [lambda: self._end(kill=False)],
            ("the agent is killed in a change", 2): lambda: [lambda: self._fault("kill")],
            ("the kernel refuses", 2): lambda: [lambda: self._fault("refuse")],
            ("the kernel refuses for now", 1): lambda: [lambda: self._fault("busy")],
            ("an answer is lost", 2): lambda: [lambda: self._fault("lose")],
            ("reading fails", 1): lambda: [lambda: setattr(self.kernel.refusals, "unreadable", chosen.randint(1, 3))],
            ("another program comes first", 1): lambda: [lambda: self._fault("program")],
            ("another program changes something", 2): lambda: [self.kernel.other_program],
            ("notifications are lost", 1): lambda: [self.kernel.overrun],
            ("the configuration is reloaded", 2): lambda: [self._reload],
            ("the clock of the node jumps", 1): lambda: [self._jump],
            ("the machine sleeps", 1): lambda: [lambda: self.clock.wait(chosen.choice((3.0, 70.0)))],
        }  # fmt: skip
        names, weights = zip(*actions)
        for number in range(events):
            at += chosen.choice((0.0, 0.05, 0.5, 2.0, 6.0, 31.0))
            place = chosen.choices(range(len(names)), weights)[0]
            for step, action in enumerate(actions[names[place], weights[place]]()):
                at += chosen.choice((0.0, 0.0, 0.2)) if step else 0.0
                self._planned.append(Planned(at, number, names[place], action))
        self._planned.append(Planned(at + 1.0, events, "all is quiet", self._calm))
        self._planned.append(Planned(at + QUIET_SECONDS, events, "the end", self._finish))

    def _base(self) -> list[dict[str, Any]]:
        net = NETS[self.node.family]
        port = {"name": "https", "port": 443, "targetPort": 6443, "protocol": "TCP"}
        address = net.cluster.format(200)
        metadata = {"namespace": "default", "name": "kubernetes"}
        spec = {"clusterIP": address, "clusterIPs": [address], "ipFamilies": [self.node.family], "ports": [port]}
        labels = {"kubernetes.io/service-name": "kubernetes"}
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec},
            {
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": self.node.family,
                "metadata": {**metadata, "labels": labels}, "ports": [{**port, "port": 6443}],
                "endpoints": [{"addresses": [net.clients[1]], "conditions": {"ready": True}}],
            },
            {
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"},
                "status": {"addresses": [{"type": "InternalIP", "address": net.node}]},
            },
        ]  # fmt: skip

    def _service_changes(self, number: int) -> list[Callable[[], None]]:
        """Return the changes of a Service with its endpoints, in any order; it may end, or become another one."""
        traits = self.chosen.choice([None, *TRAITS, "+".join(self.chosen.sample(list(TRAITS)[1:], 2))])
        if traits is None:
            changes = self._slices_become(number, "cluster", 0)
            changes.append(lambda: self.server.delete(("Service", "ns", f"s{number}")))
        else:
            changes = self._slices_become(number, traits, self.chosen.choice(_MASKS))
            item = _service(number, _combined(traits), self.node.family)
            changes.append(lambda: self.server.put(item))
        self.chosen.shuffle(changes)
        return changes

    def _slice_changes(self, number: int) -> list[Callable[[], None]]:
        return self._slices_become(
            number, self.chosen.choice(("cluster", "weights", "terminating", "UDP")), self.chosen.choice(_MASKS)
        )

    def _slices_become(self, number: int, traits: str, mask: int) -> list[Callable[[], None]]:
        found = _slices(number, _combined(traits), mask, self.node.family)
        names = {item["metadata"]["name"] for item in found}
        changes: list[Callable[[], None]] = [lambda item=item: self.server.put(item) for item in found]  # type: ignore[misc]
        for part in range(1, 4):
            name = f"s{number}-{part}"
            if name not in names:
                changes.append(lambda name=name: self.server.delete(("EndpointSlice", "ns", name)))  # type: ignore[misc]
        return changes

    # ---- what happens

    def _changed(self, kind: str) -> None:
        if self.process is not None:
            self.process.changed(kind)

    def _away(self, is_down: bool) -> None:
        self.server.is_down, self.server.trouble = is_down, 0.0

    def _fault(self, fault: str) -> None:
        refusals = self.kernel.refusals
        refusals.fault, refusals.attempts, refusals.times = fault, self.chosen.randint(0, 6), self.chosen.randint(1, 4)
        if fault == "kill":
            refusals.times = 1

    def _jump(self) -> None:
        self.wall += self.chosen.choice((-9e4, 9e4))

    def _end(self, kill: bool) -> None:
        if self.process is not None and kill:
            raise Killed
        if self.process is not None:
            self.process.agent.stop()

    def _reload(self) -> None:
        behaviour, masquerade = self.chosen.choice(_HERE), self.chosen.random() < 0.5 and not self.plane.variant
        self.node = Node(self.node.family, behaviour, (("masquerade_all", True),) if masquerade else ())
        if self.policies is not None:
            tiers, checks = (self.chosen.random() < 0.7 for _setting in range(2))
            self.policies = self.policies._replace(cluster_policies=tiers, check_sources=checks)
        self._write()
        if self.process is not None:
            self.process.agent.reload()

    def _write(self) -> None:
        write_configuration(self.configuration, self.plane, self.node, self.policies)

    def _calm(self) -> None:
        """End all faults."""
        self._away(False)
        self.kernel.refusals.fault, self.kernel.refusals.unreadable = "", 0

    def _finish(self) -> None:
        if self.process is not None:
            self.process.agent.stop()

    def node_of(self, configuration: Any) -> Node:
        """Return the settings of a configuration."""
        changes = (("masquerade_all", True),) if configuration.masquerade_all else ()
        return Node(self.node.family, configuration.node_proxy.behaviour.name, changes)

    # ---- the run

    def wait(self, descriptors: Sequence[int], seconds: float) -> None:
        """Take the place of the inbox's method: let the world continue until there is something for the loop."""
        until = self.clock.now + seconds
        agent = self.process.agent
        while not (agent._stop or not agent._inbox.is_empty or agent._reloads._requested):
            if any(monitor.is_readable and monitor.fileno() in descriptors for monitor in self.kernel.monitors):
                return
            if not self._step(until):
                self.clock.now = max(self.clock.now, until)
                return
            if agent._inbox.is_empty and self.clock.now >= until:
                return

    def _step(self, until: float) -> bool:
        """Let what is next happen, if it is not after this time."""
        threads = sorted(
            (thread.due, number, thread) for number, thread in enumerate(self.process.threads if self.process else ())
        )
        at = self._planned[0].at if self._planned else float("inf")
        if threads and threads[0][0] < at:
            due, _number, thread = threads[0]
            if due > until:
                return False
            self.clock.now = max(self.clock.now, due)
            self.process.turn(thread)
            return True
        if not self._planned or at > until:
            return False
        self.clock.now = max(self.clock.now, at)
        event = self._planned.pop(0)
        self.trace.append(f"{self.clock.now:.3f} {event.name}")
        event.action()
        return True

    def run(self) -> list[str]:
        """Return what went wrong."""
        with mock.patch.multiple(
            time, monotonic=self.clock, time=lambda: self.wall + self.clock.now, sleep=self.clock.wait
        ), replaced(self):  # fmt: skip
            random.seed(self.seed)
            while self._planned:
                self._live()
                # Until the service manager starts it again.
                pause = self.clock.now + self.chosen.choice((0.1, 1.0, 8.0))
                while self._step(pause):
                    pass
                self.clock.now = max(self.clock.now, pause)
        defects = [line for log in self.logs for line in log.splitlines() if "a defect" in line]
        return defects + self.judge.faults + self.policy_judge.faults + self.last

    def _live(self) -> None:
        """Let one process of the agent live."""
        self.starts += 1
        self.trace.append(f"{self.clock.now:.3f} the agent starts")
        process = self.process = Process(self, self.wait)
        try:
            process.run()
        except Killed:
            self.trace.append(f"{self.clock.now:.3f} the agent was killed")
        finally:
            self.process = None
            process.close()
            self.logs.append(process.log.getvalue())
        if not self._planned:
            objects = list(self.server.objects.values())
            found = self.plane.difference(self.kernel, objects, self.node)
            if self.policies is not None:
                found += self.policy_judge.last(objects, self.policies)
            self.last = [f"at the end {line}" for line in found]
