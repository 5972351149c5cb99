# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How often the agent chooses which policies are refused for the number of elements of the table.

A choice takes seconds, and refuses the policies that need most instead of the one that happened to change last.
"""

from __future__ import annotations

from typing import Callable

from ...cluster.parsing.policy_objects import PolicyChanges
from ...networkpolicy.node_policy import NodePolicy
from ..threads.timers import Pace, Timers

PAUSE_SECONDS = 2.0
#: The minimum pause after a choice is this many times its duration, so that choices take a fifth of the time at most.
PAUSE_FACTOR = 4


class PolicyChoices:
    """Applies changes to policies, and limits how often these are chosen again. ``again`` is called when it is time."""

    def __init__(self, timers: Timers, again: Callable[[], None]) -> None:
        self._clock = timers.clock
        self._timer = timers.add("choose network policies", again)
        self._pace = Pace(timers.clock, PAUSE_FACTOR, PAUSE_SECONDS)

    def update(self, policy: NodePolicy, changes: PolicyChanges) -> None:
        """Apply changes; if a choice is needed and the last one was too recent, it is made later."""
        choose = not self._pace.rest()
        self._measured(policy, lambda: policy.update(changes, choose))

    def reconsider(self, policy: NodePolicy) -> None:
        """Choose now."""
        self._measured(policy, policy.reconsider)

    def _measured(self, policy: NodePolicy, action: Callable[[], None]) -> None:
        started, before = self._clock(), policy.choices
        action()
        if policy.choices != before:
            self._pace.worked(self._clock() - started)
        if policy.is_provisional:
            self._timer.start(self._pace.rest())
