# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Frequent oversights of policy authors: pods that no policy selects, and policies that select no pod."""

from __future__ import annotations

from typing import Dict, List

from ..cluster.model import NamespacedName
from ..cluster.parsing.policy_objects import PolicyObjects
from ..cluster.policies.policy_model import Pod
from .matching.owners import counts
from .node_policy import NodePolicy
from .subjects import NETWORK_POLICY


def unselected_pods(policy: NodePolicy) -> List[NamespacedName]:
    """Return the pods of this node that no NetworkPolicy isolates in any direction, sorted."""
    return sorted(
        key for key, local in policy.local.items() if all(subject.tier != NETWORK_POLICY for subject in local.subjects)
    )


def unused_policies(objects: PolicyObjects) -> List[NamespacedName]:
    """Return the NetworkPolicies that select no pod of the whole cluster, sorted."""
    pods: Dict[str, List[Pod]] = {}
    for pod in objects.pods.values():
        if counts(pod):
            pods.setdefault(pod.namespace, []).append(pod)
    return sorted(
        key
        for key, policy in objects.policies.items()
        if not any(policy.pods.matches(pod.labels) for pod in pods.get(key.namespace, ()))
    )
