# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries of the kernel, or of the agent in userspace mode, for a destination, compared with the desired ones."""

from __future__ import annotations

import re
from typing import Any, Mapping, NamedTuple, Sequence

from ..rendering.desired import STATIC, DesiredTables
from ..rendering.rendering import Rendering
from ..rendering.settings import Arrival
from ..resources import Stage

MISSING, EXTRA = "missing", "extra"
#: What is said about a destination for which the kernel holds other entries, if it is not certain what they do.
OTHER_ENTRIES = "the kernel holds other entries than desired"
#: The most differences that are named in entries on which all Services depend.
_MOST_COMMON = 10


class Row(NamedTuple):
    """An entry in native syntax. ``state``: empty if it is held as desired, MISSING or EXTRA."""

    line: str
    state: str = ""


def why_not_forwarded(rows: Sequence[Row], endpoints: Sequence[str], rendering: Rendering[Any]) -> str:
    """Return why a destination is not forwarded by what the kernel holds, or an empty text if that is not certain."""
    if all(row.state == MISSING for row in rows):
        return "the kernel holds nothing for this destination"
    if not rendering.closes_cluster_ips and _holds_none(rows, endpoints):
        return "the kernel holds no entry that leads to an endpoint"
    return ""


def _holds_none(rows: Sequence[Row], endpoints: Sequence[str]) -> bool:
    """Return whether an entry is desired for each endpoint (ADDRESS:PORT), and the kernel holds none of them."""
    # nf_tables joins address and port by a dot, and has no brackets.
    plain = [(row.state, f" {re.sub('[][]', '', row.line).replace(' . ', ':')} ") for row in rows if row.state != EXTRA]
    for endpoint in endpoints:
        text = re.sub("[][]", "", endpoint)
        states = [state for state, line in plain if re.search(rf"[ :]{re.escape(text)}[ ,;]", line)]
        if not states or "" in states:
            return False
    return True


class Held:
    """The observed and the desired tables of a family; each resource is read once. Raises KernelError."""

    def __init__(self, tables: DesiredTables, stages: Sequence[Stage]) -> None:
        self._tables = tables
        self._observed: dict[str, Mapping[Any, Any]] = {}
        self._wanted: dict[str, Mapping[Any, Any]] = {}
        for stage in stages:
            kind = stage.resource.kind
            if kind in tables.rendering.tables:
                found = stage.resource.observe()
                self._observed[kind] = found
                self._wanted[kind] = stage.desired(found) if callable(stage.desired) else stage.desired

    def rows(self, family: str, arrivals: Sequence[Arrival]) -> list[Row]:
        """Return the entries for some destinations, the desired ones in their order, then those beside them."""
        rendering = self._tables.rendering
        found: dict[str, str] = {}
        for arrival in arrivals:
            wanted = rendering.rows(family, self._wanted, arrival)
            held = rendering.rows(family, self._observed, arrival)
            present, desired = set(held), set(wanted)
            found.update({line: "" if line in present else MISSING for line in wanted})
            found.update({line: EXTRA for line in held if line not in desired})
        return [Row(line, state) for line, state in found.items()]

    def differences(self, family: str, rows: Sequence[Row], common: bool = True) -> list[str]:
        """Return how the kernel differs from what is desired, by the rows and with ``common`` by entries for all."""
        found = [f"missing in the kernel: {row.line}" for row in rows if row.state == MISSING]
        found += [f"not desired: {row.line}" for row in rows if row.state == EXTRA]
        return found + self._common_differences(family) if common else found

    def _common_differences(self, family: str) -> list[str]:
        """Return the differences in entries on which all Services depend: hooks, lookups of Services, devices."""
        rendering = self._tables.rendering
        different: list[tuple[str, Any]] = []
        for table, key in dict.fromkeys(rendering.common_keys(self._tables.programmed(STATIC), self._wanted)):
            if table in self._wanted and self._wanted[table].get(key) != self._observed[table].get(key):
                different.append((table, key))
        names = []
        for table, key in different[:_MOST_COMMON]:
            state = "differs" if key in self._observed[table] else "is missing"
            value = self._wanted[table].get(key)
            lines = rendering.lines(family, table, key, value) if value is not None else []
            names.append(f"{lines[0] if lines else key} {state}")
        more = len(different) - len(names)
        return [*names, f"{more} more entries for all Services"] if more else names
