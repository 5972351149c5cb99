# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Follow Services, the node's addresses and verdicts with health checks, whose defects do not end the agent."""

from __future__ import annotations

from typing import Callable, Tuple

from ..services.node import NodeSync
from ..threads.failures import Steps
from ..threads.timers import Timers
from ..views import Views
from .checks import Checks
from .prober import VerdictChange

RETRY_SECONDS = 30.0


class CheckFollower:
    """Calls the health checks when something changes.

    An exception in them must not end the agent, which serves Services without them, too. After one, all Services are
    followed again, as if none had been checked.
    """

    def __init__(self, checks: Checks, views: Views, sync: NodeSync, *, timers: Timers, steps: Steps) -> None:
        self._checks = checks
        self._views = views
        self._sync = sync
        self._steps = steps
        self._addresses: Tuple[Tuple[str, str], ...] = ()
        self._retry = timers.add("follow health checks again", lambda: self.follow(everything=True))

    def follow(self, everything: bool = False) -> None:
        """Check the endpoints of changed Services; those of all Services if the node's addresses changed."""
        proxiers, view = self._sync.proxiers, self._views.current
        addresses = proxiers.node_view.addresses if proxiers is not None else ()
        # An endpoint is no longer checked once the node has its address. A new tuple is rare.
        everything = everything or addresses is not self._addresses
        if everything or view.dirty:
            self._addresses = addresses
            self._attempt(
                lambda: self._checks.follow(view, lambda: {address for _interface, address in addresses}, everything)
            )

    def changed(self, change: VerdictChange) -> None:
        """Apply the new verdict of a target."""
        self._attempt(lambda: self._checks.changed(self._views.current, change))

    def end_connections(self) -> None:
        """Close the connections to endpoints that have failed and are no longer served."""
        proxiers, view = self._sync.proxiers, self._views.current
        if proxiers is not None:
            name = "end connections to failed endpoints"
            self._steps.run(name, lambda: self._checks.end_connections(view, proxiers.families))
            self._steps.run(name, self._sync.end_connections)

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._steps.run("follow health checks", action):
            self._checks.forget()
            self._retry.start(RETRY_SECONDS)
