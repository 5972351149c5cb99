# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables of the kernel that are kept in sync, and what a sync of them has changed.

A *partial* sync applies what changed in the desired tables without observing the kernel. A *full* one observes
everything; it comes first, after a failure, and when another program may have changed something.
"""

from __future__ import annotations

from typing import Callable, Iterable, Iterator, NamedTuple, Sequence

from ...cluster.model import NamespacedName
from ...resources import PlannedChange, apply_plan

FULL, PARTIAL = "full", "partial"


class SyncResult(NamedTuple):
    """The result of a sync: the changes, none of which is empty; seconds by label of the resource."""

    changes: list[PlannedChange]
    seconds: dict[str, float]

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of entries that were added, replaced and removed, by these words."""
        words = ("added", "replaced", "removed")
        return {word: sum(len(getattr(item.change, word)) for item in self.changes) for word in words}

    def followed_by(self, later: SyncResult) -> SyncResult:
        """Return the result of two syncs."""
        labels = {**self.seconds, **later.seconds}
        longest = {label: max(self.seconds.get(label, 0.0), later.seconds.get(label, 0.0)) for label in labels}
        return SyncResult([*self.changes, *later.changes], longest)


NOTHING = SyncResult([], {})


def applied(planned: Sequence[PlannedChange]) -> SyncResult:
    """Apply planned changes. Raises KernelError."""
    seconds = apply_plan(planned)
    return SyncResult([item for item in planned if item.change], seconds)


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
