# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-proxy's DaemonSet and labels of nodes, against the test API server with a DaemonSet controller."""

from __future__ import annotations

import copy

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import (
    ApiError,
    ConfigurationError,
    PreflightError,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.placement import (
    DEFAULT_LABEL,
    Placement,
    Placer,
    StillWaiting,
    Waiting,
    merge_patch,
    with_rule,
    without_rule,
)
from tests.apiserver.daemonsets import DaemonSetController, kube_proxy_daemon_set
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates
from tests.apiserver.writes import merged

PODS, DAEMON_SETS, ALL_NODES = "/api/v1/pods", "/apis/apps/v1/daemonsets", "/api/v1/nodes"
NAMES = ("node-a", "node-b", "node-c")
OURS = {"key": DEFAULT_LABEL, "operator": "DoesNotExist"}
ZONE = {"key": "zone", "operator": "In", "values": ["one"]}
FIELD = {"key": "metadata.name", "operator": "In", "values": ["node-a"]}


def affinity(*terms, **more):
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"nodeAffinity": {**required, **more}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, affinity({"matchExpressions": [OURS]})),
        ({"podAffinity": {"x": 1}}, {"podAffinity": {"x": 1}, **affinity({"matchExpressions": [OURS]})}),
        (affinity({"matchExpressions": [ZONE]}), affinity({"matchExpressions": [ZONE, OURS]})),
        (
            affinity({"matchExpressions": [ZONE]}, {"matchFields": [FIELD]}),
            affinity({"matchExpressions": [ZONE, OURS]}, {"matchFields": [FIELD], "matchExpressions": [OURS]}),
        ),
        (
            {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}},
            affinity({"matchExpressions": [OURS]}, preferredDuringSchedulingIgnoredDuringExecution=[{"weight": 1}]),
        ),
    ],
)
def test_the_rule_is_added_to_every_term_and_removed_completely(before, after):
    unchanged = copy.deepcopy(before)
    assert with_rule(before, DEFAULT_LABEL) == after and before == unchanged
    assert with_rule(after, DEFAULT_LABEL) == after
    assert without_rule(after, DEFAULT_LABEL) == before
    assert without_rule(before, DEFAULT_LABEL) == before


def test_a_term_that_matches_no_node_still_matches_none():
    before = affinity({}, {"matchExpressions": [ZONE]})
    assert with_rule(before, DEFAULT_LABEL) == affinity({}, {"matchExpressions": [ZONE, OURS]})
    # Another program's rule of the same kind, beside a separate term, without which every node would match.
    both = affinity({"matchExpressions": [OURS]}, {"matchExpressions": [ZONE, OURS]})
    assert without_rule(both, DEFAULT_LABEL) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}, {"b": {"c": 4}, "e": [2], "f": {"g": 1}}),
        ({"a": {"b": 1}}, {"a": {"b": 1}}),
        ({}, {"a": {}}),
    ],
)
def test_merge_patch_transforms_one_into_the_other(before, after):
    assert merged(before, merge_patch(before, after)) == after


class Cluster:
    """The test API server, its DaemonSet controller, and a placer whose time passes without waiting."""

    def __init__(self, certificates):
        self.store = Store()
        self.api = ApiServer(self.store, certificates)
        self.controller = DaemonSetController()
        self.api.controllers.append(self.controller)
        for name in NAMES:
            self.store.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"x": "y"}}})
        self.store.put(kube_proxy_daemon_set())
        self.controller(self.store)
        connection = ApiConnection(host=self.api.url, api_key=self.api.token, ca_cert=str(certificates.authority))
        self.client = ApiClient(connection, sleep=lambda _seconds: None)
        self.now = 0.0
        self.while_waiting = lambda: None

    def _sleep(self, seconds):
        self.now += seconds
        self.while_waiting()

    def placer(self, check=False, timeout=10.0, placement=None, continued=False):
        return Placer(
            self.client, placement or Placement(), check, Waiting(timeout, continued, self._sleep, lambda: self.now)
        )

    def where(self):
        """Return the nodes with a pod of kube-proxy."""
        return [pod["spec"]["nodeName"] for pod in self.store.list(PODS)[0]]

    def labels(self, name):
        return next(n["metadata"]["labels"] for n in self.store.list(ALL_NODES)[0] if n["metadata"]["name"] == name)

    def pod_spec(self):
        return self.store.list(DAEMON_SETS)[0][0]["spec"]["template"]["spec"]

    def close(self):
        self.client.close()
        self.api.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def cluster(certificates):
    made = Cluster(certificates)
    try:
        yield made
    finally:
        made.close()


def test_kube_proxy_is_kept_off_one_node_and_restored(cluster):
    before = cluster.pod_spec()
    preview = cluster.placer(check=True).keep_off(["node-b"])
    assert cluster.where() == list(NAMES) and cluster.api.patched == []
    done = cluster.placer().keep_off(["node-b"])
    assert done == preview and len(done.changes) == 2
    assert done.before == {"DaemonSet kube-system/kube-proxy": {"affinity": {}}, "Node node-b": {"labels": {}}}
    assert done.after["Node node-b"] == {"labels": {DEFAULT_LABEL: "true"}}
    assert cluster.where() == ["node-a", "node-c"] and cluster.labels("node-b") == {"x": "y", DEFAULT_LABEL: "true"}
    assert cluster.placer().keep_off(["node-b"]).changes == ()
    assert cluster.placer().keep_off(["node-c"]).changes == (f"Node node-c: labelled {DEFAULT_LABEL}",)
    assert cluster.placer().bring_back(["node-b"]).changes == (f"Node node-b: no longer labelled {DEFAULT_LABEL}",)
    assert cluster.where() == ["node-a", "node-b"] and cluster.labels("node-b") == {"x": "y"}
    assert cluster.pod_spec() != before
    done = cluster.placer().bring_back(["node-c"], remove_rule=True)
    assert len(done.changes) == 2 and cluster.where() == list(NAMES)
    assert cluster.pod_spec() == before
    assert cluster.placer().bring_back(["node-c"], remove_rule=True).changes == ()


def test_the_rule_is_kept_while_other_nodes_have_the_label(cluster):
    cluster.placer().keep_off(["node-a", "node-b"])
    with pytest.raises(ConfigurationError, match=r"1 other nodes have the label kubenode.proxy/managed \(node-a\)"):
        cluster.placer().bring_back(["node-b"], remove_rule=True)
    assert cluster.where() == ["node-c"]


def test_a_concurrent_change_by_another_client_is_not_lost(cluster):
    send, interfered = cluster.client.send, []

    def interfering(method, path, *rest):
        if method == "PATCH" and "daemonsets" in path and not interfered:
            interfered.append(path)
            found = cluster.store.list(DAEMON_SETS)[0][0]
            cluster.store.put(merged(found, {"spec": {"template": {"spec": {"affinity": {"podAffinity": {"z": 1}}}}}}))
        return send(method, path, *rest)

    cluster.client.send = interfering
    cluster.placer().keep_off([])
    assert interfered and cluster.pod_spec()["affinity"]["podAffinity"] == {"z": 1}
    assert cluster.where() == list(NAMES)
    cluster.placer().keep_off(["node-a"])
    assert cluster.where() == ["node-b", "node-c"]


def test_timeouts_name_the_missing_condition(cluster):
    cluster.controller.lingering = True
    with pytest.raises(StillWaiting, match=r"pod kube-proxy-node-b of kube-proxy is still on node node-b"):
        cluster.placer().keep_off(["node-b"])
    assert cluster.now >= 10
    cluster.controller.lingering = False
    cluster.while_waiting = lambda: cluster.controller(cluster.store)
    assert cluster.placer().keep_off(["node-b"]).changes == ()
    cluster.controller.ready = False
    cluster.while_waiting = lambda: None
    placer = cluster.placer()
    with pytest.raises(StillWaiting, match=r"not ready on node node-b: pod kube-proxy-node-b is Running"):
        placer.bring_back(["node-b"])
    assert placer.outcome().changes == (f"Node node-b: no longer labelled {DEFAULT_LABEL}",)
    rollout = "DaemonSet kube-system/kube-proxy: 3 of 3 pods are updated, 0 are available"
    cluster.controller.ready = True
    cluster.controller(cluster.store)
    cluster.controller.ready = False
    with pytest.raises(StillWaiting, match=rollout):
        cluster.placer().bring_back([], remove_rule=True)


def test_a_continued_call_waits_for_the_rollout_of_the_first(cluster):
    cluster.placer().keep_off([])
    outdated = {"observedGeneration": 0, "desiredNumberScheduled": 3, "updatedNumberScheduled": 1}
    found = cluster.store.list(DAEMON_SETS)[0][0]
    cluster.store.put({**found, "status": outdated})
    assert cluster.placer().keep_off([]).changes == ()
    with pytest.raises(StillWaiting, match="0 of 3 pods are updated"):
        cluster.placer(continued=True).keep_off([])


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
            },
            "Pending (Unschedulable)",
        ),
        (
            {
                "phase": "Running",
                "containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "a\nb"}}}],
            },
            "Running (CrashLoopBackOff: a b)",
        ),
        ({}, "Pending"),
    ],
)
def test_a_pod_that_is_not_ready_has_a_phase_and_a_reason(cluster, status, words):
    pod = next(item for item in cluster.store.list(PODS)[0] if item["spec"]["nodeName"] == "node-a")
    cluster.store.put({**pod, "status": status})
    with pytest.raises(StillWaiting) as caught:
        cluster.placer().bring_back(["node-a"])
    assert str(caught.value) == f"kube-proxy is not ready on node node-a: pod kube-proxy-node-a is {words}"


@pytest.mark.parametrize(
    ("placement", "nodes", "message"),
    [
        (Placement(), ["node-a", "node-x"], "nodes: no Node is named node-x"),
        (Placement(), ["Node A"], "nodes: 'Node A' is not a name"),
        (Placement(name="a/b"), [], "name: 'a/b' is not a name"),
        (Placement(label="a b"), [], "label: 'a b' is not the key of a label"),
        (Placement(name="other"), [], "DaemonSet kube-system/other does not exist: if kube-proxy is not a DaemonSet"),
    ],
)
def test_errors_are_reported_before_anything_is_changed(cluster, placement, nodes, message):
    with pytest.raises((ConfigurationError, PreflightError)) as caught:
        cluster.placer(placement=placement).keep_off(nodes)
    assert message in str(caught.value) and cluster.api.patched == []


def test_missing_rights_are_reported(cluster):
    cluster.api.failing["/apis/apps/v1/namespaces/kube-system/daemonsets/kube-proxy"] = 403
    with pytest.raises(ApiError, match="get DaemonSet kube-system/kube-proxy: not allowed"):
        cluster.placer().keep_off(["node-a"])
    assert cluster.where() == list(NAMES)
