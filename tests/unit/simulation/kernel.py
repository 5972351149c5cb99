# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel of the simulated node: tables that outlast the agent, what refuses and delays it, and other programs."""

from __future__ import annotations

import itertools
import random
from typing import Any, Callable, Mapping, Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift.notifications import Watch, suspect
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.observation import CountedSet
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.parts import TableParts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.policy_table import _PortsTable
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import TransactionRefused
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Labelled
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.restore import RestoreError
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    ElementKey,
    Key,
    TableValue,
    Value,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Part
from tests.lab.clock import Clock
from tests.unit.transitions.iptables import Programs, empty
from tests.unit.transitions.nftables import HOOKS, Object, Simulated, Table
from tests.unit.transitions.policies import Kernel as PolicyKernel


class Killed(BaseException):
    """The process was killed. No part of the agent may catch it."""


class Refusals:
    """What the kernel does with the next attempts. ``attempts``: how many are counted before ``fault`` happens.

    ``fault``: ``kill`` before an attempt, ``refuse`` it, for a passing reason or not, ``lose`` the answer to it, or let
    another ``program`` come first. ``unreadable``: how many attempts to read fail.
    """

    def __init__(self) -> None:
        self.attempts = 0
        self.fault = ""
        self.times = 0
        self.unreadable = 0

    def next(self) -> str:
        """Return the fault of this attempt, empty if it succeeds."""
        if not self.fault:
            return ""
        if self.attempts:
            self.attempts -= 1
            return ""
        self.times -= 1
        fault = self.fault
        if self.times <= 0:
            self.fault = ""
        return fault


class Monitor:
    """Notifications about the changes of other programs, as the kernel's monitors give them."""

    author = ""

    def __init__(self, kernel: SimulatedKernel, families: set[str]) -> None:
        self._kernel = kernel
        self._families = families
        self._pending: set[str] = set()
        self.lost = self._overrun = False
        kernel.monitors.append(self)
        # Not the number of one that is open: the loop would be woken forever by what it does not wait for.
        self._number = next(kernel.descriptors)

    def fileno(self) -> int:
        return self._number

    @property
    def is_readable(self) -> bool:
        return bool(self._pending) or self._overrun

    def notify(self, family: str) -> None:
        if family in self._families:
            self._pending.add(family)

    def overrun(self) -> None:
        """Lose what has been notified; only that something was lost is known."""
        self._pending.clear()
        self._overrun = True

    def changes(self) -> set[str]:
        found, self._pending = self._pending, set()
        self.lost, self._overrun = self._overrun, False
        return set(self._families) if self.lost else found

    def close(self) -> None:
        if self in self._kernel.monitors:
            self._kernel.monitors.remove(self)


class NoAddresses:
    """In the place of a monitor of addresses, of which none changes."""

    def fileno(self) -> int:
        return -1

    def events(self) -> list[Any]:
        return []

    def pop_lost(self) -> bool:
        return False

    def close(self) -> None:
        pass


class LegacyWatch(Watch):
    """In the place of the watch of legacy tables, which compares their contents."""

    interval = 1.2

    def __init__(self, kernel: SimulatedKernel, family: str) -> None:
        self._kernel = kernel
        self._family = family
        self._known: Any = None

    def poll(self, found: dict[str, str]) -> None:
        held = self._kernel.programs.held
        if self._known is not None and self._known != held:
            suspect(found, [self._family], "contents")
            self._known = held

    def synced(self, _changed: bool, observed: bool) -> None:
        # A change by another program that comes between our own ones is found by the real watch, too: it counts ours.
        if not self._kernel.external or (observed and self._kernel.others == self._kernel.others_read):
            self._known = self._kernel.programs.held
        elif self._known is None:
            self._known = {}


class MemoryReader:
    """Reads a simulated table as :class:`.Reader` reads one of the kernel, while time passes."""

    def __init__(self, resource: Simulated, reading: Callable[[], None]) -> None:
        self.key = resource.table.key
        self._resource = resource
        self._reading = reading

    @property
    def _table(self) -> Table:
        self._reading()
        return self._resource.held

    def table(self) -> Optional[TableValue]:
        return TableValue() if self._table.key is not None else None

    def counted_sets(self) -> dict[str, CountedSet]:
        return {name: CountedSet(value, None) for name, value in self._table.sets.items()}

    def counted_set(self, name: str) -> Optional[CountedSet]:
        return self.counted_sets().get(name)

    def hooks(self) -> dict[str, Any]:
        return {name: chain.base for name, chain in self._table.chains.items()}

    def chains(self, wanted: Mapping[str, Any]) -> dict[Key, Value]:
        found = self._table.observed().items()
        return {key: value for key, value in found if key.kind == "chain" and key.name in wanted}

    def contents(self, name: str) -> dict[Key, Value]:
        found = self._table.observed().items()
        return {key: value for key, value in found if isinstance(key, ElementKey) and key.name == name}


class ServicesTable(Simulated):
    """The agent's resource of the table of nftables mode. The table itself is that of the kernel."""

    def __init__(self, kernel: SimulatedKernel, family: str) -> None:
        super().__init__(family, kernel.most_elements)
        self._kernel = kernel

    @property
    def held(self) -> Table:  # type: ignore[override]
        return self._kernel.table

    port = 7

    def observe(self) -> dict[Key, Value]:
        self._kernel.reading()
        return super().observe()

    def parts(self, expected: Any, urgent: Any = None) -> Any:
        return self._parts(expected).read(urgent or {})

    def exists(self) -> bool:
        self._kernel.reading()
        return super().exists()

    def _parts(self, expected: Any) -> Any:
        parts = TableParts.__new__(TableParts)
        parts._reader = MemoryReader(self, self._kernel.reading)  # type: ignore[assignment]
        parts._expected, parts._elements = expected, {}
        return parts

    def _send(self, labelled: list[Labelled]) -> None:
        def apply() -> None:
            self._kernel.table = self._kernel.table.after(labelled)

        self._kernel.attempt(apply, TransactionRefused)


class Restorer(Programs):
    """iptables-save and iptables-restore on the tables of the kernel."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        super().__init__(empty())
        self._kernel = kernel

    def save(self, *arguments: Any) -> str:
        self._kernel.reading()
        self._kernel.others_read = self._kernel.others
        return super().save(*arguments)

    def restore(self, variant: Any, text: str, *_arguments: Any) -> int:
        for part in text.split("COMMIT\n")[:-1]:
            commit = super().restore
            self._kernel.attempt(lambda part=part, commit=commit: commit(variant, f"{part}COMMIT\n"), RestoreError)
        return 0


class _Ports(Simulated, _PortsTable):
    """The table of ports; the resource of both tables sends its changes."""


class PoliciesTable(PolicyKernel):
    """The agent's resource of the tables of network policies."""

    port = 8

    def __init__(self, kernel: SimulatedKernel) -> None:
        super().__init__((Table({}), Table({})), lambda _tables: None)
        self._kernel = kernel
        self.held, self._ports.held = kernel.policies

    def observe(self) -> dict[Key, Value]:
        self._kernel.reading()
        self.held, self._ports.held = self._kernel.policies
        return super().observe()

    def parts(self, expected: Any, urgent: Any = None) -> Any:
        yield Part(self.observe(), expected)

    def _send(self, labelled: list[Labelled]) -> None:
        def apply() -> None:
            self.held, self._ports.held = self._kernel.policies
            super(PoliciesTable, self)._send(labelled)
            self._kernel.policies = self.tables

        self._kernel.attempt(apply, TransactionRefused, policies=True)
        self.held, self._ports.held = self._kernel.policies


class SimulatedKernel:
    """The tables of a node.

    ``judge``: called after each change by the agent, ``judge_policies`` of tables of policies, ``others_changed`` by
    another program. ``external``: whether such a change is not repaired yet, ``policies_external`` of policies;
    ``touched``: the objects that it concerns, in nftables mode. ``steps``: the changes by
    the agent. ``others``: those by other programs, ``others_read``: how many of them the agent has read. ``is_watched``
    returns whether the agent watches the tables: a change in the middle of its first sync waits for the regular check.
    """

    def __init__(self, family: str, most_elements: int, chosen: random.Random, clock: Clock) -> None:
        self.family = family
        self.most_elements = most_elements
        self.table = Table({})
        self.programs = Restorer(self)
        self.policies = (Table({}), Table({}))
        self.refusals = Refusals()
        self.monitors: list[Monitor] = []
        self.descriptors = itertools.count(1000)
        self.judge: Callable[[], None] = lambda: None
        self.judge_policies: Callable[[], None] = lambda: None
        self.others_changed: Callable[[], None] = lambda: None
        self.is_watched: Callable[[], bool] = lambda: True
        self.touched: set[Object] = set()
        self.external = self.policies_external = False
        self.others = self.others_read = 0
        self.steps = 0
        self._chosen = chosen
        self._clock = clock

    @property
    def is_empty(self) -> bool:
        return self.table.key is None and self.programs.held == empty()

    def reading(self) -> None:
        """Let time pass while something is read, which may fail."""
        self._clock.wait(self._chosen.choice((0.0, 0.001, 0.15)))
        if self.refusals.unreadable:
            self.refusals.unreadable -= 1
            raise KernelError("interrupted: no answer from the kernel")

    def attempt(self, apply: Callable[[], object], refused: Any, policies: bool = False) -> None:
        """Let the agent make a change, unless something comes before it. ``policies``: in the tables of these."""
        self._clock.wait(0.002)
        fault = self.refusals.next()
        if fault == "kill":
            raise Killed
        if fault == "program" and self.is_watched():
            self.other_program()
        if fault in ("refuse", "busy"):
            if refused is TransactionRefused:
                raise TransactionRefused("refused", transient=fault == "busy", busy_chains=False)
            raise refused("refused")
        apply()
        self.steps += 1
        (self.judge_policies if policies else self.judge)()
        if fault == "lose":
            raise KernelError("the answer was lost: no buffer space available")

    # ---- other programs

    def other_program(self) -> None:
        """Let another program change something of ours, of which the kernel sends notifications."""
        if self.policies[0].key is not None and self._chosen.random() < 0.5:
            self._change_policies()
        elif self.table.key is not None:
            self._change_table()
        elif self.programs.held != empty():
            self._change_chains()

    def _change_table(self) -> None:
        table = self.table.after([])
        what = self._chosen.choice(("element", "element", "value", "flush", "chain", "table"))
        filled = sorted(name for name, found in table.elements.items() if found)
        ruled = sorted(name for name, chain in table.chains.items() if chain.rules)
        if what in ("element", "value") and filled:
            name = self._chosen.choice(filled)
            key = self._chosen.choice(sorted(table.elements[name]))
            if what == "element":
                del table.elements[name][key]
            else:
                other = self._chosen.choice(sorted(table.elements[name]))
                table.elements[name][key] = table.elements[name][other]
            self.touched.add(("element", name, key))
        elif what == "flush" and ruled:
            name = self._chosen.choice(ruled)
            table.chains[name] = table.chains[name]._replace(rules=())
            self.touched.add(("chain", name, b""))
        elif what == "chain" and table.chains:
            example = self._chosen.choice(sorted(table.chains))
            table.chains["external"] = table.chains[example]._replace(rules=(), base=None)
        elif what == "table":
            table = Table({})
            self.touched.add(HOOKS)
        table.changed = {*self.touched}
        self.table, self.external = table, True
        self._notify(self.family)

    def _change_policies(self) -> None:
        table = self.policies[0].after([])
        filled = sorted(name for name, found in table.elements.items() if found)
        what = self._chosen.choice(("element", "element", "flush", "table"))
        if what == "element" and filled:
            name = self._chosen.choice(filled)
            del table.elements[name][self._chosen.choice(sorted(table.elements[name]))]
        elif what == "flush":
            name = self._chosen.choice(sorted(table.chains))
            table.chains[name] = table.chains[name]._replace(rules=())
        else:
            table = Table({})
        self.policies, self.policies_external = (table, self.policies[1]), True
        self._notify("inet")

    def _change_chains(self) -> None:
        held = dict(self.programs.held)
        ours = sorted(place for place, rules in held.items() if place[1].startswith("KUBE-") and rules)
        built_in = sorted(place for place, rules in held.items() if not place[1].startswith("KUBE-") and rules)
        place = self._chosen.choice(self._chosen.choice([each for each in (ours, built_in) if each] or [[("nat", "")]]))
        rules = list(held.get(place, ()))
        if rules:
            position = self._chosen.randrange(len(rules))
            # A single jump is inserted again as the first one, as by kube-proxy: another of two chains refuses.
            one = place in ours and self._chosen.random() < 0.6
            removed = slice(position, position + 1) if one else slice(None)
            del rules[removed]
            held[place] = tuple(rules)
            self.programs.held, self.external = held, True
            self._notify(self.family)

    def _notify(self, family: str) -> None:
        self.others += 1
        self.others_changed()
        for monitor in self.monitors:
            monitor.notify(family)

    def overrun(self) -> None:
        """Let another program make this many changes that notifications are lost."""
        self.other_program()
        for monitor in self.monitors:
            monitor.overrun()
