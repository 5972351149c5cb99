# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log lines and Events about objects that are served only in part or not at all, once while the reason applies."""

from __future__ import annotations

from typing import Iterable, Sequence

from ...base.errors import Refusal
from ...cluster.claims import NO_CONFLICTS, Conflicts
from ...cluster.files.static import UNREADABLE_FILE
from ...cluster.model import NamespacedName
from ...cluster.state import ClusterState
from ...convergence.report import conflict_warnings
from ...event_reasons import Reason
from ..api.events import WARNING, object_reference, service_reference
from ..reports import Reports
from ..source.view import ClusterView
from ..threads.failures import Failure
from .proxier import Proxier

#: How many failures are logged at once; if there are more, they have the same reasons.
MOST_NAMED = 20
_ANNOTATIONS = "metadata.annotations["


def failures_of(view: ClusterView, families: Iterable[Proxier]) -> frozenset[Failure]:
    """Return the objects that cannot be processed in the view or in any family."""
    return view.failures.all.union(*(proxier.failures.all for proxier in families))


class Notices:
    """Compares the conflicts, failures and limits of the last sync with those that are logged already."""

    def __init__(self, reports: Reports) -> None:
        self._metrics, self._log, self._limited = reports.metrics, reports.log, reports.limited
        self._conflicts = NO_CONFLICTS
        self._failures: frozenset[Failure] = frozenset()
        self._unserved: set[tuple[NamespacedName, str]] = set()
        self._kept_chains: set[tuple[str, str]] = set()

    def report(self, view: ClusterView, families: Sequence[Proxier]) -> None:
        """Log what is new, and set the metrics."""
        self._report_failures(view, families)
        self._report_conflicts(view.state.conflicts)
        self._report_unserved(families)
        self._report_kept_chains(families)

    def _report_failures(self, view: ClusterView, families: Sequence[Proxier]) -> None:
        found = failures_of(view, families)
        new = sorted(found - self._failures)
        for failure in new[:MOST_NAMED]:
            text = "an object cannot be processed and keeps its last state; this is a defect of the agent"
            self._limited.error(("failure", failure.key), text, object=failure.name, error=failure.error)
        if len(new) > MOST_NAMED:
            self._limited.error("failure", "further objects cannot be processed", objects=len(new) - MOST_NAMED)
        self._failures = found
        self._metrics.objects_failed.set(len({failure.key for failure in found}))

    def _report_conflicts(self, conflicts: Conflicts) -> None:
        """Log each address and node port that a Service claims and does not get."""
        if conflicts is self._conflicts:
            return
        for line in conflict_warnings(conflicts.since(self._conflicts)):
            # A Service that is created and deleted again and again repeats its conflicts.
            self._limited.warning(("conflict", line), "an address is claimed twice", conflict=line)
        self._conflicts = conflicts
        self._metrics.conflicts.set(len(conflicts))

    def _report_unserved(self, families: Sequence[Proxier]) -> None:
        """Log each ServicePort that the mode cannot serve."""
        found = {
            (service, line) for proxier in families for service, lines in proxier.unserved.items() for line in lines
        }
        for service, line in sorted(found - self._unserved):
            text = "a Service cannot be served in this mode"
            self._limited.about("unserved", service.namespace, text, service=line)
        self._unserved = found

    def _report_kept_chains(self, families: Sequence[Proxier]) -> None:
        """Log each chain that is kept because a rule of another program jumps to it."""
        found = {(proxier.family, chain) for proxier in families for chain in proxier.kept_chains}
        for family, chain in sorted(found - self._kept_chains):
            text = "a chain of a former Service is kept, empty, because a rule of another program jumps to it"
            self._log.warning(text, family=family, chain=chain)
        self._kept_chains = found


def is_annotation(part: Refusal) -> bool:
    """Return whether a part of an object that is skipped is an annotation."""
    return part.field.startswith(_ANNOTATIONS)


class AnnotationWarnings:
    """Reports invalid annotations, and those that the mode or the kernel does not support."""

    def __init__(self, reports: Reports) -> None:
        self._limited, self._post = reports.limited, reports.post
        self._known: dict[str, NamespacedName] = {}
        self._seen: object = None

    def update(self, state: ClusterState, families: Iterable[Proxier]) -> None:
        """Report problems that are new since the last sync."""
        families = tuple(families)
        skipped = state.skipped
        seen = families, [proxier.ignored_changes for proxier in families], skipped
        if seen == self._seen:
            return
        self._seen = seen
        now: dict[str, NamespacedName] = {}
        for part in skipped:
            if is_annotation(part):
                # An EndpointSlice or a Node has no Event: only its namespace counts.
                now[str(part)] = NamespacedName(part.namespace, part.name if part.kind == "Service" else "")
        for proxier in families:
            for service, lines in proxier.ignored.items():
                now.update(dict.fromkeys(lines, service))
        for line, about in now.items():
            if line in self._known or not self._limited.about(
                "annotation", about.namespace, "an annotation has no effect", reason=line
            ):
                continue
            if about.name:
                self._post(service_reference(*about), WARNING, Reason.ANNOTATION_IGNORED, "Sync", line)
        self._known = now


class RefusalEvents:
    """Reports each refusal that is new since the last call, and again if the object was valid in between.

    :class:`AnnotationWarnings` reports annotations.
    """

    def __init__(self, reports: Reports) -> None:
        self._limited, self._post = reports.limited, reports.post
        self._known: frozenset[Refusal] = frozenset()

    def update(self, refusals: tuple[Refusal, ...], skipped: tuple[Refusal, ...]) -> None:
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
