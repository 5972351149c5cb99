# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Static Services on a node with systemd: served at boot before kubelet starts, even if API server or agent fail."""

from __future__ import annotations

import json
import re

import pytest

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.waiting import wait_for

from .agent import UNIT, dataplane, picture, start_of, status, wait_for_activity
from .cluster import BRIDGE, TOKEN
from .node import later_version, run_playbook

ADDRESS = "10.103.97.2"
API_ADDRESS = "10.103.97.3"
KUBELET_ADDRESS = "10.103.97.4"
READY = "/etc/systemd/system/kubenode-proxy-ready.service"
SERVER = "https://192.0.2.11:6443"
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "registry"},
    "spec": {"clusterIP": ADDRESS, "ports": [{"name": "https", "port": 6443}]},
}
SLICE = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {"name": "registry-1", "labels": {"kubernetes.io/service-name": "registry"}},
    "addressType": "IPv4",
    "ports": [{"name": "https", "port": 6443}],
    "endpoints": [{"addresses": ["192.0.2.11"]}, {"addresses": ["192.0.2.12"]}],
}
# Records the state that a kubelet would see.
KUBELET = """
[Service]
ExecStartPre=/bin/sh -c 'iptables-save -t nat >/run/found-by-kubelet'
ExecStart=sleep infinity
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture(scope="module")
def node(start):
    return start("static")


@pytest.fixture(scope="module")
def before(node):
    return picture(node)


@pytest.fixture(scope="module")
def variables(cluster):
    return {
        "agent_kubeconfig": str(cluster.kubeconfig),
        "agent_configuration": {"mode": "iptables"},
        "service_proxy_static": [SERVICE, SLICE],
        "service_proxy_api_servers": ["192.0.2.21", "192.0.2.22:7443"],
        "service_proxy_api_address": API_ADDRESS,
    }


@pytest.fixture(scope="module")
def installed(node, before, variables):
    result = node.role("agent", variables)
    assert node.role("agent", variables).changed_tasks == []
    node.write("/etc/systemd/system/kubelet.service", KUBELET)
    node.run("systemctl", "enable", "kubelet.service")
    return result


def rules(node):
    return node.output("iptables-save", "-t", "nat")


def started(node, unit):
    """Return when systemd started the unit's process, in seconds since the machine's boot."""
    return int(node.unit(unit, "ExecMainStartTimestampMonotonic")["ExecMainStartTimestampMonotonic"]) / 1e6


def await_api_servers(node):
    """Wait until the API servers have been checked and both are served, as no server passes."""
    wait_for(lambda: len(status(node)["checks"]) == 2, what="the API servers are checked")
    targets = ("192.0.2.21:6443", "192.0.2.22:7443")
    wait_for(lambda: all(f"--to-destination {target}" in rules(node) for target in targets), what="both are served")
    assert f"{API_ADDRESS}/32" in rules(node)


def test_static_services_are_served_and_listed(node, installed):
    wait_for(lambda: f"{ADDRESS}/32" in rules(node), what="the static Service is served")
    file = "/etc/kubenode-proxy/services.d/ansible.json"
    assert status(node)["staticServices"] == {"static/apiserver": file, "static/registry": file}
    await_api_servers(node)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            {"service_proxy_static": [{**SERVICE, "spec": {**SERVICE["spec"], "clusterIP": "10.96.3.300"}}, SLICE]},
            'Service static/registry: spec.clusterIP: "10.96.3.300" is not an IP',
        ),
        (
            {"service_proxy_api_servers": ["192.0.2.300"]},
            "EndpointSlice static/apiserver-ipv4-6443: endpoints[0].addresses[0]: ",
        ),
    ],
)
def test_a_mistake_ends_the_run_before_anything_is_written(node, installed, variables, wrong, named):
    before = dataplane(node), node.output("sh", "-c", "md5sum /etc/kubenode-proxy/services.d/*")
    refused = node.role("agent", {**variables, **wrong}, failing=True)
    assert named in refused.output and refused.changed == 0, refused.output
    assert (dataplane(node), node.output("sh", "-c", "md5sum /etc/kubenode-proxy/services.d/*")) == before


def test_an_upgrade_keeps_static_services(node, installed, variables):
    await_api_servers(node)
    before, process = dataplane(node), start_of(node)
    files = node.output("sh", "-c", "md5sum /etc/kubenode-proxy/services.d/*")
    with later_version():
        upgraded = node.role("agent", variables)
    assert "kubenode.proxy.agent : Restart" in upgraded.changed_tasks
    wait_for_activity(node)
    assert start_of(node) != process
    await_api_servers(node)
    wait_for(lambda: dataplane(node) == before, what="the rules are as before")
    assert node.output("sh", "-c", "md5sum /etc/kubenode-proxy/services.d/*") == files


def test_static_services_are_served_at_boot_before_kubelet_starts(node, installed, cluster):
    cluster.go_away()
    # An agent that is stopped saves the cluster's state, so this comes first.
    node.run("systemctl", "stop", UNIT)
    node.run("rm", "-f", "/var/lib/kubenode-proxy/agent/cluster.json.gz")
    # A busy machine may need more than ten seconds to boot; the next test shows that limit.
    node.run("sed", "-i.good", "s/timeout 10 /timeout 300 /", READY)
    assert "timeout 300 " in node.output("cat", READY)
    node.restart()
    node.run("mv", f"{READY}.good", READY)
    node.run("systemctl", "daemon-reload")
    found = node.output("cat", "/run/found-by-kubelet")
    assert f"-d {ADDRESS}/32" in found and "--to-destination 192.0.2.12:6443" in found
    assert node.unit(UNIT, "ActiveState")["ActiveState"] == "active"
    assert status(node)["clusterKnown"] is False
    cluster.come_back()
    wait_for(lambda: "10.96.0.10/32" in rules(node), 90, what="the cluster follows")
    assert f"{ADDRESS}/32" in rules(node)


def test_a_failing_agent_delays_kubelet_by_at_most_ten_seconds(node, installed):
    node.run("sed", "-i.good", "s/^mode:.*/mode: wrong/", "/etc/kubenode-proxy/config.yaml")
    node.restart()
    wait_for(lambda: node.unit("kubelet.service", "ActiveState")["ActiveState"] == "active", what="kubelet runs")
    # How long the unit waits is the limit of its command, which ended it (status 124), however busy this machine is.
    ready = node.unit(READY.rpartition("/")[2], "ExecStart", "ExecMainStatus", "Result", "Before")
    (limit,) = re.findall(r"argv\[\]=timeout (\d+) ", ready["ExecStart"])
    assert int(limit) == 10 and (ready["ExecMainStatus"], ready["Result"]) == ("124", "success")
    assert "kubelet.service" in ready["Before"].split()
    assert started(node, "kubelet.service") - started(node, "kubenode-proxy-ready.service") >= 10.0
    # Nothing else of this collection delays kubelet.
    after = node.unit("kubelet.service", "After", "Requires", "Wants", "BindsTo")
    words = {word for names in after.values() for word in names.split() if word.startswith("kubenode")}
    assert words == {"kubenode-proxy-ready.service"}
    assert node.unit(UNIT, "ActiveState")["ActiveState"] != "active"
    assert node.unit("kubelet.service", "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    node.run("mv", "/etc/kubenode-proxy/config.yaml.good", "/etc/kubenode-proxy/config.yaml")
    wait_for(lambda: f"{ADDRESS}/32" in rules(node), 90, what="the agent has recovered")


# Asks an API server 30 times, each time on a new connection; prints the statuses of the answers.
ASK = """
import http.client, ssl, sys
found = []
context = ssl.create_default_context(cadata=sys.stdin.read())
for _number in range(30):
    connection = http.client.HTTPSConnection(sys.argv[1], 6443, timeout=10, context=context)
    connection.request("GET", "/readyz")
    found.append(connection.getresponse().status)
    connection.close()
print(*found)
"""


@pytest.fixture(scope="module")
def behind_the_address(node):
    """Provide three API servers whose certificate contains the address."""
    certificates = make_certificates(node.scratch / "behind", (BRIDGE, KUBELET_ADDRESS))
    servers = [ApiServer(Store(), certificates, TOKEN, ("0.0.0.0", 0)) for _number in range(3)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def kubelet(node, behind_the_address, variables):
    """Variables with which kubelet uses the address of that server."""
    path = "/etc/kubernetes/kubelet.conf"
    kubeconfig = node.scratch / "kubelet.conf"
    write_kubeconfig(kubeconfig, SERVER, node.scratch / "behind" / "ca.crt", TOKEN)
    node.write(path, kubeconfig.read_text())
    return {
        **variables,
        "service_proxy_api_servers": [f"{BRIDGE}:{port_of(server)}" for server in behind_the_address],
        "service_proxy_api_address": KUBELET_ADDRESS,
        "service_proxy_api_check": {"": "tcp", "path": "", "status": "", "ca": ""},
        "service_proxy_kubelet_kubeconfig": path,
        "service_proxy_kubelet_restart": True,
    }


WRITTEN_NOW = """
import json, time
path = "/var/lib/kubenode-proxy/kubelet.json"
record = json.load(open(path))
record["pointed"] = f"{record['pointed'].split()[0]} {time.monotonic():.6f}"
json.dump(record, open(path, "w"))
"""


def port_of(server):
    return server.url.rpartition(":")[2]


def kubelet_server(node):
    return json.loads(node.output("cat", "/etc/kubernetes/kubelet.conf"))["clusters"][0]["cluster"]["server"]


@pytest.mark.full
def test_kubelet_is_not_pointed_to_an_address_that_a_certificate_lacks(node, installed, kubelet):
    result = node.role("agent", {**kubelet, "service_proxy_api_address": API_ADDRESS}, failing=True)
    assert f"its certificate lacks the name {API_ADDRESS}; it has localhost, {BRIDGE}" in result.output
    assert kubelet_server(node) == SERVER


def test_kubelet_is_pointed_to_the_address_and_restarted(node, installed, kubelet):
    checked = node.role("agent", kubelet, "--check")
    assert kubelet_server(node) == SERVER and checked.changed
    started_before = started(node, "kubelet.service")
    node.role("agent", kubelet)
    assert kubelet_server(node) == f"https://{KUBELET_ADDRESS}:6443"
    assert started(node, "kubelet.service") > started_before
    # As after a run that failed before it restarted kubelet.
    node.run("python3", "-c", WRITTEN_NOW)
    again = started(node, "kubelet.service")
    node.role("agent", kubelet)
    assert started(node, "kubelet.service") > again


@pytest.mark.full
def test_a_rollback_leaves_kubelet_no_address_that_is_not_served(node, kubelet):
    node.run("kubenode-proxy", "rollback", "--save-before", "nftables")
    said = f"kubelet uses https://{KUBELET_ADDRESS}:6443, which would not be served any more: "
    refused = node.run("kubenode-proxy", "rollback", check=False)
    assert refused.returncode == 1 and said in refused.stderr, refused
    assert said in node.run("kubenode-proxy", "rollback", "--check", check=False).stderr
    assert node.unit(UNIT, "ActiveState")["ActiveState"] == "active"
    node.run("systemctl", "stop", UNIT)
    refused = node.run("kubenode-proxy", "cleanup", check=False)
    assert refused.returncode == 1 and said in refused.stderr, refused
    node.run("systemctl", "start", UNIT)
    given = {name: value for name, value in kubelet.items() if name.startswith("service_proxy_")}
    done = run_playbook([node], "kubenode.proxy.rollback", given, {})[node.name]
    assert "is stopped, which would undo the rollback" in done.output, done.output
    assert kubelet_server(node) == SERVER
    node.role("agent", kubelet)
    node.run("systemctl", "start", UNIT)
    assert kubelet_server(node) == f"https://{KUBELET_ADDRESS}:6443"


@pytest.mark.full
def test_removing_the_agent_restores_the_kubeconfig_of_kubelet(node, kubelet):
    node.role("agent", {**kubelet, "agent_state": "absent"})
    assert kubelet_server(node) == SERVER
    assert node.output("ls", "/etc/kubernetes").split() == ["kubelet.conf"]
    node.role("agent", kubelet)
    assert kubelet_server(node) == f"https://{KUBELET_ADDRESS}:6443"


def in_static_services(node, address):
    return address in node.output("cat", "/etc/kubenode-proxy/services.d/ansible.json")


def test_an_address_that_kubelet_uses_stays_if_a_certificate_lacks_the_new_one(node, kubelet):
    result = node.role("agent", {**kubelet, "service_proxy_api_address": API_ADDRESS}, failing=True)
    assert f"its certificate lacks the name {API_ADDRESS}; it has localhost, {BRIDGE}" in result.output
    assert kubelet_server(node) == f"https://{KUBELET_ADDRESS}:6443"
    assert in_static_services(node, KUBELET_ADDRESS) and not in_static_services(node, API_ADDRESS)
    assert f"{KUBELET_ADDRESS}/32" in rules(node)


def test_removing_a_schedule_keeps_the_record_that_restores_kubelet(node, kubelet):
    record = "/var/lib/kubenode-proxy/kubelet.json"
    unit, away = "/etc/systemd/system/kubenode-proxy.service", "/srv/kubenode-proxy.service"
    kept = node.output("cat", record)
    # As on a node that the role service_proxy serves, without an agent.
    node.run("systemctl", "stop", UNIT)
    node.run("mv", unit, away)
    node.role("schedule", {**kubelet, "schedule_state": "absent"})
    assert node.output("cat", record) == kept
    assert in_static_services(node, KUBELET_ADDRESS)
    assert node.run("test", "-e", "/usr/local/bin/kubenode-proxy", check=False).returncode != 0
    found = node.output("find", "/var/lib/kubenode-proxy", "/run/kubenode-proxy", "-not", "-group", "root")
    assert found == ""
    node.run("mv", away, unit)
    node.role("agent", kubelet)
    assert kubelet_server(node) == f"https://{KUBELET_ADDRESS}:6443"


def test_a_node_boots_with_its_address_of_the_api_servers_while_one_of_three_is_dead(node, kubelet, behind_the_address):
    dead, *others = (f"--to-destination {BRIDGE}:{port_of(server)}" for server in behind_the_address)
    behind_the_address[0].close()
    node.restart()
    wait_for(lambda: node.unit("kubelet.service", "ActiveState")["ActiveState"] == "active", what="kubelet runs")
    wait_for(
        lambda: dead not in rules(node) and all(other in rules(node) for other in others),
        what="only the others are used",
    )
    checked = {item["endpoint"]: item["passing"] for item in status(node)["checks"]}
    assert sorted(checked.values()) == [False, True, True]
    authority = (node.scratch / "behind" / "ca.crt").read_text()
    answers = node.output("python3", "-c", ASK, KUBELET_ADDRESS, text=authority).split()
    assert len(answers) == 30 and len(set(answers)) == 1, answers


def test_an_address_is_not_removed_before_kubelet_was_restarted(node, kubelet):
    without = {**kubelet, "service_proxy_api_servers": [], "service_proxy_kubelet_restart": False}
    result = node.role("agent", without, failing=True)
    assert f"kubelet uses https://{KUBELET_ADDRESS}:6443 until it is restarted" in result.output
    assert kubelet_server(node) == SERVER
    assert in_static_services(node, KUBELET_ADDRESS) and f"{KUBELET_ADDRESS}/32" in rules(node)
    node.run("systemctl", "restart", "kubelet.service")


def test_without_the_variable_static_services_are_removed_and_other_files_are_kept(node, installed, variables):
    node.write("/etc/kubenode-proxy/services.d/own.yaml", "")
    node.role("agent", {**variables, "service_proxy_static": [], "service_proxy_api_servers": []})
    assert kubelet_server(node) == SERVER
    assert node.run("test", "-e", "/var/lib/kubenode-proxy/kubelet.json", check=False).returncode != 0
    assert node.output("ls", "/etc/kubernetes").split() == ["kubelet.conf"]
    wait_for(lambda: f"{ADDRESS}/32" not in rules(node), what="it is no longer served")
    assert node.output("ls", "/etc/kubenode-proxy/services.d").split() == ["own.yaml"]


def test_absent_leaves_nothing(node, before, installed, variables):
    node.run("systemctl", "disable", "--now", "kubelet.service")
    node.run("rm", "/etc/systemd/system/kubelet.service")
    own = "/etc/kubenode-proxy/services.d/own.yaml"
    node.write(own, "apiVersion: v1\nkind: List\nitems: []\n")
    node.role("agent", {**variables, "agent_state": "absent", "agent_remove_dataplane": True})
    assert node.output("find", "/etc/kubenode-proxy", "-type", "f").split() == [own]
    node.run("rm", "-r", "/etc/kubenode-proxy")
    left = node.output("sh", "-c", "ls -d /etc/kubenode-proxy /etc/systemd/system/kubenode* 2>/dev/null || true")
    assert left == ""
