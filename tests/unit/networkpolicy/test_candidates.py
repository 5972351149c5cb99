# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The number of objects that a peer is compared with, by which the cost of a policy is judged."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.policies.policy_model import (
    Namespace,
    Pod,
    PodPeer,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.policies.selectors import parse_selector
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching import candidates
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching.candidates import (
    FEWEST_PODS,
    Candidates,
)


@pytest.mark.parametrize(
    ("namespaces", "selected", "count"),
    [
        (None, {}, 3),
        (None, {"matchLabels": {"app": "web"}}, 2),
        (None, {"matchLabels": {"app": "web", "tier": "front"}}, 2 * 2),
        ({}, {}, 2 + 4),
        ({"matchLabels": {"team": "a"}}, {}, 1 + 3),
        ({"matchLabels": {"team": "a"}}, {"matchLabels": {"app": "web"}}, 2 * (1 + 2)),
        ({"matchLabels": {"team": "none"}}, {}, 1),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, {}, 2 + 4),
        ({}, {"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", "db"]}]}, 2 + 4),
        ({}, {"matchExpressions": [{"key": "app", "operator": "In", "values": list("abcdefghijklmnopq")}]}, 2 + 4),
        (None, {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, 3),
    ],
)
def test_candidates_are_what_a_peer_is_compared_with(monkeypatch, namespaces, selected, count):
    monkeypatch.setattr(candidates, "FEWEST_PODS", 1)
    labels = [("a", "web"), ("a", "web"), ("a", "db"), ("b", "web")]
    known = [Pod(namespace, f"p{number}", labels={"app": app}) for number, (namespace, app) in enumerate(labels)]
    pods = {pod.key: pod for pod in known}
    of_namespace = {name: [key for key in pods if key.namespace == name] for name in ("a", "b")}
    found = Candidates(pods, of_namespace, {name: Namespace(name, {"team": name}) for name in ("a", "b")})
    selector = None if namespaces is None else parse_selector(namespaces, "")
    peer = PodPeer("" if selector is not None else "a", selector, parse_selector(selected, ""))
    assert found.of(peer) == count
    assert not found.exceed([peer], count)
    if count:
        assert found.exceed([peer, peer], 2 * count - 1)


def test_a_peer_counts_for_pods_that_may_come():
    pods = {pod.key: pod for pod in (Pod("a", f"p{number}") for number in range(FEWEST_PODS + 1))}
    found = Candidates(pods, {"a": list(pods)}, {"a": Namespace("a")})
    assert found.of(PodPeer("a", None)) == FEWEST_PODS + 1
    assert found.of(PodPeer("a", None, parse_selector({"matchLabels": {"app": "web"}}, ""))) == FEWEST_PODS
    assert found.of(PodPeer("", parse_selector({}, ""))) == 1 + FEWEST_PODS + 1
