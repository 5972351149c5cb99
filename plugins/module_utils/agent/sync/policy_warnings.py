# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Warnings about annotations that have no effect here: a line in the log and an Event, once for each."""

from __future__ import annotations

from typing import Dict, Iterable, Optional

from ...cluster.model import NamespacedName
from ...cluster.state import ClusterState
from ...errors import Refusal
from ...event_reasons import Reason
from ..api.events import WARNING, Post, service_reference
from ..surface.log import Log
from .proxier import Proxier

#: Lines and Events after one sync; users may annotate thousands of Services.
MOST = 20
_ANNOTATIONS = "metadata.annotations["


def is_annotation(part: Refusal) -> bool:
    """Return whether a part of an object that is skipped is an annotation."""
    return part.field.startswith(_ANNOTATIONS)


class PolicyWarnings:
    """Reports invalid annotations, and those that the mode or the kernel does not support."""

    def __init__(self, log: Log, post: Post) -> None:
        self._log = log
        self._post = post
        self._known: Dict[str, Optional[NamespacedName]] = {}
        self._seen: object = None

    def update(self, state: ClusterState, families: Iterable[Proxier]) -> None:
        """Report problems that are new since the last sync."""
        families = tuple(families)
        skipped = state.skipped
        seen = families, [family.ignored_changes for family in families], skipped
        if seen == self._seen:
            return
        self._seen = seen
        now: Dict[str, Optional[NamespacedName]] = {}
        for part in skipped:
            if is_annotation(part):
                service = NamespacedName(part.namespace, part.name)
                now[str(part)] = service if part.kind == "Service" else None
        for family in families:
            for service, lines in family.ignored.items():
                now.update(dict.fromkeys(lines, service))
        new = [line for line in now if line not in self._known]
        for line in new[:MOST]:
            self._log.warning("an annotation has no effect", reason=line)
            about = now[line]
            if about is not None:
                regarding = service_reference(about.namespace, about.name)
                self._post(regarding, WARNING, Reason.POLICY_IGNORED, "Sync", line)
        if len(new) > MOST:
            self._log.warning(
                "more annotations have no effect; kubenode-proxy status lists them", count=len(new) - MOST
            )
        self._known = now
