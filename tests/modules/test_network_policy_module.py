# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of network policies by playbook: previewed, applied, its drift found and repaired, and rolled back."""

from __future__ import annotations

import json

import pytest

from tests.modules.harness import ROOT

MODULE = "kubenode.proxy.service_proxy"
INFO = "kubenode.proxy.service_proxy_info"
ROLLBACK = "kubenode.proxy.service_proxy_rollback"
TABLE = "inet kubenode-network-policy"
KIND = "network policy objects"


def pod(name, address, node):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": name, "labels": {"app": name}},
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "podIPs": [{"ip": address}]},
    }


def snapshot(path, *policies):
    """Write the demonstration's cluster with pods and policies, and return the options that use it."""
    items = json.loads((ROOT / "tests" / "lab" / "demo" / "cluster.json").read_text(encoding="utf-8"))["items"]
    items = [item for item in items if item["kind"] in ("Service", "EndpointSlice", "Node")]
    items += [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}},
        pod("db", "10.244.1.12", "lab-iptables"),
        pod("web", "10.244.2.11", "other"),
    ]
    for name, source in policies:
        rule = {"from": [{"podSelector": {"matchLabels": {"app": source}}}]}
        spec = {"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"], "ingress": [rule]}
        metadata = {"namespace": "shop", "name": name}
        items.append(
            {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
        )
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}), encoding="utf-8")
    return {
        "snapshot": str(path),
        "node_name": "lab-iptables",
        "mode": "nftables",
        "configuration": {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48"},
        "node_configuration": {"networkPolicy": {"enabled": True}},
    }


def of_policies(result):
    """Return the part of a result about the table of network policies."""
    return [change for change in result["changes"] if change["table"] == KIND]


def test_a_change_of_policies_is_previewed_applied_watched_and_rolled_back(node, tmp_path):
    if node.run("nft", "list", "tables", check=False).returncode:
        pytest.skip("this kernel has no nf_tables")
    before = snapshot(tmp_path / "before.json", ("from-web", "web"))
    after = snapshot(tmp_path / "after.json", ("from-nobody", "nobody"))
    list_grants = {"ansible.builtin.command": f"nft list map {TABLE} grants-in4"}
    first, preview, applied, granted, _flushed, drift, repaired, rolled, back, same, off = node.play(
        {MODULE: before},
        {MODULE: after, "check_mode": True},
        {MODULE: after},
        list_grants,
        {"ansible.builtin.command": f"nft flush set {TABLE} isolated-in4"},
        {INFO: after},
        {MODULE: after},
        {ROLLBACK: {"to": 2}},
        list_grants,
        {MODULE: before, "check_mode": True},
        {MODULE: {**before, "node_configuration": {}}, "check_mode": True},
    )
    assert first["changed"] and of_policies(first), first
    assert preview["changed"] and of_policies(preview) == of_policies(applied) and applied["changed"]
    shown = "".join(entry["before"] + entry["after"] for entry in preview["diff"])
    assert "grants-in4" in shown and "10.244.1.12" in shown
    assert "10.244.1.12" not in granted["stdout"], "no pod is granted anything now"
    (found,) = of_policies(drift)
    assert (found["added"], found["removed"]) == (1, 0) and "isolated-in4" in str(found), found
    assert drift["network_policy"] == {
        "unselected_pods": [],
        "unselected_pods_count": 0,
        "unused_policies": [],
        "unused_policies_count": 0,
    }
    assert repaired["changed"] and of_policies(repaired)
    assert rolled["changed"] and "10.244.1.12" in back["stdout"]
    assert not same["changed"], same["changes"]
    assert [line for line in off["warnings"] if line.startswith("ends the isolation of ")] == [
        "ends the isolation of 1 pod: network policies are not enabled"
    ]
