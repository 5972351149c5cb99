# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent in three modes, installed by the playbook, upgraded under traffic, and exposed to faults.

There is one node for each mode that works in a container, and with FULL one with iptables-legacy, which tests/kernel
covers without systemd. The tests build on each other. The API server of one node goes down early and comes back in the
last tests, so that its outage takes no extra time.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import pytest

from tests.molecule_support.portrait import differences
from tests.waiting import wait_for

from .agent import (
    INSIDE,
    UNIT,
    Churn,
    Flows,
    Holder,
    dataplane,
    differs,
    log_since,
    mark,
    paced,
    picture,
    resident_kibibytes,
    start_of,
    start_pod,
    status,
    wait_for_activity,
    wait_until_converged,
)
from .cluster import POD, Cluster, endpoint_slice, numbered, service
from .node import Node, later_version, run_playbook

PLAYBOOK = "kubenode.proxy.agent"
CACHE = "/var/lib/kubenode-proxy/agent/cluster.json.gz"
ECHO = "10.96.0.20"
KILLS = 4
OUTAGE_SECONDS = 65.0
CHURN_RATE, CHURN_SERVICES = 200, 100
# Python returns memory in blocks; a leak of 1 kB per change would be 10,000 kB.
STEADY_KIBIBYTES = 6000
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "nftables": {"mode": "nftables", "nftables": {"minSyncPeriod": "10ms"}},
    "iptables": {"mode": "iptables"},
    "legacy": {"mode": "iptables", "iptables": {"minSyncPeriod": "100ms"}},
}
NO_KERNEL = ("-e", "proxy_prepare_kernel=false")
# The role kernel's configuration for the next boot, which agent_state=absent does not remove.
OF_THE_KERNEL = ("/etc/modules-load.d/kubenode-proxy.conf", "/etc/sysctl.d/99-kubenode-proxy.conf")


class Member(NamedTuple):
    """A node, its cluster, and its state before anything was installed."""

    node: Node
    cluster: Cluster
    before: dict[str, Any]


def _prepare(node: Node, variant: str) -> Member:
    if variant == "legacy":
        for program in ("iptables", "ip6tables"):
            node.run("update-alternatives", "--set", program, f"/usr/sbin/{program}-legacy")
        node.run("sh", "-c", "nft flush ruleset")
    start_pod(node)
    for name in ("kill_in_sync.py", "flows.py"):
        node.write(f"/srv/{name}", (INSIDE / name).read_text())
    cluster = Cluster(node.scratch, [node.name])
    both = ("TCP", "UDP")
    for item in (service("echo", ECHO, protocols=both), endpoint_slice("echo", [POD], both)):
        cluster.store.put(item)
    return Member(node, cluster, picture(node))


@pytest.fixture(scope="module")
def members(start):
    """Provide the nodes by variant, before anything is installed."""
    variants = [variant for variant in CONFIGURATIONS if variant != "legacy" or os.environ.get("FULL")]
    by_variant = {variant: _prepare(start(variant), variant) for variant in variants}
    yield by_variant
    for member in by_variant.values():
        member.cluster.close()


def run(members, *options, failing=False):
    """Run the playbook on all nodes."""
    variables = {
        "kernel_unchangeable": "warn",
        "kernel_conntrack": {"max_per_core": 0, "min": 0},
    }
    of_hosts = {
        member.node.name: {
            "agent_kubeconfig": str(member.cluster.kubeconfig),
            "agent_configuration": CONFIGURATIONS[variant],
        }
        for variant, member in members.items()
    }
    nodes = [member.node for member in members.values()]
    return run_playbook(nodes, PLAYBOOK, variables, of_hosts, *options, failing=failing)


@pytest.fixture(scope="module")
def installed(members):
    return run(members)


@pytest.fixture(scope="module")
def outage(members, installed):
    """Stop the API server of the node in iptables mode and make many changes. Provide the time of the stop."""
    _node, cluster, _before = members["iptables"]
    cluster.go_away()
    for item in numbered(1):
        cluster.store.put(item)
    cluster.store.delete("Service", "default", "web")
    cluster.store.delete("EndpointSlice", "default", "web-1")
    cluster.store.compact()
    return time.monotonic()


def test_playbook_runs_the_agent(members, installed):
    for node, _cluster, _before in members.values():
        assert installed[node.name].failed == 0
        wait_for_activity(node)
        flows = Flows(node, ECHO)
        flows.wait_for_more()
        flows.close()
        assert not differs(node)
    assert status(members["nftables"].node)["mode"] == "nftables"
    for variant, kind in (("iptables", "nft"), ("legacy", "legacy")):
        if variant in members:
            assert kind in status(members[variant].node)["families"]["IPv4"]["iptables"]


def test_unit_is_the_same_in_every_mode(members, installed):
    units = {member.node.output("cat", f"/etc/systemd/system/{UNIT}") for member in members.values()}
    assert len(units) == 1
    for node, _cluster, _before in members.values():
        assert node.unit(UNIT, "User")["User"] == "kubenode-proxy"


# In make test, the idempotence step of Molecule's default scenario covers this.
@pytest.mark.full
def test_second_playbook_run_changes_and_restarts_nothing(members, installed):
    before = {variant: start_of(member.node) for variant, member in members.items()}
    again = run(members)
    assert {name: recap.changed_tasks for name, recap in again.items()} == {name: [] for name in again}
    assert {variant: start_of(member.node) for variant, member in members.items()} == before


def test_upgrade_keeps_the_dataplane_and_all_connections(members, installed):
    """Install a new archive: the agent becomes another process, while existing connections and flows keep working."""
    flows = {variant: Flows(member.node, ECHO) for variant, member in members.items()}
    for flow in flows.values():
        flow.wait_for_more()
    before = {
        variant: (dataplane(member.node), start_of(member.node), flows[variant].entries())
        for variant, member in members.items()
    }
    with later_version():
        recaps = run(members, *NO_KERNEL)
    for variant, (node, _cluster, _before) in members.items():
        rules, process, entries = before[variant]
        assert "kubenode.proxy.agent : Restart" in recaps[node.name].changed_tasks
        wait_for_activity(node)
        assert start_of(node) != process
        assert dataplane(node) == rules
        flows[variant].wait_for_more()
        assert flows[variant].entries() == entries
        assert len(entries) == 2
        flows[variant].close()


def test_alternatives_of_iptables_do_not_lead_the_agent_elsewhere(members, installed):
    """The agent stays in the variant with its chains when the plain names of the programs become the other one."""
    node, cluster, _before = members["iptables"]
    pairs = [(program, variant) for variant in ("legacy", "nft") for program in ("iptables", "ip6tables")]
    for address, switched in (("10.96.0.31", pairs[:2]), ("10.96.0.32", pairs[2:])):
        for program, variant in switched:
            node.run("update-alternatives", "--set", program, f"/usr/sbin/{program}-{variant}")
        cluster.store.put(service("switched", address))
        wait_for(
            lambda wanted=address: f"-d {wanted}/32" in node.output("iptables-nft-save"), what=f"rules of {address}"
        )
    assert "KUBE-" not in node.output("iptables-legacy-save")
    cluster.store.delete("Service", "default", "switched")
    wait_for(lambda: "default/switched" not in node.output("iptables-nft-save"), what="removed rules")


def test_without_the_api_server_the_node_serves_and_repairs(members, outage):
    node = members["iptables"].node
    flows = Flows(node, ECHO)
    flows.wait_for_more()
    flows.close()
    before = dataplane(node)
    node.run("iptables", "-t", "nat", "-F", "KUBE-SERVICES")
    wait_for(lambda: dataplane(node) == before, what="repaired")
    health = node.output("curl", "--silent", "--show-error", "--fail", "http://127.0.0.1:10256/healthz")
    assert '"healthy": true' in health or '"healthy":true' in health


@pytest.mark.parametrize("seconds", [15, pytest.param(60, marks=pytest.mark.full)])
def test_200_changes_a_second(members, outage, seconds):
    """The kernel converges to the desired state, and memory use does not grow after the first changes."""
    node, cluster, _before = members["nftables"]
    for number in range(CHURN_SERVICES):
        for item in numbered(number):
            cluster.store.put(item)
    wait_until_converged(node)
    process, early = start_of(node), 0
    began = time.monotonic()
    for number in range(seconds * CHURN_RATE):
        name = number * 7 % CHURN_SERVICES
        # Never the same value as the last time.
        cluster.store.put(numbered(name, first=number // CHURN_SERVICES % 3, count=1 + number % 5)[1])
        if number == 2000:
            early = resident_kibibytes(node)
        paced(CHURN_RATE, number, began)
    wait_until_converged(node)
    assert start_of(node) == process
    assert status(node)["lastError"] == ""
    growth = resident_kibibytes(node) - early
    assert growth < STEADY_KIBIBYTES, f"{early} KiB have grown by {growth} KiB"


def test_dropped_watches_resume_at_their_resource_version(members):
    node, cluster, _before = members["nftables"]
    before, asked = start_of(node), len(cluster.server.requests)
    cluster.server.drop_watches()
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.77"]))
    wait_for(lambda: "10.244.1.77" in node.output("nft", "list", "ruleset"), what="the change")
    requests = cluster.server.requests[asked:]
    slices = [path for path in requests if path.startswith("/apis/discovery.k8s.io/v1/endpointslices?")]
    # The node command lists as well, and it has not run here.
    assert slices and all("watch=" in path for path in slices), requests
    assert start_of(node) == before


def test_api_server_with_another_history(members):
    """Restart the server with a later resourceVersion and no events: 410, a list, and only differences are applied."""
    node, cluster, _before = members["nftables"]
    process = start_of(node)
    flows = Flows(node, ECHO)
    flows.wait_for_more()
    cluster.go_away()
    version = cluster.store.resource_version + 100_000
    both = ("TCP", "UDP")
    echo = [service("echo", ECHO, protocols=both), endpoint_slice("echo", [POD], both)]
    cluster.forget_history([*cluster.nodes(), *echo, *numbered(5000), *numbered(3)], version)
    cluster.come_back()
    served = [item["spec"]["clusterIP"] for item in numbered(5000) if item["kind"] == "Service"]
    wait_for(lambda: served[0] in node.output("nft", "list", "ruleset"), 120, what="what is new")
    wait_until_converged(node)
    assert "10.96.0.10" not in node.output("nft", "list", "ruleset")
    paths = [path for path in cluster.server.requests if path.startswith("/api/v1/services?")]
    assert "watch=" in paths[0] and f"resourceVersion={version}" not in paths[0], paths
    assert any("watch=" not in path for path in paths), paths
    flows.wait_for_more()
    flows.close()
    assert start_of(node) == process


@pytest.mark.full
def test_killed_during_syncs(members):
    node, cluster, _before = members["legacy"]
    for number in range(300):
        for item in numbered(number):
            cluster.store.put(item)
    wait_until_converged(node)
    flows = Flows(node, ECHO)
    flows.wait_for_more()

    def change(number):
        return [numbered(number % 300, first=number // 300 % 3, count=1 + number % 4)[1]]

    with Churn(cluster, change, rate=50):
        for _round in range(KILLS):
            wait_for_activity(node)
            process = start_of(node)
            node.run("python3", "/srv/kill_in_sync.py", process["MainPID"])
            gone = process["MainPID"]
            wait_for(lambda pid=gone: node.unit(UNIT, "MainPID")["MainPID"] not in ("0", pid), what="a new process")
    wait_for_activity(node)
    wait_until_converged(node)
    assert int(node.unit(UNIT, "NRestarts")["NRestarts"]) >= KILLS
    flows.wait_for_more()
    flows.close()


@pytest.mark.full
def test_xtables_lock_held_by_another_program(members):
    """Changes during the hold are applied after the release; none is lost, and the log reports the lock."""
    node, cluster, _before = members["legacy"]
    # The agent is not root: the lock is shared with its group.
    assert node.output("stat", "-c", "%a %U %G", "/run/xtables.lock").split() == ["660", "root", "kubenode-proxy"]
    since, process = mark(node), start_of(node)
    holder = Holder(node)
    cluster.store.put(service("late", "10.96.0.40"))
    cluster.store.put(endpoint_slice("late", ["10.244.1.40"]))
    wait_for(lambda: "xtables lock" in log_since(node, since), what="the agent complains")
    cluster.store.put(endpoint_slice("late", ["10.244.1.41", "10.244.1.42"]))
    cluster.store.delete("Service", "default", "svc-7")
    cluster.store.delete("EndpointSlice", "default", "svc-7-1")
    for item in numbered(400):
        cluster.store.put(item)
    assert "10.244.1.4" not in node.output("iptables-save", "-t", "nat")
    holder.release()
    wait_until_converged(node)
    rules = node.output("iptables-save", "-t", "nat")
    assert "10.244.1.41" in rules and "10.244.1.42" in rules
    assert "10.244.1.40:" not in rules and "default/svc-7:" not in rules
    assert start_of(node) == process


@pytest.mark.full
def test_api_server_away_for_more_than_a_minute(members, outage):
    node, cluster, _before = members["iptables"]
    process = start_of(node)
    time.sleep(max(0.0, OUTAGE_SECONDS - (time.monotonic() - outage)))
    rules = node.output("iptables-save", "-t", "nat")
    assert "default/web:" in rules and "default/svc-1:" not in rules
    cluster.come_back()
    wait_until_converged(node)
    rules = node.output("iptables-save", "-t", "nat")
    assert "default/web:" not in rules and "default/svc-1:" in rules
    assert start_of(node) == process


@pytest.mark.full
@pytest.mark.parametrize("damage", ["truncate --size=-20", "tee"])
def test_damaged_disk_cache_is_reported_and_keeps_the_dataplane(members, outage, damage):
    """Truncate or empty the cache while no API server is available."""
    node, cluster, _before = members["iptables"]
    node.run("systemctl", "stop", UNIT)
    rules = dataplane(node)
    cluster.go_away()
    node.run(*damage.split(), CACHE)
    since = mark(node)
    node.run("systemctl", "start", UNIT)
    wait_for(lambda: "no cluster state to start from" in log_since(node, since), what="the log message")
    assert CACHE in log_since(node, since)
    assert dataplane(node) == rules
    cluster.store.put(endpoint_slice("svc-1", [f"10.244.1.{90 + len(damage)}"]))
    cluster.come_back()
    wait_until_converged(node)
    assert f"10.244.1.{90 + len(damage)}:8080" in node.output("iptables-save", "-t", "nat")


@pytest.mark.full
def test_playbook_removes_the_agent(members):
    """Remove the dataplane too: nodes are as before, except for the role kernel's configuration for the next boot."""
    run(members, *NO_KERNEL, "-e", "agent_state=absent", "-e", "agent_remove_dataplane=true")
    for node, _cluster, before in members.values():
        left = [line for line in differences(before, picture(node)) if not any(path in line for path in OF_THE_KERNEL)]
        assert left == []
