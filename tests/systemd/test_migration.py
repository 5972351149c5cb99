# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook migrate on nodes with systemd: with the agent, with changes to be confirmed, with lost hosts.

Each node has what a real kube-proxy had programmed in iptables mode, a process of that name while the DaemonSet
controller of the test API server has a pod for it, and an endpoint that answers. The tests build on each other: each
starts from the state that the previous one has left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

import pytest

from tests.apiserver.daemonsets import DaemonSetController, kube_proxy_daemon_set, nodes_with_label, nodes_with_pods
from tests.apiserver.store import Store
from tests.apiserver.tls import write_kubeconfig
from tests.conformance.wirelab.cases import load_case
from tests.lab import recorded
from tests.lab.node import USER
from tests.waiting import wait_for

from .agent import UNIT, dataplane, differs
from .cluster import Cluster
from .node import ROOT, Node, run_playbook

CASE = load_case(str(ROOT / "tests" / "conformance" / "cases" / "nodeport-cluster"))
LABEL = "kubenode.proxy/managed"
SERVICE = ("10.96.2.1", 80)
ENDPOINTS = ("10.244.1.11", "10.244.2.11")
SERVER = """\
import http.server
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
PENDING = "/run/kubenode-proxy-confirm"
KERNEL_FILES = "/etc/modules-load.d/kubenode-proxy.conf", "/etc/sysctl.d/99-kubenode-proxy.conf"
MARK = "/var/lib/kubenode-proxy/kube-proxy-kept-off"
HISTORY = "/var/lib/kubenode-proxy-history"
# Enough for a loaded machine; no test waits until it expires.
LONG = 900


class Fleet(Cluster):
    """The cluster of a recorded case with kube-proxy's DaemonSet, and containers as nodes."""

    def __init__(self, scratch: Path, nodes: list[Node]) -> None:
        super().__init__(scratch, [node.name for node in nodes])
        self.members = nodes
        self.store.put(kube_proxy_daemon_set())
        self.server.controllers += [DaemonSetController(), self._follow]
        for node in nodes:
            self._prepare(node)
        self.server.run_controllers()

    @staticmethod
    def first_services() -> list[dict[str, Any]]:
        """Return the case's objects with the containers as Nodes."""
        return [item for item in CASE.snapshots()[0] if item["kind"] != "Node"]

    @staticmethod
    def _prepare(node: Node) -> None:
        for address in ENDPOINTS:
            node.run("ip", "address", "add", f"{address}/32", "dev", "lo")
        # kube-proxy has set this parameter.
        node.run("sysctl", "-q", "-w", "net.ipv4.conf.all.route_localnet=1")
        recorded.load(Path(CASE.file("state-iptables.txt")), lambda words, text: node.output(*words, text=text or ""))
        node.write("/srv/server.py", SERVER)
        node.run("systemd-run", "--unit=endpoint", "python3", "/srv/server.py")
        wait_for(lambda: answers(node), what="the endpoint")

    def _follow(self, store: Store) -> None:
        """Start and stop kube-proxy's process as the kubelet does for the pods of the DaemonSet."""
        wanted = nodes_with_pods(store)
        for node in self.members:
            if node.name in wanted and not kube_proxy_runs(node):
                command = ("bash", "-c", "exec -a kube-proxy sleep infinity")
                node.run("systemd-run", "--collect", "--unit=kube-proxy", *command)
            elif node.name not in wanted and kube_proxy_runs(node):
                node.run("systemctl", "stop", "kube-proxy")

    def labelled(self) -> list[str]:
        return nodes_with_label(self.store, LABEL)

    def with_kube_proxy(self) -> list[str]:
        """Return the names of the nodes on which kube-proxy's process runs."""
        return [node.name for node in self.members if kube_proxy_runs(node)]

    def variables(self) -> dict[str, Any]:
        """Return the variables of all runs."""
        configuration = CASE.proxy_configuration("nftables", "", None)
        del configuration["hostnameOverride"]
        return {
            "ansible_user": USER,
            "service_proxy_mode": "nftables",
            "service_proxy_configuration": configuration,
            "service_proxy_kubeconfig": str(self.kubeconfig),
            "agent_kubeconfig": str(self.kubeconfig),
            "kernel_install_packages": False,
            "kernel_unchangeable": "warn",
            "migrate_probes": [{"host": SERVICE[0], "port": SERVICE[1], "timeout": 30}],
            "migrate_wait_timeout": 60,
            "service_proxy_confirm_timeout": LONG,
        }

    def migrate(self, failing: bool = False, only: Sequence[Node] = (), **more: Any) -> str:
        """Run the playbook, on ``only`` some hosts if they are given, and return its output as one line."""
        asked = ("-e", json.dumps({"proxy_serial": [1, "100%"], **more}))
        chosen = only or self.members
        recaps = run_playbook(chosen, "kubenode.proxy.migrate", self.variables(), {}, *asked, failing=failing)
        return " ".join(recaps[chosen[0].name].output.split())


def kube_proxy_runs(node: Node) -> bool:
    return node.unit("kube-proxy.service", "ActiveState")["ActiveState"] == "active"


def answers(node: Node) -> bool:
    """Return whether the Service answers on the node."""
    url = f"http://{SERVICE[0]}:{SERVICE[1]}/"
    return node.run("curl", "--silent", "--max-time", "5", "--output", "/dev/null", url, check=False).returncode == 0


def lose(node: Node, when: str) -> None:
    """Make the node unreachable for the controller once this path exists."""
    node.write("/run/lost-when", when)


def find(node: Node) -> None:
    """Make the node reachable again."""
    node.run("rm", "-f", "/run/lost-when")


def outcomes(node: Node) -> list[str]:
    """Return the outcomes of the changes that required confirmation."""
    text = node.run("cat", f"{HISTORY}/outcomes.json", check=False).stdout
    return [
        item["outcome"] for _number, item in sorted(json.loads(text or "{}").items(), key=lambda pair: int(pair[0]))
    ]


def by_the_agent(node: Node) -> bool:
    """Return whether only the agent serves the node, in nftables mode."""
    active = node.unit(UNIT, "ActiveState", "UnitFileState") == {"ActiveState": "active", "UnitFileState": "enabled"}
    return active and not differs(node) and "KUBE-SERVICES" not in node.output("iptables-save") and answers(node)


@pytest.fixture(scope="module")
def fleet(start, tmp_path_factory):
    nodes = Fleet(tmp_path_factory.mktemp("fleet"), [start(f"migrate-{letter}") for letter in "abc"])
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def before(fleet):
    """Provide the rules that kube-proxy had programmed."""
    assert fleet.with_kube_proxy() == [node.name for node in fleet.members]
    return {node.name: dataplane(node) for node in fleet.members}


def assert_untouched(fleet: Fleet, before: dict[str, list[str]], *nodes: Node) -> None:
    """Check that kube-proxy serves the nodes as it had programmed them, without any trace of the agent."""
    for node in nodes:
        assert dataplane(node) == before[node.name]
        assert kube_proxy_runs(node) and node.name not in fleet.labelled()
        assert node.unit(UNIT, "LoadState")["LoadState"] == "not-found"
        for path in (PENDING, "/var/lib/kubenode-proxy-boot", "/etc/systemd/system/kubenode-proxy-boot.service"):
            assert node.run("test", "-e", path, check=False).returncode != 0, path
        assert answers(node)


@pytest.mark.full
def test_without_access_for_the_agent_no_host_is_touched(fleet, before):
    text = fleet.migrate(agent_kubeconfig="", failing=True)
    assert "set agent_kubeconfig" in text, text
    assert fleet.server.patched == []
    assert_untouched(fleet, before, *fleet.members)


@pytest.mark.full
def test_a_change_whose_probes_fail_is_reverted_at_once(fleet, before):
    text = fleet.migrate(service_proxy_probes=["tcp://10.96.2.1:9"], service_proxy_probe_timeout=3, failing=True)
    assert "not confirmed because probes failed: tcp://10.96.2.1:9" in text, text
    assert "kube-proxy serves this host again" in text, text
    # By the playbook, or before it by the program that the failed probe starts.
    assert outcomes(fleet.members[0]) in (["rolled back"], ["reverted"])
    assert_untouched(fleet, before, *fleet.members)


@pytest.mark.full
def test_an_agent_that_never_reads_the_cluster_is_not_left_in_place_of_kube_proxy(fleet, before, tmp_path):
    wrong = write_kubeconfig(tmp_path / "kubeconfig", fleet.url, fleet.admin[0], "wrong")
    text = fleet.migrate(agent_kubeconfig=str(wrong), failing=True)
    assert "does not follow the cluster: the agent has not programmed anything yet: API server" in text, text
    assert "kube-proxy serves this host again" in text, text
    assert_untouched(fleet, before, *fleet.members)
    first = fleet.members[0]
    assert not any(first.run("test", "-e", path, check=False).returncode == 0 for path in (*KERNEL_FILES, MARK))


@pytest.mark.full
def test_a_step_of_the_revert_that_fails_keeps_no_other_from_being_undone(fleet, before, tmp_path):
    wrong = write_kubeconfig(tmp_path / "kubeconfig", fleet.url, fleet.admin[0], "wrong")
    first, lock = fleet.members[0], "/etc/gshadow.lock"
    installed = f"--path-property=PathExists=/etc/systemd/system/{UNIT}"
    # As on a full disk: from then on no user can be removed.
    first.run("systemd-run", "--unit=lock", installed, "touch", lock)
    text = fleet.migrate(agent_kubeconfig=str(wrong), failing=True)
    assert "kube-proxy serves this host again, but not everything could be undone: " in text, text
    assert "gshadow" in text, text
    assert_untouched(fleet, before, *fleet.members)
    first.run("systemctl", "stop", "lock.path")
    first.run("rm", lock)
    first.role("agent", {"agent_state": "absent", "agent_remove_dataplane": False})


@pytest.mark.full
def test_a_host_lost_before_the_change_is_confirmed_rolls_back_on_its_own(fleet, before):
    first = fleet.members[0]
    lose(first, when=PENDING)
    text = fleet.migrate(service_proxy_confirm_timeout=20, failing=True)
    find(first)
    assert "was lost in the middle: no route to host" in text, text
    assert "its label is removed, so kube-proxy returns as soon as the host works" in text, text
    assert fleet.labelled() == []
    wait_for(lambda: outcomes(first)[-1] == "reverted", 240, what="the host has gone back")
    wait_for(lambda: "is reverted: state" in first.log("kubenode-proxy-revert.service"), what="the revert has ended")
    assert_untouched(fleet, before, *fleet.members)


@pytest.mark.full
def test_a_host_lost_while_others_of_its_batch_continue_ends_the_rollout(fleet, before):
    first, second, third = fleet.members
    lose(second, when=f"/etc/systemd/system/{UNIT}")
    text = fleet.migrate(proxy_serial=[2, 1], failing=True)
    expected = (
        f"No further batch is started, since these were lost in the middle: {second.name}. kube-proxy is kept off there"
    )
    assert expected in text and f"{first.name}: done" in text, text
    assert fleet.labelled() == [first.name, second.name]
    assert by_the_agent(first) and outcomes(first)[-1] == "confirmed"
    assert second.unit(UNIT, "ActiveState")["ActiveState"] == "inactive"
    assert outcomes(second) == ["confirmed"] and answers(second)
    assert_untouched(fleet, before, third)


@pytest.mark.full
def test_a_lost_host_that_may_have_an_agent_keeps_kube_proxy_off(fleet, before):
    _first, second, third = fleet.members
    lose(second, when="/")
    text = fleet.migrate(failing=True)
    assert "no route to host" in text, text
    find(second)
    lose(second, when="/var/lib/kubenode-proxy/snapshot.json.gz")
    second.run("rm", "/var/lib/kubenode-proxy/snapshot.json.gz")
    text = fleet.migrate(proxy_serial=[2, 1], failing=True)
    find(second)
    expected = "was lost in the middle: no route to host. It has or may have an agent, so kube-proxy is kept off"
    assert expected in text, text
    assert second.name in fleet.labelled() and not kube_proxy_runs(second)
    assert_untouched(fleet, before, third)


@pytest.mark.full
def test_running_again_finishes(fleet):
    fleet.migrate(proxy_serial="100%")
    names = [node.name for node in fleet.members]
    assert fleet.labelled() == names and fleet.with_kube_proxy() == []
    for node in fleet.members:
        assert by_the_agent(node)
        assert outcomes(node)[-1] == "confirmed"
        assert node.run("test", "-e", PENDING, check=False).returncode != 0


@pytest.mark.full
def test_hosts_that_are_finished_are_only_checked(fleet):
    started = [node.unit(UNIT, "ActiveEnterTimestampMonotonic") for node in fleet.members]
    rules = [dataplane(node) for node in fleet.members]
    fleet.migrate()
    assert fleet.labelled() == [node.name for node in fleet.members] and fleet.with_kube_proxy() == []
    assert [node.unit(UNIT, "ActiveEnterTimestampMonotonic") for node in fleet.members] == started
    assert [dataplane(node) for node in fleet.members] == rules


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"service_proxy_kubeconfig": ""},
            "-migrate-a, DaemonSet kube-system/kube-proxy, label kubenode.proxy/managed)",
        ),
        (
            {"service_proxy_context": "other"},
            "the kubeconfig has no context 'other'. Run this again when it is known; or",
        ),
        (
            {"migrate_label": "other", "service_proxy_directory": "/srv/other"},
            f", label {LABEL}), and whether that is still so is unknown: the variables",
        ),
        ({"migrate_kube_proxy_name": "other"}, "DaemonSet kube-system/other does not exist"),
        (
            {"service_proxy_node_name": "other"},
            "no Node is named other. Set service_proxy_node_name if its Node has anoth",
        ),
        ({}, "kube-proxy is kept off this host, so nothing would serve it afterwards"),
    ],
    ids=str,
)
def test_a_host_is_not_cleaned_up_while_kube_proxy_may_be_kept_off(fleet, given, said):
    first = fleet.members[0]
    common = {name: value for name, value in fleet.variables().items() if not name.startswith("migrate_")}
    done = run_playbook([first], "kubenode.proxy.cleanup", {**common, **given}, {}, failing=True)[first.name]
    assert said in " ".join(done.output.split()) and done.changed == 0, done.output
    assert by_the_agent(first)


@pytest.mark.full
def test_no_agent_is_removed_if_there_is_no_kube_proxy_to_return(fleet):
    text = fleet.migrate(migrate_direction="back", migrate_kube_proxy_name="other", failing=True)
    assert 'daemonsets.apps "other" not found' in text or "other" in text, text
    for node in fleet.members:
        assert by_the_agent(node)


@pytest.mark.full
def test_hosts_with_an_agent_are_given_back(fleet, before):
    fleet.migrate(migrate_direction="back", migrate_kube_proxy_mode="iptables", proxy_serial="100%")
    assert fleet.labelled() == []
    assert_untouched(fleet, before, *fleet.members)
    # To hosts that kube-proxy serves already, the playbook does nothing.
    fleet.migrate(migrate_direction="back", migrate_kube_proxy_mode="iptables", proxy_serial="100%")
    assert_untouched(fleet, before, *fleet.members)


@pytest.mark.full
def test_scheduled_convergences_end_where_kube_proxy_returns(fleet, before):
    last, timer = fleet.members[-1], "kubenode-proxy-schedule.timer"
    common = {name: value for name, value in fleet.variables().items() if not name.startswith("migrate_")}

    def scheduled():
        fleet.migrate(only=[last], migrate_agent=False)
        last.role("schedule", {**common, "ansible_become": True})
        assert last.unit(timer, "ActiveState")["ActiveState"] == "active"

    def ended():
        assert fleet.labelled() == []
        assert last.unit(timer, "LoadState")["LoadState"] == "not-found"
        assert last.unit("kubenode-proxy-schedule-boot.service", "LoadState")["LoadState"] == "not-found"

    scheduled()
    # A later run fails, which reverts it.
    fleet.migrate(failing=True, only=[last], migrate_probes=[{"host": "192.0.2.1", "port": 9, "timeout": 1}])
    ended()
    scheduled()
    fleet.migrate(only=[last], migrate_direction="back", migrate_kube_proxy_mode="iptables")
    ended()
    assert_untouched(fleet, before, *fleet.members)


DRAIN_TASKS = f"""\
- ansible.builtin.command: kubenode-proxy drain status
  register: drained
  failed_when: drained.stdout is not search('drained')
- ansible.builtin.command: id -un
  become: false
  register: user
  failed_when: user.stdout != '{USER}'
"""


def test_a_user_with_sudo_takes_a_host_over_and_drains_it(fleet, before):
    first, *others = fleet.members
    text = fleet.migrate(only=[first])
    assert f"{first.name}: served by the agent in nftables mode, kube-proxy kept off, verified" in text, text
    assert fleet.labelled() == [first.name] and by_the_agent(first)
    # Neither of two runs at once gives back what the other has taken over.
    first.write("/run/kubenode-run", "1 elsewhere\n")
    text = fleet.migrate(failing=True, only=[first])
    first.run("rm", "/run/kubenode-run")
    assert f"{first.name}: /run/kubenode-run: another run of Ansible changes this node" in text, text
    assert fleet.labelled() == [first.name] and by_the_agent(first)
    tasks = first.scratch / "tasks.yml"
    tasks.write_text(DRAIN_TASKS, encoding="utf-8")
    options = ("-e", f"drain_tasks={tasks}", "-e", "drain_quiet=1s")
    done = run_playbook([first], "kubenode.proxy.drain", fleet.variables(), {}, *options)[first.name]
    assert f"{first.name}: back in service, served by the agent, verified" in done.output
    assert_untouched(fleet, before, *others)
