# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role schedule: a timer converges the node and reports the result."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.molecule_support.portrait import differences
from tests.waiting import wait_for

from .agent import KubeProxy, dataplane, picture
from .cluster import POD, Cluster, endpoint_slice, service
from .cluster import node as node_object
from .controller import Repository, install_ansible
from .node import ROOT, run_playbook

TIMER = "kubenode-proxy-schedule.timer"
RUN = "kubenode-proxy-schedule.service"
PLACE_OF_METRICS = "/var/lib/prometheus/node-exporter"
DROP_INS = f"/etc/systemd/system/{TIMER}.d"
METRICS = f"{PLACE_OF_METRICS}/kubenode_proxy_schedule.prom"
BOOT = "kubenode-proxy-schedule-boot.service"
KUBELET, FOUND = "kubelet.service", "/run/found-by-kubelet"
# Records the state that a kubelet would see.
FINDING = f"""
[Service]
ExecStartPre=/bin/sh -c 'iptables-save -t nat >{FOUND}'
ExecStart=sleep infinity
[Install]
WantedBy=multi-user.target
"""
TRACES = (
    f"/etc/systemd/system/{BOOT}",
    *("/etc/systemd/system/kubenode-proxy-schedule.timer", "/etc/systemd/system/kubenode-proxy-schedule.service"),
    *("/usr/local/lib/kubenode-proxy", "/usr/local/bin/kubenode-proxy", "/etc/kubenode-proxy", METRICS),
    *("/var/lib/kubenode-proxy", "/etc/tmpfiles.d/kubenode-proxy.conf"),
)

OF_THE_DATAPLANE = re.compile("(iptables|ip6tables|nftables|rules of routing): ")


@pytest.fixture(scope="module")
def node(start):
    return start("schedule")


@pytest.fixture(scope="module")
def before(node):
    """Provide the state of the node with nothing installed; the snapshot and the drop-in belong to the tests."""
    node.write("/srv/snapshot.json", "")
    # Besides the minute after boot, which is over by then or not: a run as soon as the timer is started.
    node.write(f"{DROP_INS}/at-once.conf", "[Timer]\nOnBootSec=1s\n")
    return picture(node)


@pytest.fixture(scope="module")
def snapshot(node, before):
    """Provide a function that puts objects into the snapshot on the node."""

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
    """Return the metrics of the last run by name; none before the first one."""
    text = node.output("sh", "-c", f"[ ! -e {METRICS} ] || cat {METRICS}")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {
        line.rsplit(" ", 1)[0].replace("kubenode_proxy_schedule_", ""): float(line.rsplit(" ", 1)[1]) for line in lines
    }


def runs(node):
    return node.output("journalctl", "--unit", RUN, "--output=cat").count("Starting")


def run_now(node, *, check=True):
    return node.run("systemctl", "start", RUN, check=check).returncode


def reschedule(node, variables):
    """Apply the role with a changed unit, stop the timer, and run once, so that no unexpected run follows."""
    result = node.role("schedule", variables)
    assert "kubenode.proxy.schedule : Install the units" in result.changed_tasks
    assert node.unit(TIMER, "ActiveState") == {"ActiveState": "active"}
    node.run("systemctl", "stop", TIMER)
    # If the timer has already started a run, this one joins it.
    run_now(node)
    return result


def test_nothing_is_scheduled_beside_kube_proxy(node, before, variables):
    with KubeProxy(node):
        refused = node.role("schedule", variables, "--check", failing=True)
        assert "kube-proxy runs on this node (process " in refused.output and refused.changed == 0


def test_what_the_host_has_of_others_or_lacks_is_refused_first(node, before, variables):
    node.run("useradd", "kubenode-proxy")
    refused = node.role("schedule", variables, "--check", failing=True)
    node.run("userdel", "kubenode-proxy")
    assert "the account kubenode-proxy exists, and is not the agent's own" in refused.output
    static = {
        "kind": "Service",
        "metadata": {"name": "dns"},
        "spec": {"clusterIP": "10.0.0.300", "ports": [{"port": 53}]},
    }
    refused = node.role("schedule", {**variables, "service_proxy_static": [static]}, "--check", failing=True)
    assert 'Service static/dns: spec.clusterIP: "10.0.0.300" is not an IP address' in refused.output
    pull = {"schedule_variant": "pull", "schedule_pull_url": "https://git.example.com/network.git"}
    refused = node.role("schedule", pull, "--check", failing=True)
    assert "schedule_pull_command: /usr/bin/ansible-pull cannot be read" in refused.output


def test_second_application_changes_nothing(node, scheduled, variables):
    assert node.role("schedule", variables).changed_tasks == []
    # Other controllers would be refused for an hour.
    assert node.run("test", "-e", "/run/kubenode-run", check=False).returncode != 0


def test_timer_runs_the_convergence_and_metrics_report_it(node, scheduled):
    assert node.unit(TIMER, "ActiveState", "UnitFileState") == {"ActiveState": "active", "UnitFileState": "enabled"}
    # The role does not end before the node is served.
    assert "served by scheduled convergences every 1h and at boot; the run now: changed_entries" in scheduled.output
    assert metrics(node)["success"] == 1
    assert node.unit(BOOT, "UnitFileState", "Before")["UnitFileState"] == "enabled"
    assert "kubelet.service" in node.unit(BOOT, "Before")["Before"].split()
    assert "OnBootUSec=1min " in node.output("systemctl", "show", TIMER, "--property=TimersMonotonic")
    gauges = wait_for(lambda: metrics(node), 90, what="the first run")
    assert gauges["success"] == 1
    # A restart of the timer more than a minute after the boot starts another run at once, which adds nothing.
    assert gauges['changed_entries{kind="added"}'] > 10 or runs(node) > 1
    assert gauges["refused_objects"] == 0
    assert 0 < gauges["duration_seconds"] < 60
    assert f"--to-destination {POD}:8080" in node.output("iptables-save", "-t", "nat")


def sources(node):
    """Return the variables by which playbooks read the same cluster state as the scheduled runs."""
    return {"service_proxy_mode": "iptables", "service_proxy_snapshot": str(node.scratch / "snapshot.json")}


def report(node, directory):
    files = {f"proxy_report_{kind}": str(directory / f"report.{kind}") for kind in ("html", "json")}
    run_playbook([node], "kubenode.proxy.report", {**sources(node), **files}, {})
    (found,) = json.loads((directory / "report.json").read_text(encoding="utf-8"))["nodes"]
    return found


def test_a_node_without_an_agent_is_reported_as_fine(node, scheduled, tmp_path):
    found = report(node, tmp_path)
    assert (found["agent"], found["state"], bool(found["engine"])) == (None, "ok", True), found


def test_runs_are_sandboxed_and_metrics_are_readable_for_all(node, scheduled):
    assert node.unit(RUN, "User")["User"] == "kubenode-proxy"
    assert node.output("stat", "-L", "-c", "%a", METRICS).strip() == "644"
    # As the role service_proxy has it: only root can read the state, and renew it.
    state = "/var/lib/kubenode-proxy-boot/state.json.gz"
    node.run("install", "-d", "-m", "0711", os.path.dirname(state))
    node.run("touch", "-d", "@500000000", state)
    assert run_now(node) == 0 and metrics(node)["boot_state_timestamp_seconds"] == 500000000
    node.run("rm", "-r", os.path.dirname(state))
    assert (
        node.output("stat", "-c", "%a", "/var/lib/kubenode-proxy", "/var/lib/kubenode-proxy/schedule").split()
        == ["755"] * 2
    )
    lines = node.output("systemd-analyze", "security", "--no-pager", RUN).splitlines()
    overall = next(line for line in lines if "Overall exposure level" in line)
    assert float(overall.split(":")[1].split()[0]) <= 2.5


def test_no_change_then_a_change_then_a_refused_object(node, scheduled, snapshot):
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
    gauges = metrics(node)
    assert gauges['changed_entries{kind="added"}'] > 0 and gauges["refused_objects"] == 1 and gauges["success"] == 1
    assert "--to-destination 10.244.1.7:8080" in node.output("iptables-save", "-t", "nat")


def test_failed_run_is_reported_and_the_dataplane_is_kept(node, scheduled, tmp_path):
    before = metrics(node)
    node.run("mv", "/srv/snapshot.json", "/srv/away")
    assert run_now(node, check=False) != 0
    gauges = metrics(node)
    assert gauges["success"] == 0 and "refused_objects" not in gauges
    assert gauges["last_success_timestamp_seconds"] == before["last_success_timestamp_seconds"]
    assert gauges["last_run_timestamp_seconds"] > before["last_run_timestamp_seconds"]
    assert f"--to-destination {POD}:8080" in node.output("iptables-save", "-t", "nat")
    found = report(node, tmp_path)
    failing = "scheduled runs fail, none has succeeded since 20"
    assert (found["state"], found["schedule_failure"][: len(failing)]) == ("stale", failing), found
    verified = run_playbook([node], "kubenode.proxy.verify", sources(node), {}, failing=True)[node.name]
    assert f"{node.name} does not follow the cluster: {failing}" in verified.output, verified.output
    node.run("mv", "/srv/away", "/srv/snapshot.json")


@pytest.mark.full
def test_the_role_waits_for_a_run_that_has_just_begun(node, scheduled, variables):
    drop_in = f"/etc/systemd/system/{RUN}.d"
    node.run("mkdir", drop_in)
    node.write(f"{drop_in}/late.conf", "[Service]\nExecStartPre=/bin/sh -c 'sleep 60; echo too late; exit 3'\n")
    node.run("systemctl", "daemon-reload")
    node.run("systemctl", "start", "--no-block", RUN)
    failed = node.role("schedule", variables, failing=True)
    assert "the first run has failed, and the timer repeats it: " in failed.output, failed.output
    assert "too late" in failed.output
    node.run("rm", "-r", drop_in)
    node.run("systemctl", "daemon-reload")
    run_now(node)


def test_a_run_is_refused_while_kube_proxy_serves(node, scheduled):
    with KubeProxy(node) as kube_proxy:
        assert run_now(node, check=False) != 0
        assert "kube-proxy runs on this node (process " in node.log(RUN) and metrics(node)["success"] == 0
        assert kube_proxy.serves()
    # Systemd refuses a unit's sixth start within ten seconds, unless the unit says otherwise.
    for _ in range(6):
        run_now(node)


def test_units_of_a_run_that_was_broken_off_are_read(node, scheduled, variables):
    """Systemd still has the unit of before: one that only compares."""
    unit = f"/etc/systemd/system/{RUN}"
    node.run("sed", "-i.new", 's/"--unattended"/"--check"/', unit)
    node.run("systemctl", "daemon-reload")
    node.run("mv", f"{unit}.new", unit)
    assert "--check" in node.unit(RUN, "ExecStart")["ExecStart"]
    assert node.role("schedule", variables).changed_tasks == []
    assert "--check" not in node.unit(RUN, "ExecStart")["ExecStart"]


@pytest.mark.full
def test_check_reports_the_drift_and_changes_nothing(node, scheduled, variables):
    reschedule(node, {**variables, "schedule_check": True})
    rules = dataplane(node)
    node.run("iptables", "-t", "nat", "-F", "KUBE-SERVICES")
    assert dataplane(node) != rules
    flushed = dataplane(node)
    run_now(node)
    gauges = metrics(node)
    # A chain that exists without its rules counts as one to replace.
    assert gauges["success"] == 1 and gauges['changed_entries{kind="replaced"}'] > 0
    assert dataplane(node) == flushed
    reschedule(node, variables)
    assert dataplane(node) == rules


def test_runs_against_the_api_server(node, scheduled, variables, cluster):
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.31"]))
    given = {**variables, "schedule_snapshot": "", "agent_kubeconfig": str(cluster.kubeconfig)}
    reschedule(node, given)
    assert metrics(node)["success"] == 1
    assert "--to-destination 10.244.1.31:8080" in node.output("iptables-save", "-t", "nat")
    cluster.go_away()
    rules = dataplane(node)
    assert run_now(node, check=False) != 0
    assert metrics(node)["success"] == 0
    assert dataplane(node) == rules
    cluster.come_back()


@pytest.mark.full
def test_the_timer_fires_and_after_a_reboot_kubelet_finds_the_rules(node, scheduled, variables, snapshot):
    # As on a node whose timer the tests do not hasten.
    node.run("mv", DROP_INS, "/srv/drop-ins")
    node.role("schedule", {**variables, "schedule_interval": "2s"})
    snapshot(*Cluster.first_services(), service("late", "10.96.0.21"), endpoint_slice("late", ["10.244.1.8"]))
    wait_for(lambda: "--to-destination 10.244.1.8:8080" in node.output("iptables-save", "-t", "nat"), what="a run")
    earlier = runs(node)
    wait_for(lambda: runs(node) >= earlier + 2, what="two more runs")
    node.write(f"/etc/systemd/system/{KUBELET}", FINDING)
    node.run("systemctl", "enable", KUBELET)
    node.run("touch", "/run/before-the-reboot")
    node.reboot()
    wait_for(lambda: node.unit(KUBELET, "ActiveState")["ActiveState"] == "active", what="kubelet runs")
    assert node.run("test", "-e", "/run/before-the-reboot", check=False).returncode != 0
    assert "--to-destination 10.244.1.8:8080" in node.output("cat", FOUND)
    # The timer runs on: what has changed since is served.
    snapshot(*Cluster.first_services(), service("late", "10.96.0.21"), endpoint_slice("late", ["10.244.1.9"]))
    wait_for(lambda: "--to-destination 10.244.1.9:8080" in node.output("iptables-save", "-t", "nat"), what="a run")
    assert "10.244.1.8" not in node.output("iptables-save", "-t", "nat")
    node.run("systemctl", "disable", "--now", KUBELET)
    node.run("rm", f"/etc/systemd/system/{KUBELET}", FOUND)
    node.run("mv", "/srv/drop-ins", DROP_INS)
    node.run("systemctl", "daemon-reload")


@pytest.mark.full
def test_an_agent_takes_the_place_of_the_timer(node, scheduled, variables, cluster):
    agent = {"agent_kubeconfig": str(cluster.kubeconfig), "agent_configuration": {"mode": "iptables"}}
    node.role("agent", agent)
    assert node.unit(TIMER, "ActiveState", "UnitFileState") == {"ActiveState": "inactive", "UnitFileState": "disabled"}
    assert node.unit(BOOT, "UnitFileState") == {"UnitFileState": "disabled"}
    refused = node.role("schedule", variables, failing=True)
    assert "converge would do what the agent on this host does" in refused.output and refused.changed == 0
    node.role("agent", {**agent, "agent_state": "absent"})


def test_absent_leaves_nothing(node, before, scheduled, variables):
    # As after a boot.
    node.run("systemctl", "start", BOOT)
    # A directory of others, which no run of this role has made.
    node.run("mkdir", "/srv/infra")
    node.role("schedule", {**variables, "schedule_state": "absent", "schedule_pull_directory": "/srv/infra"})
    node.run("rmdir", "/srv/infra")
    assert node.unit(TIMER, "LoadState")["LoadState"] == "not-found"
    assert [line for line in differences(before, picture(node)) if not OF_THE_DATAPLANE.match(line)] == []
    assert node.run("test", "-e", "/var/lib/prometheus", check=False).returncode != 0


@pytest.fixture(scope="module")
def repository(node, tmp_path_factory):
    install_ansible(node)
    served = Repository(tmp_path_factory.mktemp("repository"))
    yield served
    served.close()


@pytest.fixture(scope="module")
def pulled(node, cluster, repository):
    """Provide a node that pulls the repository of the examples."""
    example = ROOT / "examples" / "pull"
    repository.push({path.name: path.read_text() for path in example.iterdir()})
    node.write("/etc/kubernetes/kubenode-proxy.conf", cluster.kubeconfig.read_text())
    # The format is that of node_exporter this time.
    node.run("mkdir", "-p", PLACE_OF_METRICS)
    return reschedule(node, pull_variables(repository))


def pull_variables(repository):
    return {
        "schedule_variant": "pull",
        "schedule_pull_url": repository.url,
        "schedule_pull_playbook": "proxy.yml",
        "schedule_pull_arguments": ["--inventory", "hosts.yml"],
        "schedule_interval": "1h",
        "schedule_jitter": "1s",
    }


@pytest.mark.full
def test_ansible_pull_converges_the_node(node, pulled, cluster):
    gauges = metrics(node)
    assert gauges["success"] == 1 and gauges["failed_tasks"] == 0
    assert "--to-destination 10.244.1.31:8080" in node.output("iptables-save", "-t", "nat")
    run_now(node)
    assert metrics(node)["changed_tasks"] == 0
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.32"]))
    run_now(node)
    assert metrics(node)["changed_tasks"] == 1
    assert "--to-destination 10.244.1.32:8080" in node.output("iptables-save", "-t", "nat")


@pytest.mark.full
def test_ansible_pull_applies_a_pushed_commit(node, pulled, repository):
    playbook = (ROOT / "examples/pull/proxy.yml").read_text()
    repository.push({"proxy.yml": playbook.replace("mode: iptables", "mode: nftables")})
    run_now(node)
    assert metrics(node)["success"] == 1
    assert "table ip kube-proxy" in node.output("nft", "list", "tables")
    assert "KUBE-SERVICES" not in node.output("iptables-save", "-t", "nat")
    repository.push({"proxy.yml": playbook.replace("mode: iptables", "mode: carrier pigeons")})
    rules = dataplane(node)
    assert run_now(node, check=False) != 0
    gauges = metrics(node)
    assert gauges["success"] == 0 and gauges["failed_tasks"] == 1
    assert dataplane(node) == rules


@pytest.mark.full
def test_ansible_pull_again_changes_nothing_and_is_removed(node, pulled, repository, before):
    variables = pull_variables(repository)
    node.run("systemctl", "start", TIMER)
    assert node.role("schedule", variables).changed_tasks == []
    node.role("schedule", {**variables, "schedule_state": "absent"})
    assert node.unit(TIMER, "LoadState")["LoadState"] == "not-found"
    assert node.run("ls", *TRACES, "/var/lib/kubenode-proxy-pull", check=False).stdout == ""
    assert node.output("find", PLACE_OF_METRICS).splitlines() == [PLACE_OF_METRICS]
