# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node that gets this version after an earlier one, and that one again: no request is lost, and states are readable.

The earlier version is a commit of this repository; a clone without its history has none, and cannot run these tests.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import pytest

from tests.lab.outage import Client
from tests.waiting import wait_for

from . import node as runs
from .agent import INSIDE, UNIT, Flows, dataplane, differs, start_of, start_pod, status, wait_for_activity
from .cluster import POD, Cluster, endpoint_slice, numbered, service
from .node import ROOT, Node, Recap, run_playbook

EARLIER = "5043b543"
ECHO = "10.96.0.20"
CACHE = "/var/lib/kubenode-proxy/agent/cluster.json.gz"
HISTORY = "/var/lib/kubenode-proxy-history"
#: The state in which nothing was programmed yet.
FIRST = 1

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[Path]:
    """Provide the directories of collections with the earlier version and with this one."""
    top = tmp_path_factory.mktemp("earlier")
    target = top / "ansible_collections/kubenode/proxy"
    target.mkdir(parents=True)
    archive = top / "archive.tar"
    subprocess.run(["git", "-C", str(ROOT), "archive", f"--output={archive}", EARLIER], check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(target)
    return [top, runs.collection()]


class Serving(NamedTuple):
    """A node and its cluster, with traffic to its Services."""

    node: Node
    cluster: Cluster
    flows: Flows
    client: Client

    def apply(self, version: Path, playbook: str, variables: Mapping[str, Any]) -> None:
        """Run a playbook of a version. Raises AssertionError if a request fails or a connection ends meanwhile."""
        began, entries = time.monotonic(), self.flows.entries()
        run(version, self.node, playbook, variables)
        self.flows.wait_for_more()
        assert self.client.outage(began) == 0.0
        assert self.flows.entries() == entries

    def starts_from(self, cache: str) -> None:
        """Restart the agent with the state that is kept on disk there, while no API server answers."""
        rules = dataplane(self.node)
        self.node.run("systemctl", "stop", UNIT)
        self.cluster.go_away()
        self.node.run("cp", "-a", cache, CACHE)
        self.node.run("systemctl", "start", UNIT)
        wait_for_activity(self.node)
        wait_for(lambda: status(self.node)["startedFromCache"], what="the state on disk is used")
        assert dataplane(self.node) == rules
        self.cluster.come_back()


def run(version: Path, node: Node, playbook: str, variables: Mapping[str, Any]) -> None:
    """Run a playbook of the collection in this directory."""
    run_on_all(version, [node], playbook, variables)


def run_on_all(
    version: Path, nodes: Sequence[Node], playbook: str, variables: Mapping[str, Any], *, failing: bool = False
) -> dict[str, Recap]:
    """Run a playbook of the collection in this directory on nodes, and return their recaps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "collection", lambda: version)
        options = ("-e", "proxy_prepare_kernel=false")
        return run_playbook(nodes, f"kubenode.proxy.{playbook}", variables, {}, *options, failing=failing)


@pytest.fixture(params=["nftables", "iptables"])
def serving(request, start, versions):
    """Provide a function that begins to serve, with the earlier version, and returns the node under traffic."""
    node = start(f"versions-{request.param}-{request.node.originalname[-6:]}")
    start_pod(node)
    node.write("/srv/flows.py", (INSIDE / "flows.py").read_text())
    cluster = Cluster(node.scratch, [node.name])
    both = ("TCP", "UDP")
    for item in (service("echo", ECHO, protocols=both), endpoint_slice("echo", [POD], both)):
        cluster.store.put(item)
    begun: list[Serving] = []

    def begin(playbook: str, variables: Callable[[str, str], Mapping[str, Any]]) -> tuple[Serving, Mapping[str, Any]]:
        chosen = variables(str(cluster.kubeconfig), request.param)
        run(versions[0], node, playbook, chosen)
        flows = Flows(node, ECHO)
        flows.wait_for_more()
        client = Client(f"/proc/{node.pid}/ns/net", "10.96.0.10", 80, b"hello\n")
        wait_for(lambda: client.answered_since(0.0), what="an answer")
        begun.append(Serving(node, cluster, flows, client))
        return begun[0], chosen

    yield begin
    for item in begun:
        item.client.close()
        item.flows.close()
    cluster.close()
    node.close()


def test_an_agent_is_upgraded_and_downgraded(serving, versions):
    def variables(kubeconfig: str, mode: str) -> Mapping[str, Any]:
        return {"agent_kubeconfig": kubeconfig, "agent_configuration": {"mode": mode}}

    member, chosen = serving("agent", variables)
    node, made, engines = member.node, [dataplane(member.node)], []
    for version in (versions[1], versions[0]):
        engines.append(status(node)["engine"])
        node.run("systemctl", "stop", UNIT)
        node.run("cp", "-a", CACHE, "/srv/cache")
        node.run("systemctl", "start", UNIT)
        process = start_of(node)
        member.apply(version, "agent", chosen)
        wait_for_activity(node)
        assert start_of(node) != process
        assert not differs(node)
        made.append(dataplane(node))
        member.starts_from("/srv/cache")
    assert engines[0] == status(node)["engine"] != engines[1]
    # Nothing that only one of the versions makes is left by the other.
    assert made[2] == made[0]


def test_a_state_that_one_version_saved_is_restored_by_the_other(serving, versions):
    def variables(kubeconfig: str, mode: str) -> Mapping[str, Any]:
        return {"service_proxy_kubeconfig": kubeconfig, "service_proxy_mode": mode}

    member, chosen = serving("converge", variables)
    node, made = member.node, {}
    for number, version in enumerate((versions[1], versions[0])):
        # At first only what the versions make differently changes, then the cluster.
        for items in ([], numbered(number)):
            for item in items:
                member.cluster.store.put(item)
            before = dataplane(node)
            member.apply(version, "converge", chosen)
            made.update(dict.fromkeys(saved_states(node) - {FIRST, *made}, (version, before)))
    for version in reversed(versions):
        # The newest that the other version has saved.
        state = max(state for state, (saved_by, _before) in made.items() if saved_by != version)
        member.apply(version, "rollback", {"rollback_to": state})
        assert dataplane(node) == made[state][1]


def saved_states(node: Node) -> set[int]:
    """Return the numbers of the states in the history."""
    return {int(name[6:12]) for name in node.output("ls", HISTORY).split() if name.startswith("state-")}


@pytest.fixture
def fleet(start, versions, tmp_path):
    """Provide a node of each version, and the variables for playbooks of both."""
    nodes = [start("fleet-earlier"), start("fleet-this")]
    cluster = Cluster(nodes[0].scratch, [node.name for node in nodes])
    given = str(cluster.kubeconfig)
    agent = {"agent_kubeconfig": given, "agent_configuration": {"mode": "nftables"}}
    for version, node in zip(versions, nodes):
        run(version, node, "agent", agent)
        wait_for_activity(node)
    yield nodes, {"service_proxy_kubeconfig": given, "service_proxy_mode": "nftables"}
    cluster.close()


def test_half_of_a_fleet_has_the_earlier_version(fleet, versions, tmp_path):
    nodes, variables = fleet
    place = tmp_path / "report.json"
    files = {"proxy_report_html": str(tmp_path / "report.html"), "proxy_report_json": str(place)}
    flow = {"explain_from": "10.244.1.9", "explain_to": "10.96.0.10:80"}
    engines = {status(node)["engine"][:12] for node in nodes}
    for version, own, other in ((versions[0], *nodes), (versions[1], *reversed(nodes))):
        # What only one of the versions makes is named.
        verified = run_on_all(version, nodes, "verify", variables, failing=True)
        assert (verified[own.name].failed, verified[other.name].failed) == (0, 1)
        assert f"{other.name} has drifted from the cluster's state" in verified[other.name].output
        reported = run_on_all(version, nodes, "report", {**variables, **files})
        document = json.loads(place.read_text())
        assert {text.rpartition("+")[2] for text in document["summary"]["engines"]} == engines
        differing = [item for item in document["exceptions"] if item["kind"] == "differs"]
        assert [item["subject"] for item in differing[0]["items"]][:1] == ["engine"]
        explained = run_on_all(version, nodes, "explain", flow)
        for recap in (verified, reported, explained):
            assert "Traceback" not in recap[other.name].output
    assert "(2 of 2): forwarded by Service default/web to 10.244.1.2:8080" in explained[own.name].output
