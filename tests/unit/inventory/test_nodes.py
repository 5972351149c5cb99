# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventory plugin as ansible-inventory and a playbook use it, against the tests' API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.fields import Invalid
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.node_hosts import node_host
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.conftest import ROOT
from tests.lab.manifests import node

READY = {"conditions": [{"type": "Ready", "status": "True"}]}
ADDRESSES = [
    {"type": "ExternalIP", "address": "203.0.113.2"},
    {"type": "InternalIP", "address": "192.0.2.12"},
    {"type": "InternalIP", "address": "2001:db8::12"},
    {"type": "Hostname", "address": "worker-2"},
]
WORKER = node(
    "worker-2",
    "",
    "10.1.2.0/24",
    metadata={
        "labels": {
            "node-role.kubernetes.io/worker": "",
            "topology.kubernetes.io/zone": "eu-1a",
            "topology.kubernetes.io/region": "eu",
            "example.com/proxy-mode": "ipvs",
        }
    },
    spec={
        "podCIDRs": ["10.1.2.0/24"],
        "unschedulable": True,
        "taints": [{"key": "a", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}],
    },
    status={**READY, "addresses": ADDRESSES, "nodeInfo": {"osImage": "{{ 1 + 1 }}", "architecture": "arm64"}},
)
PLAIN = node("worker-1", "192.0.2.11", "10.1.1.0/24")
CONTROL = node("cp", "192.0.2.10", "10.1.0.0/24", metadata={"labels": {"node-role.kubernetes.io/control-plane": ""}})


def unmarked(value):
    """Return the string in an object with which ansible-inventory prints one that is not a template."""
    return value.get("__ansible_unsafe", value)


class Cluster:
    """An API server with Nodes, and the commands of Ansible with a configuration of the plugin."""

    def __init__(self, directory):
        self.directory = directory
        self.store = Store()
        self.api = ApiServer(self.store, None)
        self.source = directory / "inventory" / "nodes.yml"
        self.source.parent.mkdir()
        for item in (WORKER, PLAIN, CONTROL):
            self.store.put(item)

    def run(self, program, *arguments, **options):
        """Run a command line of Ansible with options of the plugin; return status, output and errors."""
        self.source.write_text(yaml.safe_dump({"plugin": "kubenode.proxy.nodes", "host": self.api.url, **options}))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("K8S_AUTH", "KUBECONFIG"))},
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_HOME": str(self.directory / "home"),
            "ANSIBLE_NOCOLOR": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", f"ansible.cli.{program}", "-i", str(self.source.parent), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=self.directory,
        )
        return done.returncode, done.stdout, done.stderr

    def inventory(self, **options):
        status, output, errors = self.run("inventory", "--list", **options)
        assert status == 0, errors
        found = json.loads(output, object_hook=unmarked)
        variables = found.pop("_meta")["hostvars"]
        return {name: group.get("hosts", []) for name, group in found.items()}, variables


@pytest.fixture
def cluster(tmp_path):
    """Provide a cluster of three Nodes."""
    found = Cluster(tmp_path)
    yield found
    found.api.close()


def test_nodes_are_hosts_with_groups_and_variables(cluster):
    groups, variables = cluster.inventory()
    assert sorted(groups["k8s_cluster"]) == ["cp", "worker-1", "worker-2"]
    assert (groups["ready"], sorted(groups["not_ready"])) == (["worker-2"], ["cp", "worker-1"])
    assert groups["unschedulable"] == groups["role_worker"] == groups["zone_eu_1a"] == ["worker-2"]
    assert groups["role_control_plane"] == ["cp"]
    found = variables["worker-2"]
    assert found["ansible_host"] == "192.0.2.12"
    assert found["kubernetes_node_addresses"] == {
        "ExternalIP": ["203.0.113.2"],
        "Hostname": ["worker-2"],
        "InternalIP": ["192.0.2.12", "2001:db8::12"],
    }
    assert (found["kubernetes_node_zone"], found["kubernetes_node_region"]) == ("eu-1a", "eu")
    assert (found["kubernetes_node_ready"], found["kubernetes_node_schedulable"]) == (True, False)
    assert found["kubernetes_node_taints"] == [{"key": "a", "value": "", "effect": "NoSchedule"}]
    assert found["kubernetes_node_pod_cidrs"] == ["10.1.2.0/24"]


def test_selector_addresses_and_constructed_groups(cluster):
    groups, variables = cluster.inventory(
        label_selector="!node-role.kubernetes.io/control-plane",
        group="workers",
        address_types=["ExternalIP"],
        compose={"service_proxy_mode": "kubernetes_node_labels['example.com/proxy-mode'] | default('nftables')"},
        groups={"arm": "kubernetes_node_info.architecture == 'arm64'"},
        keyed_groups=[{"prefix": "cidr", "key": "kubernetes_node_pod_cidrs[0]"}],
        strict=True,
    )
    assert (sorted(groups["workers"]), groups["arm"]) == (["worker-1", "worker-2"], ["worker-2"])
    assert groups["cidr_10_1_1_0_24"] == ["worker-1"]
    assert {name: found["service_proxy_mode"] for name, found in variables.items()} == {
        "worker-1": "nftables",
        "worker-2": "ipvs",
    }
    assert variables["worker-2"]["ansible_host"] == "203.0.113.2" and "ansible_host" not in variables["worker-1"]


def test_the_cache_replaces_the_api_server_until_it_is_flushed(cluster):
    options = {"cache": True, "cache_plugin": "ansible.builtin.jsonfile", "cache_connection": str(cluster.directory)}
    first = cluster.inventory(**options)
    cluster.store.delete("Node", "", "worker-1")
    assert cluster.inventory(**options) == first
    selected, _variables = cluster.inventory(**options, label_selector="!node-role.kubernetes.io/control-plane")
    assert selected["k8s_cluster"] == ["worker-2"]
    if "--flush-cache" not in cluster.run("inventory", "--help")[1]:
        return  # ansible-inventory has the option since 2.19.
    status, output, errors = cluster.run("inventory", "--graph", "--flush-cache", **options)
    assert status == 0 and "worker-1" not in output, output + errors


def test_a_playbook_runs_on_the_nodes_and_their_values_are_no_templates(cluster):
    playbook = cluster.directory / "play.yml"
    tasks = [{"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} is {{ kubernetes_node_info.osImage }}"}}]
    playbook.write_text(yaml.safe_dump([{"hosts": "k8s_cluster:&ready", "gather_facts": False, "tasks": tasks}]))
    status, output, errors = cluster.run("playbook", "--check", str(playbook))
    assert status == 0 and "worker-2 is {{ 1 + 1 }}" in output, output + errors


def test_a_node_that_cannot_be_used_is_skipped_by_name(cluster):
    cluster.store.put(node("worker-3", "192.0.2.13", "10.1.3.0/24", spec={"unschedulable": "yes"}))
    status, output, errors = cluster.run("inventory", "--list")
    assert status == 0 and "worker-3" not in json.loads(output)["_meta"]["hostvars"]
    assert "skipped Node worker-3: spec.unschedulable" in errors.replace("\n", " ")


def test_no_node_takes_the_place_of_the_controller(cluster):
    names = ("localhost", "127.0.0.1", "127.1", "a.localhost")
    for name in names:
        cluster.store.put(node(name, "192.0.2.99", "10.1.9.0/24"))
    playbook = cluster.directory / "play.yml"
    task = {"ansible.builtin.command": {"argv": ["echo", "here"]}, "run_once": True}
    tasks = [{**task, "delegate_to": name} for name in names[:2]]
    playbook.write_text(yaml.safe_dump([{"hosts": "k8s_cluster", "gather_facts": False, "tasks": tasks}]))
    status, output, errors = cluster.run("playbook", str(playbook))
    assert status == 0 and output.count("changed: [cp -> ") == 2, output + errors
    for name in names:
        line = f"skipped Node {name}: metadata.name: {name} is a name of the controller"
        assert " ".join(errors.split()).count(line) == 1


def test_no_node_takes_the_place_of_a_host_by_its_address(cluster):
    """A kubelet reports the addresses of its Node, and the known ssh host key of one is that of the other host."""
    (cluster.source.parent / "hosts.yml").write_text(
        yaml.safe_dump({"all": {"hosts": {"db1": {"ansible_host": "192.0.2.5"}}}})
    )
    for name, *addresses in (
        ("of-node", "192.0.2.10", "192.0.2.21"),
        ("of-host", "192.0.2.5", "192.0.2.22"),
        ("mapped", "::ffff:192.0.2.10"),
        ("other", "2001:db8::12"),
    ):
        listed = [{"type": "InternalIP", "address": address} for address in addresses]
        cluster.store.put(node(name, "", "10.1.9.0/24", status={**READY, "addresses": listed}))
    for name, address in (("hexadecimal", "0xc000020a"), ("named", "WORKER-1")):
        status = {**READY, "addresses": [{"type": "Hostname", "address": address}]}
        cluster.store.put(node(name, "", "10.1.9.0/24", status=status))
    # Ansible connects to the name of a host without a usable address.
    for name in ("192.0.2.10", "192.0.2.5", "192.0.2.60"):
        cluster.store.put(node(name, "192.0.2.60", "10.1.9.0/24"))
    cluster.store.put(node("192.0.2.70", "192.0.2.70", "10.1.9.0/24"))
    # Also of a Node that is not selected.
    options = {"label_selector": "!node-role.kubernetes.io/control-plane"}
    for chosen in ({}, options):
        _groups, variables = cluster.inventory(**chosen)
        assert {name: host["ansible_host"] for name, host in variables.items() if "ansible_host" in host} == {
            "db1": "192.0.2.5",
            "of-node": "192.0.2.21",
            "of-host": "192.0.2.22",
            "worker-1": "192.0.2.11",
            "worker-2": "192.0.2.12",
            "192.0.2.70": "192.0.2.70",
        }
        assert [name for name in variables if name.startswith("192.0.2.")] == ["192.0.2.70"]
        assert ("cp" in variables) == (not chosen)
    _status, _output, errors = cluster.run("inventory", "--list")
    assert "192.0.2.10 is an address of another Node or host" in " ".join(errors.split())
    assert "skipped the address 192.0.2.10 of Node of-node: another Node or host has it, too" in " ".join(
        errors.split()
    )


def test_nodes_and_their_labels_do_not_join_what_other_sources_have(cluster):
    """Labels name groups on which other plays run, and the Node a host of theirs."""
    static = {"databases": {"hosts": {"db1": {"secret": 1}}}, "zone_eu_1a": {"hosts": {"other": {}}}, "ready": {}}
    (cluster.source.parent / "hosts.yml").write_text(yaml.safe_dump(static))
    labels = {"labels": {"pool": "databases", "topology.kubernetes.io/zone": "eu-1b"}}
    for name in ("db1", "a", "databases"):
        cluster.store.put(node(name, "192.0.2.99", "10.1.9.0/24", metadata=labels))
    options = {"keyed_groups": [{"prefix": "", "separator": "", "key": "kubernetes_node_labels.pool"}]}
    groups, variables = cluster.inventory(**options)
    assert (groups["databases"], groups["zone_eu_1a"], groups["zone_eu_1b"]) == (["db1"], ["other"], ["a"])
    assert sorted(groups["k8s_cluster"]) == ["a", "cp", "worker-1", "worker-2"] and variables["db1"] == {"secret": 1}
    _status, _output, errors = cluster.run("inventory", "--list", **options)
    text = " ".join(errors.split())
    for line in (
        "skipped Node db1: metadata.name: db1 is a host of an earlier source (see merge_hosts)",
        "skipped Node databases: metadata.name: databases is the name of a group",
        "skipped the group zone_eu_1a: it is a group of an earlier source (see merge_groups)",
        "skipped the keyed group databases: it is a group of an earlier source (see merge_groups)",
    ):
        assert text.count(line) == 1, text
    options.update(merge_hosts=True, merge_groups=["databases", "zone_eu_1a"])
    groups, variables = cluster.inventory(**options)
    assert sorted(groups["databases"]) == ["a", "db1"] and sorted(groups["zone_eu_1a"]) == ["other", "worker-2"]
    assert variables["db1"]["secret"] == 1 and variables["db1"]["kubernetes_node_name"] == "db1"


def test_labels_do_not_rearrange_the_groups_of_the_configuration(cluster):
    names = ("all", "ungrouped", "_meta", "k8s_cluster", "ready", "role_control_plane", "pools", "racks", "cp")
    for number, name in enumerate(names):
        labels = {"labels": {"pool": name, "rack": "pools"}}
        cluster.store.put(node(f"n{number}", "192.0.2.99", "10.1.9.0/24", metadata=labels))
    key = {"prefix": "", "separator": ""}
    keyed = [
        {**key, "key": "kubernetes_node_labels.pool", "parent_group": "pools"},
        {**key, "key": "kubernetes_node_labels.rack", "parent_group": "racks"},
    ]
    before, _variables = cluster.inventory()
    groups, variables = cluster.inventory(keyed_groups=keyed)
    assert {name: hosts for name, hosts in groups.items() if hosts} == {
        name: hosts for name, hosts in before.items() if hosts
    }
    assert len(variables) == 3 + len(names)


def test_two_clusters_share_the_groups_of_their_labels_but_no_host(cluster):
    (cluster.source.parent / "a.nodes.yml").write_text(
        yaml.safe_dump(
            {"plugin": "kubenode.proxy.nodes", "host": cluster.api.url, "label_selector": "!example.com/proxy-mode"}
        )
    )
    cluster.store.put(node("cp-2", "192.0.2.20", "10.2.0.0/24", metadata=CONTROL["metadata"] | {"name": "cp-2"}))
    groups, _variables = cluster.inventory(label_selector="example.com/proxy-mode", group="second")
    assert (groups["second"], groups["ready"]) == (["worker-2"], ["worker-2"])
    _status, _output, errors = cluster.run("inventory", "--list")
    assert " ".join(errors.split()).count("is a host of an earlier source (see merge_hosts)") == 3


def test_a_node_with_the_name_of_a_group_is_skipped(cluster):
    for name in ("all", "ready", "unschedulable", "arm"):
        cluster.store.put(node(name, "192.0.2.99", "10.1.9.0/24"))
    options = {"groups": {"arm": "kubernetes_node_info.architecture == 'arm64'"}}
    groups, variables = cluster.inventory(**options)
    assert sorted(groups["k8s_cluster"]) == sorted(variables) == ["cp", "worker-1", "worker-2"]
    assert groups["ready"] == groups["unschedulable"] == ["worker-2"]
    _status, _output, errors = cluster.run("inventory", "--list", **options)
    assert "skipped Node ready: metadata.name: ready is the name of a group" in errors.replace("\n", " ")


def test_a_keyed_group_with_the_name_of_a_host_is_skipped(cluster):
    # A kubelet may set such a label, on its own Node.
    labels = {"labels": {"pool": "cp", "rack": "zz"}}
    cluster.store.put(node("a", "192.0.2.99", "10.1.9.0/24", metadata=labels))
    cluster.store.put(node("zz", "192.0.2.98", "10.1.8.0/24", metadata={"labels": {"pool": "blue"}}))
    keyed = [
        {"prefix": "", "separator": "", "key": "kubernetes_node_labels.pool", "parent_group": "pools"},
        {"prefix": "rack", "key": "kubernetes_node_labels.rack", "parent_group": "zz"},
    ]
    groups, variables = cluster.inventory(keyed_groups=keyed)
    assert sorted(variables) == sorted(groups["k8s_cluster"]) == ["a", "cp", "worker-1", "worker-2", "zz"]
    assert (groups["blue"], groups["rack_zz"]) == (["zz"], ["a"]) and not {"cp", "zz"} & set(groups)
    _status, _output, errors = cluster.run("inventory", "--list", keyed_groups=keyed)
    text = " ".join(errors.split())
    assert text.count("skipped the keyed group cp: it is the name of a host") == 1
    assert text.count("skipped the keyed group zz: it is the name of a host") == 1
    assert "Found both group and host" not in text


def test_an_api_server_that_cannot_be_read_is_an_error(cluster):
    cluster.api.failing["/api/v1/nodes"] = 403
    _status, _output, errors = cluster.run("inventory", "--list")
    assert "list nodes" in errors and "403" in errors


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "127.1"])
def test_an_address_of_the_controller_is_ignored(address):
    for kind in ("Hostname", "InternalIP", "ExternalDNS"):
        raw = node("a", "", "10.0.0.0/24", status={"addresses": [{"type": kind, "address": address}]})
        assert node_host(raw).address(["Hostname", "InternalIP", "ExternalDNS"]) == ""


@pytest.mark.parametrize(
    "address", ["-oProxyCommand=touch /tmp/x", "worker 1", "worker-1;id", "{{ lookup('pipe', 'id') }}", ""]
)
def test_an_address_that_a_program_could_take_for_something_else_is_ignored(address):
    for kind in ("Hostname", "InternalIP", "ExternalDNS"):
        raw = node("a", "", "10.0.0.0/24", status={"addresses": [{"type": kind, "address": address}]})
        assert node_host(raw).address(["Hostname", "InternalIP", "ExternalDNS"]) == ""


@pytest.mark.parametrize("name", ["", "A B", "-i", "{{ x }}", None])
def test_a_node_without_a_valid_name_is_refused(name):
    with pytest.raises(Invalid):
        node_host({"metadata": {"name": name}})
