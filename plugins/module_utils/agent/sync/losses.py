# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Notices when most Services of the node lose their endpoints within a short time, at a cost of O(change).

A real outage must be followed, so this is reported and not refused; only where the operator asks for it are the
Services concerned served as before for a while.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, NamedTuple, Set

from ...cluster.model import NamespacedName
from ...preflight.cluster_state import LOSS_MINIMUM

#: Services that lose their endpoints within this time count together.
WINDOW_SECONDS = 60.0
_NAMED = 5


class Loss(NamedTuple):
    """What a sync is about to do: the Services that lose their endpoints by it, ``text`` in one line.

    ``is_new``: the node was not in this condition before. ``held``: the Services are to be served as before for now.
    """

    services: Set[NamespacedName]
    text: str
    is_new: bool
    held: bool


class LossWatch:
    """Remembers which Services have endpoints on this node, as programmed.

    ``max_percent``: a loss of more than this share is reported; 100 reports none. ``hold_seconds``: for how long at
    most it is held back. ``held_until``: when (by ``clock``) what is held back will be made, 0 if nothing is.
    """

    def __init__(self, max_percent: float, hold_seconds: float, clock: Callable[[], float]) -> None:
        self.max_percent = max_percent
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._served: Set[NamespacedName] = set()
        self._lost: Dict[NamespacedName, float] = {}
        self._since = 0.0
        self.held_until = 0.0

    def judge(self, dirty: Iterable[NamespacedName], has_endpoints: Callable[[NamespacedName], bool]) -> Loss:
        """Return what the change of these Services loses; no Services in it if that is not too much.

        ``has_endpoints`` is asked only where so many Services change that it could be.
        """
        now = self._clock()
        self._lost = {name: moment for name, moment in self._lost.items() if now - moment < WINDOW_SECONDS}
        before = len(self._served) + len(self._lost)
        changed = [name for name in dirty if name in self._served]
        losing: Set[NamespacedName] = set()
        if before >= LOSS_MINIMUM and self._exceeds(len(changed), before):
            losing = {name for name in changed if not has_endpoints(name)}
        if not losing or not self._exceeds(len(losing), before):
            if not self._exceeds(0, before):
                self._since = self.held_until = 0.0
            return Loss(set(), "", False, False)
        is_new = not self._since
        if is_new:
            self._since = now
        held = now < self._since + self._hold_seconds
        self.held_until = self._since + self._hold_seconds if held else 0.0
        shown = ", ".join(str(name) for name in sorted(losing)[:_NAMED])
        more = f" and {len(losing) - _NAMED} more" if len(losing) > _NAMED else ""
        count = len(self._lost) + len(losing)
        text = f"{count} of the {before} Services that have endpoints on this node lose them: {shown}{more}"
        return Loss(losing, text, is_new, held)

    def _exceeds(self, more: int, before: int) -> bool:
        return (len(self._lost) + more) * 100 > self.max_percent * before

    def programmed(self, services: Iterable[NamespacedName], has_endpoints: Callable[[NamespacedName], bool]) -> None:
        """Take note of what has been programmed for these Services."""
        now = self._clock()
        for name in services:
            if has_endpoints(name):
                self._served.add(name)
                self._lost.pop(name, None)
            elif name in self._served:
                self._served.discard(name)
                self._lost[name] = now

    def forget(self) -> None:
        """Begin anew: all Services are about to be programmed again."""
        self._served.clear()
        self._lost.clear()
        self._since = self.held_until = 0.0
