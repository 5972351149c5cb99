# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the memory limit that the role agent computes: the given cluster fits, as the agent computes it."""

from __future__ import annotations

from pathlib import Path

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.memory import BASE_BYTES, MOST
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.packed import text_of
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import RATES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from tests.benchmarks.large_cluster import large_cluster
from tests.unit.roles.rendering import ROLES, rendered

CASES = [
    ({}, "iptables", 10_000, 10),
    ({"agent_configuration": {"mode": "nftables"}, "agent_cluster_services": 100_000}, "nftables", 100_000, 1),
    ({"agent_configuration": {"mode": "ipvs"}, "agent_cluster_endpoints": "1000000"}, "ipvs", 10_000, 100),
]


def limits(scratch: Path, cases: list) -> list:
    """Return the limit for each set of variables, in one run."""
    return rendered(scratch, ["agent"], "__agent_memory_max", cases)


def test_the_limit_carries_forwarded_connections(tmp_path):
    """40 KiB for each of them, where the agent forwards connections at all."""
    tiny = {"agent_cluster_services": 10, "agent_cluster_endpoints": 10}
    few = {"agent_node_configuration": {"userspace": {"maxConnections": 1000}}}
    many = {"agent_node_configuration": {"userspace": {"maxConnections": 100_000}}}
    userspace = {"agent_configuration": {"mode": "userspace"}}
    cases = [{**tiny, **userspace}, {**tiny, **userspace, **few}, {**tiny, **userspace, **many}, {**tiny, **many}]
    default, small, large, unused = (int(limit[:-1]) for limit in limits(tmp_path, cases))
    assert small == unused == 512
    assert 16_384 * 40 // 1024 < default < 16_384 * 40 // 1024 + 60
    assert 100_000 * 40 // 1024 < large < 100_000 * 40 // 1024 + 60


def test_the_limit_carries_the_cluster_with_room_to_spare(tmp_path):
    own, tiny = {"agent_memory_max": "300M"}, {"agent_cluster_services": 10, "agent_cluster_endpoints": 10}
    found = limits(tmp_path, [own, tiny, *(variables for variables, *_expected in CASES)])
    assert found[:2] == ["300M", "512M"]
    for limit, (_variables, mode, services, endpoints) in zip(found[2:], CASES):
        sample = [raw for raw in large_cluster(100, endpoints) if raw["kind"] != "Node"]
        size = sum(len(text_of(prune(raw))) for raw in sample) * services // 100
        carried = (int(limit[:-1]) * 2**20 * MOST - BASE_BYTES) / RATES[mode].bytes_of_object
        # As for iptables mode, whatever the mode is, so that the unit does not depend on it.
        assert size < carried < 2 * size * RATES["iptables"].bytes_of_object / RATES[mode].bytes_of_object, limit


def test_every_score_of_the_oom_killer_is_used(tmp_path):
    text = (ROLES / "agent/templates/kubenode-proxy.service.j2").read_text(encoding="utf-8")
    (expression,) = (line.partition("{{")[2].rpartition("}}")[0] for line in text.splitlines() if "OOMScore" in line)
    cases = [{"agent_configuration": {"oomScoreAdj": score}} for score in (None, 0, 5)]
    assert rendered(tmp_path, ["agent"], expression, [{}, *cases]) == [-999, -999, 0, 5]
