# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module cluster_snapshot, through Ansible, from files and from an API server."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.lab.ansible_playbook import ansible_playbook, compiled_environment
from tests.modules.harness import ROOT

SNAPSHOT = ROOT / "tests" / "lab" / "demo" / "cluster.json"
MODULE = "kubenode.proxy.cluster_snapshot"


class Controller:
    """Run tasks on this host as the controller does, with a separate HOME and environment."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    def play(self, *tasks, environment=None, defaults=None):
        """Run tasks and return their results; a failed one does not end the run."""
        results = self.scratch / "results.json"
        steps = [
            {"register": f"result_{number}", "ignore_errors": True, "diff": True, **task}
            for number, task in enumerate(tasks)
        ]
        content = "{{ [" + ", ".join(f"result_{number}" for number in range(len(tasks))) + "] | to_json }}"
        steps.append({"ansible.builtin.copy": {"content": content, "dest": str(results)}, "diff": False})
        variables = {"ansible_python_interpreter": sys.executable}
        play = {"hosts": "localhost", "gather_facts": False, "vars": variables, "tasks": steps}
        play["module_defaults"] = defaults or {}
        playbook = self.scratch / "playbook.yml"
        playbook.write_text(json.dumps([play]), encoding="utf-8")
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("K8S_AUTH_", "KUBECONFIG"))}
        done = subprocess.run(
            [*ansible_playbook(), "-c", "local", "-i", "localhost,", str(playbook)],
            env={
                **variables,
                **compiled_environment(),
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
                "ANSIBLE_LOCAL_TEMP": str(self.scratch / "local"),
                "ANSIBLE_REMOTE_TEMP": str(self.scratch / "remote"),
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(results.read_text(encoding="utf-8"))


@pytest.fixture
def controller(tmp_path):
    return Controller(tmp_path)


@pytest.fixture
def api(tmp_path):
    certificates = make_certificates(tmp_path / "tls")
    store = Store()
    store.replace_all(json.loads(SNAPSHOT.read_text(encoding="utf-8"))["items"])
    server = ApiServer(store, certificates)
    write_kubeconfig(tmp_path / "kubeconfig", server.url, certificates.authority, "test-token")
    server.certificates = certificates
    try:
        yield server
    finally:
        server.close()


def objects_of(path):
    """Return the objects of a snapshot file, read without the engine."""
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["items"]


def names(items):
    return sorted((item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in items)


def test_from_an_api_server_is_idempotent_and_predicted_by_check_mode(controller, api):
    target = controller.scratch / "cluster.json.gz"
    options = {"kubeconfig": str(controller.scratch / "kubeconfig"), "snapshot_file": str(target)}
    check, first, check_again, second = controller.play(
        {MODULE: options, "check_mode": True},
        {MODULE: options},
        {MODULE: options, "check_mode": True},
        {MODULE: options},
    )
    assert [run.get("changed") for run in (check, first, check_again, second)] == [True, True, False, False], check
    assert "size_bytes" not in check and first["size_bytes"] == target.stat().st_size
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert names(objects_of(target)) == names(
        item
        for item in json.loads(SNAPSHOT.read_text(encoding="utf-8"))["items"]
        if item["kind"] in ("Service", "EndpointSlice", "Node", "ServiceCIDR")
        and item.get("spec", {}).get("clusterIP") != "None"
        and "service.kubernetes.io/headless" not in item["metadata"].get("labels", {})
    )
    assert first["counts"]["Service"] >= 12 and first["digest"] == second["digest"] == check["digest"]
    assert "Service shop/" in first["diff"][0]["after"] and not second.get("diff")
    assert not {"path", "dest", "state"} & set(first)

    # A node's heartbeat is not a change; another port is, and the diff names that Service and nothing else.
    node = next(item for item in api.store.list("/api/v1/nodes")[0])
    node.setdefault("status", {})["conditions"] = [{"type": "Ready", "lastHeartbeatTime": "2026-09-14T09:00:00Z"}]
    api.store.put({**node, "kind": "Node", "apiVersion": "v1"})
    (heartbeat,) = controller.play({MODULE: options})
    assert not heartbeat["changed"]
    changed = next(item for item in objects_of(target) if item["kind"] == "Service" and item["spec"].get("ports"))
    changed["spec"]["ports"][0]["port"] = 4711
    api.store.put(changed)
    (third,) = controller.play({MODULE: options})
    label = f"Service {changed['metadata']['namespace']}/{changed['metadata']['name']} "
    assert third["changed"]
    assert third["diff"][0]["before"].startswith(label) and third["diff"][0]["after"].startswith(label)
    assert third["diff"][0]["after"].count("\n") == 1


def test_sources_of_the_server_address(controller, api):
    kubeconfig = str(controller.scratch / "kubeconfig")
    authority = str(api.certificates.authority)
    target = {"snapshot_file": str(controller.scratch / "cluster.json")}
    host = {**target, "host": api.url, "ca_cert": authority, "api_key": "test-token"}
    by_host, wrong_key, no_authority, wrong_context = controller.play(
        {MODULE: host},
        {MODULE: {**host, "api_key": "not-the-token"}},
        {MODULE: {**target, "host": api.url, "api_key": "test-token"}},
        {MODULE: {**target, "kubeconfig": kubeconfig, "context": "no-such-context"}},
    )
    assert by_host["changed"], by_host
    assert wrong_key["failed"] and wrong_key["error_kind"] == "api" and "401" in wrong_key["msg"], wrong_key
    assert "not-the-token" not in json.dumps(wrong_key)
    assert no_authority["failed"] and "certificate" in no_authority["msg"].lower(), no_authority
    assert wrong_context["failed"] and "no-such-context" in wrong_context["msg"], wrong_context
    for variable in ("K8S_AUTH_KUBECONFIG", "KUBECONFIG"):
        (found,) = controller.play({MODULE: target}, environment={variable: kubeconfig})
        assert not found["changed"] and not found.get("failed"), (variable, found)
    environment = {"K8S_AUTH_HOST": api.url, "K8S_AUTH_API_KEY": "test-token", "K8S_AUTH_SSL_CA_CERT": authority}
    # Options shared by all modules of an action group can be set for all of them.
    group = {"group/kubenode.proxy.kubernetes_api": {"kubeconfig": kubeconfig}}
    (found,) = controller.play({MODULE: target}, defaults=group)
    assert not found["changed"] and not found.get("failed"), found
    found, file = controller.play(
        {MODULE: target}, {MODULE: {**target, "source_file": str(SNAPSHOT)}}, environment=environment
    )
    assert not found["changed"] and not found.get("failed"), found
    assert not file.get("failed"), "an API server in the environment must not exclude a source file"
    (nowhere,) = controller.play({MODULE: target}, environment={"HOME": str(controller.scratch)})
    assert nowhere["failed"] and nowhere["msg"].startswith("no source of the cluster state: "), nowhere
    for remedy in ("KUBECONFIG", "service_proxy_kubeconfig", "service_proxy_snapshot"):
        assert remedy in nowhere["msg"] and "\n" not in nowhere["msg"], nowhere


def test_a_failing_api_server_leaves_the_file_unchanged(controller, api):
    target = controller.scratch / "cluster.json.gz"
    options = {"kubeconfig": str(controller.scratch / "kubeconfig"), "snapshot_file": str(target), "api_timeout": 5}
    (first,) = controller.play({MODULE: options})
    content = target.read_bytes()
    api.failing["/apis/discovery.k8s.io/v1/endpointslices"] = 403
    (forbidden,) = controller.play({MODULE: options})
    api.close()
    (gone,) = controller.play({MODULE: options})
    assert first["changed"]
    assert forbidden["failed"] and "endpointslices" in forbidden["msg"] and "403" in forbidden["msg"], forbidden
    assert gone["failed"] and gone["error_kind"] == "api" and api.url.split("//")[1] in gone["msg"], gone
    assert "\n" not in gone["msg"] and target.read_bytes() == content


def test_from_output_of_kubectl(controller):
    target = controller.scratch / "cluster.json.gz"
    listing = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    listing["items"].reverse()
    shuffled = controller.scratch / "shuffled.json"
    shuffled.write_text(json.dumps(listing), encoding="utf-8")
    truncated = controller.scratch / "truncated.json"
    truncated.write_text(SNAPSHOT.read_text(encoding="utf-8")[:3000], encoding="utf-8")
    first, same, cut, nowhere, both = controller.play(
        {MODULE: {"source_file": str(SNAPSHOT), "snapshot_file": str(target), "mode": "0640"}},
        {MODULE: {"source_file": str(shuffled), "snapshot_file": str(target)}},
        {MODULE: {"source_file": str(truncated), "snapshot_file": str(target)}},
        {MODULE: {"source_file": str(SNAPSHOT), "snapshot_file": "/nonexistent/cluster.json"}},
        {MODULE: {"source_file": str(SNAPSHOT), "snapshot_file": str(target), "kubeconfig": "/tmp/k"}},
    )
    assert first["changed"] and stat.S_IMODE(target.stat().st_mode) == 0o640
    assert not same["changed"] and same["digest"] == first["digest"]
    assert target.stat().st_size * 10 < SNAPSHOT.stat().st_size
    assert cut["failed"] and cut["error_kind"] == "snapshot" and "truncated" in cut["msg"]
    assert nowhere["failed"] and "/nonexistent/cluster.json: cannot be written" in nowhere["msg"]
    assert both["failed"] and "mutually exclusive" in both["msg"]


def test_pods_and_policies_are_read_on_request_only_and_pruned(controller, api):
    api.store.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": "shop", "name": "db", "labels": {"app": "db"}, "annotations": {"secret": "x"}},
            "spec": {"nodeName": "node1", "containers": [{"name": "c", "env": [{"name": "PASSWORD", "value": "x"}]}]},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.244.1.5"}]},
        }
    )
    api.store.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop", "labels": {"a": "b"}}})
    policy = {"metadata": {"namespace": "shop", "name": "deny"}, "spec": {"podSelector": {}}}
    api.store.put({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", **policy})
    target = controller.scratch / "cluster.json.gz"
    options = {"kubeconfig": str(controller.scratch / "kubeconfig"), "snapshot_file": str(target)}
    without, with_policies = controller.play({MODULE: options}, {MODULE: {**options, "network_policies": True}})
    assert not {"Pod", "Namespace", "NetworkPolicy"} & set(without["counts"])
    counts = with_policies["counts"]
    assert (counts["Pod"], counts["Namespace"], counts["NetworkPolicy"]) == (1, 1, 1)
    assert without["counts"].items() <= counts.items()
    (pod,) = [item for item in objects_of(target) if item["kind"] == "Pod"]
    assert pod["metadata"]["labels"] == {"app": "db"} and "PASSWORD" not in json.dumps(pod) and "secret" not in str(pod)
    assert not any("clusternetworkpolicies" in path for path in api.requests)
    (refused,) = controller.play(
        {MODULE: {"snapshot_file": str(target), "network_policies": True, "source_file": str(SNAPSHOT)}}
    )
    assert refused.get("failed") and "no Pod" in refused["msg"]
