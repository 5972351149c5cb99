# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evaluation of the policies on one node, updated object by object at a cost proportional to the change.

Pods, Namespaces and policies of the cluster become the rows that this node needs (see :mod:`.rows`): which pods are
isolated, the class of each peer, and what pods of the node may exchange with peers of a class.
"""

from __future__ import annotations

from itertools import islice
from typing import AbstractSet, Iterable, Mapping, NamedTuple, Optional, Sequence

from ..base.addresses import FAMILIES, Network, family_of_packed
from ..base.progress import Progress, unheeded
from ..cluster.model import NamespacedName
from ..cluster.parsing.policy_objects import PolicyChanges, PolicyObjects
from ..cluster.policies import policy_model as model
from .address_ranges import AddressRanges, PodRanges
from .family_tables import FamilyTables
from .judge import Judge
from .limits import MOST_CANDIDATES_TOGETHER, MOST_PIECES, PolicySide, TooManyRows
from .matching.candidates import Candidates
from .matching.compiled import Content, PeerEntry, side
from .matching.contents import PodContents
from .matching.owners import Address, AddressOwners, addresses_of, counts
from .matching.peer_index import PeerIndex, PodPeers
from .rows import EGRESS_EXEMPT, EXEMPT, ISOLATED, POLICED, SELF, PolicyRows
from .rule_compiler import RuleCompiler
from .subject_table import SubjectTable
from .subjects import NETWORK_POLICY, Subject
from .values import GrantValues

#: If more pods than one in this many are affected, all are checked once instead of searching for each new peer.
_MANY = 4
#: Default for ``portion``: takes some milliseconds.
PORTION = 200


_NO_CONTENT = Content()


class _Work(NamedTuple):
    """The pending work of an update: pods as peers, pods of this node as subjects, and addresses."""

    pods: set[NamespacedName]
    local: set[NamespacedName]
    addresses: set[Address]


class LocalPod(NamedTuple):
    """A pod of this node: the subjects that each of its addresses is part of."""

    pod: model.Pod
    at: Mapping[Address, tuple[Subject, ...]]

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """Return the subjects of all its addresses."""
        return tuple(dict.fromkeys(subject for subjects in self.at.values() for subject in subjects))


class PolicyState:
    """The rows of one node. If TooManyRows is raised, the state is incomplete and must not be used.

    ``node_name``: the node whose pods are judged. ``cluster_policies``: whether ClusterNetworkPolicies are enforced.
    ``pod_ranges``, ``egress_exempt``, ``exempt``: see :class:`.NodePolicy`. ``refused``: see :class:`.RuleCompiler`.
    ``most_rows``: see :class:`.PolicyRows`. ``portion``: if pods of this node come or go, an update classifies at most
    this many other pods again, and leaves more of them to :meth:`proceed`. ``progress`` is called between the steps of
    an update.
    """

    def __init__(
        self,
        node_name: str,
        objects: PolicyObjects,
        node_addresses: Iterable[Address] = (),
        *,
        cluster_policies: bool = False,
        pod_ranges: Sequence[Network] = (),
        egress_exempt: Sequence[Network] = (),
        exempt: Sequence[Network] = (),
        refused: AbstractSet[PolicySide] = frozenset(),
        most_rows: Optional[int] = None,
        portion: int = PORTION,
        progress: Progress = unheeded,
    ) -> None:
        self.table = PolicyRows(most_rows, progress)
        self.local: dict[NamespacedName, LocalPod] = {}
        self.owners = AddressOwners(node_name, node_addresses)
        self.peers = PodPeers(objects.namespaces)
        self._values = GrantValues(self.table)
        most_pieces = MOST_PIECES if most_rows is not None else None
        self.families = {family: FamilyTables(family, self.table, self._values, most_pieces) for family in FAMILIES}
        self.pod_ranges = PodRanges(pod_ranges, self.table)
        self.egress_exempt = AddressRanges(EGRESS_EXEMPT, egress_exempt, self.table)
        AddressRanges(EXEMPT, exempt, self.table)
        self._node_name = node_name
        self._objects = objects
        self._cluster_policies = cluster_policies
        self._pods: dict[NamespacedName, model.Pod] = {}
        self._of_namespace: dict[str, set[NamespacedName]] = {}
        self._policies: dict[str, dict[str, model.NetworkPolicy]] = {}
        self._limited = most_rows is not None
        self._candidates = 0
        self._contents = PodContents(MOST_CANDIDATES_TOGETHER if self._limited else None)
        self.subjects = SubjectTable(self.table, self.peers, self.families.values(), limited=self._limited)
        self.compiler = RuleCompiler(refused, objects, progress)
        # Pods still to be classified again.
        self._later: dict[NamespacedName, None] = {}
        self._portion = portion
        self._progress = progress
        self._complete = True
        self.update(
            PolicyChanges(
                set(objects.pods), set(objects.namespaces), set(objects.policies), set(objects.cluster_policies)
            )
        )
        self._complete = False

    @property
    def pending(self) -> bool:
        """Return whether :meth:`proceed` has something to do."""
        return bool(self._later)

    def proceed(self) -> None:
        """Classify one more portion of the pods that updates left. Raises TooManyRows."""
        self._refresh(_Work(set(islice(self._later, self._portion)), set(), set()))

    def update(self, changes: PolicyChanges) -> None:
        """Apply changes of the objects. Raises TooManyRows.

        A new pod of this node may bring peers or port names that thousands of pods match. It is isolated at once, and
        so are the grants to classes that exist; grants to the others may come later, with :meth:`proceed`.
        """
        work = _Work(set(), set(), set())
        self._follow_namespaces(changes.namespaces, work)
        self._follow_pods(changes.pods, work)
        self.compiler.candidates = Candidates(self._pods, self._of_namespace, self._objects.namespaces)
        self._follow_policies(changes, work)
        self._refresh(work)
        if changes.policies or changes.cluster_policies:
            used = [policy for policies in self._policies.values() for policy in policies.values()]
            self.compiler.keep_only([*used, *self._objects.cluster_policies.values()])

    def set_node_addresses(self, addresses: Iterable[Address]) -> None:
        """Apply the addresses of the node, which no pod can have. Raises TooManyRows."""
        moved = self.owners.set_node_addresses(addresses)
        self.pod_ranges.follow(moved, self.owners.owners)
        keys = {pod.key for address in moved for pod in self.owners.claims(address)}
        self._refresh(_Work(keys, {key for key in keys if self._is_local(key)}, moved))

    def judge(self) -> Judge:
        """Return a judge that uses the current rows."""
        families = self.families
        return Judge(
            self.table, lambda address: families[family_of_packed(address)], self._values.value, self.egress_exempt
        )

    # ---- what changed

    def _follow_namespaces(self, names: Iterable[str], work: _Work) -> None:
        for name in names:
            self.peers.index.namespace_changed(name)
            pods = self._of_namespace.get(name, set())
            work.pods.update(pods)
            if self._cluster_policies:
                work.local.update(pods & self.local.keys())

    def _follow_pods(self, keys: Iterable[NamespacedName], work: _Work) -> None:
        for key in keys:
            before, now = self._pods.pop(key, None), self._objects.pods.get(key)
            if now is not None and counts(now):
                self._pods[key] = now
                self._of_namespace.setdefault(key.namespace, set()).add(key)
            elif before is not None:
                self._of_namespace[key.namespace].discard(key)
                if not self._of_namespace[key.namespace]:
                    # Clusters create and delete namespaces without end.
                    del self._of_namespace[key.namespace]
            affected = {key, *self.owners.owners_of(before), *self.owners.owners_of(now)}
            moved = self.owners.replace(before, now)
            self.pod_ranges.follow(moved, self.owners.owners)
            work.addresses.update(moved)
            affected.update(self.owners.owners_of(before), self.owners.owners_of(now))
            work.pods.update(affected)
            if key in self.local or self._is_local(key):
                work.local.add(key)

    def _is_local(self, key: NamespacedName) -> bool:
        pod = self._pods.get(key)
        return pod is not None and pod.node_name == self._node_name

    def _follow_policies(self, changes: PolicyChanges, work: _Work) -> None:
        namespaces = set()
        for key in changes.policies:
            self.compiler.policy_changed(key)
            policy = self._objects.policies.get(key)
            if policy is not None:
                self._policies.setdefault(key.namespace, {})[key.name] = policy
            elif key.namespace in self._policies:
                self._policies[key.namespace].pop(key.name, None)
                if not self._policies[key.namespace]:
                    del self._policies[key.namespace]
            namespaces.add(key.namespace)
        if changes.nodes:
            self.compiler.nodes_changed()
        if (changes.cluster_policies or changes.nodes) and self._cluster_policies:
            work.local.update(self.local)
        elif namespaces:
            work.local.update(key for key in self.local if key.namespace in namespaces)

    # ---- bringing everything up to date

    def _refresh(self, work: _Work) -> None:
        self.table.steps = self.peers.index.compared = 0
        gradual = self._reselect_local_pods(work.local) and not self._complete
        self._later.update(dict.fromkeys(self._pods_to_reclassify(work.pods)))
        if not gradual or len(self._later) <= self._portion:
            work.pods.update(self._later)
        for tables in self.families.values():
            work.addresses.update(tables.divide())
        for key in sorted(work.pods):
            self._later.pop(key, None)
            self._progress()
            self._classify_pod(key)
            work.addresses.update(self.owners.owned_by(self._pods.get(key)))
        for address in sorted(work.addresses):
            owner = self.owners.owners.get(address)
            content = self._contents.of(owner.key) if owner is not None else _NO_CONTENT
            self.families[family_of_packed(address)].classify(address, content)
        for tables in self.families.values():
            tables.flush()

    def _reselect_local_pods(self, keys: set[NamespacedName]) -> bool:
        """Determine the subjects of pods of this node again.

        Return whether grants may follow later: not if a pod that was already isolated would lack them meanwhile, nor
        if new rules can deny.
        """
        keys = self._with_sharers(keys)
        known = {key: self.local[key].subjects for key in keys if key in self.local}
        before = self._pairs(keys)
        judged = {address for key in keys if key in self.local for address in self.local[key].at}
        # Most pods claim several addresses, and alone.
        found: dict[tuple[NamespacedName, ...], tuple[Subject, ...]] = {}
        for key in keys:
            self.local.pop(key, None)
            pod = self._pods.get(key)
            claimed = [address for address in addresses_of(pod) if address in self.owners.local]
            if pod is None or not claimed or not self._is_local(key):
                continue
            at = {}
            for address in claimed:
                pods = self.owners.local[address]
                names = tuple(item.key for item in pods)
                if names not in found:
                    found[names] = tuple(self._subjects_of(pods))
                at[address] = found[names]
            self.local[key] = LocalPod(pod, at)
            judged.update(at)
        # An address may move from one pod to another of the same subject. New subjects are added before old ones are
        # removed, so that objects used by both are not dropped in between.
        now = self._pairs(keys)
        gradual = all(self.local[key].subjects == subjects for key, subjects in known.items() if key in self.local)
        for subject, address in sorted(now - before, key=_pair_key):
            gradual &= subject.tier == NETWORK_POLICY or any(subject.addresses.values())
            subject.addresses[family_of_packed(address)].add(address)
            self.families[family_of_packed(address)].join(subject, address)
        for subject, address in sorted(before - now, key=_pair_key):
            self._leave(subject, address)
        for address in judged:
            self._set_isolation_rows(address)
        return gradual

    def _pairs(self, keys: Iterable[NamespacedName]) -> set[tuple[Subject, Address]]:
        """Return the subjects of some pods of this node, paired with each of their addresses."""
        found = (self.local[key] for key in keys if key in self.local)
        return {(subject, address) for local in found for address, each in local.at.items() for subject in each}

    def _with_sharers(self, keys: set[NamespacedName]) -> set[NamespacedName]:
        """Return these pods, and the other pods of the node that claim an address of theirs."""
        addresses = {address for key in keys for address in addresses_of(self._pods.get(key))}
        addresses.update(address for key in keys if key in self.local for address in self.local[key].at)
        return keys.union(pod.key for address in addresses for pod in self.owners.local.get(address, ()))

    def _set_isolation_rows(self, address: Address) -> None:
        """Set the rows that select the directions in which policies apply to an address."""
        rows = self.table
        claims = self.owners.local.get(address)
        subjects = self.local[claims[0].key].at[address] if claims else ()
        sides = {subject.side for subject in subjects}
        isolated = {subject.side for subject in subjects if subject.tier == NETWORK_POLICY}
        for each in ("in", "out"):
            for row, wanted in (((ISOLATED, each, address), isolated), ((POLICED, each, address), sides)):
                if each in wanted:
                    rows.put(row)
                else:
                    rows.remove(row)
        if claims:
            rows.put((SELF, address))
        else:
            rows.remove((SELF, address))

    def _leave(self, subject: Subject, address: Address) -> None:
        family = family_of_packed(address)
        subject.addresses[family].discard(address)
        self.families[family].leave(subject, address)
        if not any(subject.addresses.values()):
            self.subjects.remove(subject)

    def _subjects_of(self, pods: Sequence[model.Pod]) -> Iterable[Subject]:
        """Return the subjects of an address that all these pods claim: their policies add up."""
        self._progress()
        ports = frozenset(port for pod in pods for port in pod.ports)
        selecting = {
            policy.key: policy
            for pod in pods
            for _name, policy in sorted(self._policies.get(pod.namespace, {}).items())
            if policy.pods.matches(pod.labels)
        }
        for direction in model.DIRECTIONS:
            chosen = [policy for policy in selecting.values() if direction in policy.directions]
            if chosen:
                rules = [rule for policy in chosen for rule in self.compiler.rules(policy, direction)]
                yield self.subjects.of(NETWORK_POLICY, side(direction), rules, ports)
        if self._cluster_policies:
            yield from self._cluster_subjects(pods, ports)

    def _cluster_subjects(self, pods: Sequence[model.Pod], ports: frozenset[model.ContainerPort]) -> Iterable[Subject]:
        ordered = sorted(self._objects.cluster_policies.values(), key=lambda policy: (policy.priority, policy.name))
        selecting = [policy for policy in ordered if any(self._selects(policy, pod) for pod in pods)]
        for tier in (model.ADMIN, model.BASELINE):
            for direction in model.DIRECTIONS:
                rules = [
                    rule
                    for policy in selecting
                    if policy.tier == tier
                    for rule in self.compiler.rules(policy, direction)
                ]
                if rules:
                    yield self.subjects.of(tier, side(direction), rules, ports)

    def _selects(self, policy: model.ClusterNetworkPolicy, pod: model.Pod) -> bool:
        namespace = self._objects.namespaces.get(pod.namespace)
        selector = policy.subject.namespaces
        if namespace is None or selector is None:
            return False
        return selector.matches(namespace.labels) and policy.subject.pods.matches(pod.labels)

    def _pods_to_reclassify(self, dirty: set[NamespacedName]) -> set[NamespacedName]:
        """Return the pods to classify again because peers or port names have come into use or out of use.

        Raises TooManyRows if the peers in use may match too many objects.
        """
        new, gone = self.peers.flush()
        self._count_candidates(new, gone)
        names = self.subjects.pop_changed_names()
        if len(dirty) * _MANY > len(self._pods) and (new or names):
            return set(self._pods)
        found: set[NamespacedName] = set()
        for entry in gone:
            found |= self._contents.members(entry)
        found |= self._matched(new)
        if names:
            found.update(key for key, pod in self._pods.items() for port in pod.ports if port.name in names)
        return found

    def _count_candidates(self, new: Iterable[PeerEntry], gone: Iterable[PeerEntry]) -> None:
        candidates = self.compiler.candidates
        for entry in gone:
            self._candidates -= entry.candidates
            entry.candidates = 0
        for entry in new:
            entry.candidates = candidates.of(entry.peer)
            self._candidates += entry.candidates
            if self._limited and self._candidates > MOST_CANDIDATES_TOGETHER:
                raise TooManyRows

    def _matched(self, entries: Sequence[PeerEntry]) -> set[NamespacedName]:
        """Return the pods that any of these peers matches."""
        if not entries:
            return set()
        index = PeerIndex(self._objects.namespaces)
        for entry in entries:
            index.add(entry)
        everywhere = any(entry.peer.namespaces is not None for entry in entries)
        scope = set(self._of_namespace) if everywhere else {entry.peer.namespace for entry in entries}
        keys = (key for name in scope for key in self._of_namespace.get(name, ()))
        return {key for key in keys if index.matches(self._pods[key])}

    def _classify_pod(self, key: NamespacedName) -> None:
        """Determine which peers match a pod, and which of its port names are used.

        Raises TooManyRows, also if many pods that came at the same time are compared with too many peers.
        """
        pod = self._pods.get(key)
        content = _NO_CONTENT
        if pod is not None:
            names = self.subjects.names
            ports = frozenset(port for port in pod.ports if port.name in names) if names else frozenset()
            content = Content(frozenset(self.peers.index.matching(pod)), frozenset(), ports)
            if self._limited and self.peers.index.compared > MOST_CANDIDATES_TOGETHER:
                raise TooManyRows
        self._contents.set(key, content)


def _pair_key(pair: tuple[Subject, Address]) -> tuple[str, str, Address]:
    return (pair[0].tier, pair[0].side, pair[1])
