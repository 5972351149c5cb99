# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A disk that is read-only or full under the files of the role agent: the old agent serves on, the next run completes.

A disk with little room lets the role begin, and fails under one of its files.
"""

from __future__ import annotations

import pytest

from tests.lab.faulty_disk import FULL, READ_ONLY, REASONS, mount_script
from tests.waiting import wait_for

from .agent import dataplane, start_of, status, wait_for_activity
from .node import later_version

KEPT = "/srv/kept"
ENGINE = "/usr/local/lib/kubenode-proxy"
LITTLE = "little"
FAULTS = [
    (ENGINE, LITTLE),
    *((place, kind) for place in (ENGINE, "/etc/kubenode-proxy", "/etc/systemd/system") for kind in (READ_ONLY, FULL)),
]


@pytest.fixture(scope="module")
def node(start):
    return start("agent")


def script(place: str, kind: str) -> str:
    """Return the script that makes a directory faulty; one with little room for less than the engine."""
    full = mount_script(FULL if kind == LITTLE else kind, place, KEPT, "32m")
    return f"{full}; truncate -s -65536 {place}/.filled" if kind == LITTLE else full


@pytest.mark.full
def test_a_run_that_fails_names_the_file_and_the_next_one_completes(node, cluster):
    variables = {"agent_kubeconfig": str(cluster.kubeconfig), "agent_configuration": {"mode": "nftables"}}
    node.role("agent", variables)
    wait_for_activity(node)
    before, rules, version = start_of(node), dataplane(node), status(node)["version"]
    changed = {**variables, "agent_configuration": {"mode": "nftables", "nftables": {"masqueradeBit": 15}}}
    changed["agent_kubelet_delay"] = 7
    with later_version():
        for place, kind in FAULTS:
            node.run("sh", "-ec", script(place, kind))
            said = node.role("agent", changed, failing=True).output
            node.run("sh", "-c", f"umount -l {place}; umount -l {KEPT} 2>/dev/null || true")
            assert place in said and REASONS[FULL if kind == LITTLE else kind] in said, (kind, said)
            assert start_of(node) == before and dataplane(node) == rules, (place, kind)
        node.role("agent", changed)
        assert start_of(node) != before
        wait_for(lambda: status(node).get("version", version) != version, what="the later version runs")
        assert node.role("agent", changed).changed_tasks == []
