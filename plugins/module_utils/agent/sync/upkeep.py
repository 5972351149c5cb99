# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node needs from time to time without any change of the cluster."""

from __future__ import annotations

from typing import Callable, Optional

from ..drift.parameters import PARAMETERS_SECONDS
from ..timers import Timers
from .other_modes import DRAIN_SECONDS
from .setup import Proxiers
from .syncer import Syncer

GAUGES_SECONDS = 30.0


class Upkeep:
    """Removes drained real servers, refreshes gauges and repairs kernel parameters, all with timers.

    ``proxiers`` returns those of the mode in effect. ``changed`` is called when entries of the kernel were removed.
    """

    def __init__(
        self, timers: Timers, syncer: Syncer, proxiers: Callable[[], Optional[Proxiers]], changed: Callable[[], None]
    ) -> None:
        self._syncer = syncer
        self._proxiers = proxiers
        self._changed = changed
        self._draining = timers.add("remove drained real servers", self._drain)
        self._gauges = timers.add("refresh gauges", self._refresh_gauges)
        self._parameters = timers.add("repair kernel parameters", self._repair_parameters)

    def synced(self, proxiers: Proxiers) -> None:
        """Start the timers after a sync, unless they run."""
        if any(family.draining for family in proxiers.families):
            self._draining.start(DRAIN_SECONDS)
        self._gauges.start(GAUGES_SECONDS)
        self._parameters.start(PARAMETERS_SECONDS)

    def _drain(self) -> None:
        proxiers = self._proxiers()
        if proxiers is not None:
            gone, left = self._syncer.drain(proxiers.families)
            if gone:
                self._changed()
            if left:
                self._draining.start(DRAIN_SECONDS)

    def _refresh_gauges(self) -> None:
        proxiers = self._proxiers()
        if proxiers is not None:
            for family in proxiers.families:
                self._syncer.measures.count_rules(proxiers, family)

    def _repair_parameters(self) -> None:
        proxiers = self._proxiers()
        if proxiers is not None:
            self._syncer.repairs.repair_parameters(proxiers.sysctls)
            self._parameters.start(PARAMETERS_SECONDS)
