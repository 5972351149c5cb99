# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lines in the log and Events about objects that are skipped because they are invalid, one for each."""

from __future__ import annotations

from typing import FrozenSet, Tuple

from ...cluster.static import UNREADABLE_FILE
from ...errors import Refusal
from ...event_reasons import Reason
from ..api.events import WARNING, Post, object_reference
from ..surface.log import LimitedLog

#: Lines and Events at a time; users may create thousands of invalid objects.
MOST = 20


class RefusalEvents:
    """Reports each refusal that is new since the last call, and again if the object was valid in between."""

    def __init__(self, limited: LimitedLog, post: Post) -> None:
        self._limited = limited
        self._post = post
        self._known: FrozenSet[Refusal] = frozenset()

    def update(self, refusals: Tuple[Refusal, ...]) -> None:
        """Report the new ones of ``refusals``, which are all that are in effect."""
        now = frozenset(refusals)
        if now == self._known:
            return
        new = [refusal for refusal in refusals if refusal not in self._known]
        for refusal in new[:MOST]:
            key = ("refused", refusal.kind, refusal.namespace, refusal.name)
            if not self._limited.warning(key, "an invalid object is skipped", object=refusal):
                continue
            # A static object comes from a file of this node, as does a file that cannot be read.
            of_cluster = refusal.name and not refusal.source and refusal.kind != UNREADABLE_FILE
            about = object_reference(refusal) if of_cluster else None
            self._post(about, WARNING, Reason.OBJECT_REFUSED, "Sync", f"skipped: {refusal}")
        if len(new) > MOST:
            text = "further invalid objects are skipped; kubenode-proxy status lists them"
            self._limited.warning("refused", text, objects=len(new) - MOST)
        self._known = now
