# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The taint with which kubelet registers a Node, and the example rule that removes it, against their documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import ProxyHealth
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import (
    ApiError,
    ConfigurationError,
    PreflightError,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.startup_taint import remove_taint
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates

KEY = "kubenode.proxy/not-ready"
OURS = {"key": KEY, "effect": "NoSchedule"}
OTHER = {"key": "example.com/dedicated", "value": "ci", "effect": "NoSchedule"}


class Cluster:
    """The test API server with one Node, which another client changes as often as ``conflicts`` says."""

    def __init__(self, certificates):
        self.store = Store()
        self.api = ApiServer(self.store, certificates)
        self.conflicts = 0
        connection = ApiConnection(host=self.api.url, api_key=self.api.token, ca_cert=str(certificates.authority))
        self.client = ApiClient(connection, sleep=lambda _seconds: None)
        self._get = self.client.get
        self.client.get = self._get_and_change

    def _get_and_change(self, resource, name):
        node = self._get(resource, name)
        if self.conflicts:
            self.conflicts -= 1
            self.put([*node["spec"]["taints"], {**OTHER, "key": f"example.com/added-{self.conflicts}"}])
        return node

    def put(self, taints):
        spec = {"taints": taints} if taints else {}
        self.store.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}, "spec": spec})

    def taints(self):
        return self.store.list("/api/v1/nodes")[0][0]["spec"].get("taints")

    def close(self):
        self.client.close()
        self.api.close()


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(make_certificates(tmp_path))
    yield cluster
    cluster.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([OURS], None),
        ([OTHER, OURS, {**OURS, "effect": "NoExecute", "value": "x"}], [OTHER]),
        ([OTHER], [OTHER]),
        ([], None),
    ],
)
def test_only_taints_with_the_key_are_removed(cluster, before, after):
    cluster.put(before)
    checked = remove_taint(cluster.client, "node-a", KEY, check=True)
    assert (checked.before, checked.after) == (before, after or []) and (cluster.taints() or []) == before
    assert remove_taint(cluster.client, "node-a", KEY) == checked and cluster.taints() == after
    again = remove_taint(cluster.client, "node-a", KEY)
    assert again.before == again.after


def test_a_taint_that_is_added_meanwhile_is_kept(cluster):
    cluster.put([OURS])
    cluster.conflicts = 2
    remove_taint(cluster.client, "node-a", KEY)
    assert [taint["key"] for taint in cluster.taints()] == ["example.com/added-1", "example.com/added-0"]


def test_attempts_end(cluster):
    cluster.put([OURS])
    cluster.conflicts = 100
    with pytest.raises(ApiError, match=r"patch Node node-a: .*modified"):
        remove_taint(cluster.client, "node-a", KEY)
    assert OURS in cluster.taints() and cluster.conflicts == 95


def test_wrong_names_are_errors(cluster):
    with pytest.raises(PreflightError, match="node_name: no Node is named node-x"):
        remove_taint(cluster.client, "node-x", KEY)
    with pytest.raises(ConfigurationError, match="key: 'a b' is not the key of a taint"):
        remove_taint(cluster.client, "node-a", "a b")


# ---- node-readiness-controller 0.5

EXAMPLES = Path("examples/readiness")


def test_the_example_rule_waits_for_what_the_example_reporter_writes():
    """The reporter takes a status of 2xx for True, and everything else for False."""
    rule = yaml.safe_load((EXAMPLES / "rule.yml").read_text(encoding="utf-8"))
    objects = yaml.safe_load((EXAMPLES / "reporter.yml").read_text(encoding="utf-8"))["items"]
    daemon_set = next(item for item in objects if item["kind"] == "DaemonSet")
    environment = daemon_set["spec"]["template"]["spec"]["containers"][0]["env"]
    values = {item["name"]: item.get("value") for item in environment}
    condition = rule["spec"]["conditions"][0]
    assert rule["apiVersion"] == "readiness.node.x-k8s.io/v1alpha1" and rule["kind"] == "NodeReadinessRule"
    assert (condition["type"], condition["requiredStatus"]) == (values["CONDITION_TYPE"], "True")
    assert "defaultStatus" not in condition and rule["spec"]["enforcementMode"] == "bootstrap-only"
    assert rule["spec"]["taint"]["key"].split("/")[0] == "readiness.k8s.io" and rule["spec"]["nodeSelector"]
    assert values["CHECK_ENDPOINT"].endswith(":10256/readyz")


def test_the_state_of_a_node_is_one_answer_until_it_changes():
    """The reporter copies the body of a 503 into the Node, which is a write at every check if it always differs."""
    now = [1000.0]
    health = ProxyHealth(60.0, lambda: now[0], lambda: now[0])
    stages = {"services": True, "policies": False}
    health.stages = lambda: stages
    health.updated("IPv4")
    first = health.readiness_answer()
    now[0] += 100
    assert first.code == 503 and health.readiness_answer() == first
    stages["policies"] = True
    assert health.readiness_answer().code == 200
    health.queued("IPv4")
    now[0] += 60
    assert health.readiness_answer().code == 503
