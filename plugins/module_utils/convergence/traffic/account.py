# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The traffic of ServicePorts and their endpoints: totals over the counters of the kernel.

The kernel resets a counter when its object is created again, as by a repair, a restore of chains or a changed element.
So only increases are added up. What a counter had counted between the last reading and its reset is lost, and the time
of that is kept with the totals.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Hashable, Iterable, Iterator, NamedTuple, Optional

from ...serviceports.info import ServicePortName

#: The counters of a sample, in this order, by their names in documents.
COUNTERS = ("connections", "packetsIn", "packetsOut", "bytesIn", "bytesOut")
#: The numbers of connections at the time of a reading.
GAUGES = ("active", "inactive")

Numbers = tuple[Optional[int], ...]
UNCOUNTED: Numbers = (None,) * len(COUNTERS)


class CountedElement(NamedTuple):
    """An element of a set or map of nf_tables, as the object of a sample; that of all its elements has no key."""

    set: str
    key: bytes = b""


def connections_only(count: int) -> Numbers:
    """Return the counters of a sample that counts only connections."""
    return (count, *UNCOUNTED[1:])


class Sample(NamedTuple):
    """One object of the kernel that counts traffic of a ServicePort, or of one of its endpoints.

    ``object``: its identity. An object may have two samples: one of an endpoint, and one of the ServicePort.
    ``endpoint``: ``ip:port``, empty for the ServicePort itself. ``counters`` are in the order of COUNTERS; None is what
    the mode does not count. Several samples of one ServicePort are added.
    """

    object: Hashable
    port: ServicePortName
    endpoint: str
    counters: Numbers
    active: Optional[int] = None
    inactive: Optional[int] = None


class Total:
    """What was counted for a ServicePort or an endpoint. ``reset_at``: when a count was lost last, 0 if never."""

    def __init__(self) -> None:
        self.counters: list[Optional[int]] = list(UNCOUNTED)
        self.gauges: list[Optional[int]] = [None, None]
        self.reset_at = 0.0

    def add(self, counters: Numbers, before: Optional[Numbers], now: float) -> None:
        """Add what a source has counted since ``before``, its last reading."""
        for position, value in enumerate(counters):
            if value is None:
                continue
            last = (before[position] if before is not None else 0) or 0
            if value < last:
                last, self.reset_at = 0, now
            self.counters[position] = (self.counters[position] or 0) + value - last

    def add_gauges(self, values: Iterable[Optional[int]]) -> None:
        """Add the connections of one source."""
        for position, value in enumerate(values):
            if value is not None:
                self.gauges[position] = (self.gauges[position] or 0) + value

    def document(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return {**dict(zip(COUNTERS, self.counters)), **dict(zip(GAUGES, self.gauges)), "resetAt": self.reset_at}


_Place = tuple[ServicePortName, str]


class TrafficAccount:
    """The totals of one IP family."""

    def __init__(self) -> None:
        #: The last reading, by object and whether the sample is of an endpoint.
        self._last: dict[tuple[Hashable, bool], tuple[_Place, Numbers]] = {}
        self._totals: dict[_Place, Total] = {}

    def update(self, ports: Iterable[ServicePortName], samples: Iterable[Sample], now: float) -> None:
        """Add a reading of all counters. ``ports``: all ServicePorts; totals of others and of past endpoints end."""
        previous, self._last = self._last, {}
        totals, self._totals = self._totals, {}
        for port in ports:
            total = self._totals[port, ""] = totals.get((port, "")) or Total()
            total.gauges = [None, None]
        for sample in samples:
            place = (sample.port, sample.endpoint)
            found = self._totals.get(place)
            if found is None:
                found = self._totals[place] = totals.get(place) or Total()
                found.gauges = [None, None]
            source = (sample.object, bool(sample.endpoint))
            known = previous.get(source)
            before = known[1] if known is not None and known[0] == place else None
            found.add(sample.counters, before, now)
            found.add_gauges((sample.active, sample.inactive))
            self._last[source] = (place, sample.counters)
        for source, known in previous.items():
            if self._last.get(source, ((), ()))[0] != known[0]:
                self._lost(known, now)

    def forget(self, objects: AbstractSet[Hashable], now: float) -> None:
        """Expect that these objects count from zero again: they have just been created or removed."""
        for name in self._affected(objects):
            for of_endpoint in (False, True):
                known = self._last.pop((name, of_endpoint), None)
                if known is not None:
                    self._lost(known, now)

    def _affected(self, objects: AbstractSet[Hashable]) -> AbstractSet[Hashable]:
        """Return the objects, with the elements in place of sets."""
        sets = {item.set for item in objects if isinstance(item, CountedElement) and not item.key}
        if not sets:
            return objects
        known = {name for name, _of_endpoint in self._last}
        return objects | {name for name in known if isinstance(name, CountedElement) and name.set in sets}

    def _lost(self, known: tuple[_Place, Numbers], now: float) -> None:
        """Note that a sample has ended; what it counted after its last reading is lost."""
        place, counters = known
        if place in self._totals and counters != UNCOUNTED:
            self._totals[place].reset_at = now

    def last(self, name: Hashable) -> Optional[Numbers]:
        """Return the counters of an object's endpoint in the last reading; None if it had no such sample."""
        known = self._last.get((name, True))
        return known[1] if known is not None else None

    def ports(self) -> Iterator[tuple[ServicePortName, Total]]:
        """Yield the totals of all ServicePorts."""
        for (port, endpoint), total in self._totals.items():
            if not endpoint:
                yield port, total

    def document(self, family: str, namespace: str = "", endpoints: bool = True) -> list[dict[str, Any]]:
        """Return the totals as plain JSON values, those of one namespace if it is not empty.

        ``endpoints``: with the totals of endpoints.
        """
        found: dict[ServicePortName, dict[str, Any]] = {}
        for (port, endpoint), total in self._totals.items():
            if namespace and port.namespace != namespace:
                continue
            if not endpoint:
                names = {"namespace": port.namespace, "name": port.name, "port": port.port_name}
                row = {**names, "protocol": port.protocol, "family": family, **total.document(), "endpoints": []}
                found[port] = row
        for (port, endpoint), total in self._totals.items():
            if endpoints and endpoint and port in found:
                found[port]["endpoints"].append({"endpoint": endpoint, **total.document()})
        return list(found.values())
