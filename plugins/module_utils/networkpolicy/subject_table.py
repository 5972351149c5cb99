# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The subjects of the pods of a node, and what all of them together keep in memory and use."""

from __future__ import annotations

from typing import Collection

from ..cluster.policies.policy_model import ContainerPort
from .family_tables import FamilyTables
from .limits import MOST_KEPT, TooManyRows
from .matching.compiled import CompiledRule
from .matching.peer_index import PodPeers
from .matching.port_unions import PortUnions
from .rows import PolicyRows
from .subjects import NETWORK_POLICY, Subject, SubjectKey


class SubjectTable:
    """Subjects by key. ``names``: how many of them use a port name whose meaning depends on the peer.

    ``limited``: whether NetworkPolicies may keep at most MOST_KEPT (see :attr:`.Subject.kept`). Those of the
    administrator's policies do not count: to refuse NetworkPolicies would not reduce them.
    """

    def __init__(self, rows: PolicyRows, peers: PodPeers, families: Collection[FamilyTables], *, limited: bool) -> None:
        self.names: dict[str, int] = {}
        self.unions = PortUnions()
        self.kept = 0
        self._subjects: dict[SubjectKey, Subject] = {}
        self._names_changed: set[str] = set()
        self._rows = rows
        self._peers = peers
        self._families = families
        self._limited = limited

    def of(self, tier: str, side: str, rules: list[CompiledRule], ports: Collection[ContainerPort]) -> Subject:
        """Return the subject of a pod with these ports, a new one if no other pod has the same. Raises TooManyRows."""
        names = {name.name for rule in rules for name in rule.names} if side == "in" else set()
        key = SubjectKey(tier, side, tuple(map(id, rules)), frozenset(port for port in ports if port.name in names))
        self._spend(tier, len(rules) + sum(len(rule.names) for rule in rules))
        subject = self._subjects.get(key)
        if subject is None:
            before = self.unions.steps
            subject = self._subjects[key] = Subject(key, rules, self._peers, self.unions)
            self._spend(tier, subject.kept + self.unions.steps - before)
            self._use(subject, 1)
            if self._limited and self.kept > MOST_KEPT:
                raise TooManyRows
        return subject

    def _spend(self, tier: str, steps: int) -> None:
        if tier == NETWORK_POLICY:
            self._rows.spend(steps)

    def remove(self, subject: Subject) -> None:
        """Remove a subject that no pod has any more."""
        del self._subjects[subject.key]
        subject.close()
        self._use(subject, -1)

    def pop_changed_names(self) -> set[str]:
        """Return the port names that have come into use or out of use since the last call."""
        names, self._names_changed = self._names_changed, set()
        return names

    def _use(self, subject: Subject, count: int) -> None:
        if subject.tier == NETWORK_POLICY:
            self.kept += count * subject.kept
        for tables in self._families:
            tables.use_blocks(subject.blocks, count)
        for name in subject.names:
            before = self.names.get(name, 0)
            self.names[name] = before + count
            if not self.names[name]:
                del self.names[name]
            if not before or name not in self.names:
                self._names_changed.add(name)
