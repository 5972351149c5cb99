# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role schedule: a timer converges the node and says how it went."""

from __future__ import annotations

import json

import pytest

from .cluster import POD, Cluster, endpoint_slice, service
from .cluster import node as node_object
from .node import wait_for

TIMER = "kubenode-proxy-schedule.timer"
RUN = "kubenode-proxy-schedule.service"
METRICS = "/var/lib/prometheus/node-exporter/kubenode_proxy_schedule.prom"
TRACES = (
    *("/etc/systemd/system/kubenode-proxy-schedule.timer", "/etc/systemd/system/kubenode-proxy-schedule.service"),
    *("/usr/local/lib/kubenode-proxy", "/usr/local/bin/kubenode-proxy", "/etc/kubenode-proxy", METRICS),
    *("/var/lib/kubenode-proxy", "/etc/tmpfiles.d/kubenode-proxy.conf"),
)


@pytest.fixture(scope="module")
def node(start):
    return start("schedule")


@pytest.fixture(scope="module")
def snapshot(node):
    """A function that puts objects into the snapshot on the node."""

    def put(*items):
        objects = [node_object(node.name, "10.88.255.254"), *items]
        (node.scratch / "snapshot.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
        node.copy(node.scratch / "snapshot.json", "/srv/snapshot.json")

    put(*Cluster.first_services())
    return put


@pytest.fixture(scope="module")
def variables(snapshot):
    return {
        "schedule_snapshot": "/srv/snapshot.json",
        "schedule_interval": "1h",
        "schedule_jitter": "1s",
        "agent_configuration": {"mode": "iptables"},
    }


@pytest.fixture(scope="module")
def scheduled(node, variables):
    return node.role("schedule", variables)


def metrics(node):
    text = node.run("cat", METRICS, check=False).stdout
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {
        line.rsplit(" ", 1)[0].replace("kubenode_proxy_schedule_", ""): float(line.rsplit(" ", 1)[1]) for line in lines
    }


def run_now(node, *, check=True):
    return node.run("systemctl", "start", RUN, check=check).returncode


def test_timer_runs_the_convergence_and_metrics_tell(node, scheduled):
    assert node.unit(TIMER, "ActiveState", "UnitFileState") == {"ActiveState": "active", "UnitFileState": "enabled"}
    # The first run is a minute after boot: it may be past, or has to be waited for.
    found = wait_for("the first run", lambda: metrics(node), 90)
    assert found["success"] == 1
    assert found['changed_entries{kind="added"}'] > 10
    assert found["refused_objects"] == 0
    assert 0 < found["duration_seconds"] < 60
    assert f"--to-destination {POD}:8080" in node.output("iptables-save", "-t", "nat")


def test_second_application_changes_nothing(node, scheduled, variables):
    assert node.role("schedule", variables).changed_tasks == []


def test_runs_are_sandboxed_and_metrics_are_for_all(node, scheduled):
    assert node.unit(RUN, "User")["User"] == "kubenode-proxy"
    assert node.output("stat", "-L", "-c", "%a", METRICS).strip() == "644"
    assert (
        node.output("stat", "-c", "%a", "/var/lib/kubenode-proxy", "/var/lib/kubenode-proxy/metrics").split()
        == ["755"] * 2
    )
    lines = node.output("systemd-analyze", "security", "--no-pager", RUN).splitlines()
    overall = next(line for line in lines if "Overall exposure level" in line)
    assert float(overall.split(":")[1].split()[0]) <= 2.5


def test_nothing_to_do_then_a_change_then_a_refused_object(node, scheduled, snapshot):
    run_now(node)
    assert {key: value for key, value in metrics(node).items() if "changed" in key} == {
        'changed_entries{kind="added"}': 0,
        'changed_entries{kind="replaced"}': 0,
        'changed_entries{kind="removed"}': 0,
    }
    bad = service("bad", "10.96.0.77")
    bad["spec"]["ports"][0]["port"] = 99999
    snapshot(*Cluster.first_services(), service("api", "10.96.0.20"), endpoint_slice("api", ["10.244.1.7"]), bad)
    run_now(node)
    found = metrics(node)
    assert found['changed_entries{kind="added"}'] > 0 and found["refused_objects"] == 1 and found["success"] == 1
    assert "--to-destination 10.244.1.7:8080" in node.output("iptables-save", "-t", "nat")


def test_failed_run_is_told_and_the_dataplane_stays(node, scheduled):
    before = metrics(node)
    node.run("mv", "/srv/snapshot.json", "/srv/away")
    assert run_now(node, check=False) != 0
    found = metrics(node)
    assert found["success"] == 0 and "refused_objects" not in found
    assert found["last_success_timestamp_seconds"] == before["last_success_timestamp_seconds"]
    assert found["last_run_timestamp_seconds"] > before["last_run_timestamp_seconds"]
    assert f"--to-destination {POD}:8080" in node.output("iptables-save", "-t", "nat")
    node.run("mv", "/srv/away", "/srv/snapshot.json")


def test_absent_leaves_nothing(node, scheduled, variables):
    node.role("schedule", {**variables, "schedule_state": "absent"})
    assert node.run("ls", *TRACES, check=False).stdout == ""
    assert node.run("getent", "passwd", "kubenode-proxy", check=False).stdout == ""
    assert node.unit(TIMER, "LoadState")["LoadState"] == "not-found"
