# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies on a node where a running kube-proxy serves the Services: its rules are never changed."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.command.cli import Streams, main
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge, inspect
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.restore import RollbackRequest, rollback
from tests.conformance.wirelab.cases import load_case
from tests.kernel.agent_node import ROOT, AgentNode, service
from tests.kernel.policy_node import FROM_WEB, TABLE, granted, isolated, pod, policy_node
from tests.lab import recorded
from tests.lab.system import run
from tests.waiting import wait_for

CASE = load_case(str(ROOT / "tests" / "conformance" / "cases" / "lb-local"))
ONLY = {"networkPolicy": {"enabled": True, "standalone": True}}


def of_kube_proxy() -> str:
    """Return all rules but those of the policies, as the programs of each subsystem list them."""
    tables = [line for line in run(["nft", "list", "tables"]).splitlines() if "kubenode" not in line]
    listed = [run(["nft", "-s", "list", *line.split()]) for line in tables]
    lines = "".join(listed + [run([program]) for program in ("iptables-legacy-save", "ip6tables-legacy-save")])
    return "\n".join(line for line in lines.splitlines() if not line.startswith((":", "#")))


def policies() -> str:
    done = subprocess.run(["nft", "list", "table", *TABLE.split()], capture_output=True, text=True, check=False)
    return done.stdout


@contextlib.contextmanager
def running_process(*shown_as: str) -> Iterator[None]:
    """Run a process that a process list shows as these words; the second is its duration in seconds."""
    with subprocess.Popen(shown_as, executable="/bin/sleep") as process:
        try:
            # The kernel shows the words some time after the program has been started.
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
                time.sleep(0.001)
            yield
        finally:
            process.kill()


def objects(*more: dict[str, Any]) -> list[dict[str, Any]]:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}
    peers = [pod("web", "10.244.1.7", {"app": "web"}, "node2"), pod("db", "10.244.0.5", {"app": "db"}, CASE.node)]
    return [*CASE.snapshots()[0], namespace, *peers, *more]


@pytest.mark.parametrize(("recording", "variant"), [("iptables", "nft"), ("nftables", "nft"), ("iptables", "legacy")])
def test_rules_of_kube_proxy_are_not_changed(tmp_path, recording, variant):
    recorded.load(Path(CASE.file(f"state-{recording}.txt")), run, variant)
    before = of_kube_proxy()
    assert "KUBE" in before or "kube-proxy" in before
    configuration = load({}, node_source=ONLY).configuration
    request = Request(
        ClusterState.from_objects(objects(FROM_WEB)),
        configuration,
        node_name=CASE.node,
        mode="iptables",
        state_directory=str(tmp_path / "state"),
        history_directory=str(tmp_path / "history"),
    )
    with running_process("kube-proxy", "600"):
        serving = request._replace(configuration=load({}).configuration, whole_cluster=False)
        with pytest.raises(PreflightError, match="kube-proxy runs on this node"):
            converge(serving)
        first = converge(request)
        assert (first.mode, first.families, first.changed) == ("none", (), True)
        assert {change.table for change in first.changes} <= {"network policy objects", "kernel modules"}
        assert isolated() and granted() and of_kube_proxy() == before
        assert not converge(request).changed and not inspect(request).changed
        run(["nft", "flush", "set", *TABLE.split(), "isolated-in4"])
        (drift,) = inspect(request).changes
        assert (drift.table, drift.added) == ("network policy objects", 1)
        changed = converge(request._replace(cluster=ClusterState.from_objects(objects())))
        assert changed.saved_state == 2 and not isolated() and of_kube_proxy() == before
        # Services of kube-proxy that came after the state was saved stay.
        run(["nft", "add table ip kube-proxy; add chain ip kube-proxy later; add table ip nat"])
        run(["iptables-nft", "-t", "nat", "-N", "KUBE-LATER"])
        later = of_kube_proxy()
        saved = RollbackRequest(
            history_directory=request.history_directory, state_directory=request.state_directory, stop_units=False
        )
        rollback(saved._replace(to=2))
        assert granted() and of_kube_proxy() == later
        rollback(saved._replace(to=1))
        assert not policies() and of_kube_proxy() == later
        converge(request)
        assert converge(request._replace(state="absent")).changed
        assert not policies() and of_kube_proxy() == later


def _request(directory: Path, **policies: Any) -> Request:
    node_source = {"networkPolicy": policies} if policies else None
    return Request(
        ClusterState.from_objects(objects(FROM_WEB)),
        load({}, node_source=node_source).configuration,
        node_name=CASE.node,
        state_directory=str(directory / "state"),
        history_directory=str(directory / "history"),
    )


@pytest.mark.parametrize("check", [True, False])
def test_a_state_with_services_is_not_restored_beside_a_running_kube_proxy(tmp_path, check):
    recorded.load(Path(CASE.file("state-iptables.txt")), run, "nft")
    converge(_request(tmp_path)._replace(mode="nftables"))
    before = of_kube_proxy()
    request = RollbackRequest(
        history_directory=str(tmp_path / "history"),
        state_directory=str(tmp_path / "state"),
        stop_units=False,
        check=check,
    )
    with running_process("kube-proxy", "600"):
        with pytest.raises(PreflightError, match=r"kube-proxy runs on this node \(process \d+\) and would revert"):
            rollback(request)
        command = ["rollback", "--history", request.history_directory, "--state-directory", request.state_directory]
        streams = Streams(io.StringIO(), io.StringIO())
        assert main([*command, *(["--check"] if check else [])], streams) == 1
        assert "kube-proxy runs on this node" in streams.errors.getvalue() and of_kube_proxy() == before
        report = rollback(request._replace(ignore_findings=("kube-proxy",)))
    assert report.changed and report.warnings[0].startswith("ignored: kube-proxy runs on this node")
    assert (of_kube_proxy() == before) is check


@pytest.mark.parametrize("check", [True, False])
def test_the_rules_of_a_running_kube_proxy_are_not_removed(tmp_path, check):
    recorded.load(Path(CASE.file("state-iptables.txt")), run, "nft")
    before = of_kube_proxy()
    request = _request(tmp_path)._replace(state="absent", check=check)
    with running_process("kube-proxy", "600"):
        with pytest.raises(PreflightError, match=r"kube-proxy runs on this node \(process \d+\), and the rules"):
            converge(request)
        assert of_kube_proxy() == before
        report = converge(request._replace(ignore_findings=("kube-proxy",)))
    assert report.changed and report.warnings[0].startswith("ignored: kube-proxy runs on this node")
    assert ("KUBE-SERVICES" in of_kube_proxy()) is check


def test_a_node_that_kube_proxy_serves_again_keeps_no_policies_that_nobody_updates(tmp_path):
    recorded.load(Path(CASE.file("state-iptables.txt")), run, "nft")
    before = of_kube_proxy()
    enforcing = _request(tmp_path, **ONLY["networkPolicy"])
    assert converge(enforcing).changed and isolated()
    assert not converge(enforcing._replace(state="handed_over")).changed and isolated()
    released = _request(tmp_path)._replace(state="handed_over")
    assert converge(released._replace(check=True)).changed and isolated()
    assert converge(released).changed and not policies() and of_kube_proxy() == before
    assert not converge(released).changed


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    agent_node = policy_node(tmp_path, **ONLY)
    yield agent_node
    agent_node.close()


def test_the_agent_only_enforces_policies(node):
    recorded.load(Path(CASE.file("state-nftables.txt")), run)
    before = of_kube_proxy()
    local = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 31999}
    node.store.put(service(1, **local))
    with running_process("kube-proxy", "600"):
        node.start()
        wait_for(lambda: isolated() and granted(), 30)
        node.store.put(service(2))
        node.store.put(pod("late", "10.244.0.6", {"app": "db"}))
        wait_for(lambda: "10.244.0.6" in policies(), 30)
        wait_for(lambda: node.status()["networkPolicy"]["inForce"], 30)
        status = node.status()
        assert (status["mode"], status["families"]) == ("none", {}) and status["healthy"] and not status["lastError"]
        assert "no Service" not in node.log and ":31999" not in run(["ss", "-Hltn"])
        health = json.loads(node.fetch("/healthz", node.health_port))
        assert health["healthy"] and set(health["status"]) == {"NetworkPolicy"}
        words = ("explain", "--control", str(node.scratch / "agent.sock"))
        shown = node.run(*words, "--from", "shop/web", "--to", "shop/db:80")
        assert shown.returncode == 0 and "allowed by shop/db ingress[0]" in shown.stdout
        assert node.run(*words, "default/s1").stdout.count("mode none") == 1
        assert not node.differences()["changed"]
        assert node.stop() == 0
    assert isolated() and of_kube_proxy() == before
    done = node.run("cleanup", "--config", str(node.scratch / "config.yaml"), "--state-directory", str(node.scratch))
    assert done.returncode == 0, done.stderr
    assert not policies() and of_kube_proxy() == before
