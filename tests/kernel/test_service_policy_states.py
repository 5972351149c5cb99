# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests of annotations in check mode, diff, drift and rollback of a node without an agent."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from tests.kernel.rollback_node import Node, differences, dump
from tests.lab import manifests
from tests.lab.system import run

#: By mode: what the diff shows of the policies, and the commands with which another program then changes them.
EXPECTED: dict[str, list[str]] = {
    "nftables": ["jhash ip saddr", "80 . 203.0.113.0 }", ". 203.0.113.64 }", "10.244.0.12"],
    "iptables": ["-s 203.0.113.0/24", "-s 203.0.113.64/26", "--probability 0.75"],
    "ipvs": ["-s mh -b mh-fallback,mh-port", "203.0.113.0/24", "203.0.113.64/26", "-m -w 3", "-p 60 -M 255.255.255.0"],
}
DRIFT: dict[str, list[str]] = {
    "nftables": ["nft flush table ip kube-proxy"],
    "iptables": ["iptables -t nat -F KUBE-SERVICES"],
    "ipvs": ["ipvsadm -E -t 10.96.0.7:80 -s rr", "ipvsadm -e -t 10.96.0.8:80 -r 10.244.0.11:8080 -m -w 9"],
}
FULL = pytest.mark.full
MODES = ["nftables", pytest.param("iptables", marks=FULL), pytest.param("ipvs", marks=(pytest.mark.uml, FULL))]


def fields(mode: str, annotated: bool) -> dict[str, Any]:
    """Return the request fields for Services with annotations of every kind, or without any."""
    hashed = {
        "kubenode.proxy/scheduler": "mh",
        "kubenode.proxy/scheduler-flags": "mh-port, mh-fallback",
        "kubenode.proxy/allowed-sources": "203.0.113.0/24",
    }
    affinity = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}
    services = (
        ("hashed", hashed, {"type": "NodePort", "externalIPs": ["198.51.100.7"]}),
        ("weighted", {}, {}),
        ("grouped", {"kubenode.proxy/persistence-netmask": "24"}, affinity),
    )
    objects = []
    for place, (name, asked, spec) in enumerate(services):
        port = manifests.port(80, nodePort=30080) if name == "hashed" else manifests.port(80)
        metadata = {"annotations": asked if annotated else {}}
        objects.append(manifests.service(name, f"10.96.0.{7 + place}", [port], metadata=metadata, **spec))
        for number, weight in ((11, "3"), (12, "1")):
            weights = {"kubenode.proxy/weight": weight} if annotated and name == "weighted" else {}
            item = manifests.endpoint_slice(
                name,
                [manifests.endpoint(f"10.244.0.{number}", "node1")],
                [manifests.port(8080)],
                name=f"{name}-{number}",
                metadata={"annotations": weights},
            )
            objects.append(item)
    sources = {"servicePolicy": {"nodePortSources": ["203.0.113.64/26"]}} if annotated else {}
    return {
        "cluster": ClusterState.from_objects(objects),
        "configuration": load({"mode": mode}, node_source=sources).configuration,
        "node_name": "node1",
    }


@pytest.mark.parametrize("mode", MODES)
def test_policies_are_previewed_repaired_and_rolled_back(tmp_path, mode) -> None:
    run(["ip", "address", "add", "192.0.2.1/24", "dev", "lo"])
    node, annotated = Node(tmp_path), fields(mode, True)
    node.converge(mode, **fields(mode, False))
    before = dump()

    preview = node.converge(mode, **annotated, check=True, describe=True)
    assert preview.changed and differences(before, dump()) == ""
    shown = "\n".join(line for change in preview.changes for line in change.after)
    assert [text for text in EXPECTED[mode] if text not in shown] == []
    assert node.converge(mode, **annotated).changed
    programmed = dump()
    assert not node.converge(mode, **annotated, check=True).changed

    for command in DRIFT[mode]:
        run([*command.split()])
    assert node.converge(mode, **annotated, check=True).changed
    assert node.converge(mode, **annotated).changed
    assert differences(programmed, dump()) == ""

    # The state before the annotations is the second one that was saved.
    report = node.roll_back(2)
    assert report.changed and differences(before, dump()) == ""
    node.roll_back(report.saved)
    assert differences(programmed, dump()) == ""
    assert not node.converge(mode, **annotated).changed
