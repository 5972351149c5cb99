# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node command explain: the Service at a destination, its endpoints and their reasons, and programmed entries."""

from __future__ import annotations

import argparse
import io
import json
import os
import socket

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.control import ControlServer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import (
    ConfigurationError,
    ProxyError,
    UnknownDestination,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.command.absent_service import why_absent
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import (
    ask_agent,
    error_answer,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.explain import (
    desired_family,
    explain,
    explanation_document,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.target import parse_target
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.unit.command.node_command import ENDPOINTS, SERVICE, run

SETTINGS = DataplaneSettings(
    "IPv4",
    "node1",
    "192.0.2.1",
    local_traffic=LocalTraffic("cidr", "10.244.0.0/16"),
    node_addresses=(("eth0", "192.0.2.1"),),
    node_port_addresses=("192.0.2.1",),
    # One that the kernel of this machine need not have.
    schedulers=frozenset(("mh",)),
)
CONTEXT = NodeContext("IPv4", "node1", "zone-a")


def explained(destination, mode="iptables", *objects, client="", rising=None):
    state = ClusterState.from_objects(objects or (SERVICE, ENDPOINTS))
    state.set_rising(NamespacedName("shop", "web"), rising or {})
    family = desired_family(state, mode_named(mode).rendering, FamilyContext(SETTINGS, CONTEXT, None))
    return explanation_document(explain(state, [family], mode, parse_target(destination), client=client))


@pytest.mark.parametrize(
    ("destination", "via", "traffic", "policy", "chosen"),
    [
        ("10.96.0.7:80/tcp", "cluster IP", "internal", "Cluster", ["10.244.1.5:8080", "10.244.2.5:8080"]),
        ("10.96.0.7:80", "cluster IP", "internal", "Cluster", ["10.244.1.5:8080", "10.244.2.5:8080"]),
        ("203.0.113.7:80", "load balancer IP", "external", "Local", ["10.244.1.5:8080"]),
        ("192.0.2.1:30080", "node port", "external", "Local", ["10.244.1.5:8080"]),
        ("127.0.0.1:30080", "node port", "external", "Local", ["10.244.1.5:8080"]),
    ],
)
def test_explains_how_a_destination_is_served(destination, via, traffic, policy, chosen):
    (item,) = explained(destination)["found"]
    assert (item["service"], item["via"], item["traffic"], item["trafficPolicy"]) == ("shop/web", via, traffic, policy)
    assert [verdict["endpoint"] for verdict in item["endpoints"] if verdict["chosen"]] == chosen
    reasons = {verdict["endpoint"]: verdict["reason"] for verdict in item["endpoints"]}
    assert reasons["10.244.2.6:8080"] == "not ready"
    assert "on this node" in reasons["10.244.2.5:8080"] if policy == "Local" else reasons["10.244.2.5:8080"] == "ready"
    assert item["programmed"]


@pytest.mark.parametrize("destination", ["10.96.0.7:81", "10.96.0.7:80/udp", "203.0.113.8:80", "198.51.100.1:30080"])
def test_explains_that_nothing_answers(destination):
    assert explained(destination)["found"] == []


@pytest.mark.parametrize(
    ("mode", "start"), [("iptables", "-t nat -A KUBE-"), ("ipvs", "-A -t 10.96.0.7:80"), ("nftables", "")]
)
def test_shows_the_programmed_entries_of_each_mode(mode, start):
    (item,) = explained("10.96.0.7:80", mode)["found"]
    assert any(line.startswith(start) for line in item["programmed"])


def hashed_service(flags=""):
    annotations = {"kubenode.proxy/scheduler": "maglev", "kubenode.proxy/scheduler-flags": flags}
    return {**SERVICE, "metadata": {**SERVICE["metadata"], "annotations": annotations}}


def test_explains_which_endpoint_a_client_reaches():
    found = {}
    for number in range(1, 30):
        client = f"198.51.100.{number}"
        document = explained("10.96.0.7:80", "nftables", hashed_service(), ENDPOINTS, client=client)
        (item,) = document["found"]
        found[client] = item["clientEndpoint"]
        assert document["client"] == client
    assert item["outcome"] == "sent to one of 2 endpoints, by the client's address"
    assert set(found.values()) == {"10.244.1.5:8080", "10.244.2.5:8080"}
    slots = [line for line in item["programmed"] if line.startswith("# service-slots") and "10.96.0.7" in line]
    assert sum(int(line.rpartition(", ")[2].split()[0]) for line in slots) == 600
    assert len(item["programmed"]) < 100


@pytest.mark.parametrize(
    ("mode", "service", "outcome"),
    [
        ("nftables", SERVICE, "sent to one of 2 endpoints"),
        ("iptables", hashed_service(), "sent to one of 2 endpoints"),
        ("nftables", hashed_service("mh-port"), "sent to one of 2 endpoints, by the client's address and port"),
        ("ipvs", SERVICE, "sent to one of 2 endpoints"),
        ("ipvs", hashed_service(), "sent to one of 2 endpoints, by the client's address"),
        ("ipvs", hashed_service("mh-port"), "sent to one of 2 endpoints, by the client's address and port"),
    ],
)
def test_explains_that_the_address_of_a_client_does_not_decide(mode, service, outcome):
    (item,) = explained("10.96.0.7:80", mode, service, ENDPOINTS, client="198.51.100.1")["found"]
    assert (item["clientEndpoint"], item["outcome"]) == ("", outcome)


@pytest.mark.parametrize(
    ("mode", "service", "reason"),
    [
        ("iptables", hashed_service(), "ready, in slow start with 3/8 of its share"),
        ("ipvs", SERVICE, "ready, in slow start with 3/8 of its share"),
        ("ipvs", hashed_service(), "ready"),
        ("nftables", hashed_service(), "ready"),
    ],
)
def test_explains_the_share_of_an_endpoint_in_slow_start(mode, service, reason):
    (item,) = explained("10.96.0.7:80", mode, service, ENDPOINTS, rising={("10.244.2.5", 8080): 3})["found"]
    assert {verdict["endpoint"]: verdict["reason"] for verdict in item["endpoints"]}["10.244.2.5:8080"] == reason


@pytest.mark.parametrize(
    ("destination", "left"), [("10.96.0.7:80", ["shop/web"]), ("shop/web", ["shop/web"]), ("10.96.0.7:81", [])]
)
def test_names_a_service_that_is_left_to_a_program(destination, left):
    labels = {"kubenode.proxy/node-local": "true"}
    service = {**SERVICE, "metadata": {**SERVICE["metadata"], "labels": labels}}
    document = explained(destination, "nftables", service, ENDPOINTS)
    assert (document["found"], document["leftToPrograms"]) == ([], left)


@pytest.mark.parametrize("destination", ["203.0.113.7:80", "203.0.113.7:80/tcp", "203.0.113.7:81", "shop/web"])
def test_says_which_addresses_of_a_service_are_refused(destination):
    state = ClusterState.from_objects((SERVICE, ENDPOINTS))
    state.set_external_ranges(("198.51.100.0/24",))
    family = desired_family(state, mode_named("nftables").rendering, FamilyContext(SETTINGS, CONTEXT, None))
    document = explanation_document(explain(state, [family], "nftables", parse_target(destination)))
    reason = "status.loadBalancer.ingress: 203.0.113.7 is outside of servicePolicy.externalRanges"
    assert document["refused"] == ([] if destination.endswith("81") else [f"Service shop/web: {reason}"])
    assert bool(document["found"]) is (destination == "shop/web")
    assert "203.0.113.7" not in str(document["found"])


def test_says_which_addresses_a_service_loses():
    (metadata, spec) = ({"name": "old", "namespace": "a", "creationTimestamp": "2019-01-01T00:00:00Z"}, SERVICE["spec"])
    older = {**SERVICE, "metadata": metadata, "spec": {**spec, "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"]}}
    refused = explained("shop/web", "nftables", SERVICE, ENDPOINTS, older)["refused"]
    assert any(line.startswith("203.0.113.7:80/TCP is claimed by Service a/old") for line in refused)


def test_explains_hints_terminating_endpoints_and_refusals():
    hinted = json.loads(json.dumps(ENDPOINTS))
    for item, zone in zip(hinted["endpoints"], ("zone-a", "zone-b", "zone-a", "zone-a")):
        item["hints"] = {"forZones": [{"name": zone}]}
    (item,) = explained("10.96.0.7:80", "iptables", SERVICE, hinted)["found"]
    reasons = {verdict["endpoint"]: verdict["reason"] for verdict in item["endpoints"]}
    assert item["topology"] == "same-zone"
    assert reasons["10.244.1.5:8080"] == "ready, hinted for this zone"
    assert reasons["10.244.2.5:8080"] == "ready, but hinted for zone-b"
    ending = json.loads(json.dumps(ENDPOINTS))
    del ending["endpoints"][:3]
    (item,) = explained("10.96.0.7:80", "iptables", SERVICE, ending)["found"]
    assert item["endpoints"][0]["reason"] == "terminating, still serving; used because no endpoint is ready"
    (item,) = explained("203.0.113.7:80", "iptables", SERVICE, ending)["found"]
    assert item["outcome"].startswith("dropped")
    (item,) = explained("10.96.0.7:80", "iptables", SERVICE)["found"]
    assert item["outcome"].startswith("refused")


WRONG_TARGETS = [
    "",
    "10.96.0.7",
    "10.96.0.7:0",
    "10.96.0.7:80/icmp",
    "web:80",
    "10.96.0.7:99999",
    "web",
    "shop/",
    "/web",
    "shop/web:",
    "shop/web:0",
    "shop/web:70000",
    "Shop/web",
    "shop/web/x:80",
    "web.shop:80/icmp",
    "web..shop",
    "shop/web;reboot",
    "a" * 64 + "/web",
    "shop/web\nshop/api",
]


@pytest.mark.parametrize("text", WRONG_TARGETS)
def test_an_invalid_target_is_a_one_line_error_with_exit_code_2(text):
    with pytest.raises(ConfigurationError, match=r"is not ADDRESS:PORT|protocol must be|port must be"):
        parse_target(text)
    code, output, errors = run("explain", text, "--snapshot", "/nowhere")
    assert (code, output, errors.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[FD00::1]:80/UDP", "[fd00::1]:80/udp"),
        ("shop/web", "shop/web"),
        (" shop/web:http ", "shop/web:http"),
        ("shop/web:80/tcp", "shop/web:80/tcp"),
        ("web.shop", "shop/web"),
        ("web.shop:80", "shop/web:80"),
        ("web.shop.svc:http", "shop/web:http"),
        ("web.shop.svc.cluster.local:53/UDP", "shop/web:53/udp"),
    ],
)
def test_a_target_is_an_address_or_a_service(text, shown):
    assert str(parse_target(text)) == shown


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables"])
@pytest.mark.parametrize("target", ["shop/web", "web.shop", "shop/web:http", "web.shop:80/tcp"])
def test_a_service_is_explained_by_its_name(mode, target):
    internal, external = explained(target, mode)["found"]
    assert (internal["service"], internal["via"], internal["frontends"]) == (
        "shop/web",
        "cluster IP",
        ["10.96.0.7:80"],
    )
    assert external["via"] == "load balancer IP, node port"
    assert external["frontends"] == ["203.0.113.7:80", "192.0.2.1:30080"]
    assert (internal["trafficPolicy"], external["trafficPolicy"]) == ("Cluster", "Local")
    assert internal["programmed"] and external["programmed"]
    assert explained("shop/web:no", mode)["found"] == explained("shop/other", mode)["found"] == []
    assert explained("shop/web:80/udp", mode)["found"] == []


def programmed_lines(rendering, tables):
    return {
        line
        for table, rows in tables.items()
        for key, value in rows.items()
        for line in rendering.lines("IPv4", table, key, value)
    }


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables"])
@pytest.mark.parametrize("endpoints", [6, 1200])
def test_every_line_shown_is_in_the_desired_table(mode, endpoints):
    many = json.loads(json.dumps(ENDPOINTS))
    many["endpoints"] = [
        {"addresses": [f"10.244.{number // 200}.{number % 200 + 1}"], "nodeName": "node1", "conditions": {}}
        for number in range(endpoints)
    ]
    state = ClusterState.from_objects((SERVICE, many))
    rendering = mode_named(mode).rendering
    desired = programmed_lines(rendering, rendering.desired_tables(all_service_ports(state, CONTEXT), SETTINGS))
    for target in ("10.96.0.7:80", "203.0.113.7:80", "192.0.2.1:30080", "shop/web"):
        for item in explained(target, mode, SERVICE, many)["found"]:
            assert item["programmed"] and set(item["programmed"]) <= desired
            assert len(item["programmed"]) > 2 or mode == "nftables"


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables"])
def test_explanations_of_the_agent_use_the_syntax_of_each_mode(tmp_path, mode):
    path = str(tmp_path / "agent.sock")
    document = {"found": explained("shop/web", mode)["found"]}
    server = ControlServer(path, lambda ask: ask.reply(document))
    Supervisor(Log(io.StringIO())).start("control", server.run)
    try:
        answer = ask_agent(path, {"command": "explain"})
    finally:
        server.close()
    for sent, received in zip(document["found"], answer["found"]):
        assert received["programmed"] == [line.expandtabs() for line in sent["programmed"]] != []
        assert not any("?" in line for line in received["programmed"])


def named(name, **spec):
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "shop", "name": name}, "spec": spec}


ABSENT = [
    (
        "web-headless",
        "shop/web-headless is headless: DNS gives clients the addresses of its pods, and no node",
    ),
    ("out", 'shop/out is an ExternalName: DNS gives clients the name "example.org", and no node programs anything'),
    (
        "other",
        "shop/other is left to another program, which its label service.kubernetes.io/service-proxy-name",
    ),
    ("wen", "there is no Service shop/wen; did you mean web? (namespace shop has other, out, web, web-headless)"),
    ("web", "shop/web exists, but no such port of it is served here: it has http (80/tcp)"),
]


@pytest.mark.parametrize(("name", "reason"), ABSENT)
@pytest.mark.parametrize("source", ["snapshot", "API server"])
def test_a_service_that_no_node_serves_has_a_reason(tmp_path, api_of_absent, name, reason, source):
    objects, kubeconfig = api_of_absent
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    snapshot = str(path) if source == "snapshot" else ""
    options = argparse.Namespace(snapshot=snapshot, from_cache=False, kubeconfig=kubeconfig, config="")
    assert why_absent(options, "shop", name).startswith(reason)


@pytest.fixture(scope="module")
def api_of_absent(tmp_path_factory):
    """Provide Services that no node serves, and the kubeconfig of an API server that has them."""
    labelled = named("other", clusterIP="10.96.0.9")
    labelled["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": "else"}
    objects = [SERVICE, named("web-headless", clusterIP="None"), labelled]
    objects.append(named("out", type="ExternalName", externalName="example.org"))
    directory = tmp_path_factory.mktemp("absent")
    certificates, store = make_certificates(directory), Store()
    for item in objects:
        store.put(item)
    api = ApiServer(store, certificates)
    try:
        yield objects, str(write_kubeconfig(directory / "kubeconfig", api.url, certificates.authority, api.token))
    finally:
        api.close()


@pytest.mark.parametrize(
    ("error", "explained_further"),
    [
        (UnknownDestination("no such destination"), True),
        (ProxyError("there is no pod shop/client"), False),
    ],
)
def test_only_for_an_unknown_destination_other_services_are_named(tmp_path, api_of_absent, error, explained_further):
    path, (_objects, kubeconfig) = str(tmp_path / "agent.sock"), api_of_absent
    server = ControlServer(path, lambda ask: ask.reply(error_answer(error)))
    Supervisor(Log(io.StringIO())).start("control", server.run)
    ends = ("--from", "shop/client", "--to", "shop/wen:80")
    try:
        status, _output, errors = run("explain", *ends, "--control", path, "--kubeconfig", kubeconfig)
    finally:
        server.close()
    assert status == 1 and errors.startswith(f"kubenode-proxy: {error}")
    assert ("did you mean web?" in errors) is explained_further


def test_without_an_api_server_the_reason_names_what_is_possible(tmp_path):
    options = argparse.Namespace(snapshot="", from_cache=False, kubeconfig=str(tmp_path / "none"), config="")
    found = why_absent(options, "shop", "web")
    assert "it does not exist, or it is headless or an ExternalName" in found and "cannot be asked: " in found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("words", [("status",), ("top",), ("drain", "status"), ("explain", "shop/web"), ("reload",)])
def test_a_command_without_the_rights_of_root_says_so(tmp_path, words):
    path = tmp_path / "agent.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    os.chmod(path, 0o600)
    os.seteuid(65534)
    try:
        found = run(*words, "--control", str(path))
    finally:
        os.seteuid(0)
        listener.close()
    assert found == (1, "", f"kubenode-proxy: {path}: permission denied: run this as root\n")
