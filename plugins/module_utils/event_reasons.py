# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reasons of the Events that agents post, each with what it is about and its kind for Event-Driven Ansible."""

from __future__ import annotations

from enum import Enum

#: The kind of Events of no kind of their own.
OTHER = "other"


class Subject(Enum):
    """What an Event is about, and so how many of them a cluster needs.

    ``NODE``: the node, whose agent alone can post it. ``OBJECT``: an object of the cluster alone, so that all agents
    would post the same. ``OBJECT_ON_NODE``: an object as this node sees it.
    """

    NODE = "node"
    OBJECT = "object"
    OBJECT_ON_NODE = "object on a node"


class Reason(str, Enum):
    """The reason of an Event, with its :class:`Subject` and kind."""

    subject: Subject
    kind: str

    DRIFT_NOT_REPAIRED = "DriftNotRepaired", Subject.NODE, "drift"
    DRIFT_REPAIRED = "DriftRepaired", Subject.NODE, "repair"
    OTHER_SERVICE_PROXY = "OtherServiceProxy", Subject.NODE, "drift"
    OTHER_SERVICE_PROXY_GONE = "OtherServiceProxyGone", Subject.NODE, "repair"
    OBJECT_REFUSED = "ObjectRefused", Subject.OBJECT, "refused"
    ANNOTATION_IGNORED = "AnnotationIgnored", Subject.OBJECT, "refused"
    ENDPOINT_FAILING = "EndpointFailing", Subject.OBJECT_ON_NODE, "check_failed"
    ENDPOINT_PASSING = "EndpointPassing", Subject.OBJECT_ON_NODE, "check_passed"
    POLICIES_STALE = "NetworkPoliciesStale", Subject.NODE, "refused"
    MODE_CHANGED = "ModeChanged", Subject.NODE, "mode_changed"
    ENDPOINTS_LOST = "EndpointsLost", Subject.NODE, "endpoints_lost"
    MEMORY_LOW = "MemoryLow", Subject.NODE, "memory"
    MEMORY_LIMIT = "MemoryLimit", Subject.NODE, "memory"
    DRAIN_STARTED = "DrainStarted", Subject.NODE, "drain_started"
    DRAIN_ENDED = "DrainEnded", Subject.NODE, "drain_ended"
    STARTING = "Starting", Subject.NODE, "started"
    HEALTH_PORT_FAILED = "FailedToStartServiceHealthcheck", Subject.OBJECT_ON_NODE, OTHER
    HEALTHZ_FAILED = "FailedToStartProxierHealthcheck", Subject.NODE, OTHER
    METRICS_FAILED = "FailedToStartMetricServer", Subject.NODE, OTHER
    IPVS_DEPRECATED = "IPVSDeprecation", Subject.NODE, OTHER

    def __new__(cls, text: str, subject: Subject, kind: str) -> Reason:
        """Return the reason as the text that the API has for it."""
        found = str.__new__(cls, text)
        found._value_ = text
        found.subject, found.kind = subject, kind
        return found
