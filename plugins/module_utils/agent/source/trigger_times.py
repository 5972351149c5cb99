# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When the changes of endpoints that are not programmed yet were triggered, for the network programming latency."""

from __future__ import annotations

import datetime
import time
from typing import Iterable

from ...base.addresses import FAMILIES
from ...cluster.model import EndpointSlice, NamespacedName

_MOST_TIMES = 100
_MOST_FRACTION_DIGITS = 9


def _seconds_of(text: str) -> float:
    """Return a trigger time of an EndpointSlice in seconds since the epoch; 0 if it is none."""
    if not text.endswith("Z"):
        return 0.0
    whole, _point, fraction = text[:-1].partition(".")
    if not (fraction or "0").isdecimal() or len(fraction) > _MOST_FRACTION_DIGITS:
        return 0.0
    try:
        moment = datetime.datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=datetime.timezone.utc)
        return moment.timestamp() + float(f"0.{fraction or '0'}")
    except ValueError:
        return 0.0


class TriggerTimes:
    """The trigger times of EndpointSlices by their family and Service, at most a hundred of each.

    Families are synced one by one, so each has its own times, as in kube-proxy.
    """

    def __init__(self) -> None:
        self._times: dict[str, dict[NamespacedName, list[float]]] = {family: {} for family in FAMILIES}
        self._started = time.time()
        self._started_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._started))

    def note(self, item: EndpointSlice) -> None:
        """Record the trigger time of a changed EndpointSlice, unless it is from before the start."""
        # A list at the start has tens of thousands of times before it, which sort before it as text, too.
        if item.trigger_time < self._started_text:
            return
        moment = _seconds_of(item.trigger_time)
        if moment > self._started:
            times = self._times[item.family].setdefault(item.service_key, [])
            if len(times) < _MOST_TIMES:
                times.append(moment)

    def forget(self, families: Iterable[str], services: Iterable[NamespacedName]) -> None:
        """Forget the times of Services of which an EndpointSlice in these families was removed."""
        for family in families:
            for service in services:
                self._times[family].pop(service, None)

    def pop(self, family: str, now: float) -> list[float]:
        """Return the seconds since each known time of a family, which is programmed now; forget them.

        A time in the future counts as now: anyone who may write an EndpointSlice can set it.
        """
        times, self._times[family] = self._times[family], {}
        return [max(0.0, now - moment) for moments in times.values() for moment in moments]

    def clear(self) -> None:
        """Forget the times of all families."""
        for times in self._times.values():
            times.clear()
