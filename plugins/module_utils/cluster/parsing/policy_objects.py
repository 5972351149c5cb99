# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods, Namespaces and network policies, and which of them have changed."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Set, Union

from ..model import NamespacedName
from ..policies.policy_model import ClusterNetworkPolicy, Namespace, NetworkPolicy, Pod
from .objects import ObjectKey

PolicyObject = Union[Pod, Namespace, NetworkPolicy, ClusterNetworkPolicy]
POLICY_TYPES = (Pod, Namespace, NetworkPolicy, ClusterNetworkPolicy)
#: An invalid version does not replace a valid one of these kinds: the pods would lose their protection.
KEPT_KINDS = ("NetworkPolicy", "ClusterNetworkPolicy")


class PolicyChanges(NamedTuple):
    """The names of objects that were added, changed or deleted."""

    pods: Set[NamespacedName]
    namespaces: Set[str]
    policies: Set[NamespacedName]
    cluster_policies: Set[str]

    def __bool__(self) -> bool:
        return any(self)


class PolicyObjects:
    """The objects by name. ``changes``: what changed since :meth:`pop_changes` was last called."""

    def __init__(self) -> None:
        self.pods: Dict[NamespacedName, Pod] = {}
        self.namespaces: Dict[str, Namespace] = {}
        self.policies: Dict[NamespacedName, NetworkPolicy] = {}
        self.cluster_policies: Dict[str, ClusterNetworkPolicy] = {}
        self.changes = PolicyChanges(set(), set(), set(), set())

    def pop_changes(self) -> PolicyChanges:
        """Return what changed since the last call."""
        changes, self.changes = self.changes, PolicyChanges(set(), set(), set(), set())
        return changes

    def put(self, item: PolicyObject) -> None:
        """Add or replace an object; an equal one changes nothing."""
        if isinstance(item, Pod):
            _put(self.pods, item.key, item, self.changes.pods)
        elif isinstance(item, Namespace):
            _put(self.namespaces, item.name, item, self.changes.namespaces)
        elif isinstance(item, NetworkPolicy):
            _put(self.policies, item.key, item, self.changes.policies)
        else:
            _put(self.cluster_policies, item.name, item, self.changes.cluster_policies)

    def holds(self, key: ObjectKey) -> bool:
        """Return whether there is a policy with this key."""
        if key.kind == "NetworkPolicy":
            return NamespacedName(key.namespace, key.name) in self.policies
        return key.kind == "ClusterNetworkPolicy" and key.name in self.cluster_policies

    def remove(self, key: ObjectKey) -> None:
        """Delete an object if it is of a kind that is kept here."""
        named = NamespacedName(key.namespace, key.name)
        if key.kind == "Pod":
            _remove(self.pods, named, self.changes.pods)
        elif key.kind == "Namespace":
            _remove(self.namespaces, key.name, self.changes.namespaces)
        elif key.kind == "NetworkPolicy":
            _remove(self.policies, named, self.changes.policies)
        elif key.kind == "ClusterNetworkPolicy":
            _remove(self.cluster_policies, key.name, self.changes.cluster_policies)


def _put(table: Dict[Any, Any], key: Any, item: Any, changed: Set[Any]) -> None:
    if table.get(key) != item:
        table[key] = item
        changed.add(key)


def _remove(table: Dict[Any, Any], key: Any, changed: Set[Any]) -> None:
    if table.pop(key, None) is not None:
        changed.add(key)
