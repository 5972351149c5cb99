# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The form in which modules, playbooks and the node command show what differs: a unified diff, as Ansible prints it.

A line with ``-`` is on the node and goes, one with ``+`` will be added.
"""

from __future__ import annotations

import difflib
from typing import Any, Sequence

from .resources import Change, Resource

_CONTEXT = 3


def changed_lines(resource: Resource[Any, Any], change: Change[Any, Any]) -> tuple[list[str], list[str]]:
    """Return the lines of the entries that differ, before and after, in the syntax of the table's usual tool."""
    before: list[str] = []
    after: list[str] = []
    for key, value in change.removed.items():
        before += resource.describe(key, value)
    for key, (old, new) in change.replaced.items():
        before += resource.describe(key, old)
        after += resource.describe(key, new)
    for key, value in change.added.items():
        after += resource.describe(key, value)
    return before, after


def unified(name: str, before: Sequence[str], after: Sequence[str], limit: int = 0) -> list[str]:
    """Return the diff of a table, with at most ``limit`` lines below its two headers, all of them if it is <= 0."""
    lines = list(difflib.unified_diff(before, after, f"before: {name}", f"after: {name}", n=_CONTEXT, lineterm=""))
    shown = lines[: limit + 2] if limit > 0 else lines
    left = len(lines) - len(shown)
    return [*shown, f"... and {left} more lines"] if left else shown


def differing(before: Sequence[str], after: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return both sides without the lines that a diff of them does not show."""
    left: list[str] = []
    right: list[str] = []
    for group in difflib.SequenceMatcher(None, before, after).get_grouped_opcodes(_CONTEXT):
        left += before[group[0][1] : group[-1][2]]
        right += after[group[0][3] : group[-1][4]]
    return left, right
