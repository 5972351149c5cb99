# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Another service proxy that serves the node beside the agent, as the agent notices it.

The agent's user sees no processes of other users: before each start the unit checks for them as root. A kube-proxy that
returns later is noticed by what it does: it answers at the agent's ports, or writes rules again that the agent has
removed. Both would revert each other's changes without end, so the agent reports it, and reverts less and less often.
"""

from __future__ import annotations

from typing import Callable, Hashable, NamedTuple

from ..event_reasons import Reason
from .api.events import NORMAL, WARNING
from .reports import Reports

#: Another program is taken for a service proxy after this many repairs of entries that it has written, in this time.
REPAIRS, REPAIRS_SECONDS = 3, 600.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 30.0, 600.0
_OTHER_MODE = "other mode"


class _Writes(NamedTuple):
    """Entries of a family that another program has written, and how often they were repaired since when."""

    entries: frozenset[Hashable]
    repairs: int
    since: float


class OtherProxy:
    """Evidence of another service proxy. ``expected``: whether one is meant to serve, which then is no evidence."""

    def __init__(self, clock: Callable[[], float], reports: Reports, *, expected: Callable[[], bool]) -> None:
        self._clock = clock
        self._limited, self._post = reports.limited, reports.post
        self._expected = expected
        self._found: dict[str, str] = {}
        self._writes: dict[str, _Writes] = {}
        self._pause = 0.0
        self._until = 0.0

    @property
    def text(self) -> str:
        """All evidence in one line; empty without any."""
        return "; ".join(self._found.values())

    @property
    def pause(self) -> float:
        """Seconds for which no change of another program is reverted; 0 without evidence that it would come back."""
        return max(0.0, self._until - self._clock())

    def port_in_use(self, name: str, port: int) -> None:
        """Record that a program of root listens at a port of the agent."""
        # The agent's user cannot see which one.
        what = f"port {port} ({name}) is in use by root: by another service proxy, unless other software needs it"
        self._find(name, f"{what}, for which {name}BindAddress can be changed")

    def repaired(self, family: str, written: frozenset[Hashable], noticed_by: str) -> None:
        """Record a repair of a family. ``written``: the entries that another program had added or changed."""
        now = self._clock()
        known = self._writes.get(family)
        if known is None or not written & known.entries or now - known.since > REPAIRS_SECONDS:
            known = _Writes(written, 0, now)
        self._writes[family] = known = _Writes(written, known.repairs + 1, known.since)
        if known.repairs >= REPAIRS:
            self._writes[family] = known._replace(since=now)
            text = f"another program writes the rules of Services again and again ({family}, {noticed_by})"
            if self._find(family, text):
                self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)
                self._until = self._clock() + self._pause

    def other_mode(self, holds: bool) -> None:
        """Record whether the kernel holds rules of another mode although the agent has removed them."""
        if holds:
            # They may be in use. At its next start the agent knows that no other service proxy runs.
            text = "another program serves Services in another mode; when it has stopped, restart the agent"
            self._find(_OTHER_MODE, text)
        else:
            self.lose(_OTHER_MODE)

    def _find(self, name: str, text: str) -> bool:
        """Report new evidence; return whether evidence counts here."""
        if self._expected():
            return False
        if name not in self._found:
            advice = "stop it, or give the node back to it (kubenode.proxy.migrate with migrate_direction=back)"
            if self._limited.warning(("other proxy", name), "another service proxy runs on this node", evidence=text):
                self._post(None, WARNING, Reason.OTHER_SERVICE_PROXY, "Serve", f"{text}: {advice}")
        self._found[name] = text
        return True

    def lose(self, name: str) -> None:
        """Record that no program of root listens at a port, or that nothing was to be repaired in a family."""
        if self._found.pop(name, "") and not self._found:
            self._pause = self._until = 0.0
            note = "no other service proxy is noticed any more"
            self._post(None, NORMAL, Reason.OTHER_SERVICE_PROXY_GONE, "Serve", note)
