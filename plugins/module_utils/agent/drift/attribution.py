# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Short descriptions of external changes to the tables for one log line: kinds, counts and some names."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, Hashable, Iterable, Sequence, Tuple

from ...rendering.iptables.tables import ChainKey, DormantKey, JumpKey
from ...rendering.ipvs.model import RealServerKey, SetElementKey, VirtualServerKey
from ...rendering.nftables.objects import TABLE_KEY, ElementKey, ObjectKey
from ...resources import Kind, PlannedChange

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
}
_NFTABLES_KINDS = {
    "table": "table",
    "chain": "chain",
    "set": "set or map",
    "element": "element of",
    "list": "element of",
}
_PLURALS = {"set or map": "sets and maps", "element of": "elements of", "ipset element of": "ipset elements of"}


def kind_and_name(kind: str, key: Any) -> Tuple[str, str]:
    """Return the word for an entry, in the singular, and its name. ``kind``: the kind of its resource."""
    if isinstance(key, ChainKey):
        return f"{key.table} chain", key.chain
    if isinstance(key, JumpKey):
        return f"{key.table} jump", key.chain
    if isinstance(key, DormantKey):
        return "dormant flag", key.table
    if isinstance(key, SetElementKey):
        return "ipset element of", key.set
    if isinstance(key, VirtualServerKey):
        return "virtual server", str(key)
    if isinstance(key, RealServerKey):
        return "real server", str(key)
    if isinstance(key, (ObjectKey, ElementKey)):
        return _NFTABLES_KINDS[key.kind], key.name
    return _SINGULAR.get(kind, kind), str(key)


def summary(entries: Iterable[Tuple[str, Any]]) -> str:
    """Return text such as ``2 nat chains (KUBE-SERVICES, KUBE-NODEPORTS), 3 nat jumps (OUTPUT, PREROUTING)``.

    ``entries``: kind of the resource, key. Kinds and names keep their order, except that jumps into our chains and base
    chains come first.
    """
    counts: Dict[str, int] = {}
    names: Dict[str, Dict[str, None]] = {}
    for table, key in entries:
        kind, name = kind_and_name(table, key)
        counts[kind] = counts.get(kind, 0) + 1
        names.setdefault(kind, {})[name] = None
    parts = []
    for kind, count in counts.items():
        some = sorted(names[kind], key=lambda name: name not in _FIRST)[:MOST_NAMES]
        more = len(names[kind]) - len(some)
        plural = _PLURALS.get(kind) or (f"{kind}es" if kind.endswith("s") else f"{kind}s")
        shown = ", ".join(some) + (f" and {more} more" if more else "")
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


def written(changes: Sequence[PlannedChange]) -> FrozenSet[Hashable]:
    """Return the entries that another program has added, or to which it has given another value.

    ``changes``: what the repair changed. Flags that disable whole tables are none: no service proxy sets them.
    """
    found = set()
    for item in changes:
        keys = {*item.change.removed, *(key for key, values in item.change.replaced.items() if _has_more(*values))}
        found |= {(item.resource.label, key) for key in keys if key != TABLE_KEY and not isinstance(key, DormantKey)}
    return frozenset(found)


def attributed(changes: Sequence[PlannedChange]) -> Dict[str, str]:
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
