# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent as a process: it converges, follows changes, repairs external changes, and survives faults."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_ip, endpoint_slice, node_object, service
from tests.lab.background import lock_holder
from tests.lab.system import run
from tests.waiting import wait_for

SETUPS = [("iptables", "nft"), ("iptables", "legacy"), ("nftables", "")]


# Slow tests of the agent itself, independent of the mode: one mode is enough for `make test`.
LONG = [*(pytest.param(setup, marks=pytest.mark.full) for setup in SETUPS[:2]), SETUPS[2]]


def name_of(setup):
    return "-".join(filter(None, setup))


@pytest.fixture(params=SETUPS, ids=name_of)
def node(request, tmp_path):
    mode, variant = request.param
    agent_node = AgentNode(tmp_path, mode, variant)
    agent_node.variant = variant
    for number in range(1, 6):
        agent_node.store.put(service(number))
        agent_node.store.put(endpoint_slice(number))
    yield agent_node
    agent_node.close()


@pytest.fixture
def one_node(tmp_path):
    agent_node = AgentNode(tmp_path, "iptables", "nft")
    agent_node.variant = "nft"
    for number in range(1, 6):
        agent_node.store.put(service(number))
        agent_node.store.put(endpoint_slice(number))
    yield agent_node
    agent_node.close()


def has(node, text):
    return lambda: text in node.kernel_text(node.variant)


def lacks(node, text):
    return lambda: text not in node.kernel_text(node.variant)


def test_converges_and_follows_each_change(node):
    node.start()
    assert node.differences()["changed"] is False
    assert cluster_ip(5) in node.kernel_text(node.variant)
    node.store.put(service(6))
    node.store.put(endpoint_slice(6, count=3))
    wait_for(has(node, endpoint_ip(6, 2)), 30.0)
    node.store.put(endpoint_slice(6, count=2))
    wait_for(lacks(node, endpoint_ip(6, 2)), 30.0)
    node.store.delete("Service", "default", "svc-6")
    wait_for(lacks(node, cluster_ip(6)), 30.0)
    assert node.differences()["changed"] is False
    before = node.kernel_text(node.variant).count(endpoint_ip(3, 0))
    assert node.stop() == 0
    assert node.kernel_text(node.variant).count(endpoint_ip(3, 0)) == before > 0


def _damage(node):
    """Yield manual changes: a description, and commands, each with the environment it needs."""
    if node.mode == "nftables":
        table = ("ip", "kube-proxy")
        yield "flushed map", [("nft", "flush", "map", *table, "service-ips")]
        yield "deleted table", [("nft", "delete", "table", *table)]
        yield "rule of another program", [("nft", "insert", "rule", *table, "services", "drop")]
        return
    program = f"iptables-{node.variant}"
    nat = (program, "-t", "nat")
    lines = node.kernel_text(node.variant).splitlines()
    chain = next(line.split()[1] for line in lines if line.startswith("-A KUBE-SEP-"))
    altered = (
        *(*nat, "-R", chain, "1", "-s", "198.51.100.9/32"),
        *("-m", "comment", "--comment", "default/svc-1:p80", "-j", "KUBE-MARK-MASQ"),
    )
    yield "deleted jump", [(*nat, "-D", "PREROUTING", "1")]
    yield "deleted rule", [(*nat, "-D", "KUBE-SERVICES", "1")]
    yield "rule of another program", [(*nat, "-I", "KUBE-SERVICES", "-d", "198.51.100.9", "-j", "RETURN")]
    yield "flushed chain", [(*nat, "-F", "KUBE-POSTROUTING")]
    yield "flushed chains of the table filter", [(program, "-F", "FORWARD"), (program, "-F", "KUBE-FORWARD")]
    yield "flushed table", [(*nat, "-F")]
    yield "altered rule of equal size", [altered]
    yield "altered rule of equal size, with another lock", [("env", f"XTABLES_LOCKFILE={node.scratch}/lock", *altered)]


def test_external_changes_are_repaired_and_counted(node):
    node.start()

    def content():
        lines = node.kernel_text(node.variant).splitlines()
        return sorted(line for line in lines if not line.startswith(("#", ":")) and "counter packets" not in line)

    def repaired():
        return node.metric("kubenode_proxy_drift_repaired_total")

    before = content()
    for what, commands in _damage(node):
        known = repaired()
        if commands[0][1] == "flush":
            names = [line.split()[1] for line in node.kernel_text("").splitlines() if line.strip().startswith("map ")]
            commands = next([(*commands[0][:-1], name)] for name in names if "goto" in _map_text(name))
        for command in commands:
            run(command)
        try:
            wait_for(lambda known=known: repaired() > known, 240.0, 0.05)
            wait_for(lambda: content() == before, 30.0, 0.05)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
    assert node.differences()["changed"] is False


def _map_text(name):
    done = subprocess.run(("nft", "list", "map", "ip", "kube-proxy", name), capture_output=True, text=True, check=True)
    return done.stdout


def test_own_changes_are_never_mistaken_for_external_ones(node):
    node.start()
    for round_number in range(8):
        node.store.put(endpoint_slice(2, count=2 + round_number % 2))
        wait_for(has(node, endpoint_ip(2, 2)) if round_number % 2 else lacks(node, endpoint_ip(2, 2)), 30.0)
    # Long enough for every watcher to poll several times.
    time.sleep(3.0)
    assert node.metric("kubenode_proxy_drift_repaired_total") == 0
    assert "repaired" not in node.log


@pytest.mark.parametrize("node", LONG, indirect=True, ids=name_of)
def test_two_hundred_changes_a_second_converge_to_the_desired_state(node):
    node.start()
    began = time.monotonic()
    for number in range(2000):
        node.store.put(endpoint_slice(1 + number % 5, count=1 + number % 4, first=number % 3))
        ahead = number / 200 - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(ahead)
    wait_for(lambda: node.differences()["changed"] is False, 60.0, 0.5)
    assert node.status()["lastError"] == ""


@pytest.mark.parametrize("node", LONG, indirect=True, ids=name_of)
def test_state_left_by_a_kill_during_a_sync_is_adopted_at_the_next_start(node):
    for number in range(10, 300):
        node.store.put(service(number))
        node.store.put(endpoint_slice(number))
    for pause in (0.9, 1.3, 1.6):
        node.start(wait=False)
        time.sleep(pause)
        node.stop(signal.SIGKILL)
    node.start()
    assert node.differences()["changed"] is False
    node.stop(signal.SIGKILL)
    node.start()
    assert "added=0 replaced=0 removed=0" in node.log


def test_starts_from_the_cached_state_while_the_api_server_is_down(one_node):
    node = one_node
    node.start()
    node.stop()
    run(["iptables-nft", "-t", "nat", "-F"])
    node.stop_api()
    node.start()
    assert "starting from the cluster state kept on disk" in node.log
    assert cluster_ip(5) in node.kernel_text("nft")
    assert node.status()["startedFromCache"] is True
    node.store.delete("Service", "default", "svc-4")
    node.start_api()
    wait_for(lacks(node, cluster_ip(4)), 40.0, 0.2)
    assert node.differences()["changed"] is False


@pytest.mark.parametrize("damage", ["truncated", "flipped", "garbage"])
def test_a_damaged_cache_is_ignored(one_node, damage):
    node = one_node
    node.start()
    node.stop()
    cache = node.scratch / "cache.gz"
    content = bytearray(cache.read_bytes())
    if damage == "truncated":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[-20] ^= 0xFF
    else:
        content = bytearray(b"\0garbage")
    cache.write_bytes(content)
    node.start()
    assert "no cluster state to start from" in node.log
    assert node.differences()["changed"] is False


def test_survives_dropped_watches_compaction_and_a_restarted_api_server(one_node):
    node = one_node
    node.start()
    assert node.api is not None
    node.api.drop_watches()
    node.store.put(service(7))
    wait_for(lambda: node.status()["families"]["IPv4"]["services"] == 6, 60.0)
    node.stop_api()
    node.store.put(service(8))
    node.store.delete("Service", "default", "svc-7")
    node.store.compact()
    node.start_api()
    socket_path = str(node.scratch / "agent.sock")

    def explained():
        """Return whether the new Service is served."""
        return "svc-8" in node.run("explain", f"{cluster_ip(8)}:80", "--control", socket_path).stdout

    wait_for(explained, 40.0, 0.3)
    wait_for(lacks(node, "svc-7"), 60.0)
    assert node.differences()["changed"] is False


def test_a_held_xtables_lock_delays_the_sync_without_failing_it(tmp_path):
    node = AgentNode(tmp_path, "iptables", "legacy")
    node.variant = "legacy"
    node.environment["XTABLES_LOCKFILE"] = str(tmp_path / "xtables.lock")
    node.store.put(service(1))
    node.store.put(endpoint_slice(1))
    try:
        node.start()
        with lock_holder(tmp_path / "xtables.lock", seconds="4") as holder:
            node.store.put(service(2))
            node.store.put(endpoint_slice(2))
            holder.process.wait(20)
        wait_for(has(node, endpoint_ip(2, 1)), 40.0, 0.2)
        assert node.differences()["changed"] is False
    finally:
        node.close()


def test_runtime_surface(one_node):
    node = one_node
    raw = service(9, type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=32009)
    raw["spec"]["ports"][0]["nodePort"] = 30009
    node.store.put(raw)
    node.store.put(endpoint_slice(9))
    node.start()
    assert node.fetch("/proxyMode") == "iptables"
    configuration = json.loads(node.fetch("/configz"))["kubeproxy.config.k8s.io"]
    assert configuration["hostnameOverride"] == "node1" and configuration["mode"] == "iptables"
    health = json.loads(node.fetch("/healthz", node.health_port))
    assert health["healthy"] is True and health["nodeEligible"] is True and "IPv4" in health["status"]
    assert json.loads(node.fetch("/livez", node.health_port))["healthy"] is True
    port = json.loads(node.fetch("/", 32009))
    assert port["localEndpoints"] == 0 and port["service"] == {"namespace": "default", "name": "svc-9"}
    metrics = node.fetch("/metrics")
    labels = '{ip_family="IPv4",traffic_policy="external"}'
    assert f"kubeproxy_sync_proxy_rules_no_local_endpoints_total{labels} 1.0" in metrics, metrics
    assert "kubenode_proxy_api_connected 1.0" in metrics
    assert 'kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1.0' in metrics
    assert "restore_failures" not in metrics
    for table in ("filter", "nat"):
        labels = f'{{ip_family="IPv4",table="{table}"}}'
        name = "kubeproxy_sync_proxy_rules_iptables_total"
        assert name in metrics, metrics
        (total,) = re.findall(rf"^{name}{re.escape(labels)} (\S+)$", metrics, re.MULTILINE)
        assert f"kubeproxy_sync_proxy_rules_iptables_last{labels} {total}" in metrics
    assert 'kubernetes_healthchecks_total{name="proxy",status="success",type="livez"}' in node.fetch("/metrics/slis")
    tainted = node_object(spec={"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]})
    node.store.put(tainted)
    wait_for(lambda: json.loads(node.fetch("/healthz", node.health_port))["nodeEligible"] is False, 30.0)
    assert node.api is not None
    assert node.api.posted[0]["reason"] == "Starting"
    node.store.delete("Service", "default", "svc-9")
    wait_for(lambda: node.fetch("/", 32009) == "", 30.0)


def test_reload_applies_a_new_configuration_and_refuses_an_invalid_one(one_node):
    node = one_node
    node.start()
    assert node.process is not None
    node.write_configuration(iptables={"masqueradeAll": True, "minSyncPeriod": "10ms", "syncPeriod": "30s"})
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "is in effect" in node.log, 30.0)
    wait_for(lambda: node.differences()["changed"] is False, 60.0, 0.3)
    assert "KUBE-MARK-MASQ" in node.kernel_text("nft")
    node.write_configuration(clusterCIDR="nonsense")
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "keeping the previous configuration" in node.log, 30.0)
    assert node.status()["healthy"] is True


def test_the_reload_command_waits_for_the_result(one_node):
    node = one_node
    node.start()
    control = ("--control", str(node.scratch / "agent.sock"))
    node.write_configuration(iptables={"masqueradeAll": True, "minSyncPeriod": "10ms", "syncPeriod": "30s"})
    done = node.run("reload", *control)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"the configuration is in effect: node node1, mode {node.mode}\n"
    assert "the configuration has changed and is in effect" in node.log
    assert node.run("reload", *control).stdout == done.stdout
    # The best mode that this kernel can run, chosen by the agent.
    node.write_configuration(mode="auto")
    done = node.run("reload", *control)
    assert (done.stdout, done.stderr) == ("the configuration is in effect: node node1, mode nftables\n", "")
    # Valid, but the agent must read the other Node first.
    node.stop_api()
    node.write_configuration(hostnameOverride="node2")
    done = node.run("reload", *control)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kubenode-proxy: the previous configuration is kept: ")
    assert node.status()["node"] == "node1"
    node.stop()
    assert node.run("reload", *control).returncode == 4


def test_reload_applies_a_changed_node_name(one_node):
    node = one_node
    other = node_object()
    other["metadata"] = {"name": "node2", "labels": {}}
    other["spec"]["taints"] = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]
    node.store.put(other)
    node.start()
    assert node.process is not None
    assert json.loads(node.fetch("/healthz", node.health_port))["nodeEligible"] is True
    node.write_configuration(hostnameOverride="node2")
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: node.status().get("node") == "node2", 30.0)
    wait_for(lambda: json.loads(node.fetch("/healthz", node.health_port))["nodeEligible"] is False, 30.0)
    other["spec"]["taints"] = []
    node.store.put(other)
    wait_for(lambda: json.loads(node.fetch("/healthz", node.health_port))["nodeEligible"] is True, 30.0)
    assert node.differences()["changed"] is False
    # Of no Node: endpoints on this node are not local, and the status says so until there is one.
    node.write_configuration(hostnameOverride="absent")
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: node.status().get("node") == "absent", 30.0)
    (caution,) = node.status()["ignored"]
    assert caution.startswith("no Node is named absent (the cluster state has none)"), caution
    assert f"caution:    {caution}" in node.run("status", "--control", str(node.scratch / "agent.sock")).stdout
    # Of a Node with other addresses, which may be that of another host.
    node.store.put({**other, "metadata": {"name": "absent"}})
    named = "Node absent has no address of this host"
    wait_for(lambda: [line.startswith(named) for line in node.status()["ignored"]] == [True], 30.0)
    addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
    node.store.put({**other, "metadata": {"name": "absent"}, "status": {"addresses": addresses}})
    wait_for(lambda: node.status()["ignored"] == [], 30.0)
    node.write_configuration(hostnameOverride="node2")
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: node.status().get("node") == "node2", 30.0)
    node.stop_api()
    node.write_configuration(hostnameOverride="node3")
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "keeping the previous configuration" in node.log, 60.0)
    assert node.status()["node"] == "node2"


def test_agent_and_one_shot_convergence_name_each_other_as_lock_holder(one_node):
    node = one_node
    node.start()
    done = node.converge("--lock-timeout", "0.2")
    assert done.returncode == 1
    assert "the agent (kubenode-proxy run)" in done.stderr


def test_memory_does_not_grow(one_node):
    node = one_node
    for number in range(10, 200):
        node.store.put(service(number))
        node.store.put(endpoint_slice(number))
    node.start()

    def churn(rounds):
        # The agent follows each round before the next one begins. Otherwise it holds more objects that have arrived and
        # are not applied yet, the slower the machine is.
        for number in range(rounds):
            for changed in range(500):
                node.store.put(endpoint_slice(10 + changed % 190, count=1 + changed % 4))
            node.store.put(endpoint_slice(1, count=1, first=number % 8))
            wait_for(has(node, f"{endpoint_ip(1, number % 8)}:8080"), 120.0, 0.1)

    churn(8)
    before = node.resident_mebibytes()
    churn(20)
    assert node.resident_mebibytes() - before < 3
