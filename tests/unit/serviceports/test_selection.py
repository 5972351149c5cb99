# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which endpoints are selected: cases for policies, hints and termination, and properties of every selection."""

from __future__ import annotations

from typing import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import Endpoint
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.selection import (
    NO_TOPOLOGY,
    SAME_NODE,
    SAME_ZONE,
    select,
    topology_mode,
)

NODE, ZONE = "node-a", "a"


def endpoint(number: int, text: str) -> Endpoint:
    """Return an endpoint from words: local, unready, terminating (still serving), gone (terminating, not serving),
    zone:X for a zone hint and node:X for a node hint.
    """
    words = text.split()
    stopping = "terminating" in words or "gone" in words
    return Endpoint(
        f"10.0.0.{number}",
        80,
        is_local="local" in words,
        ready="unready" not in words and not stopping,
        serving="unready" not in words and "gone" not in words,
        terminating=stopping,
        zone_hints=tuple(word[5:] for word in words if word.startswith("zone:")),
        node_hints=tuple(word[5:] for word in words if word.startswith("node:")),
    )


def endpoints(*texts: str) -> tuple[Endpoint, ...]:
    return tuple(endpoint(number, text) for number, text in enumerate(texts, 1))


def numbers(chosen: Sequence[Endpoint]) -> list[int]:
    return [int(item.ip.rpartition(".")[2]) for item in chosen]


CLUSTER, LOCAL, BOTH = (True, False), (False, True), (True, True)
HINTED = ("local zone:a", "zone:b", "zone:a", "zone:c")


@pytest.mark.parametrize(
    ("case", "policy", "zone", "texts", "cluster", "local", "reachable", "has_any"),
    [
        ("all hinted, zone known", CLUSTER, "a", HINTED, [1, 3], [], [1, 3], True),
        ("external local with a node port, hints", BOTH, "b", HINTED, [2], [1], [1, 2], True),
        ("hints never apply to the local list", BOTH, "a", ("local zone:b", "local zone:a"), [2], [1, 2], [1, 2], True),
        ("no zone label", CLUSTER, "", HINTED, [1, 2, 3, 4], [], [1, 2, 3, 4], True),
        ("a zone that nobody hints", CLUSTER, "z", HINTED, [1, 2, 3, 4], [], [1, 2, 3, 4], True),
        ("hinted endpoint not ready", CLUSTER, "a", ("zone:a unready", "zone:a", "zone:b"), [2], [], [2], True),
        (
            "only unready ones in the zone",
            CLUSTER,
            "a",
            ("zone:a unready", "zone:b", "zone:c"),
            [2, 3],
            [],
            [2, 3],
            True,
        ),
        ("one ready endpoint lacks a hint", CLUSTER, "a", ("zone:a", "zone:b", ""), [1, 2, 3], [], [1, 2, 3], True),
        ("an unready endpoint lacks a hint", CLUSTER, "a", ("zone:a", "zone:b", "unready"), [1], [], [1], True),
        (
            "several zones in a hint",
            CLUSTER,
            "a",
            ("zone:a zone:b", "zone:b zone:c", "zone:c zone:a"),
            [1, 3],
            [],
            [1, 3],
            True,
        ),
        ("node hints for this node", CLUSTER, "a", ("node:node-a zone:b", "node:node-b zone:a"), [1], [], [1], True),
        (
            "one endpoint without hints of both kinds",
            CLUSTER,
            "a",
            ("node:node-a zone:a", ""),
            [1, 2],
            [],
            [1, 2],
            True,
        ),
        (
            "node hints for others only: zones decide",
            CLUSTER,
            "a",
            ("node:node-b zone:b", "node:node-c zone:a"),
            [2],
            [],
            [2],
            True,
        ),
        ("a missing node hint: zones decide", CLUSTER, "a", ("node:node-a zone:b", "zone:a"), [2], [], [2], True),
        ("internal local only, all remote", LOCAL, "", ("", ""), [], [], [], True),
        ("internal local only, mixed", LOCAL, "", ("local", "", "local"), [], [1, 3], [1, 3], True),
        ("cluster, none usable", CLUSTER, "", ("unready", "unready gone"), [], [], [], False),
        ("cluster, some ready", CLUSTER, "", ("", "unready", ""), [1, 3], [], [1, 3], True),
        (
            "cluster, all terminating and serving",
            CLUSTER,
            "",
            ("terminating", "terminating local"),
            [1, 2],
            [],
            [1, 2],
            True,
        ),
        (
            "topology does not apply to terminating ones",
            CLUSTER,
            "a",
            ("terminating zone:a", "terminating zone:b"),
            [1, 2],
            [],
            [1, 2],
            True,
        ),
        ("internal local, external cluster with a node port", BOTH, "", ("local", ""), [1, 2], [1], [1, 2], True),
        ("both local, all remote", BOTH, "", ("", ""), [1, 2], [], [1, 2], True),
        ("both local, all remote and terminating", BOTH, "", ("terminating", "terminating"), [1, 2], [], [1, 2], True),
        (
            "remote ready, local terminating",
            BOTH,
            "",
            ("", "local unready", "local terminating", "terminating"),
            [1],
            [3],
            [1, 3],
            True,
        ),
        ("no endpoints", BOTH, "", (), [], [], [], False),
        ("terminating, and neither serving nor ready", BOTH, "", ("gone", "local gone"), [], [], [], False),
        (
            "local list falls back alone",
            BOTH,
            "",
            ("local terminating", "local terminating", "local gone", ""),
            [4],
            [1, 2],
            [1, 2, 4],
            True,
        ),
        ("terminating remote only, local traffic", LOCAL, "", ("terminating",), [], [], [], True),
        ("unready remote only, local traffic", LOCAL, "", ("unready",), [], [], [], False),
        ("ready local beats terminating local", LOCAL, "", ("local", "local terminating"), [], [1], [1], True),
    ],
)
def test_selection(case, policy, zone, texts, cluster, local, reachable, has_any):
    chosen = select(endpoints(*texts), *policy, NODE, zone)
    found = (numbers(chosen.cluster), numbers(chosen.local), numbers(chosen.reachable), chosen.has_any)
    assert found == (cluster, local, reachable, has_any), case


def test_topology_modes():
    both = endpoints("node:node-a zone:a", "node:node-b zone:b")
    assert topology_mode(both, NODE, ZONE) == SAME_NODE
    assert topology_mode(both, "node-z", ZONE) == SAME_ZONE
    assert topology_mode(both, "node-z", "z") == NO_TOPOLOGY
    assert topology_mode(endpoints("zone:a unready"), NODE, ZONE) == NO_TOPOLOGY
    assert topology_mode((), NODE, ZONE) == NO_TOPOLOGY


WORDS = ["local", "unready", "terminating", "gone", "zone:a", "zone:b", "node:node-a", "node:node-b"]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join), max_size=6)


@given(TEXTS, st.sampled_from([CLUSTER, LOCAL, BOTH]), st.sampled_from(["", "a", "b", "z"]))
def test_every_choice(texts, policy, zone):
    given_endpoints = endpoints(*texts)
    chosen = select(given_endpoints, *policy, NODE, zone)

    def usable(item: Endpoint) -> bool:
        return item.ready or (item.serving and item.terminating)

    for part in (chosen.cluster, chosen.local, chosen.reachable):
        assert list(part) == [item for item in given_endpoints if item in part], "order is kept, nothing is invented"
        assert all(usable(item) for item in part)
    assert set(chosen.reachable) == set(chosen.cluster) | set(chosen.local) or (
        set(chosen.local) <= set(chosen.cluster) == set(chosen.reachable)
    )
    assert all(item.is_local for item in chosen.local)
    if any(item.ready for item in given_endpoints) and policy[0]:
        assert chosen.cluster and all(item.ready for item in chosen.cluster)
    if policy[0] and any(usable(item) for item in given_endpoints):
        assert chosen.cluster, "hints never take the last endpoint away"
    if policy[1]:
        assert bool(chosen.local) == any(usable(item) and item.is_local for item in given_endpoints)
        assert chosen.has_any == any(usable(item) for item in given_endpoints)
    else:
        assert chosen.local == () and chosen.has_any == bool(chosen.cluster)
    if not policy[0]:
        assert chosen.cluster == ()


@given(TEXTS, st.sampled_from([CLUSTER, LOCAL, BOTH]))
def test_unusable_endpoints_change_nothing(texts, policy):
    some = endpoints(*texts, "unready", "local gone", "unready zone:a")
    kept = tuple(item for item in some if item.ready or (item.serving and item.terminating))
    assert select(some, *policy, NODE, ZONE) == select(kept, *policy, NODE, ZONE)
