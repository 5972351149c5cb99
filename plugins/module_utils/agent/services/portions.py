# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Services that wait while others are synced, because they make many entries.

One change of an endpoint may replace a hundred thousand entries of a Service, and a user may change many such Services
at once. Programmed together with these, the change of another Service would wait for all of them. So Services that make
more entries than their size suggests wait once there are too many entries for one sync, and follow in portions: several
Services, or some ports of one. What an entry takes differs with its kind, the tables and the load of the node, so
portions that take long become smaller.

A port is replaced as a whole: meanwhile the Service has its new endpoints at some ports and the former ones at others.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import Callable, Iterable, Mapping, NamedTuple, Optional, Sequence

from ...cluster.model import NamespacedName
from ...serviceports.info import ServicePortInfo, ServicePortName
from ..threads.timers import Pace, Timers
from .summaries import Summaries

#: The most entries in one portion, unless a single port has more: in nftables mode, those of lists are replaced in an
#: eighth of a second.
MOST_ENTRIES = 10_000
#: The time that a portion may take; after one that took longer, the next ones are smaller, but not smaller than this:
#: each change of iptables takes some time, however small it is.
MOST_SECONDS = 0.5
FEWEST_ENTRIES = 250
PORTION_PAUSE_SECONDS = 0.1
#: While changes have arrived that are not processed yet, portions take a tenth of the loop's time.
BEHIND_PAUSE_FACTOR = 9.0


class Size(NamedTuple):
    """The entries of a Service, 0 if there are not more than its size suggests, and the number of its ports."""

    entries: int
    ports: int = 1


SizeOf = Callable[[NamespacedName], Size]


class Step(NamedTuple):
    """Some ports of a Service: ``number`` of ``ports``, from the ``first`` one on; the first follows the last.

    ``begins``: it is the first step since the Service changed, ``ends``: the last one.
    """

    first: int
    number: int
    ports: int
    begins: bool
    ends: bool

    def covers(self, index: int) -> bool:
        """Return whether the port of this number is one of them."""
        return (index - self.first) % self.ports < self.number


#: The steps of the Services of which only some ports are replaced.
Steps = Mapping[NamespacedName, Step]
NO_STEPS: Steps = MappingProxyType({})
#: All ports of a Service at once.
WHOLE = Step(0, 1, 1, begins=True, ends=True)


class _Waiting:
    """A Service that waits. ``left``: the ports that are still to be programmed, from the ``first`` on."""

    def __init__(self, size: Size) -> None:
        self._first = 0
        self.changed(size)

    def changed(self, size: Size) -> None:
        """Begin with all ports again, at the one that is next: each comes, however often the Service changes."""
        self.entries = size.entries
        self._ports = self._left = max(1, size.ports)
        self._first %= self._ports

    @property
    def left(self) -> int:
        """The entries of the ports that are still to be programmed."""
        return self.entries * self._left // self._ports

    def step(self, entries: int) -> Step:
        """Return the next ports, with at most this many entries unless a single port has more."""
        number = self._left if self.left <= entries else max(1, self._ports * entries // self.entries)
        begins, self._left = self._left == self._ports, self._left - number
        step = Step(self._first, number, self._ports, begins, ends=not self._left)
        self._first = (self._first + number) % self._ports
        return step


class Portions:
    """Chooses which Services are programmed next; what a Service removes counts as what it makes."""

    def __init__(self) -> None:
        # In the order in which they began to wait.
        self._waiting: dict[NamespacedName, _Waiting] = {}
        self._programmed: dict[NamespacedName, int] = {}
        # The entries of a portion, and those of the last one.
        self._most = MOST_ENTRIES
        self._taken = 0

    @property
    def waiting(self) -> frozenset[NamespacedName]:
        """The Services that wait."""
        return frozenset(self._waiting)

    def clear(self) -> None:
        """Forget who waits: everything is programmed at once."""
        self._waiting.clear()

    def urgent(self, dirty: set[NamespacedName], size_of: SizeOf) -> set[NamespacedName]:
        """Return the Services that are programmed at once; the others wait."""
        heavy: dict[NamespacedName, Size] = {}
        for service in dirty:
            size = size_of(service)
            if size.entries or service in self._programmed:
                heavy[service] = size._replace(entries=max(size.entries, self._programmed.get(service, 0)))
        if not self._waiting and sum(size.entries for size in heavy.values()) <= self._most:
            for service in heavy:
                self._note(service, size_of)
            return dirty
        self.wait(heavy, heavy.__getitem__)
        at_once = dirty - heavy.keys()
        for service in at_once & self._waiting.keys():
            del self._waiting[service]
        return at_once

    def wait(self, services: Iterable[NamespacedName], size_of: SizeOf) -> None:
        """Have Services wait, with all their ports."""
        for service in sorted(services):
            if service in self._waiting:
                self._waiting[service].changed(size_of(service))
            else:
                self._waiting[service] = _Waiting(size_of(service))

    def take(self, size_of: SizeOf) -> dict[NamespacedName, Step]:
        """Return the next portion: the Service that waits longest, then those of the namespaces with fewest entries."""
        of_namespace: Counter[str] = Counter()
        for service, waiting in self._waiting.items():
            # Its endpoints may have arrived since it began to wait.
            waiting.entries = max(waiting.entries, size_of(service).entries)
            of_namespace[service.namespace] += waiting.entries
        steps: dict[NamespacedName, Step] = {}
        left = self._most
        for service in [
            *list(self._waiting)[:1],
            *sorted(self._waiting, key=lambda each: of_namespace[each.namespace]),
        ]:
            waiting = self._waiting[service]
            if service not in steps and (not steps or waiting.left <= left):
                before = waiting.left
                steps[service] = waiting.step(left)
                left -= before - waiting.left
        self._taken = self._most - left
        for service, step in steps.items():
            self._note(service, size_of)
            if step.ends:
                del self._waiting[service]
        return steps

    def took(self, seconds: float) -> None:
        """Adapt the size of portions to the time that the last one took."""
        if seconds > MOST_SECONDS:
            self._most = min(MOST_ENTRIES, max(FEWEST_ENTRIES, int(self._taken * MOST_SECONDS / seconds)))
        else:
            self._most = min(MOST_ENTRIES, 2 * self._most + 1)

    def _note(self, service: NamespacedName, size_of: SizeOf) -> None:
        entries = size_of(service).entries
        if entries:
            self._programmed[service] = entries
        else:
            self._programmed.pop(service, None)


class WaitingServices:
    """When the Services that wait are programmed: a portion after a pause, while there are any.

    ``is_behind`` returns whether changes of the cluster have arrived that are not processed yet. They may be about any
    Service, and the loop processes them between two portions, which then take a tenth of its time.
    """

    def __init__(self, timers: Timers, is_behind: Callable[[], bool], program: Callable[[], None]) -> None:
        self._clock = timers.clock
        self._is_behind = is_behind
        self._program = program
        self._pace = Pace(timers.clock, BEHIND_PAUSE_FACTOR)
        self._timer = timers.add("program Services with many entries", self._run)

    def follow(self) -> None:
        """Program the next portion after a pause, which syncs that come meanwhile do not make longer."""
        self._timer.start(PORTION_PAUSE_SECONDS)

    def _run(self) -> None:
        if self._is_behind() and self._pace.rest():
            self._timer.start(PORTION_PAUSE_SECONDS)
            return
        started = self._clock()
        self._program()
        self._pace.worked(self._clock() - started)


class _Number(NamedTuple):
    """What one port of a Service must have for itself: its number, or its node port."""

    protocol: str
    port: int
    node_port: int


def _numbers_of(info: ServicePortInfo) -> list[_Number]:
    protocol = info.key.protocol
    found = [_Number(protocol, info.port, 0)]
    return [*found, _Number(protocol, 0, info.node_port)] if info.node_port else found


class PortSteps:
    """What one family needs to know between the steps of its Services."""

    def __init__(self) -> None:
        # The ServicePorts of Services whose steps have begun and not ended.
        self._begun: dict[NamespacedName, Sequence[ServicePortInfo]] = {}
        # Which ServicePort has which number, of Services with several ports.
        self._owners: dict[NamespacedName, dict[_Number, ServicePortName]] = {}

    def computed(self, service: NamespacedName, step: Step) -> Optional[Sequence[ServicePortInfo]]:
        """Return the ServicePorts that the first of these steps has computed; None if they must be computed now."""
        return None if step.begins else self._begun.get(service)

    def kept(
        self, services: Mapping[NamespacedName, Sequence[ServicePortInfo]], steps: Steps, known: Summaries
    ) -> set[ServicePortName]:
        """Return the ServicePorts that these steps leave as they are. ``known``: the Services that had any before."""
        kept: set[ServicePortName] = set()
        for service, ports in services.items():
            step = steps.get(service, WHOLE)
            tied = self._is_tied(service, ports, service in known)
            if step.ends or tied:
                self._begun.pop(service, None)
            else:
                self._begun[service] = ports
            if not tied:
                kept.update([info.key for index, info in enumerate(ports) if not step.covers(index)])
        return kept

    def _is_tied(self, service: NamespacedName, ports: Sequence[ServicePortInfo], known: bool) -> bool:
        """Return whether a port may get a number that another one had: both must change together."""
        before = self._owners.pop(service, None)
        if len(ports) < 2:
            return known
        now = self._owners[service] = {number: info.key for info in ports for number in _numbers_of(info)}
        if before is None:
            return known
        return any(before.get(number, key) != key for number, key in now.items())
