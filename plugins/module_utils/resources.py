# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The core mechanism: observe a resource table, compare it with the desired table, apply the difference.

A *resource* is anything on the node that the project owns, seen as a mapping from a key to a value: kernel module to
loaded, chain to rules, virtual server to its settings, real server to its weight, set to elements, file to content.
Convergence, check mode, diff output, drift reports, clean-up and rollback are all :func:`difference`.
"""

from __future__ import annotations

import time
from typing import (
    Any,
    Callable,
    Generic,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    TypeVar,
    Union,
)

from .base.progress import Progress, unheeded

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

#: In a journal of a table, as the value that a key had before: it was not there.
ABSENT: Any = object()


class Kind:
    """The contents of a resource table, as named in results, metrics, logs and documentation."""

    CHAINS = "chains"
    EMPTY_TABLES = "empty tables"
    TABLE_OBJECTS = "table objects"
    POLICY_OBJECTS = "network policy objects"
    IPVS_OBJECTS = "IPVS table objects"
    SETS = "sets"
    SET_ELEMENTS = "set elements"
    VIRTUAL_SERVERS = "virtual servers"
    REAL_SERVERS = "real servers"
    TIMEOUTS = "IPVS timeouts"
    DEVICES = "devices"
    ADDRESSES = "addresses"
    SYSCTLS = "sysctls"
    LISTENERS = "listeners"
    MODULES = "modules"
    MODULE_PARAMETERS = "module parameters"
    FILES = "files"


def label(kind: str, family: str = "", qualifier: str = "") -> str:
    """Return the name of a resource table in everything users read: ``IPv4 chains``, ``sysctls``.

    ``family``: IPv4, IPv6, or empty if the table belongs to neither. ``qualifier`` distinguishes tables of one kind and
    family: ``IPv4 chains (nft)``.
    """
    name = f"{family} {kind}" if family else kind
    return f"{name} ({qualifier})" if qualifier else name


class Change(Generic[Key, Value]):
    """The difference between an observed table and a desired one, by key.

    ``added`` maps a key to its new value, ``replaced`` to a pair (old value, new value), ``removed`` to its old value.
    """

    __slots__ = ("added", "removed", "replaced")

    def __init__(
        self,
        added: Optional[dict[Key, Value]] = None,
        replaced: Optional[dict[Key, tuple[Value, Value]]] = None,
        removed: Optional[dict[Key, Value]] = None,
    ) -> None:
        self.added: dict[Key, Value] = added if added is not None else {}
        self.replaced: dict[Key, tuple[Value, Value]] = replaced if replaced is not None else {}
        self.removed: dict[Key, Value] = removed if removed is not None else {}

    def __bool__(self) -> bool:
        return bool(self.added or self.replaced or self.removed)

    def __len__(self) -> int:
        return len(self.added) + len(self.replaced) + len(self.removed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Change):
            return NotImplemented
        return (self.added, self.replaced, self.removed) == (other.added, other.replaced, other.removed)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Change(added={self.added!r}, replaced={self.replaced!r}, removed={self.removed!r})"

    def with_keys_of(self, other: Change[Key, Value]) -> Change[Key, Value]:
        """Return a change with the keys of both, to find out later what is left to do for them."""
        return Change(
            {**self.added, **other.added}, {**self.replaced, **other.replaced}, {**self.removed, **other.removed}
        )

    def new_values(self) -> dict[Key, Value]:
        """Return the value that each added or replaced key gets."""
        return {**self.added, **{key: new for key, (_old, new) in self.replaced.items()}}

    def passes(self, limited: Callable[[Key], Optional[Key]] = lambda _key: None) -> Passes[Key, Value]:
        """Return the additions and replacements, and the removals.

        ``limited`` returns the key of the entry that an entry limits, if any. Such an entry is removed with the
        additions, and added with the removals, unless what it limits comes or goes as well.
        """
        new, old = {None, *self.added}, {None, *self.removed}
        late = {key: value for key, value in self.added.items() if limited(key) not in new}
        early = {key: value for key, value in self.removed.items() if limited(key) not in old}
        now, rest = difference(late, self.added), difference(early, self.removed)
        return Change(now.added, self.replaced, early), Change(late, removed=rest.added)


#: What of a change is applied in the first pass, and what in the second.
Passes = tuple[Change[Key, Value], Change[Key, Value]]
#: Never changed.
NO_CHANGE: Change[Any, Any] = Change()


def difference(
    observed: Mapping[Key, Value], desired: Mapping[Key, Value], keys: Optional[Iterable[Key]] = None
) -> Change[Key, Value]:
    """Return the change that turns ``observed`` into ``desired``.

    With ``keys``, only these are compared; after a conflict, this plans again only the objects that a transaction
    touched. Added and replaced keys keep the order of ``desired``, removed keys the order of ``observed``.
    """
    change: Change[Key, Value] = Change()
    if keys is not None:
        chosen = list(keys)
        observed = {key: observed[key] for key in chosen if key in observed}
        desired = {key: desired[key] for key in chosen if key in desired}
    for key, value in desired.items():
        if key not in observed:
            change.added[key] = value
        elif observed[key] != value:
            change.replaced[key] = (observed[key], value)
    for key, value in observed.items():
        if key not in desired:
            change.removed[key] = value
    return change


class Part(Generic[Key, Value]):
    """A part of an observed table, which may be compared by itself.

    ``keys``: those that would be in ``observed`` if they were in the table.
    """

    def __init__(self, observed: dict[Key, Value], keys: Iterable[Key]) -> None:
        self.observed = observed
        self._keys = keys

    def difference(self, desired: Mapping[Key, Value]) -> Change[Key, Value]:
        """Return the change that turns this part of the table into that of ``desired``."""
        return difference(self.observed, desired, dict.fromkeys([*self._keys, *self.observed]))


class Resource(Generic[Key, Value]):
    """A table of objects in the kernel or on the node's disk; subclasses live in the kernel layer.

    ``kind`` and ``family`` (IPv4, IPv6, or empty) identify it; :attr:`label` is its name for users. An ``atomic``
    resource gets its whole change in one call (chains: one transaction); the others get additions and replacements in a
    first pass over all resources, in their order, and removals in a second pass in reverse order, so that an object is
    added after the objects that it refers to, and removed before them.
    """

    kind: str = ""
    family: str = ""
    qualifier: str = ""
    atomic: bool = False
    progress: Progress = staticmethod(unheeded)

    @property
    def label(self) -> str:
        """Return the name that users read: see :func:`label`."""
        return label(self.kind, self.family, self.qualifier)

    def report_to(self, progress: Progress) -> None:
        """Call ``progress`` before the resource is read or changed, and between the steps of long work."""
        self.progress = progress

    def observe(self) -> dict[Key, Value]:
        """Return the current table, restricted to what the project owns, in the same terms as the desired table.

        Raises KernelError if it cannot be read.
        """
        raise NotImplementedError(self.label)

    def parts(
        self, expected: Mapping[Key, Value], urgent: Change[Key, Value] = NO_CHANGE
    ) -> Iterator[Part[Key, Value]]:
        """Yield the current table in parts, all of which together are what :meth:`observe` returns. Raises KernelError.

        A resource that can be read in parts, or that reads ``expected`` entries in less time, overrides this. Entries
        may change between two parts if ``expected`` changes with them. The entries of an ``urgent`` change come early.
        """
        yield Part(self.observe(), expected)

    def is_empty(self) -> bool:
        """Return whether :meth:`observe` would return nothing. Raises KernelError.

        A resource that can find out without reading the whole table overrides this.
        """
        return not self.observe()

    def apply(self, change: Change[Key, Value]) -> None:
        """Make the change in one batch; all or nothing where the kernel allows. Raises KernelError."""
        raise NotImplementedError(self.label)

    def passes(self, change: Change[Key, Value]) -> Passes[Key, Value]:
        """Return what of a change belongs into the first pass, and what into the second: see the class."""
        return (change, NO_CHANGE) if self.atomic else change.passes()

    def describe(self, key: Key, value: Value) -> list[str]:
        """Return lines that show one entry to users, in the syntax of the usual tool (``iptables-save``, ...)."""
        return [f"{key} {value}"]


class WrappedResource(Resource[Key, Value]):
    """A resource that subclasses observe in another way, and that is changed and shown as it is."""

    def __init__(self, resource: Resource[Key, Value]) -> None:
        self.kind, self.family, self.qualifier = resource.kind, resource.family, resource.qualifier
        self.atomic = resource.atomic
        self._resource = resource

    def report_to(self, progress: Progress) -> None:
        """See the base class."""
        super().report_to(progress)
        self._resource.report_to(progress)

    def apply(self, change: Change[Key, Value]) -> None:
        """Apply the change to the resource. Raises KernelError."""
        self._resource.apply(change)

    def passes(self, change: Change[Key, Value]) -> Passes[Key, Value]:
        """See the base class."""
        return self._resource.passes(change)

    def describe(self, key: Key, value: Value) -> list[str]:
        """Describe the entry as the resource itself does."""
        return self._resource.describe(key, value)


class ObservedOnce(WrappedResource[Key, Value]):
    """A resource that several stages of one plan read: it is observed once, and again only after it was changed.

    Create one per plan: the cached observation must not outlive it.
    """

    def __init__(self, resource: Resource[Key, Value]) -> None:
        super().__init__(resource)
        self._table: Optional[dict[Key, Value]] = None

    def observe(self) -> dict[Key, Value]:
        """Return the table as the first call observed it. Raises KernelError."""
        if self._table is None:
            self._table = self._resource.observe()
        return dict(self._table)

    def apply(self, change: Change[Key, Value]) -> None:
        """Apply the change to the resource. Raises KernelError."""
        self._table = None
        super().apply(change)


class UnloadedResource(Resource[Key, Value]):
    """Check-mode stand-in for a resource whose kernel module is not loaded; always empty.

    ``describe`` returns the lines that show an entry, as the resource itself does.
    """

    def __init__(self, kind: str, family: str, describe: Callable[[Key, Value], list[str]]) -> None:
        self.kind, self.family = kind, family
        self._describe = describe

    @classmethod
    def instead_of(cls, resource: Resource[Key, Value]) -> UnloadedResource[Key, Value]:
        """Return the stand-in for a resource that can be created without the module."""
        stand_in = cls(resource.kind, resource.family, resource.describe)
        stand_in.atomic = resource.atomic
        return stand_in

    def observe(self) -> dict[Key, Value]:
        """Return an empty table."""
        return {}

    def apply(self, change: Change[Key, Value]) -> None:
        """Do nothing; never called, because a check applies nothing."""

    def describe(self, key: Key, value: Value) -> list[str]:
        """Describe the entry as the resource itself does."""
        return self._describe(key, value)


def never(_change: Change[Any, Any]) -> bool:
    """Return False: the default for changes that need not wait for other stages."""
    return False


def always(_change: Change[Any, Any]) -> bool:
    """Return True, for changes that wait for all other stages."""
    return True


class Stage(NamedTuple):
    """A resource and the table it should hold.

    ``desired`` is a table, or, if it depends on the current state, a function from the observed table to the desired
    one: a real server with open connections is desired at weight 0 until they have ended. ``postponed`` returns whether
    a change must come after those of all other stages, because the entries it removes still serve traffic until then.
    """

    resource: Resource[Any, Any]
    desired: Union[Mapping[Any, Any], Callable[[Mapping[Any, Any]], Mapping[Any, Any]]]
    postponed: Callable[[Change[Any, Any]], bool] = never


class PlannedChange(NamedTuple):
    """A resource and the change to apply to it; ``change`` may be empty.

    ``entries``: how many entries were observed. ``observed``: these entries, empty where nothing was observed.
    """

    resource: Resource[Any, Any]
    change: Change[Any, Any]
    entries: int = 0
    observed: Mapping[Any, Any] = {}


def plan(stages: Sequence[Stage]) -> list[PlannedChange]:
    """Observe every resource and compare it with its desired table, without changing anything. Raises KernelError."""
    planned: list[PlannedChange] = []
    postponed: list[PlannedChange] = []
    for stage in stages:
        stage.resource.progress()
        if callable(stage.desired):
            observed = stage.resource.observe()
            table = stage.desired(observed)
        else:
            table = stage.desired
            observed = {key: value for part in stage.resource.parts(table) for key, value in part.observed.items()}
        change = difference(observed, table)
        chosen = postponed if stage.postponed(change) else planned
        chosen.append(PlannedChange(stage.resource, change, len(observed), observed))
    return planned + postponed


def apply_plan(
    planned: Sequence[PlannedChange], clock: Callable[[], float] = time.monotonic, removals: bool = True
) -> dict[str, float]:
    """Apply planned changes in dependency order and return seconds spent per resource label. Raises KernelError.

    ``removals`` False: entries that are removed without a replacement are left to a later plan.
    """
    seconds: dict[str, float] = {}

    def run(resource: Resource[Any, Any], change: Change[Any, Any]) -> None:
        if change:
            started = clock()
            resource.progress()
            resource.apply(change)
            seconds[resource.label] = seconds.get(resource.label, 0.0) + clock() - started

    passes = [(resource, resource.passes(change)) for resource, change, *_observed in planned]
    for resource, (first, _second) in passes:
        run(resource, first)
    for resource, (_first, second) in reversed(passes if removals else []):
        run(resource, second)
    return seconds
