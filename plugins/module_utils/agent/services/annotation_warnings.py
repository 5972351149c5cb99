# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Warnings about annotations that have no effect here: a line in the log and an Event, once for each."""

from __future__ import annotations

from typing import Dict, Iterable

from ...base.errors import Refusal
from ...cluster.model import NamespacedName
from ...cluster.state import ClusterState
from ...event_reasons import Reason
from ..api.events import WARNING, Post, service_reference
from ..telemetry.log import LimitedLog
from .proxier import Proxier

_ANNOTATIONS = "metadata.annotations["


def is_annotation(part: Refusal) -> bool:
    """Return whether a part of an object that is skipped is an annotation."""
    return part.field.startswith(_ANNOTATIONS)


class PolicyWarnings:
    """Reports invalid annotations, and those that the mode or the kernel does not support."""

    def __init__(self, limited: LimitedLog, post: Post) -> None:
        self._limited = limited
        self._post = post
        self._known: Dict[str, NamespacedName] = {}
        self._seen: object = None

    def update(self, state: ClusterState, families: Iterable[Proxier]) -> None:
        """Report problems that are new since the last sync."""
        families = tuple(families)
        skipped = state.skipped
        seen = families, [family.ignored_changes for family in families], skipped
        if seen == self._seen:
            return
        self._seen = seen
        now: Dict[str, NamespacedName] = {}
        for part in skipped:
            if is_annotation(part):
                # An EndpointSlice or a Node has no Event: only its namespace counts.
                now[str(part)] = NamespacedName(part.namespace, part.name if part.kind == "Service" else "")
        for family in families:
            for service, lines in family.ignored.items():
                now.update(dict.fromkeys(lines, service))
        for line, about in now.items():
            if line in self._known or not self._limited.about(
                "annotation", about.namespace, "an annotation has no effect", reason=line
            ):
                continue
            if about.name:
                self._post(service_reference(*about), WARNING, Reason.ANNOTATION_IGNORED, "Sync", line)
        self._known = now
