# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Placement of kube-proxy: a rule in its DaemonSet that keeps it off nodes with a label, and that label on nodes.

The DaemonSet controller deletes the pod of a node that no longer matches the pod template's required node affinity, and
creates one as soon as the node matches again. With the rule in place, a label on a node removes kube-proxy from it, and
removing the label brings it back.

Each change is a merge patch (RFC 7386). That of the DaemonSet contains the resourceVersion on which it is based, so
that a concurrent change by another client causes an error 409, and the patch is computed again.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, NamedTuple, Optional, Sequence

from ..base.errors import ApiError, ConfigurationError, one_line, some_of
from ..cluster.api.client import ApiClient
from ..cluster.api.errors import unless_absent
from ..cluster.api.resource_types import NODES, ResourceType
from ..cluster.fields import is_dns_subdomain, is_label_key
from .patches import get_node, repeat_on_conflict, send_patch

DEFAULT_LABEL = "kubenode.proxy/managed"
LABEL_VALUE = "true"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_NAMED = 5
_POLL_SECONDS = 0.5
#: Of the text of a kubelet.
_MOST_CHARACTERS = 200

Object = dict[str, Any]


class Placement(NamedTuple):
    """kube-proxy's DaemonSet, and the key of the label that keeps it off a node."""

    namespace: str = "kube-system"
    name: str = "kube-proxy"
    label: str = DEFAULT_LABEL

    @property
    def path(self) -> str:
        """Path of the DaemonSet at the API server."""
        return f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets/{self.name}"

    def __str__(self) -> str:
        return f"DaemonSet {self.namespace}/{self.name}"


class PlacementChange(NamedTuple):
    """Descriptions of the changes that were, or would be, made, and the state before and after by object."""

    changes: tuple[str, ...]
    before: Object
    after: Object


class StillWaiting(ApiError):
    """The cluster has not applied a change in time; the text is what is missing."""


class Waiting(NamedTuple):
    """How long to wait for the cluster to apply a change, in seconds; 0 not to wait.

    ``continued``: an earlier call, which may have changed the rule, has not waited until the end. The other fields are
    for tests.
    """

    timeout: float = 300.0
    continued: bool = False
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def check_names(placement: Placement, nodes: Sequence[str]) -> None:
    """Raise ConfigurationError for names that no object can have."""
    named = [("namespace", placement.namespace), ("name", placement.name), *(("nodes", node) for node in nodes)]
    for field, value in named:
        if not is_dns_subdomain(value):
            raise ConfigurationError(f"{field}: {value!r} is not a name of lower case letters, digits, dashes and dots")
    if not is_label_key(placement.label):
        raise ConfigurationError(f"label: {placement.label!r} is not the key of a label")


# ---- the rule


def _terms(affinity: Object) -> list[Object]:
    return list(((affinity.get("nodeAffinity") or {}).get(_REQUIRED) or {}).get("nodeSelectorTerms") or [])


def _keeps_off(term: Object, label: str) -> bool:
    return any(_is_ours(item, label) for item in term.get("matchExpressions") or [])


def _is_ours(expression: Object, label: str) -> bool:
    return expression.get("key") == label and expression.get("operator") == "DoesNotExist"


def _is_empty(term: Object) -> bool:
    return not term.get("matchExpressions") and not term.get("matchFields")


def _with_terms(affinity: Object, terms: list[Object]) -> Object:
    node = dict(affinity.get("nodeAffinity") or {})
    if terms:
        node[_REQUIRED] = {**(node.get(_REQUIRED) or {}), "nodeSelectorTerms": terms}
    else:
        node.pop(_REQUIRED, None)
    changed = {**affinity, "nodeAffinity": node}
    if not node:
        del changed["nodeAffinity"]
    return changed


def with_rule(affinity: Object, label: str) -> Object:
    """Return an affinity that also excludes nodes with the label.

    A node matches if it matches one of the terms, so the rule is added to each of them. An empty term matches no node
    and is not changed.
    """
    expression = {"key": label, "operator": "DoesNotExist"}
    terms = []
    for term in _terms(affinity) or [{"matchExpressions": [expression]}]:
        if not _is_empty(term) and not _keeps_off(term, label):
            term = {**term, "matchExpressions": [*(term.get("matchExpressions") or []), expression]}
        terms.append(term)
    return _with_terms(affinity, terms)


def without_rule(affinity: Object, label: str) -> Object:
    """Return an affinity without the rule; everything else is kept."""
    terms = _terms(affinity)
    if not any(_keeps_off(term, label) for term in terms):
        return affinity
    left = []
    for term in terms:
        expressions = [item for item in term.get("matchExpressions") or [] if not _is_ours(item, label)]
        rest = {key: value for key, value in term.items() if key != "matchExpressions"}
        if expressions:
            rest["matchExpressions"] = expressions
        if _is_empty(rest) and not _is_empty(term):
            # The rule was the only condition of this term: without it every node matches.
            return _with_terms(affinity, [])
        left.append(rest)
    return _with_terms(affinity, left)


def merge_patch(before: Object, after: Object) -> Object:
    """Return the merge patch (RFC 7386) that turns ``before`` into ``after``."""
    patch: Object = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key in before and isinstance(before[key], dict) and isinstance(value, dict):
            inner = merge_patch(before[key], value)
            if inner:
                patch[key] = inner
        elif key not in before or before[key] != value:
            patch[key] = value
    return patch


def pod_spec(daemon_set: Object) -> Object:
    """Return the specification of a DaemonSet's pods. Raises ApiError."""
    spec = ((daemon_set.get("spec") or {}).get("template") or {}).get("spec")
    if not isinstance(spec, dict):
        raise ApiError("the answer of the API server is not a DaemonSet: spec.template.spec: is missing")
    return spec


# ---- the cluster


class Placer:
    """Changes objects of one API server and waits for the effect. With ``check`` it neither changes nor waits."""

    def __init__(
        self, client: ApiClient, placement: Placement, check: bool = False, waiting: Optional[Waiting] = None
    ) -> None:
        self._client = client
        self._placement = placement
        self._check = check
        self._waiting = waiting or Waiting()
        self._changes: list[str] = []
        self._before: Object = {}
        self._after: Object = {}

    def keep_off(self, nodes: Sequence[str]) -> PlacementChange:
        """Add the rule to the DaemonSet, label the nodes, and wait until kube-proxy no longer runs on them.

        Raises ApiError, ConfigurationError, PreflightError.
        """
        check_names(self._placement, nodes)
        found = self._find_nodes(nodes)
        self._set_rule(with_rule)
        for node in found:
            self._set_label(node, LABEL_VALUE)
        if not self._check:
            for name in nodes:
                self._wait(functools.partial(self._still_there, name))
        return self.outcome()

    def bring_back(self, nodes: Sequence[str], remove_rule: bool = False) -> PlacementChange:
        """Remove the label from the nodes and wait until kube-proxy is ready on them again.

        With ``remove_rule`` also remove the rule from the DaemonSet, which is refused while other nodes have the label.
        Raises ApiError, ConfigurationError, PreflightError.
        """
        check_names(self._placement, nodes)
        found = self._find_nodes(nodes)
        if remove_rule:
            self._refuse_if_labelled(nodes)
        for node in found:
            self._set_label(node, None)
        if remove_rule:
            self._set_rule(without_rule)
        if not self._check:
            for name in nodes:
                self._wait(functools.partial(self._not_ready, name))
        return self.outcome()

    def outcome(self) -> PlacementChange:
        """Return what was changed so far."""
        return PlacementChange(tuple(self._changes), self._before, self._after)

    def _read(self) -> Object:
        daemon_set = unless_absent(
            lambda: self._client.send("GET", self._placement.path, None, f"get {self._placement}")
        )
        if daemon_set is None:
            raise ConfigurationError(
                f"{self._placement} does not exist: if kube-proxy is not a DaemonSet (but a unit, a static pod, or part"
                " of k3s), stop it there"
            )
        return daemon_set

    def _set_rule(self, change: Callable[[Object, str], Object]) -> None:
        """Change the DaemonSet's affinity if necessary, and wait until its pods have been replaced."""
        name, label = str(self._placement), self._placement.label
        daemon_set, before, after = repeat_on_conflict(functools.partial(self._change_affinity, change))
        if after == before:
            if self._waiting.continued and not self._check:
                self._wait(functools.partial(self._unfinished_rollout, 0))
            return
        word = "no longer runs" if change is with_rule else "runs again"
        self._changes.append(f"{name}: {word} on nodes with the label {label}")
        self._before[name], self._after[name] = {"affinity": before}, {"affinity": after}
        if not self._check:
            available = (daemon_set.get("status") or {}).get("numberAvailable") or 0
            self._wait(functools.partial(self._unfinished_rollout, available))

    def _change_affinity(self, change: Callable[[Object, str], Object]) -> tuple[Object, Object, Object]:
        """Change the DaemonSet's affinity if necessary; return the DaemonSet, and its affinity before and after."""
        daemon_set = self._read()
        before = pod_spec(daemon_set).get("affinity") or {}
        after = change(before, self._placement.label)
        if after != before and not self._check:
            affinity = merge_patch(before, after) if after and before else (after or None)
            version = (daemon_set.get("metadata") or {}).get("resourceVersion")
            patch: Object = {"spec": {"template": {"spec": {"affinity": affinity}}}}
            if version:
                patch["metadata"] = {"resourceVersion": version}
            send_patch(self._client, self._placement.path, patch, f"patch {self._placement}")
        return daemon_set, before, after

    def _find_nodes(self, names: Sequence[str]) -> list[Object]:
        """Return the Nodes of these names. Raises PreflightError unless all of them exist."""
        return [get_node(self._client, name, "nodes") for name in names]

    def _set_label(self, node: Object, value: Optional[str]) -> None:
        name, label = node["metadata"]["name"], self._placement.label
        labels = node["metadata"].get("labels") or {}
        if labels.get(label) == value:
            return
        if not self._check:
            patch = {"metadata": {"labels": {label: value}}}
            send_patch(self._client, f"{NODES.path}/{name}", patch, f"patch Node {name}")
        self._changes.append(f"Node {name}: {'labelled' if value else 'no longer labelled'} {label}")
        self._before[f"Node {name}"] = {"labels": {label: labels[label]} if label in labels else {}}
        self._after[f"Node {name}"] = {"labels": {label: value} if value else {}}

    def _refuse_if_labelled(self, nodes: Sequence[str]) -> None:
        """Raise ConfigurationError if other nodes than these have the label."""
        selected = NODES._replace(label_selector=self._placement.label)
        names = [item["metadata"]["name"] for item in self._client.list(selected).items]
        others = sorted(set(names).difference(nodes))
        if others:
            raise ConfigurationError(
                f"remove_rule: {len(others)} other nodes have the label {self._placement.label}"
                f" ({some_of(others, _NAMED)}), and without the rule kube-proxy would return to all of them:"
                " bring them back first"
            )

    # ---- conditions to wait for: each returns a sentence about what is missing, or empty text

    def _wait(self, missing: Callable[[], str]) -> None:
        timeout, _continued, sleep, clock = self._waiting
        deadline = clock() + timeout
        while timeout > 0:
            problem = missing()
            if not problem:
                return
            if clock() >= deadline:
                raise StillWaiting(problem)
            sleep(_POLL_SECONDS)

    def _pods(self, node: str) -> list[Object]:
        selector = (self._read().get("spec") or {}).get("selector") or {}
        path = f"/api/v1/namespaces/{self._placement.namespace}/pods"
        pods = ResourceType(path, "pods", "Pod", _label_selector(selector), f"spec.nodeName={node}")
        return self._client.list(pods).items

    def _still_there(self, node: str) -> str:
        pods = self._pods(node)
        return f"pod {pods[0]['metadata']['name']} of kube-proxy is still on node {node}" if pods else ""

    def _not_ready(self, node: str) -> str:
        pods = self._pods(node)
        if any(_is_ready(pod) for pod in pods):
            return ""
        found = [f"pod {pod['metadata']['name']} is {_condition(pod)}" for pod in pods] or ["it has no pod there yet"]
        return f"kube-proxy is not ready on node {node}: {', '.join(found)}"

    def _unfinished_rollout(self, available: int) -> str:
        """Return how far the DaemonSet has replaced its pods after a change of the template; empty when it is done.

        Rules remain in the kernels meanwhile. ``available``: how many pods were available before the change; pods that
        were not available then need not become so.
        """
        daemon_set = self._read()
        spec, status = daemon_set.get("spec") or {}, daemon_set.get("status") or {}
        if (spec.get("updateStrategy") or {}).get("type") == "OnDelete":
            return ""
        generation = (daemon_set.get("metadata") or {}).get("generation") or 0
        wanted = status.get("desiredNumberScheduled") or 0
        seen = (status.get("observedGeneration") or 0) >= generation
        updated, ready = status.get("updatedNumberScheduled") or 0, status.get("numberAvailable") or 0
        if seen and updated >= wanted and ready >= min(available, wanted):
            return ""
        return f"{self._placement}: {updated if seen else 0} of {wanted} pods are updated, {ready} are available"


def _is_ready(pod: Object) -> bool:
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)


def _condition(pod: Object) -> str:
    """Return the phase of a pod that is not ready, and the reason: of a container, of a condition, or of the pod."""
    status = pod.get("status") or {}
    phase = (
        "being deleted" if (pod.get("metadata") or {}).get("deletionTimestamp") else status.get("phase") or "Pending"
    )
    states = [item.get("state") or {} for item in status.get("containerStatuses") or []]
    stopped = [state.get("waiting") or state.get("terminated") or {} for state in states]
    missing = [item for item in status.get("conditions") or [] if item.get("status") != "True"]
    for item in [*stopped, *missing, status]:
        parts = [one_line(str(item[key]))[:_MOST_CHARACTERS] for key in ("reason", "message") if item.get(key)]
        if parts:
            return f"{phase} ({': '.join(parts)})"
    return phase


def _label_selector(selector: Object) -> str:
    """Return a label selector object in the syntax of a query."""
    parts = [f"{key}={value}" for key, value in (selector.get("matchLabels") or {}).items()]
    for item in selector.get("matchExpressions") or []:
        key, values = item["key"], ",".join(item.get("values") or [])
        texts = {"In": f"{key} in ({values})", "NotIn": f"{key} notin ({values})", "Exists": key}
        parts.append(texts.get(item.get("operator"), f"!{key}"))
    if not parts:
        raise ApiError("the answer of the API server is not a DaemonSet: spec.selector: is missing")
    return ",".join(parts)
