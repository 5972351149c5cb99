# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook migrate.yml: nodes are taken over from kube-proxy and given back, and a failure stops the rollout.

Each node is a network and mount namespace with the rules that a real kube-proxy had programmed. Its kube-proxy is a
process of that name without a function, which runs while the DaemonSet controller of the test API server has a pod for
it. The tests build on each other: each starts from the state that the previous one has left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Iterator, Sequence

import pytest

from tests.apiserver.daemonsets import DaemonSetController, kube_proxy_daemon_set, nodes_with_label, nodes_with_pods
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.conformance.wirelab.cases import load_case
from tests.lab import manifests, recorded, system
from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.background import Background, runs_as
from tests.lab.namespaces import HIDDEN, Namespaces, ansible_environment

ROOT = Path(__file__).resolve().parents[2]
CASE = load_case(str(ROOT / "tests" / "conformance" / "cases" / "nodeport-cluster"))
STATE = Path(CASE.file("state-iptables.txt"))
LABEL = "kubenode.proxy/managed"
# A first batch and a second one; only with FULL has the second one several hosts.
NODES = ("node-a", "node-b", "node-c") if os.environ.get("FULL") else ("node-a", "node-b")
SERVICE = ("10.96.2.1", 80)
ENDPOINTS = ("10.244.1.11", "10.244.2.11")
SNAPSHOT = "/var/lib/kubenode-proxy/snapshot.json.gz"
ROLLOUT = manifests.endpoint_slice(
    "sentinel",
    [manifests.endpoint("10.244.9.9", "node-z")],
    [manifests.port(7000, name="s")],
    name="rollout",
    namespace="lab-sentinel",
)


class Node(Namespaces):
    """Namespaces in which endpoints answer, and kube-proxy's process."""

    def __init__(self, name: str, scratch: Path, state: Path = STATE) -> None:
        self.name = name
        self.processes: dict[str, Background] = {}
        super().__init__()
        self.inside = self.enter(Path("/"))
        self.interpreter = scratch / f"python-{name}"
        self.interpreter.write_text(
            f'#!/bin/sh\nexec {" ".join(self.inside)} {sys.executable} "$@"\n', encoding="ascii"
        )
        self.interpreter.chmod(0o755)
        for address in ENDPOINTS:
            self.run(["ip", "address", "add", f"{address}/32", "dev", "lo"])
        self.run(["ip", "route", "add", "default", "dev", "lo"])
        # kube-proxy has set this parameter.
        self.run(["sh", "-c", "echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet"])
        recorded.load(state, self.run, "nft")
        self._echo = scratch / f"echo-{name}.json"
        self._echo.write_text(json.dumps([{"name": name, "namespace": None, "ports": [["TCP", 8080]]}]))
        self.start_endpoint()

    def run(self, command, text=None) -> str:
        done = self.execute(command, Path("/"), text or "")
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def start_endpoint(self) -> None:
        command = [*self.inside, sys.executable, "-m", "tests.lab.echo", str(self._echo)]
        self.processes["endpoint"] = Background(command, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def start_named(self, name: str) -> None:
        """Start a process of that name which does nothing."""
        command = ["bash", "-c", f"exec -a {name} sleep 1800"]
        self.processes[name] = Background([*self.inside, *command], ready=runs_as(name))

    def stop(self, what: str) -> None:
        self.processes.pop(what).close()

    def set_kube_proxy(self, wanted: bool) -> None:
        """Start or stop kube-proxy's process as the DaemonSet controller requires."""
        if wanted and "kube-proxy" not in self.processes:
            self.start_named("kube-proxy")
        elif not wanted and "kube-proxy" in self.processes:
            self.stop("kube-proxy")

    def rules(self) -> list[str]:
        """Return the chains and rules of both families, without counters."""
        text = self.run(["iptables-nft-save"]) + self.run(["ip6tables-nft-save"])
        return [re.sub(r"\[\d+:\d+\]", "", line) for line in text.splitlines() if line[:1] in ("-", ":")]

    def files(self) -> list[str]:
        found = self.run(["find", *HIDDEN, "-type", "f", "-o", "-type", "s"]).split()
        return [path for path in found if "kubenode" in path]

    def set_agent(self, running: bool) -> None:
        """Let systemd report an agent that an earlier run has installed and that runs, or that there is none."""
        units, systemctl = "/etc/systemd/system", self.run(["sh", "-c", "command -v systemctl"]).strip()
        if running:
            self.run(["mount", "-t", "tmpfs", "node-test", units])
            self.run(["touch", f"{units}/kubenode-proxy.service"])
            self.run(["mount", "--bind", "/bin/true", systemctl])
        else:
            self.run(["umount", systemctl, units])

    def close(self) -> None:
        for what in list(self.processes):
            self.stop(what)
        super().close()


class Cluster:
    """Nodes, an API server with a DaemonSet controller, and ansible-playbook run against them."""

    def __init__(self, scratch: Path, nodes: Sequence[Node], mode: str = "iptables") -> None:
        self.scratch = scratch
        self.mode = mode
        self.nodes = {node.name: node for node in nodes}
        certificates = make_certificates(scratch / "tls")
        self.store = Store()
        for item in CASE.snapshots()[0]:
            if item["kind"] != "Node":
                self.store.put(item)
        for name in self.nodes:
            metadata = {"name": name, "labels": {}}
            addresses = [{"type": "InternalIP", "address": "172.18.0.2"}]
            self.store.put(
                {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"addresses": addresses}}
            )
        self.store.put(kube_proxy_daemon_set())
        self.api = ApiServer(self.store, certificates)
        controller = DaemonSetController()
        self.api.controllers += [controller, self._follow]
        self.api.run_controllers()
        self.kubeconfig = write_kubeconfig(scratch / "kubeconfig", self.api.url, certificates.authority, self.api.token)
        self._write_inventory()

    def _follow(self, store: Store) -> None:
        where = self.with_kube_proxy()
        for name, node in self.nodes.items():
            node.set_kube_proxy(name in where)

    def with_kube_proxy(self) -> list[str]:
        return nodes_with_pods(self.store)

    def labelled(self) -> list[str]:
        return nodes_with_label(self.store, LABEL)

    def _write_inventory(self) -> None:
        configuration = CASE.proxy_configuration(self.mode, "", None)
        del configuration["hostnameOverride"]
        variables = {
            "ansible_connection": "local",
            "ansible_become": False,
            "service_proxy_mode": self.mode,
            "service_proxy_configuration": configuration,
            # The name of the Node in the configuration wins, for all steps.
            "agent_configuration": {"hostnameOverride": "{{ inventory_hostname | upper }}"},
            "service_proxy_node_name": "node-of-nobody",
            "service_proxy_kubeconfig": str(self.kubeconfig),
            "kernel_install_packages": False,
            "kernel_unchangeable": "warn",
            "migrate_agent": False,
            "migrate_probes": [{"host": SERVICE[0], "port": SERVICE[1], "timeout": 3}],
            "migrate_wait_timeout": 20,
        }
        hosts = {name: {"ansible_python_interpreter": str(node.interpreter)} for name, node in self.nodes.items()}
        inventory = {"k8s_cluster": {"hosts": hosts, "vars": variables}}
        (self.scratch / "inventory.json").write_text(json.dumps(inventory), encoding="utf-8")

    def migrate(self, *options: str, playbook: str = "kubenode.proxy.migrate") -> tuple[int, str]:
        """Run a playbook; return its status and output."""
        environment = {
            **os.environ,
            **ansible_environment(self.scratch),
            "TMPDIR": str(self.scratch),
        }
        argv = [*ansible_playbook(), "-i", str(self.scratch / "inventory.json"), playbook, *options]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        self.api.close()
        for node in self.nodes.values():
            node.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Provide the cluster in a separate network namespace, like every kernel test."""
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    system.unshare(system.CLONE_NEWNET)
    made = None
    try:
        system.forget_host_settings()
        system.ip_batch(["link set lo up"])
        scratch = tmp_path_factory.mktemp("migration")
        made = Cluster(scratch, [Node(name, scratch) for name in NODES])
        yield made
    finally:
        if made is not None:
            made.close()
        system.enter(f"/proc/self/fd/{descriptor}", system.CLONE_NEWNET)
        os.close(descriptor)


@pytest.fixture(autouse=True)
def own_network_namespace() -> None:
    """Replace the fixture of that name: all tests here share the cluster's namespace."""


@pytest.fixture(scope="module")
def before(cluster) -> dict[str, list[str]]:
    """Provide the rules that kube-proxy had programmed."""
    return {name: node.rules() for name, node in cluster.nodes.items()}


class Rollout:
    """A rollout of an application: a pod comes as soon as a host has its snapshot, and goes before the next batch.

    The host has then converged to a state that the cluster is no longer in when it is verified.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[str] = []
        self._cluster = cluster
        self._lock = threading.Lock()
        self._ended = threading.Event()
        for node in cluster.nodes.values():
            node.run(["rm", "-f", SNAPSHOT])
        cluster.api.controllers.append(self._remove_pod)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _remove_pod(self, store: Store) -> None:
        with self._lock, contextlib.suppress(KeyError):
            store.delete("EndpointSlice", ROLLOUT["metadata"]["namespace"], ROLLOUT["metadata"]["name"])

    def _follow(self) -> None:
        while not self._ended.wait(0.05):
            for name, node in self._cluster.nodes.items():
                if name not in self.seen and not node.execute(["test", "-e", SNAPSHOT], Path("/"), "").returncode:
                    self.seen.append(name)
                    with self._lock:
                        self._cluster.store.put(ROLLOUT)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._cluster.api.controllers.remove(self._remove_pod)
        self._remove_pod(self._cluster.store)


def assert_untouched(cluster, before, *names: str) -> None:
    for name in names:
        assert cluster.nodes[name].rules() == before[name] and cluster.nodes[name].files() == []


def test_a_finding_on_one_host_is_reported_before_any_host_is_changed(cluster, before):
    cluster.nodes[NODES[-1]].start_named("kube-router")
    status, text = cluster.migrate()
    cluster.nodes[NODES[-1]].stop("kube-router")
    assert status != 0 and "kube-router runs its own service proxy on this node" in text, text
    assert cluster.api.patched == [] and cluster.with_kube_proxy() == list(NODES)
    assert_untouched(cluster, before, *NODES)


def test_kube_proxys_configuration_is_compared_adopted_on_request_and_decides_about_the_way_back(cluster, before):
    configuration = CASE.proxy_configuration("iptables", "", None)
    metadata = {"namespace": "kube-system", "name": "kube-proxy"}
    data = {"config.conf": json.dumps(configuration), "kubeconfig.conf": "kind: Config"}
    cluster.store.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    nothing = json.dumps({"service_proxy_configuration": {"conntrack": configuration["conntrack"]}})
    status, text = cluster.migrate("-e", nothing)
    assert status != 0 and "clusterCIDR: kube-proxy has 10.244.0.0/16,fd00:10:244::/48, the host none" in text, text
    assert "conntrack" not in text and cluster.api.patched == [] and cluster.with_kube_proxy() == list(NODES)
    assert_untouched(cluster, before, *NODES)
    status, text = cluster.migrate(
        "-e", nothing, "-e", "migrate_configuration=kube-proxy", "--check", "--limit", NODES[0]
    )
    assert status == 0 and "by iptables: 0 entries added, 0 replaced, 0 removed" in text, text
    assert 'service_proxy_configuration: {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48"' in text.replace("\\", ""), (
        text
    )
    back = json.dumps({"migrate_direction": "back", "service_proxy_mode": "nftables"})
    status, text = cluster.migrate("-e", nothing, "-e", back, "--check", "--limit", NODES[0])
    assert status == 0 and "by iptables: 0 entries added, 0 replaced, 0 removed" in text, text
    status, text = cluster.migrate("-e", back, "-e", "migrate_configuration=own", "--limit", NODES[0])
    assert status != 0 and "migrate_kube_proxy_mode: with migrate_configuration=own, that of kube-proxy is" in text, (
        text
    )
    assert_untouched(cluster, before, *NODES)


def test_a_kernel_parameter_that_cannot_be_changed_is_reported_before_any_host_is_changed(cluster, before):
    wanted = {"kernel_unchangeable": "fail", "kernel_sysctls": {"net.netfilter.nf_conntrack_max": 77777}}
    status, text = cluster.migrate("-e", json.dumps(wanted))
    assert status != 0 and "net.netfilter.nf_conntrack_max" in text and "kernel_unchangeable" in text, text
    assert cluster.api.patched == [] and cluster.with_kube_proxy() == list(NODES)
    assert_untouched(cluster, before, *NODES)


def test_the_preview_shows_the_rules_that_differ_on_one_host_and_changes_nothing(cluster, before):
    node = cluster.nodes["node-a"]
    saved = node.run(["iptables-nft-save", "-t", "nat"])
    node.run(["nft", "flush", "chain", "ip", "nat", "KUBE-NODEPORTS"])
    status, text = cluster.migrate("--check", "--diff")
    node.run(["iptables-nft-restore"], saved)
    assert status == 0 and "+++ after: IPv4 chains" in text, text
    assert "\n+nat: -A KUBE-NODEPORTS " in text, text
    counts = re.findall(
        r"([\w-]+): would serve 3 Services \(1 without endpoints\) with 10 endpoints of \d+ ports by iptables: "
        r"(\d+ entries added, \d+ replaced, \d+ removed)",
        text,
    )
    assert dict(counts) == dict.fromkeys(NODES, "0 entries added, 0 replaced, 0 removed") | {
        "node-a": "0 entries added, 1 replaced, 0 removed"
    }
    for name in NODES:
        assert f"{name}: would be served in iptables mode, kube-proxy kept off" in text and "as requested" not in text
    assert cluster.api.patched == [] and cluster.with_kube_proxy() == list(NODES)
    assert_untouched(cluster, before, *NODES)


def test_a_first_host_that_does_not_answer_is_rolled_back_and_stops_the_rollout(cluster, before):
    node = cluster.nodes["node-a"]
    # Something to repair, so that there is a change to roll back.
    node.run(["nft", "flush", "chain", "ip", "nat", "KUBE-NODEPORTS"])
    found = node.rules()
    node.stop("endpoint")
    status, text = cluster.migrate()
    node.start_endpoint()
    assert status != 0 and "10.96.2.1 port 80 does not answer from node-a" in text, text
    assert '(kube-proxy serves this host again)"' in text, text
    assert cluster.labelled() == [] and cluster.with_kube_proxy() == list(NODES)
    assert f"/api/v1/nodes/{NODES[0]}" in {path for path, _body in cluster.api.patched}
    assert f"/api/v1/nodes/{NODES[1]}" not in {path for path, _body in cluster.api.patched}
    assert sorted(node.rules()) == sorted(found) != sorted(before["node-a"])
    assert_untouched(cluster, before, *NODES[1:])


def test_a_revert_does_not_empty_a_host_on_which_nothing_was_programmed(cluster, before):
    """As after a reboot with kube-proxy kept off: what is programmed serves until kube-proxy has taken it over."""
    node = cluster.nodes["node-a"]
    found = [(program, node.run([f"{program}-save"])) for program in ("iptables-nft", "ip6tables-nft")]
    node.run(["nft", "flush", "ruleset"])
    node.stop("endpoint")
    try:
        status, text = cluster.migrate()
        assert status != 0 and '(kube-proxy serves this host again)"' in text, text
        assert cluster.labelled() == [] and cluster.with_kube_proxy() == list(NODES)
        assert any("10.96.2.1/32" in line for line in node.rules())
    finally:
        node.start_endpoint()
        node.run(["nft", "flush", "ruleset"])
        for program, text in found:
            node.run([f"{program}-restore"], text)


@pytest.mark.full
def test_a_host_to_which_kube_proxy_does_not_return_says_what_serves_it(cluster, before):
    cluster.nodes["node-a"].stop("endpoint")
    controller = next(item for item in cluster.api.controllers if isinstance(item, DaemonSetController))
    controller.ready = False
    try:
        status, text = cluster.migrate("-e", "migrate_wait_timeout=8")
    finally:
        controller.ready = True
        cluster.nodes["node-a"].start_endpoint()
        cluster.store.delete("Pod", "kube-system", f"kube-proxy-{NODES[0]}")
        cluster.api.run_controllers()
    assert status != 0 and "10.96.2.1 port 80 does not answer from node-a" in text, text
    assert "(kube-proxy could not be let back: " in text, text
    assert "what is programmed on the host still serves, and does not follow the cluster" in text, text
    assert cluster.labelled() == [] and cluster.with_kube_proxy() == list(NODES)


def test_all_hosts_are_taken_over_without_changes_while_the_cluster_changes(cluster, before):
    rollout = Rollout(cluster)
    try:
        status, text = cluster.migrate("-e", json.dumps({"proxy_serial": [1, "100%"]}))
    finally:
        rollout.end()
    assert status == 0, text
    assert rollout.seen == list(NODES)
    assert cluster.labelled() == list(NODES) and cluster.with_kube_proxy() == []
    for name, node in cluster.nodes.items():
        assert sorted(node.rules()) == sorted(before[name])
        assert SNAPSHOT in node.files()
        assert f"{name}: served in iptables mode, kube-proxy kept off, verified. The rules do not survive" in text


@pytest.mark.parametrize(
    ("playbook", "variables"),
    [
        ("cleanup", {}),
        ("converge", {"service_proxy_state": "absent"}),
        ("agent", {"agent_state": "absent", "agent_remove_dataplane": True}),
    ],
)
def test_nothing_is_removed_from_a_host_that_kube_proxy_is_kept_off(cluster, before, playbook, variables):
    status, text = cluster.migrate("-e", json.dumps(variables), playbook=f"kubenode.proxy.{playbook}")
    refused = re.findall(r"([\w-]+): kube-proxy is kept off this host, so nothing would serve it afterwards", text)
    assert status != 0 and set(refused) == set(NODES), text
    assert "-e migrate_direction=back" in text
    assert [sorted(node.rules()) for node in cluster.nodes.values()] == [sorted(before[name]) for name in NODES]


def test_another_label_than_that_of_the_hosts_is_refused_before_any_is_touched(cluster, before):
    status, text = cluster.migrate("-e", "migrate_label=example.com/other")
    refused = re.findall(r"([\w-]+): kept off is Node [^\n]*, but the variables say Node", text)
    assert status != 0 and set(refused) == set(NODES), text
    assert "Check that no other run changes the host" not in text and "Let kube-proxy return" not in text
    assert cluster.labelled() == list(NODES)


def test_a_wait_for_kube_proxy_says_what_it_waits_for(cluster, tmp_path):
    play = {
        "hosts": NODES[0],
        "gather_facts": False,
        "tasks": [
            {
                "kubenode.proxy.kube_proxy_placement": {
                    "nodes": [NODES[0]],
                    "state": "absent",
                    "kubeconfig": str(cluster.kubeconfig),
                    "wait_part": 0.2,
                    "wait_timeout": 8,
                },
                "delegate_to": "localhost",
            }
        ],
    }
    path = tmp_path / "wait.yml"
    path.write_text(json.dumps([play]), encoding="utf-8")
    controller = next(item for item in cluster.api.controllers if isinstance(item, DaemonSetController))
    controller.ready = False
    try:
        status, text = cluster.migrate(playbook=str(path))
    finally:
        controller.ready = True
        cluster.store.delete("Pod", "kube-system", f"kube-proxy-{NODES[0]}")
        cluster.api.run_controllers()
    words = "kube-proxy is not ready on node node-a: pod kube-proxy-node-a is Running"
    assert status != 0 and f"{NODES[0]}: waiting: {words}" in text, text
    assert f"{words} after 8 s. It is no longer kept off, so it returns as soon as the node works" in text
    assert cluster.labelled() == list(NODES[1:])
    assert cluster.migrate("--limit", NODES[0])[0] == 0


def test_a_host_that_an_earlier_run_has_finished_is_not_reverted_because_of_drift(cluster, before):
    node = cluster.nodes["node-a"]
    node.run(["nft", "flush", "chain", "ip", "nat", "KUBE-NODEPORTS"])
    found = node.rules()
    node.set_agent(running=True)
    try:
        status, text = cluster.migrate("--limit", "node-a")
    finally:
        node.set_agent(running=False)
    assert status != 0 and "node-a has drifted from the cluster's state" in text, text
    assert "the agent serves this host, so it is not reverted" in text, text
    assert cluster.labelled() == list(NODES) and cluster.with_kube_proxy() == []
    assert node.rules() == found


def test_all_hosts_are_given_back_without_a_file_of_the_collection(cluster, before):
    cluster.nodes["node-a"].run(["nft", "flush", "chain", "ip", "nat", "KUBE-SERVICES"])
    given = {
        "migrate_direction": "back",
        "proxy_serial": "100%",
        # Served until kube-proxy has returned.
        "service_proxy_static": [
            {
                "kind": "Service",
                "metadata": {"name": "dns"},
                "spec": {"clusterIP": "10.96.9.9", "ports": [{"port": 53}]},
            }
        ],
    }
    # One host at a time: both have this machine's directories below /usr, of which each removes the empty ones.
    status, text = cluster.migrate("-e", json.dumps(given), "--limit", NODES[0])
    assert status == 0 and cluster.labelled() == list(NODES[1:]), text
    # As after a run that was broken off: kube-proxy serves one of the hosts already.
    status, text = cluster.migrate("--forks", "1", "-e", json.dumps({**given, "migrate_remove_rule": True}))
    assert status == 0, text
    assert f"{NODES[0]}: served by kube-proxy again, which is ready" in text
    assert cluster.labelled() == [] and cluster.with_kube_proxy() == list(NODES)
    daemon_set = cluster.store.list("/apis/apps/v1/daemonsets")[0][0]
    assert "affinity" not in daemon_set["spec"]["template"]["spec"]
    for name, node in cluster.nodes.items():
        # kube-proxy's next sync would remove them.
        assert sorted(line for line in node.rules() if "static/dns" not in line) == sorted(before[name]), node.run(
            ["iptables-nft-save"]
        )
        assert not [path for path in node.files() if "history" not in path and not path.startswith("/run/")]
        left = node.run(["find", "/etc", "/var/lib", "-maxdepth", "1", "-name", "kubenode-proxy"])
        assert left == "", "directories of the collection"
