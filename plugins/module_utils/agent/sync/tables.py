# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables of the kernel that are kept in sync, and what a sync of them has changed.

A *partial* sync applies what changed in the desired tables without observing the kernel. A *full* one observes
everything; it comes first, after a failure, and when another program may have changed something.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple

from ...cluster.model import NamespacedName
from ...resources import PlannedChange

FULL, PARTIAL = "full", "partial"


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


class SyncedTables:
    """The tables of one family, or those of network policies, which are brought up to date and compared together.

    ``family``: IPv4, IPv6 or NetworkPolicy. ``needs_full``: whether the next sync must observe the kernel.
    """

    def __init__(self, family: str) -> None:
        self.family = family
        self.needs_full = True

    @property
    def has_observed(self) -> bool:
        """Whether the kernel has been observed; until then, the tables have nothing of what it serves."""
        return True

    @property
    def is_divisible(self) -> bool:
        """Whether :meth:`compare` makes several steps."""
        return False

    def awaits_portions(self) -> bool:
        """Return whether the kernel lacks what follows in portions, as a comparison would find. Raises KernelError."""
        return False

    def is_cold(self) -> bool:
        """Return whether the kernel contains none of our entries yet. Raises KernelError."""
        raise NotImplementedError(self.family)

    def full(self) -> SyncResult:
        """Observe everything and apply the difference. Raises KernelError; the next sync is then full, too."""
        raise NotImplementedError(self.family)

    def partial(self) -> SyncResult:
        """Apply the changes of the desired tables. Raises KernelError; the next sync is then full."""
        raise NotImplementedError(self.family)

    def compare(self, later: Callable[[], Iterable[NamespacedName]]) -> Iterator[SyncResult]:
        """Do what :meth:`full` does, in steps between which the desired tables and the kernel may change together.

        If the kernel has lost everything, the Services that ``later`` returns follow when they are applied. Raises
        KernelError; the next sync is then full, too.
        """
        yield self.full()
