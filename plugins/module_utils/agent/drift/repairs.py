# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Repairs of external changes: counted, described in one log line, posted as Events, and repeated after a failure.

Services and network policies report them alike.
"""

from __future__ import annotations

from typing import Any, Hashable, Iterable, Mapping, NamedTuple, Sequence

from ...base.errors import KernelError, ProxyError, some_of
from ...convergence.modes.stages.sysctls import sysctl_stage
from ...event_reasons import Reason
from ...kernel.parameters.sysctls import SysctlsResource, Wanted
from ...rendering.iptables.tables import ChainKey, DormantKey, JumpKey
from ...rendering.ipvs.model import SetElementKey
from ...rendering.nftables.objects import TABLE_KEY, ElementKey, ObjectKey
from ...resources import Change, Kind, PlannedChange, plan
from ..api.events import WARNING
from ..other_proxy import OtherProxy
from ..reports import Reports

#: Number of names of one kind to list.
MOST_NAMES = 4
#: These come first: without them no packet reaches our chains.
_FIRST = ("KUBE-SERVICES", "services")

#: The word for one entry of a kind whose keys are plain text.
_SINGULAR = {
    Kind.SETS: "ipset",
    Kind.TIMEOUTS: "IPVS timeout",
    Kind.DEVICES: "device",
    Kind.ADDRESSES: "address",
    Kind.SYSCTLS: "sysctl",
    Kind.MODULES: "module",
    Kind.LISTENERS: "listener",
    Kind.VIRTUAL_SERVERS: "virtual server",
    Kind.REAL_SERVERS: "real server",
}
_NFTABLES_KINDS = {
    "table": "table",
    "chain": "chain",
    "set": "set or map",
    "element": "element of",
    "list": "element of",
}
_PLURALS = {"set or map": "sets and maps", "element of": "elements of", "ipset element of": "ipset elements of"}


def kind_and_name(kind: str, key: Any) -> tuple[str, str]:
    """Return the word for an entry, in the singular, and its name. ``kind``: the kind of its resource."""
    if isinstance(key, ChainKey):
        return f"{key.table} chain", key.chain
    if isinstance(key, JumpKey):
        return f"{key.table} jump", key.chain
    if isinstance(key, DormantKey):
        return "dormant flag", key.table
    if isinstance(key, SetElementKey):
        return "ipset element of", key.set
    if isinstance(key, (ObjectKey, ElementKey)):
        return _NFTABLES_KINDS[key.kind], key.name
    return _SINGULAR.get(kind, kind), str(key)


def summary(entries: Iterable[tuple[str, Any]]) -> str:
    """Return text such as ``2 nat chains (KUBE-SERVICES, KUBE-NODEPORTS), 3 nat jumps (OUTPUT, PREROUTING)``.

    ``entries``: kind of the resource, key. Kinds and names keep their order, except that jumps into our chains and base
    chains come first.
    """
    counts: dict[str, int] = {}
    names: dict[str, dict[str, None]] = {}
    for table, key in entries:
        kind, name = kind_and_name(table, key)
        counts[kind] = counts.get(kind, 0) + 1
        names.setdefault(kind, {})[name] = None
    parts = []
    for kind, count in counts.items():
        plural = _PLURALS.get(kind) or (f"{kind}es" if kind.endswith("s") else f"{kind}s")
        shown = some_of(sorted(names[kind], key=lambda name: name not in _FIRST), MOST_NAMES)
        parts.append(f"{count} {kind if count == 1 else plural} ({shown})")
    return ", ".join(parts)


def _is_empty(value: Any) -> bool:
    """Return whether a chain has no rules; chains are tuples of rules, or have them in a field."""
    return value == () or getattr(value, "rules", None) == ()


def _rules(value: Any) -> Any:
    """Return the rules of a chain, and None for the value of anything else, which may be a tuple with named fields."""
    is_chain = isinstance(value, tuple) and not hasattr(value, "_fields")
    return getattr(value, "rules", value if is_chain else None)


def _has_more(before: Any, now: Any) -> bool:
    """Return whether a value is not just the desired one with rules or members missing."""
    held, wanted = _rules(before), _rules(now)
    if held is None or wanted is None:
        return bool(before != now)
    return not set(held) <= set(wanted)


def written(changes: Sequence[PlannedChange]) -> frozenset[Hashable]:
    """Return the entries that another program has added, or to which it has given another value.

    ``changes``: what the repair changed. Flags that disable whole tables are none: no service proxy sets them.
    """
    found = set()
    for item in changes:
        keys = {*item.change.removed, *(key for key, values in item.change.replaced.items() if _has_more(*values))}
        found |= {(item.resource.label, key) for key in keys if key != TABLE_KEY and not isinstance(key, DormantKey)}
    return frozenset(found)


def attributed(changes: Sequence[PlannedChange]) -> dict[str, str]:
    """Return the log fields for external changes: removed, flushed, modified, added. Empty fields are omitted.

    ``changes``: what the repair changed.
    """
    tables = [(item.resource.kind, item.change) for item in changes]
    replaced = [((kind, key), before) for kind, change in tables for key, (before, _now) in change.replaced.items()]
    found = {
        "removed": summary((kind, key) for kind, change in tables for key in change.added),
        "flushed": summary(item for item, before in replaced if _is_empty(before)),
        "modified": summary(item for item, before in replaced if not _is_empty(before)),
        "added": summary((kind, key) for kind, change in tables for key in change.removed),
    }
    return {word: text for word, text in found.items() if text}


#: Seconds between reads of kernel parameters, of whose changes the kernel sends no notifications: less than 1 ms each.
PARAMETERS_SECONDS = 10.0


class Repairs:
    """Reports the repairs of tables. A family is IPv4 or IPv6, or NetworkPolicy.

    ``count``: the entries that were repaired.
    """

    def __init__(self, reports: Reports) -> None:
        self.count = 0
        self._log, self._limited, self._post = reports.log, reports.limited, reports.post
        # Families whose repair failed because another program made changes at the same time, with the reason for the
        # repair.
        self._unrepaired: dict[str, str] = {}

    def succeeded(self, family: str, suspicion: str, changes: Sequence[PlannedChange], seconds: float) -> int:
        """Count the entries that a repair changed and log them in one line; return their number."""
        count = sum(len(item.change) for item in changes)
        self.count += count
        if count:
            what = attributed(changes)
            logged = self._limited.warning(
                ("repair", family),
                "repaired external changes",
                family=family,
                noticed_by=suspicion,
                **what,
                entries=count,
                seconds=round(seconds, 4),
            )
            if logged:
                words = "; ".join(f"{word}: {text}" for word, text in what.items())
                self._post(None, WARNING, Reason.DRIFT_REPAIRED, "Repair", f"{family}: {words}")
        else:
            self._log.debug("nothing to repair", family=family, noticed_by=suspicion)
        return count

    def failed(self, family: str, suspicion: str, error: ProxyError) -> None:
        """Remember a repair that failed, for the next sync, and post an Event about the first failure."""
        if family not in self._unrepaired:
            note = f"{family}: external changes are not repaired yet ({suspicion}): {error}"
            self._post(None, WARNING, Reason.DRIFT_NOT_REPAIRED, "Repair", note)
        self._unrepaired[family] = suspicion

    def pop_unrepaired(self, family: str) -> str:
        """Return the reason for a repair of a family that failed, and forget it; empty if none did."""
        return self._unrepaired.pop(family, "")


class ServiceRepairs(Repairs):
    """Reports the repairs of Services, which another service proxy may revert, and repairs kernel parameters.

    ``count`` includes the parameters.
    """

    def __init__(self, reports: Reports, other_proxy: OtherProxy) -> None:
        super().__init__(reports)
        self._other_proxy = other_proxy
        self._metrics = reports.metrics
        self._refused_parameters: list[str] = []

    def succeeded(self, family: str, suspicion: str, changes: Sequence[PlannedChange], seconds: float) -> int:
        """See the base class. Also count the entries by resource, and those that another program has written."""
        by_others = written(changes)
        if by_others:
            self._other_proxy.repaired(family, by_others, suspicion)
        elif not changes:
            self._other_proxy.lose(family)
        for item in changes:
            self._metrics.drift_repaired.labels(item.resource.kind, item.resource.family).inc(len(item.change))
        return super().succeeded(family, suspicion, changes, seconds)

    def repair_parameters(self, wanted: Mapping[str, Wanted]) -> None:
        """Restore kernel parameters that another program has changed, and count them as drift.

        What the kernel refuses is logged once, until something else is refused.
        """
        try:
            repaired, refused = repair_parameters(wanted)
        except KernelError as error:
            repaired, refused = {}, [str(error)]
        if repaired:
            self.count += len(repaired)
            self._metrics.drift_repaired.labels(SysctlsResource.kind, SysctlsResource.family).inc(len(repaired))
            what = ", ".join(f"{key} from {old} to {new}" for key, (old, new) in repaired.items())
            text = "restored kernel parameters that another program had changed"
            if self._limited.warning("parameters", text, parameters=what):
                self._post(None, WARNING, Reason.DRIFT_REPAIRED, "Repair", f"kernel parameters: {what}")
        if refused and refused != self._refused_parameters:
            reason = "; ".join(refused)
            self._log.warning("kernel parameters cannot be restored", reason=reason)
            self._post(None, WARNING, Reason.DRIFT_NOT_REPAIRED, "Repair", f"kernel parameters: {reason}")
        self._refused_parameters = refused


class RepairedParameters(NamedTuple):
    """Parameters that were restored, each with the value found and the value wanted.

    ``refused``: one line for each parameter that the kernel refused to change.
    """

    repaired: dict[str, tuple[str, str]]
    refused: list[str]


def repair_parameters(wanted: Mapping[str, Wanted]) -> RepairedParameters:
    """Restore each kernel parameter that differs from its wanted value.

    Programs that change them are, for example, tuned, Docker, and ``sysctl --system`` after an update.

    Parameters that cannot be changed in this container or network namespace are skipped, as at the start. Raises
    KernelError if a parameter cannot be read.
    """
    stage, _unchangeable = sysctl_stage(wanted)
    found = RepairedParameters({}, [])
    for resource, change, *_observed in plan([stage]):
        parts = [(key, Change(replaced={key: values})) for key, values in change.replaced.items()]
        parts += [(key, Change(added={key: value})) for key, value in change.added.items()]
        for key, part in parts:
            try:
                resource.apply(part)
            except KernelError as error:
                found.refused.append(str(error))
            else:
                # A parameter that the kernel does not have is an addition, which apply() refuses.
                found.repaired[key] = change.replaced[key]
    return found
