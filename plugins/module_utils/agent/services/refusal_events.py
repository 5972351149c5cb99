# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lines in the log and Events about objects that are skipped, and parts of objects, one for each."""

from __future__ import annotations

from typing import FrozenSet, Tuple

from ...base.errors import Refusal
from ...cluster.files.static import UNREADABLE_FILE
from ...event_reasons import Reason
from ..api.events import WARNING, Post, object_reference
from ..telemetry.log import LimitedLog
from .annotation_warnings import is_annotation


class RefusalEvents:
    """Reports each refusal that is new since the last call, and again if the object was valid in between.

    Annotations are reported elsewhere (see ``annotation_warnings``).
    """

    def __init__(self, limited: LimitedLog, post: Post) -> None:
        self._limited = limited
        self._post = post
        self._known: FrozenSet[Refusal] = frozenset()

    def update(self, refusals: Tuple[Refusal, ...], skipped: Tuple[Refusal, ...]) -> None:
        """Report the new ones of the refusals of objects, and of parts, which are all that are in effect."""
        parts = [part for part in skipped if not is_annotation(part)]
        now = frozenset((*refusals, *parts))
        if now == self._known:
            return
        new = [refusal for refusal in (*refusals, *parts) if refusal not in self._known]
        whole = frozenset(refusals)
        for refusal in new:
            text = "an invalid object is skipped" if refusal in whole else "a part of an object is skipped"
            if not self._limited.about("refused", refusal.namespace, text, object=refusal):
                continue
            # A static object comes from a file of this node, as does a file that cannot be read.
            of_cluster = refusal.name and not refusal.source and refusal.kind != UNREADABLE_FILE
            about = object_reference(refusal) if of_cluster else None
            self._post(about, WARNING, Reason.OBJECT_REFUSED, "Sync", f"skipped: {refusal}")
        self._known = now
