# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connections that policies no longer allow, cut beside the other work of the loop.

The table of connections may have a million entries, and any user of the cluster can revoke something at any time. So it
is read only when something was revoked, for the pods concerned, in short steps between which the loop programs new
pods and Services, and with pauses.
"""

from __future__ import annotations

from typing import AbstractSet, Optional

from ...base.errors import KernelError
from ...base.progress import Progress
from ...convergence.policy import cutting_denied
from ...kernel.conntrack.socket import Steps
from ...networkpolicy.matching.owners import Address
from ...networkpolicy.node_policy import NodePolicy
from ..reports import Reports
from ..threads.timers import Pace, Timers

#: The loop does other work after this time.
STEP_SECONDS = 0.02
#: The pause after a pass; cuts take a tenth of the time at most.
PAUSE_SECONDS, PAUSE_FACTOR = 2.0, 9.0
#: How often to look whether pending grants, or policies that are refused for the moment, are in force.
_WAIT_SECONDS = 0.5


class ConnectionCuts:
    """Cuts what :meth:`revoke` names, once the policies that :meth:`follow` names are in force."""

    def __init__(self, timers: Timers, reports: Reports, progress: Progress) -> None:
        self._clock = timers.clock
        self._log, self._limited = reports.log, reports.limited
        self._progress = progress
        self._timer = timers.add("cut connections that are no longer allowed", self._work)
        self._pace = Pace(timers.clock, PAUSE_FACTOR, PAUSE_SECONDS)
        self._policy: Optional[NodePolicy] = None
        # Addresses whose connections are to be evaluated, and whether those of all pods are.
        self._addresses: set[Address] = set()
        self._everything = False
        # The pass in progress, and the time that it has taken.
        self._steps: Optional[Steps[int]] = None
        self._seconds = 0.0

    def revoke(self, addresses: Optional[AbstractSet[Address]]) -> None:
        """Have the connections of these addresses evaluated, or those of all pods."""
        if addresses is None:
            self._everything = True
        else:
            self._addresses |= addresses

    def follow(self, policy: NodePolicy) -> None:
        """Evaluate by these policies from now on, beginning soon if something was revoked."""
        if policy is not self._policy:
            self._everything |= self._steps is not None
            self._abandon()
            self._policy = policy
        if self._everything or self._addresses:
            self._timer.start(self._pace.rest())

    def forget(self) -> None:
        """Cut nothing any more."""
        self._abandon()
        self._policy, self._everything, self._addresses = None, False, set()

    def _abandon(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _work(self) -> None:
        policy = self._policy
        if policy is None:
            return
        if policy.pending or policy.is_provisional:
            # Connections that only pending grants allow, or policies that may soon be in force again, are kept.
            self._timer.start(_WAIT_SECONDS)
            return
        if self._steps is None:
            addresses = None if self._everything else frozenset(self._addresses)
            self._everything, self._addresses, self._seconds = False, set(), 0.0
            self._steps = cutting_denied(policy, addresses, self._progress)
        began = self._clock()
        try:
            while self._clock() - began < STEP_SECONDS:
                next(self._steps)
        except StopIteration as end:
            self._end(self._clock() - began, end.value)
        except KernelError as error:
            self._limited.warning("cut", "connections that are no longer allowed cannot be cut", error=error)
            self._end(self._clock() - began, 0)
        else:
            self._seconds += self._clock() - began
            self._timer.start(0)

    def _end(self, seconds: float, count: int) -> None:
        self._steps = None
        self._pace.worked(self._seconds + seconds)
        if count:
            self._log.info("cut connections that are no longer allowed", connections=count)
        if self._everything or self._addresses:
            self._timer.start(self._pace.rest())
