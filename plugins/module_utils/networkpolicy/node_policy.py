# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The policies of one node within a budget: those that fit into the table; the others are refused by name.

:mod:`.policy_state` evaluates them. Refused policies allow nothing, and their pods stay isolated.
Two functions find frequent oversights of policy authors: pods that no policy selects, and policies that select no pod.
"""

from __future__ import annotations

from functools import partial
from typing import AbstractSet, Iterable, Mapping, Optional, Sequence

from ..base.addresses import Network
from ..base.progress import Progress, unheeded
from ..cluster.model import NamespacedName
from ..cluster.parsing.policy_objects import PolicyChanges, PolicyObjects
from ..cluster.policies.policy_model import Pod
from .budget import Demand, named
from .judge import Judge
from .limits import MOST_CANDIDATES_TOGETHER, MOST_ROWS, PolicySide, TooManyRows
from .matching.owners import Address, AddressOwners, counts
from .policy_state import PORTION, LocalPod, PolicyState
from .rows import ANY, EVERYTHING_ID, HERE, POLICED, PolicyRows, Row
from .subjects import NETWORK_POLICY, Subject

#: The share of all policies, one in this many, that may be refused although they would fit.
_FINENESS = 16
_SPARE = 16


class NodePolicy:
    """The rows of one node.

    ``node_name``: the node whose pods are selected. ``cluster_policies``: whether ClusterNetworkPolicies are enforced.
    ``most_rows``: the maximum number of elements that depend on the content of policies. ``pod_ranges``: the addresses
    of the node's pods; traffic of those in them that belong to no known pod is denied. ``egress_exempt``:
    destinations to which no egress rule is applied. ``exempt``: what pods may send from although it is not theirs.
    ``portion``: see :class:`.PolicyState`. ``progress`` is called
    between the steps of a computation, which may take seconds.
    """

    def __init__(
        self,
        node_name: str,
        objects: PolicyObjects,
        node_addresses: Iterable[Address] = (),
        cluster_policies: bool = False,
        most_rows: int = MOST_ROWS,
        *,
        pod_ranges: Sequence[Network] = (),
        egress_exempt: Sequence[Network] = (),
        exempt: Sequence[Network] = (),
        portion: int = PORTION,
        progress: Progress = unheeded,
    ) -> None:
        self._node_name = node_name
        self._objects = objects
        self._node_addresses = list(node_addresses)
        self._most_rows = most_rows
        self._new_state = partial(
            PolicyState,
            node_name,
            objects,
            cluster_policies=cluster_policies,
            pod_ranges=pod_ranges,
            egress_exempt=egress_exempt,
            exempt=exempt,
            portion=portion,
            progress=progress,
        )
        self._links: frozenset[Row] = frozenset()
        self._progress = progress
        self._refused: frozenset[PolicySide] = frozenset()
        #: Whether policies are refused only because they changed last; see :meth:`update`.
        self.is_provisional = False
        #: How often policies were chosen among all.
        self.choices = 0
        self._state = self._made(self._refused) or self._search()

    @property
    def table(self) -> PolicyRows:
        """Return the rows."""
        return self._state.table

    @property
    def local(self) -> Mapping[NamespacedName, LocalPod]:
        """Return the pods of this node."""
        return self._state.local

    @property
    def owners(self) -> AddressOwners:
        """Return the owners of addresses."""
        return self._state.owners

    @property
    def too_large(self) -> dict[PolicySide, str]:
        """Return the policies that allow nothing in a direction because of their size, with the reason."""
        return {**self._state.compiler.too_large, **named(self._refused, self._most_rows)}

    def is_unknown(self, address: Address) -> bool:
        """Return whether an address in the pod ranges belongs to no known pod."""
        return self._state.pod_ranges.contain(address) and address not in self.owners.owners

    def is_egress_exempt(self, address: Address) -> bool:
        """Return whether no egress rule is applied to connections to an address."""
        return self._state.egress_exempt.contain(address)

    def judge(self) -> Judge:
        """Return a judge that uses the current rows."""
        return self._state.judge()

    def update(self, changes: PolicyChanges, choose: bool = False) -> None:
        """Apply changes of the objects.

        Policies that were refused for the number of elements remain so until :meth:`reconsider`. If changed pods need
        too many, the policies are chosen again, which may take seconds. If changed policies do, that is done only with
        ``choose``; without, some of them are refused until :meth:`reconsider`, although others may need more.
        """
        gone = changes.policies - self._objects.policies.keys()
        self._refused = frozenset(item for item in self._refused if item[0] not in gone)
        self._state.compiler.refused = self._refused
        try:
            self._state.update(changes)
        except TooManyRows:
            self._replace(None if choose else self._without(changes.policies))

    @property
    def pending(self) -> bool:
        """Return whether :meth:`proceed` has something to do."""
        return self._state.pending

    def proceed(self) -> None:
        """Apply a portion of the grants that :meth:`update` postponed: to peers that only new pods select."""
        try:
            self._state.proceed()
        except TooManyRows:
            self._replace(None)

    def set_node_addresses(self, addresses: Iterable[Address]) -> None:
        """Apply the addresses of the node, which no pod can have."""
        self._node_addresses = list(addresses)
        try:
            self._state.set_node_addresses(self._node_addresses)
        except TooManyRows:
            self._replace(None)

    def policed(self) -> frozenset[Address]:
        """Return the addresses of pods of this node that any policy selects."""
        judge = self.judge()
        return frozenset(address for local in self.local.values() for address in local.at if judge.is_policed(address))

    def restricted(self, side: str) -> frozenset[Address]:
        """Return the addresses of pods of this node whose traffic in a direction some policy limits.

        That is any pod that they are about, unless a rule of a NetworkPolicy allows it everything, and no
        ClusterNetworkPolicy selects it.
        """
        return frozenset(
            address
            for local in self.local.values()
            for address, subjects in local.at.items()
            if self._is_restricted(subjects, side, address)
        )

    def _is_restricted(self, subjects: Iterable[Subject], side: str, address: Address) -> bool:
        rows = self.table.rows
        if (POLICED, side, address) not in rows:
            return False
        tiers = any(subject.side == side and subject.tier != NETWORK_POLICY for subject in subjects)
        return tiers or rows.get((ANY, side, address)) != EVERYTHING_ID

    def set_links(self, links: Iterable[Row]) -> None:
        """Apply the rows about interfaces of pods: see :func:`.link_rows`."""
        before, self._links = self._links, frozenset(links)
        for row in before - self._links:
            self.table.remove(row)
        for row in self._links - before:
            self.table.put(row)

    def is_forged(self, pod: Pod, address: Address) -> bool:
        """Return whether packets that a pod sends from an address it claims are known to be dropped where they arrive.

        They are if the address is of this node, or of a pod of this node, and the sender not the one that has it.
        """
        if pod.node_name != self._node_name:
            return (HERE, address) in self._links
        local = self.local.get(pod.key)
        return local is not None and address not in local.at and any((HERE, each) in self._links for each in local.at)

    def reconsider(self) -> None:
        """Choose again which policies are refused, if any are."""
        if self.too_large:
            self._replace(self._made(frozenset()))
        self.is_provisional = False

    def _replace(self, state: Optional[PolicyState]) -> None:
        """Replace the state; if there is none, choose the policies again."""
        earlier = self._state.table
        self.is_provisional = state is not None
        self._state = state or self._search()
        for row in self._links:
            self.table.put(row)
        self._state.table.succeed(earlier)

    def _made(self, refused: frozenset[PolicySide], spare: int = 0) -> Optional[PolicyState]:
        """Return the state with some policies refused, or None if it does not fit and leave ``spare`` elements."""
        try:
            state = self._new_state(self._node_addresses, refused=refused, most_rows=self._most_rows - spare)
        except TooManyRows:
            return None
        state.table.allow(spare)
        self._refused = frozenset(item for item in refused if item[0] in self._objects.policies)
        return state

    def _search(self) -> PolicyState:
        """Return a state that fits, with few policies refused, in their order."""
        self.choices += 1
        demand = Demand(self._objects, self._node_name, progress=self._progress)
        # With room for new pods: without, each of them would cause another search.
        spare = self._most_rows // _SPARE
        refused = demand.crowding(MOST_CANDIDATES_TOGETHER - MOST_CANDIDATES_TOGETHER // _SPARE)
        order = [item for item in demand.order_of_refusal() if item not in refused]
        found = self._made(refused, spare) if refused else None
        if found is None:
            # Usually the policies of one namespace need too much.
            first = sum(key.namespace == order[0][0].namespace for key, _direction in order)
            found = self._fitting(order, 0, refused, spare, first)
        if found is None:
            # ClusterNetworkPolicies belong to the administrator and are not refused.
            self._refused = refused.union(order)
            found = self._new_state(self._node_addresses, refused=self._refused)
        return found

    def _without(self, changed: AbstractSet[NamespacedName]) -> Optional[PolicyState]:
        """Return a state that fits because few of the changed policies are refused; None if none does."""
        demand = Demand(self._objects, self._node_name, changed, self._progress)
        order = [item for item in demand.order_of_refusal() if item not in self._refused]
        if not order:
            return None
        refused = self._refused
        # Something must be refused.
        return self._fitting(order, 1, refused, 0) or self._made(refused.union(order))

    def _fitting(
        self, order: Sequence[PolicySide], low: int, refused: frozenset[PolicySide], spare: int, first: int = 0
    ) -> Optional[PolicyState]:
        """Return a state that fits, with few of the policies in ``order`` refused; None if none does.

        ``low``: the minimum number of these. ``refused``: others that are refused in any case. ``first``: how many to
        try first, 0 for half of them.
        """
        found: Optional[PolicyState] = None
        # More policies never need fewer elements. An attempt takes seconds, so some policies may be refused in vain.
        high = len(order)
        middle = first or (low + high) // 2
        while low < high and (found is None or high - low > len(order) // _FINENESS):
            state = self._made(refused.union(order[:middle]), spare)
            if state is None:
                low = middle + 1
            else:
                found, high = state, middle
            middle = (low + high) // 2
        return found


def unselected_pods(policy: NodePolicy) -> list[NamespacedName]:
    """Return the pods of this node that no NetworkPolicy isolates in any direction, sorted."""
    return sorted(
        key for key, local in policy.local.items() if all(subject.tier != NETWORK_POLICY for subject in local.subjects)
    )


def unused_policies(objects: PolicyObjects) -> list[NamespacedName]:
    """Return the NetworkPolicies that select no pod of the whole cluster, sorted."""
    pods: dict[str, list[Pod]] = {}
    for pod in objects.pods.values():
        if counts(pod):
            pods.setdefault(pod.namespace, []).append(pod)
    return sorted(
        key
        for key, policy in objects.policies.items()
        if not any(policy.pods.matches(pod.labels) for pod in pods.get(key.namespace, ()))
    )
