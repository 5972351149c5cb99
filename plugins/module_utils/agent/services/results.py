# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the sync of a family has changed."""

from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple

from ...resources import PlannedChange


class SyncResult(NamedTuple):
    """The result of a sync: entries added, replaced, removed; seconds by label of the resource; the changes."""

    added: int
    replaced: int
    removed: int
    seconds: Dict[str, float]
    changes: List[PlannedChange]

    def followed_by(self, later: SyncResult) -> SyncResult:
        """Return the result of two syncs."""
        labels = {**self.seconds, **later.seconds}
        return SyncResult(
            self.added + later.added,
            self.replaced + later.replaced,
            self.removed + later.removed,
            {label: max(self.seconds.get(label, 0.0), later.seconds.get(label, 0.0)) for label in labels},
            [*self.changes, *later.changes],
        )


NOTHING = SyncResult(0, 0, 0, {}, [])


def result_of(planned: Iterable[PlannedChange], seconds: Dict[str, float]) -> SyncResult:
    """Count planned changes that have been applied."""
    changes = [item for item in planned if item.change]
    return SyncResult(
        sum(len(item.change.added) for item in changes),
        sum(len(item.change.replaced) for item in changes),
        sum(len(item.change.removed) for item in changes),
        seconds,
        changes,
    )
