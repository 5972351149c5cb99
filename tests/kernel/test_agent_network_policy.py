# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies in the agent: followed object by object, repaired, kept over restarts and without the API server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from typing import Iterator, Optional
from urllib.parse import urlsplit

import pytest

from tests.apiserver.discovery import discovery
from tests.apiserver.wire import Answer, failure, response
from tests.kernel.agent_node import NODE, AgentNode, endpoint_slice, service, service_manager
from tests.kernel.policy_node import PORTS, TABLE, bridge_port, elements, granted, isolated, pod, policy, policy_node
from tests.lab import manifests, system
from tests.lab.manifests import Object
from tests.waiting import wait_for


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    agent_node = policy_node(tmp_path, networkPolicy={"enabled": True})
    yield agent_node
    agent_node.close()


def test_pods_and_policies_are_followed(node):
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    node.store.put(pod("web", "10.244.1.7", {"app": "other"}, "node2"))
    wait_for(lambda: "10.244.1.7" not in elements("pods4"), 30)
    assert isolated()
    node.store.put(pod("late", "10.244.0.6", {"app": "db"}))
    wait_for(lambda: "10.244.0.6" in elements("isolated-in4"), 30)
    node.store.delete("NetworkPolicy", "shop", "db")
    wait_for(lambda: "10.244.0" not in elements("isolated-in4"), 30)
    assert node.log.count("network policies are in force") == 1, "followed without a full comparison"


def test_changes_by_another_program_are_repaired(node):
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    subprocess.run(["nft", "flush", "set", *TABLE.split(), "isolated-in4"], check=True)
    wait_for(isolated, 30)
    subprocess.run(["nft", "delete", "table", *TABLE.split()], check=True)
    wait_for(lambda: isolated() and granted(), 30)


def test_the_table_of_ports_is_repaired_and_removed(node):
    def checked():
        shown = subprocess.run(["nft", "list", "table", *PORTS.split()], capture_output=True, text=True, check=False)
        return '"port0" . 10.244.0.5' in shown.stdout and "@here6" in shown.stdout

    with bridge_port("10.244.0.5/24", "10.244.0.1/24"):
        node.start()
        wait_for(checked, 30)
        for words in (f"flush set {PORTS} bound4", f"flush chain {PORTS} frames", f"delete table {PORTS}"):
            subprocess.run(["nft", *words.split()], check=True)
            wait_for(checked, 30)
        node.stop()
        node.node_configuration["networkPolicy"] = {"enabled": True, "checkSources": False}
        node.write_configuration()
        node.start()
        wait_for(lambda: not checked(), 30)
        assert isolated() and granted()


def test_policies_stay_in_force_without_agent_and_without_api_server(node):
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    node.stop()
    assert isolated() and granted()
    node.stop_api()
    subprocess.run(["nft", "delete", "table", *TABLE.split()], check=True)
    node.start()
    wait_for(lambda: isolated() and granted(), 60)


PODS = "/api/v1/pods"


def test_at_boot_the_agent_is_ready_once_policies_are_in_force(node):
    """It is what kubelet waits for before it starts pods, though not for longer than ten seconds."""
    assert node.api is not None
    node.api.failing[PODS] = 503
    with service_manager(node) as sent:
        started = time.monotonic()
        node.start()
        assert not isolated() and ("READY=1" not in sent() or time.monotonic() - started >= 10.0)
        node.api.failing.clear()
        wait_for(lambda: "READY=1" in sent(), 30, 0.05)
        assert (isolated() and granted()) or "network policies are not in force yet" in node.log


def test_a_boot_starts_from_the_copy_on_disk_if_pods_or_nothing_can_be_listed(node):
    """The copy must have Pods even after an agent that could not list them. There is no ClusterNetworkPolicy."""
    assert node.api is not None
    node.node_configuration["networkPolicy"]["clusterNetworkPolicies"] = True
    node.write_configuration()
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    node.stop()
    node.api.failing[PODS] = 403
    for boot in range(2):
        subprocess.run(["nft", "flush", "ruleset"], check=True)
        node.start()
        wait_for(lambda: isolated() and granted(), 30)
        assert ("using pods and network policies kept on disk" in node.log) is (boot == 0)
        node.stop()
        node.stop_api()


def test_policies_of_a_terminating_namespace_hold_until_it_is_gone(node):
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    terminating = {"name": "shop", "deletionTimestamp": "2026-01-02T00:00:00Z"}
    node.store.put({"apiVersion": "v1", "kind": "Namespace", "metadata": terminating})
    node.store.delete("NetworkPolicy", "shop", "db")
    node.store.put(pod("late", "10.244.0.6", {"app": "db"}))
    wait_for(lambda: "10.244.0.6" in elements("isolated-in4"), 30)
    assert isolated() and granted()
    node.store.delete("Namespace", "", "shop")
    wait_for(lambda: not isolated(), 30)


GROUP = "policy.networking.k8s.io"
KNOWN_VERSIONS = [f"/apis/{GROUP}/{version}/clusternetworkpolicies" for version in ("v1beta1", "v1alpha2")]


def cluster_policy(app: str) -> Object:
    """Return a ClusterNetworkPolicy about pods with this label."""
    selected = {"pods": {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": app}}}}
    deny = {"action": "Deny", "from": [{"namespaces": {}}]}
    spec = {"tier": "Admin", "priority": 1, "subject": selected, "ingress": [deny]}
    return {"kind": "ClusterNetworkPolicy", "metadata": {"name": "lockdown"}, "spec": spec}


def future_version(target: str) -> Optional[Answer]:
    """Answer as an API server that has ClusterNetworkPolicies in a version of the future only."""
    version = f"{GROUP}/v1"
    groups = discovery("/apis", set(KNOWN_VERSIONS))
    assert groups is not None
    documents = {
        "/apis": {**groups, "groups": [*groups["groups"], {"name": GROUP, "versions": [{"groupVersion": version}]}]},
        f"/apis/{version}": {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [{"name": "clusternetworkpolicies"}],
        },
    }
    found = documents.get(urlsplit(target).path)
    return None if found is None else Answer(response(json.dumps(found).encode()))


def test_cluster_policies_are_followed_in_the_version_that_is_served_and_stay_without_one(node):
    assert node.api is not None

    def denied() -> bool:
        """Return whether the policy applies to a pod that no NetworkPolicy selects."""
        return "10.244.0.4" in elements("policed-in4")

    node.store.put(pod("open", "10.244.0.4", {"app": "open"}))
    node.node_configuration["networkPolicy"]["clusterNetworkPolicies"] = True
    node.write_configuration()
    node.store.put(cluster_policy("open"))
    node.api.absent.add(KNOWN_VERSIONS[0])
    node.start()
    wait_for(lambda: isolated() and denied(), 30)
    assert "read in version policy.networking.k8s.io/v1alpha2" in node.log
    # An upgrade of the definition: the older version is no longer served.
    node.api.absent = {KNOWN_VERSIONS[1]}
    node.api.drop_watches()
    wait_for(lambda: "read in version policy.networking.k8s.io/v1beta1" in node.log, 30)
    node.store.put(cluster_policy("other"))
    wait_for(lambda: not denied(), 30)
    node.store.put(cluster_policy("open"))
    wait_for(denied, 30)
    # One that this agent does not know: the last policies stay, NetworkPolicies are followed, and it is said.
    node.api.absent, node.api.wrong = set(KNOWN_VERSIONS), future_version
    node.api.drop_watches()
    stale = "it has them in version policy.networking.k8s.io/v1, not in"
    wait_for(lambda: stale in node.status()["networkPolicy"]["error"], 30)
    wait_for(lambda: "NetworkPoliciesStale" in [item.get("reason") for item in node.api.posted], 30)
    node.store.put(cluster_policy("other"))
    for start in range(2):
        node.store.put(pod(f"late{start}", f"10.244.0.{7 + start}", {"app": "db"}))
        wait_for(lambda start=start: f"10.244.0.{7 + start}" in elements("isolated-in4"), 30)
        assert denied() and stale in node.log
        node.stop()
        node.start()
    wait_for(lambda: stale in node.status()["networkPolicy"]["error"], 30)
    assert denied() and node.status()["networkPolicy"]["inForce"]


def test_all_nodes_are_followed_while_a_policy_selects_nodes(node):
    """A rule about nodes denies nothing while they are being listed, and everything if they cannot be."""

    def blocks() -> str:
        return elements("blocks4")

    assert node.api is not None
    node.node_configuration["networkPolicy"]["clusterNetworkPolicies"] = True
    node.write_configuration()
    edge = manifests.node("node9", "192.0.2.9", "10.244.9.0/24", metadata={"labels": {"role": "edge"}})
    node.store.put(edge)
    node.store.put(pod("open", "10.244.0.4", {"app": "open"}))
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    watches = [path for path in node.api.requests if "/nodes?" in path and "watch=true" in path]
    assert watches and all("fieldSelector" in path for path in watches)
    selecting = cluster_policy("open")
    rule = {"action": "Deny", "to": [{"nodes": {"matchLabels": {"role": "edge"}}}]}
    selecting["spec"] = {**selecting["spec"], "ingress": [], "egress": [rule]}
    node.store.put(selecting)
    wait_for(lambda: "192.0.2.9" in blocks(), 30)
    assert "192.0.2.1" not in blocks() and node.status()["networkPolicy"]["warnings"] == []
    node.store.put({**edge, "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.8"}]}})
    wait_for(lambda: "192.0.2.8" in blocks() and "192.0.2.9" not in blocks(), 30)
    node.store.delete("ClusterNetworkPolicy", "", "lockdown")
    wait_for(lambda: "192.0.2.8" not in blocks(), 30)
    node.stop()
    # Restarted without the right to list all Nodes.
    node.api.wrong = without_all_nodes
    node.start()
    wait_for(lambda: node.status()["networkPolicy"]["inForce"], 30)
    node.store.put(selecting)
    wait_for(lambda: "10.244.0.4" in elements("policed-out4"), 30)
    assert any("the Nodes are not known" in line for line in node.status()["networkPolicy"]["warnings"])
    node.api.wrong = None
    wait_for(lambda: "192.0.2.8" in blocks() and node.status()["networkPolicy"]["warnings"] == [], 60)


def without_all_nodes(target: str) -> Optional[Answer]:
    """Refuse lists of all Nodes."""
    path = urlsplit(target)
    refused = path.path == "/api/v1/nodes" and "fieldSelector" not in path.query
    return Answer(failure(403, "Forbidden")) if refused else None


def test_a_refused_version_of_a_policy_does_not_replace_a_valid_one(node):
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    node.store.put(policy("db", podSelector={"matchExpressions": [{"key": "app", "operator": "Gt", "values": ["1"]}]}))
    node.store.put(pod("late", "10.244.0.6", {"app": "db"}))
    wait_for(lambda: "10.244.0.6" in elements("isolated-in4"), 30)
    assert isolated() and granted()
    # After a restart the agent knows the valid version from its copy on disk.
    for _start in range(2):
        node.stop()
        node.start()
        wait_for(lambda: node.status()["networkPolicy"]["inForce"], 30)
        assert isolated() and granted() and "its version on disk remains in force" in node.log


def test_the_table_is_removed_when_policies_are_disabled(node):
    node.start()
    wait_for(isolated, 30)
    node.stop()
    node.node_configuration["networkPolicy"] = {"enabled": False}
    node.write_configuration()
    node.start()
    wait_for(lambda: not elements("isolated-in4"), 30)
    assert all("/pods" not in line for line in node.log.splitlines())


def test_agent_and_snapshot_explain_which_rule_allows(node, tmp_path):
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    words = ("explain", "--control", str(node.scratch / "agent.sock"), "--from", "shop/web", "--to")
    allowed = node.run(*words, "shop/db:80/tcp")
    assert allowed.returncode == 0 and "allowed by shop/db ingress[0]" in allowed.stdout
    assert "element inet kubenode-network-policy grants-in4" in allowed.stdout
    denied = node.run(*words, "10.244.0.5:81", "--why-not")
    assert denied.returncode == 3 and "matches, but no entry of ports has 81" in denied.stdout
    missing = node.run(*words, "shop/nobody:80")
    assert missing.returncode == 1
    assert missing.stderr.startswith("kubenode-proxy: there is no pod or Service shop/nobody that this node serves: ")
    snapshot = tmp_path / "snapshot.json"
    paths = ("/api/v1/nodes", "/api/v1/pods", "/api/v1/namespaces", "/apis/networking.k8s.io/v1/networkpolicies")
    # A snapshot without any Service is not complete.
    objects = [service(1), endpoint_slice(1), *(item for path in paths for item in node.store.list(path)[0])]
    snapshot.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    source = ("--snapshot", str(snapshot), "--node-name", NODE, "--mode", node.mode)
    again = node.run(*words, "shop/db:80/tcp", *source)
    assert (again.returncode, again.stdout) == (0, allowed.stdout)


def metric(node: AgentNode, name: str) -> float:
    return node.metric(f"kubenode_proxy_network_policy_{name}")


def test_status_metrics_and_health_show_the_state(node):
    node.store.put(pod("open", "10.244.0.9", {"app": "open"}))
    node.store.put(policy("useless", podSelector={"matchLabels": {"app": "nobody"}}))
    node.start()
    wait_for(lambda: isolated() and granted(), 30)
    wait_for(lambda: node.status()["networkPolicy"]["inForce"], 30)
    shown = node.run("status", "--control", str(node.scratch / "agent.sock"))
    assert shown.returncode == 0 and "policies:   in force: 2 policies, 2 pods" in shown.stdout
    assert "pods that no policy selects: shop/open\n" in shown.stdout
    assert "policies without a pod: shop/useless\n" in shown.stdout
    assert metric(node, "in_force") == 1 and metric(node, "pods") == 2 and metric(node, "refused") == 0
    assert 'denied_packets_total{direction="ingress",namespace="shop",pod="db"} 0.0' in node.fetch("/metrics")
    assert json.loads(node.fetch("/healthz", node.health_port))["status"]["NetworkPolicy"]["healthy"] is True
    subprocess.run(["nft", "flush", "set", *TABLE.split(), "isolated-in4"], check=True)
    wait_for(lambda: isolated() and metric(node, "repaired_total") >= 1, 30)
    assert node.status()["networkPolicy"]["repaired"] >= 1


def test_a_table_that_cannot_be_written_is_reported_until_it_is_in_force(node):
    with subprocess.Popen(["nft", "-i"], stdin=subprocess.PIPE, text=True) as owner:
        try:
            # Only the process that owns a table may change it, and the table goes with the process.
            assert owner.stdin is not None
            owner.stdin.write(f"add table {TABLE} {{ flags owner; }}\n")
            owner.stdin.flush()
            wait_for(lambda: subprocess.run(["nft", "list", "table", *TABLE.split()], capture_output=True).stdout, 30)
            node.start()
            wait_for(lambda: metric(node, "sync_failures_total") >= 1, 30)
            status = node.status()["networkPolicy"]
            assert not status["inForce"] and "kubenode-network-policy" in status["error"]
            shown = node.run("status", "--control", str(node.scratch / "agent.sock"))
            assert shown.returncode == 4 and "policies:   not up to date" in shown.stdout
            assert metric(node, "in_force") == 0
            assert json.loads(node.fetch("/readyz", node.health_port))["inForce"] == {
                "services": True,
                "policies": False,
            }
        finally:
            owner.stdin.close()
    wait_for(lambda: isolated() and granted(), 30)
    wait_for(lambda: node.status()["networkPolicy"]["inForce"], 30)


def test_denied_packets_are_logged_with_the_policies_that_isolate_the_pod(node):
    node.node_configuration["networkPolicy"] = {"enabled": True, "logDenied": True, "logGroup": 4115}
    node.write_configuration()
    node.store.put(policy("quiet", podSelector={"matchLabels": {"app": "db"}}, policyTypes=["Egress"]))
    name = f"kndenied{os.getpid()}"
    system.ip_batch([f"netns add {name}", f"link add pod0 type veth peer name eth0 netns {name}"])
    try:
        system.ip_batch(["addr add 10.244.0.1/32 dev pod0", "link set pod0 up", "route add 10.244.0.5/32 dev pod0"])
        lines = ["link set eth0 up", "addr add 10.244.0.5/32 dev eth0", "route add 10.244.0.1/32 dev eth0"]
        system.ip_batch([*lines, "link set lo up"], name)
        node.start()
        wait_for(lambda: "10.244.0.5" in elements("isolated-out4"), 30)

        def logged() -> bool:
            """Send a packet that the policies deny, and return whether the log has a line about such a packet."""
            sent = ["bash", "-c", "echo > /dev/udp/10.244.0.1/53"]
            subprocess.run(["ip", "netns", "exec", name, *sent], check=False, capture_output=True)
            return "denied by network policies" in node.log

        wait_for(logged, 60, 0.2)
        (line, *_others) = [text for text in node.log.splitlines() if "denied by network policies" in text]
        for part in ("egress", "shop/db (10.244.0.5)", "10.244.0.1", "udp", "53", "shop/quiet", "no rule allows it"):
            assert part in line, line
        system.ip_batch(
            ["addr add 192.0.2.77/32 dev eth0", "route replace 10.244.0.1/32 dev eth0 src 192.0.2.77"], name
        )
        wait_for(lambda: logged() and "not its sender's" in node.log, 60, 0.2)
        (line, *_others) = [text for text in node.log.splitlines() if "not its sender's" in text]
        assert "source=192.0.2.77 destination=10.244.0.1 protocol=udp port=53" in line, line
        assert re.search(r'forged_packets_total\{interface="pod0"\} [1-9]', node.fetch("/metrics"))
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
