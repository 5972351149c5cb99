# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of a loss: most Services of the node lose their endpoints within a short time. The cost is O(change).

The agent must follow a real outage, so a loss is reported and not refused. Only if the operator requests it, the agent
continues to serve the affected Services as before for a while.
"""

from __future__ import annotations

from typing import Callable, Iterable, NamedTuple

from ...base.errors import some_of
from ...cluster.model import NamespacedName
from ...preflight.cluster_state import LOSS_MINIMUM

#: Services that lose their endpoints within this time count together.
WINDOW_SECONDS = 60.0
_NAMED = 5


class Loss(NamedTuple):
    """The Services that are about to lose their endpoints in a sync; ``text`` describes the loss in one line.

    ``is_new``: whether the loss has just begun. ``held``: whether to serve the Services as before for now.
    """

    services: set[NamespacedName]
    text: str
    is_new: bool
    held: bool


class EndpointLossWatch:
    """Keeps track of the Services that are programmed with endpoints on this node.

    ``max_percent``: report a loss of more than this percentage; 100 reports none. ``hold_seconds``: maximum time for
    which to hold back a loss. ``held_until``: when (by ``clock``) a held-back loss will be applied, 0 if there is none.
    """

    def __init__(self, max_percent: float, hold_seconds: float, clock: Callable[[], float]) -> None:
        self.max_percent = max_percent
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._served: set[NamespacedName] = set()
        self._lost: dict[NamespacedName, float] = {}
        self._since = 0.0
        self.held_until = 0.0

    def judge(self, dirty: Iterable[NamespacedName], has_endpoints: Callable[[NamespacedName], bool]) -> Loss:
        """Return the loss that the change of these Services causes; without Services if it is within the limit.

        ``has_endpoints`` is called only if enough Services change to exceed the limit.
        """
        now = self._clock()
        self._lost = {name: moment for name, moment in self._lost.items() if now - moment < WINDOW_SECONDS}
        before = len(self._served) + len(self._lost)
        changed = [name for name in dirty if name in self._served]
        losing: set[NamespacedName] = set()
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
        shown = some_of([str(name) for name in sorted(losing)], _NAMED)
        count = len(self._lost) + len(losing)
        text = f"{count} of the {before} Services that have endpoints on this node lose them: {shown}"
        return Loss(losing, text, is_new, held)

    def _exceeds(self, more: int, before: int) -> bool:
        return (len(self._lost) + more) * 100 > self.max_percent * before

    def programmed(self, services: Iterable[NamespacedName], has_endpoints: Callable[[NamespacedName], bool]) -> None:
        """Record what has been programmed for these Services."""
        now = self._clock()
        for name in services:
            if has_endpoints(name):
                self._served.add(name)
                self._lost.pop(name, None)
            elif name in self._served:
                self._served.discard(name)
                self._lost[name] = now

    def release(self) -> None:
        """Stop holding back the current loss."""
        self._since = min(self._since, self._clock() - self._hold_seconds)
        self.held_until = 0.0

    def forget(self) -> None:
        """Reset the records, because all Services are about to be programmed again."""
        self._served.clear()
        self._lost.clear()
        self._since = self.held_until = 0.0
