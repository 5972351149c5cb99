# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The compiled rules of policies, kept while the policies do not change, and the policies whose rules are omitted."""

from __future__ import annotations

from typing import AbstractSet, Iterable, Union

from ..base.progress import Progress, unheeded
from ..cluster.model import NamespacedName
from ..cluster.parsing.policy_objects import PolicyObjects
from ..cluster.policies.policy_model import DIRECTIONS, ClusterNetworkPolicy, NetworkPolicy
from .excess import excess
from .limits import PolicySide
from .matching.candidates import Candidates
from .matching.compiled import CompiledRule, compile_rule, compile_rules
from .matching.node_peers import resolved_rule

Policy = Union[NetworkPolicy, ClusterNetworkPolicy]


class RuleCompiler:
    """Compiles the rules of policies; the same policy object gives the same rules.

    ``refused``: NetworkPolicies whose rules are omitted in a direction. ``too_large``: further ones, with the reason
    (see :mod:`.excess`). ``objects``: with the Nodes that rules select. ``progress`` is called for each policy.
    """

    def __init__(self, refused: AbstractSet[PolicySide], objects: PolicyObjects, progress: Progress = unheeded) -> None:
        self.refused = refused
        self._objects = objects
        self._progress = progress
        self.too_large: dict[PolicySide, str] = {}
        #: Of the current pods, by which the size of policies is judged.
        self.candidates = Candidates({}, {}, {})
        self._compiled: dict[tuple[int, str], tuple[Policy, tuple[CompiledRule, ...]]] = {}

    def rules(self, policy: Policy, direction: str) -> tuple[CompiledRule, ...]:
        """Return the compiled rules of a policy in one direction."""
        key = (id(policy), direction)
        found = self._compiled.get(key)
        if found is None or found[0] is not policy:
            self._progress()
            if isinstance(policy, ClusterNetworkPolicy):
                resolved = (resolved_rule(rule, self._objects) for rule in policy.rules(direction))
                compiled = map(compile_rule, resolved)
                rules = tuple(rule for rule in compiled if rule.is_useful)
            else:
                rules = self._affordable(policy, direction, compile_rules(policy.rules(direction)))
            found = self._compiled[key] = (policy, rules)
        return found[1]

    def _affordable(
        self, policy: NetworkPolicy, direction: str, rules: tuple[CompiledRule, ...]
    ) -> tuple[CompiledRule, ...]:
        key = (policy.key, direction)
        if key in self.refused:
            return ()
        reason = excess(key, rules, self.candidates)
        if not reason:
            self.too_large.pop(key, None)
            return rules
        self.too_large[key] = reason
        return ()

    def policy_changed(self, key: NamespacedName) -> None:
        """Drop the reason why a NetworkPolicy was too large; its new version may not be, or select no pod."""
        for direction in DIRECTIONS:
            self.too_large.pop((key, direction), None)

    def nodes_changed(self) -> None:
        """Drop the rules of policies with Nodes as peers."""
        for key, (policy, _rules) in list(self._compiled.items()):
            if isinstance(policy, ClusterNetworkPolicy) and policy.has_node_peers:
                del self._compiled[key]

    def keep_only(self, policies: Iterable[Policy]) -> None:
        """Drop the rules of all other policies, including previous versions of changed ones."""
        current = set(map(id, policies))
        for key in [key for key in self._compiled if key[0] not in current]:
            del self._compiled[key]
