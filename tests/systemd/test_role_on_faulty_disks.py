# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A disk that is read-only or full under the files of a role: the node serves as before, and the next run completes.

A disk with little room lets a role begin, and fails under one of its files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import pytest

from tests.lab.faulty_disk import FULL, READ_ONLY, REASONS, mount_script
from tests.waiting import wait_for

from .agent import dataplane, start_of, status, wait_for_activity
from .cluster import Cluster
from .cluster import node as node_object
from .node import Node, Recap, later_version, run_playbook

KEPT = "/srv/kept"
ENGINE, UNITS = "/usr/local/lib/kubenode-proxy", "/etc/systemd/system"
CONFIGURATION, STATE = "/etc/kubenode-proxy", "/var/lib/kubenode-proxy"
LITTLE = "little"

MODE = {"mode": "nftables"}
OTHER_BIT = {"agent_configuration": {**MODE, "nftables": {"masqueradeBit": 15}}}
KERNEL = {"kernel_mode": "iptables", "kernel_install_packages": False, "kernel_unchangeable": "warn"}


class Part(NamedTuple):
    """The variables of a role or playbook, those of a change, and the directories that this change writes to."""

    variables: Dict[str, Any]
    changed: Dict[str, Any]
    places: Sequence[str]


def listed(node: Node, name: str, *items: Dict[str, Any]) -> Path:
    """Write a snapshot of the cluster on the controller."""
    path = node.scratch / name
    objects = [node_object(node.name, "10.88.255.254"), *items]
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    return path


def of_agent(_node: Node, cluster: Cluster) -> Part:
    variables = {**KERNEL, "agent_kubeconfig": str(cluster.kubeconfig), "agent_configuration": MODE}
    return Part(variables, {**OTHER_BIT, "agent_kubelet_delay": 7}, (ENGINE, CONFIGURATION, UNITS))


def of_schedule(node: Node, _cluster: Cluster) -> Part:
    node.copy(listed(node, "schedule.json", *Cluster.first_services()), "/srv/snapshot.json")
    variables = {**KERNEL, "schedule_snapshot": "/srv/snapshot.json", "schedule_interval": "1h"}
    variables["agent_configuration"] = MODE
    return Part(variables, {**OTHER_BIT, "schedule_interval": "2h"}, (ENGINE, CONFIGURATION, UNITS))


def of_convergence(node: Node, _cluster: Cluster) -> Part:
    first = Cluster.first_services()
    snapshots = [str(listed(node, f"{name}.json", *items)) for name, items in (("all", first), ("none", ()))]
    variables = {**KERNEL, "service_proxy_mode": "nftables", "service_proxy_snapshot": snapshots[0]}
    changed = {"service_proxy_snapshot": snapshots[1], "service_proxy_max_unserved_percent": 100}
    changed["kernel_modules"] = ["dummy"]
    changed["kernel_sysctls"] = {"net.ipv4.ip_forward": 1}
    return Part(variables, changed, (STATE, "/etc/modules-load.d", "/etc/sysctl.d"))


PARTS: Dict[str, Callable[[Node, Cluster], Part]] = {
    "agent": of_agent,
    "schedule": of_schedule,
    "converge": of_convergence,
}


def faults(places: Sequence[str]) -> List[Tuple[str, str]]:
    little = [(place, LITTLE) for place in places if place == ENGINE]
    return [*little, *((place, kind) for place in places for kind in (READ_ONLY, FULL))]


def script(place: str, kind: str) -> str:
    """Return the script that makes a directory faulty; one with little room for less than the engine."""
    full = mount_script(FULL if kind == LITTLE else kind, place, KEPT, "32m")
    return f"{full}; truncate -s -65536 {place}/.filled" if kind == LITTLE else full


@pytest.mark.full
@pytest.mark.parametrize("name", PARTS)
def test_a_run_that_fails_names_the_file_and_the_next_one_completes(start, cluster, name):
    node = start(name)
    part = PARTS[name](node, cluster)
    changed = {**part.variables, **part.changed}

    def played(variables: Dict[str, Any], failing: bool = False) -> Recap:
        if name != "converge":
            return node.role(name, variables, failing=failing)
        return run_playbook([node], "kubenode.proxy.converge", variables, {}, failing=failing)[node.name]

    played(part.variables)
    before = rules = version = None
    if name == "agent":
        wait_for_activity(node)
        before, version = start_of(node), status(node)["version"]
    rules = dataplane(node)
    with later_version():
        for place, kind in faults(part.places):
            node.run("sh", "-ec", script(place, kind))
            said = played(changed, failing=True).output
            node.run("sh", "-c", f"umount -l {place}; umount -l {KEPT} 2>/dev/null || true")
            assert place in said and REASONS[FULL if kind == LITTLE else kind] in said, (place, kind, said)
            assert dataplane(node) == rules, (place, kind)
            assert name != "agent" or start_of(node) == before, (place, kind)
        played(changed)
        if name == "agent":
            assert start_of(node) != before
            wait_for(lambda: status(node).get("version", version) != version, what="the later version runs")
        assert played(changed).changed_tasks == []
