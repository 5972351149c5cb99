# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods, Namespaces and network policies, and which of them have changed."""

from __future__ import annotations

from time import monotonic
from typing import AbstractSet, Any, Callable, NamedTuple, Union

from ..model import NamespacedName, Node
from ..policies.policy_model import ClusterNetworkPolicy, Namespace, NetworkPolicy, Pod
from .objects import ObjectKey

PolicyObject = Union[Pod, Namespace, NetworkPolicy, ClusterNetworkPolicy]
POLICY_TYPES = (Pod, Namespace, NetworkPolicy, ClusterNetworkPolicy)
#: An invalid version does not replace a valid one of these kinds: the pods would lose their protection.
KEPT_KINDS = ("NetworkPolicy", "ClusterNetworkPolicy")


#: How long the deletion of a policy may arrive before the event that its namespace is terminating.
_OVERTAKEN_SECONDS = 5.0


class PolicyChanges(NamedTuple):
    """The names of objects that were added, changed or deleted."""

    pods: set[NamespacedName]
    namespaces: set[str]
    policies: set[NamespacedName]
    cluster_policies: set[str]
    #: Nodes, as peers of policies: empty while no policy has any.
    nodes: AbstractSet[str] = frozenset()

    def __bool__(self) -> bool:
        return any(self)


class PolicyObjects:
    """The objects by name. ``changes``: what changed since :meth:`pop_changes` was last called.

    ``nodes_known``: whether ``nodes`` are all Nodes of the cluster.

    A NetworkPolicy that is deleted with its namespace stays until the Namespace is gone, so until its pods are: API
    servers before 1.33 may delete policies before pods (CVE-2024-7598).
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.pods: dict[NamespacedName, Pod] = {}
        self.namespaces: dict[str, Namespace] = {}
        self.policies: dict[NamespacedName, NetworkPolicy] = {}
        self.cluster_policies: dict[str, ClusterNetworkPolicy] = {}
        self.nodes: dict[str, Node] = {}
        self.nodes_known = True
        self.changes = _no_changes()
        self._clock = clock
        # Those that stay with their namespace, and those deleted a short time ago, with the time.
        self._held: set[NamespacedName] = set()
        self._deleted: dict[NamespacedName, tuple[float, NetworkPolicy]] = {}
        self._with_node_peers: set[str] = set()

    def pop_changes(self) -> PolicyChanges:
        """Return what changed since the last call."""
        changes, self.changes = self.changes, _no_changes()
        return changes

    def put(self, item: PolicyObject) -> None:
        """Add or replace an object; an equal one changes nothing."""
        if isinstance(item, Pod):
            _put(self.pods, item.key, item, self.changes.pods)
        elif isinstance(item, Namespace):
            _put(self.namespaces, item.name, item, self.changes.namespaces)
            self._hold(item.name) if item.deleting else self._release(item.name)
        elif isinstance(item, NetworkPolicy):
            self._held.discard(item.key)
            _put(self.policies, item.key, item, self.changes.policies)
        else:
            _put(self.cluster_policies, item.name, item, self.changes.cluster_policies)
            (self._with_node_peers.add if item.has_node_peers else self._with_node_peers.discard)(item.name)

    @property
    def have_node_peers(self) -> bool:
        """Whether any ClusterNetworkPolicy has Nodes as peers."""
        return bool(self._with_node_peers)

    def put_node(self, node: Node) -> None:
        """Add or replace a Node."""
        before = self.nodes.get(node.name)
        self.nodes[node.name] = node
        if before is None or (before.labels, before.addresses) != (node.labels, node.addresses):
            self._nodes_changed(node.name)

    def set_nodes_known(self, known: bool) -> None:
        """Record whether all Nodes are known."""
        if known != self.nodes_known:
            self.nodes_known = known
            self._nodes_changed("")

    def _nodes_changed(self, name: str) -> None:
        if self._with_node_peers:
            self.changes = self.changes._replace(nodes=self.changes.nodes | {name})

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
            self._release(key.name)
        elif key.kind == "NetworkPolicy" and named in self.policies:
            self._remove_policy(named)
        elif key.kind == "ClusterNetworkPolicy":
            _remove(self.cluster_policies, key.name, self.changes.cluster_policies)
            self._with_node_peers.discard(key.name)
        elif key.kind == "Node" and self.nodes.pop(key.name, None) is not None:
            self._nodes_changed(key.name)

    def _remove_policy(self, key: NamespacedName) -> None:
        namespace = self.namespaces.get(key.namespace)
        if namespace is not None and namespace.deleting:
            self._held.add(key)
            return
        # The event that the Namespace is terminating may arrive later, by another watch.
        now = self._clock()
        self._deleted = {name: each for name, each in self._deleted.items() if each[0] > now - _OVERTAKEN_SECONDS}
        self._deleted[key] = now, self.policies[key]
        _remove(self.policies, key, self.changes.policies)

    def _hold(self, namespace: str) -> None:
        """Put back the policies of a terminating namespace whose deletion has overtaken the event that says so."""
        since = self._clock() - _OVERTAKEN_SECONDS
        for key in [key for key in self._deleted if key.namespace == namespace]:
            at, policy = self._deleted.pop(key)
            if at > since and key not in self.policies:
                _put(self.policies, key, policy, self.changes.policies)
                self._held.add(key)

    def _release(self, namespace: str) -> None:
        for key in [key for key in self._held if key.namespace == namespace]:
            self._held.discard(key)
            _remove(self.policies, key, self.changes.policies)


def _no_changes() -> PolicyChanges:
    return PolicyChanges(set(), set(), set(), set())


def _put(table: dict[Any, Any], key: Any, item: Any, changed: set[Any]) -> None:
    if table.get(key) != item:
        table[key] = item
        changed.add(key)


def _remove(table: dict[Any, Any], key: Any, changed: set[Any]) -> None:
    if table.pop(key, None) is not None:
        changed.add(key)
