# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many Events one agent posts, whatever users of the cluster write.

Like client-go's filter of Events: 25 at once, then one in five minutes, for each reason about the node and for each
namespace of other objects. So the objects of one namespace take no Event from those of another, and none from the node.
"""

from __future__ import annotations

from typing import Dict, Tuple

from ...event_reasons import Reason, Subject

BURST, SECONDS_OF_ONE = 25, 300.0
#: All namespaces together, which users may be able to create.
BURST_OF_ALL, SECONDS_OF_ONE_OF_ALL = 100, 60.0
_MOST_KEYS = 1000


class _Bucket:
    """A token bucket: full with ``burst`` tokens, and one more after each ``seconds``."""

    def __init__(self, burst: int, seconds: float, now: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._tokens = float(burst)
        self._at = now

    def left(self, now: float) -> float:
        """Return the tokens in the bucket."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) / self._seconds)
        self._at = now
        return self._tokens

    def take(self) -> None:
        """Remove a token; :meth:`left` must have returned at least one."""
        self._tokens -= 1


class EventBudget:
    """Decides which Events are posted. Only one thread may use it."""

    def __init__(self, now: float) -> None:
        self._of_all = _Bucket(BURST_OF_ALL, SECONDS_OF_ONE_OF_ALL, now)
        self._buckets: Dict[Tuple[Subject, str], _Bucket] = {}

    def admits(self, reason: Reason, namespace: str, now: float, *, about_node: bool) -> bool:
        """Return whether an Event may be posted, and count it. ``namespace``: of the object that it is about."""
        key = (Subject.NODE, reason.value) if about_node else (Subject.OBJECT, namespace)
        bucket = self._buckets.pop(key, None) or _Bucket(BURST, SECONDS_OF_ONE, now)
        # The one that was used last comes last.
        self._buckets[key] = bucket
        if len(self._buckets) > _MOST_KEYS:
            del self._buckets[next(iter(self._buckets))]
        needed = [bucket] if about_node else [bucket, self._of_all]
        if any(each.left(now) < 1 for each in needed):
            return False
        for each in needed:
            each.take()
        return True
