# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node command: its arguments, answers, exit codes and completion."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import threading

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.surface.control import ControlRequest, ControlServer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.surface.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.command import agent_commands, cli, commands
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.explanation.explain import (
    desired_family,
    explain,
    explanation_document,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.explanation.target import parse_target
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, TableChange
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import NoAgent, ask_agent
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import ConfigurationError, KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.identity import identity
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.apiserver.accounts import sign

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"namespace": "shop", "name": "web"},
    "spec": {
        "type": "LoadBalancer",
        "clusterIP": "10.96.0.7",
        "clusterIPs": ["10.96.0.7"],
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080}],
        "externalTrafficPolicy": "Local",
    },
    "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7"}]}},
}
ENDPOINTS = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {"namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
    "addressType": "IPv4",
    "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
    "endpoints": [
        {"addresses": ["10.244.1.5"], "nodeName": "node1", "conditions": {"ready": True}},
        {"addresses": ["10.244.2.5"], "nodeName": "node2", "conditions": {"ready": True}},
        {"addresses": ["10.244.2.6"], "nodeName": "node2", "conditions": {"ready": False}},
        {
            "addresses": ["10.244.2.7"],
            "nodeName": "node2",
            "conditions": {"ready": False, "serving": True, "terminating": True},
        },
    ],
}
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
    return explanation_document(explain(state, [family], mode, parse_target(destination), client))


def run(*words):
    output, errors = io.StringIO(), io.StringIO()
    code = cli.main(list(words), cli.Streams(output, errors))
    return code, output.getvalue(), errors.getvalue()


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
    assert item["endpoints"][0]["reason"] == "terminating, still serving; taken because no endpoint is ready"
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


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "a command is missing"),
        (("nonsense",), 2, "invalid choice"),
        (("converge", "--mode", "fast"), 2, "invalid choice"),
        (("explain",), 2, "give either a Service, or both --from and --to"),
        (("explain", "shop/web", "--from", "shop/db"), 2, "with a Service, --from is the address of a client"),
        (("explain", "--from", "shop/web"), 2, "give either a Service, or both --from and --to"),
        (("explain", "shop/web", "--from", "shop/web", "--to", "shop/db:80"), 2, "give either a Service"),
        (("explain", "shop/web", "--why-not"), 2, "--why-not needs --from and --to"),
        (("explain", "--from", "shop/web", "--to", "shop/db"), 2, "the destination needs :PORT"),
        (("--config", "/etc/x.yaml", "status"), 2, "--config: options follow the command"),
        (("-v", "run"), 2, "-v: options follow the command"),
        (("--snapshot=/x", "converge"), 2, "--snapshot: options follow the command"),
        (("explain", "nonsense", "--snapshot", "/nowhere"), 2, "is not ADDRESS:PORT"),
        (("converge", "--snapshot", "/nowhere.json"), 1, "/nowhere.json: No such file"),
        (("converge", "--config", "/nowhere.yaml"), 1, "/nowhere.yaml: No such file"),
    ],
)
def test_wrong_usage_and_failures_have_their_exit_codes(words, code, said):
    found, _output, errors = run(*words)
    assert found == code and said in errors and errors.count("\n") == 1


def test_help_and_version_go_to_the_output():
    assert "converge" in run("--help")[1]
    assert run("explain", "--help")[0] == 0
    code, output, _errors = run("--version")
    assert (code, output) == (0, f"kubenode-proxy {identity().text}\n")
    assert run("version") == (code, output, "")
    for command in ("run", "converge", "status"):
        assert "{," not in run(command, "--help")[1]


@pytest.mark.parametrize(("check", "changed", "code"), [(False, True, 0), (True, True, 3), (True, False, 0)])
def test_converge_prints_its_changes(monkeypatch, tmp_path, check, changed, code):
    requests = []

    def converge(request):
        requests.append(request)
        change = TableChange(table="virtual servers", added=2, replaced=1, removed=0, before=("old",), after=("new",))
        counts = {"services": 1, "without_endpoints": 0, "service_ports": 1, "endpoints": 4}
        changes = (change,) if changed else ()
        return Report(
            mode="ipvs",
            mode_reason="",
            node_name="node1",
            families=("IPv4",),
            xtables_variant="",
            changed=changed,
            changes=changes,
            counts=counts,
            programmed={},
            refused=(),
            warnings=("take care",),
            durations={},
        )

    monkeypatch.setattr(commands, "converge", converge)
    snapshot = tmp_path / "cluster.json"
    snapshot.write_text(json.dumps({"kind": "List", "items": [SERVICE, ENDPOINTS]}))
    words = ["converge", "--snapshot", str(snapshot), *(["--check", "--diff"] if check else [])]
    found, output, errors = run(*words)
    assert found == code and requests[0].check is check and requests[0].describe is check
    assert errors == "kubenode-proxy: warning: take care\n"
    assert ("no differences" in output) is not changed
    if changed and check:
        assert "-old\n+new\n" in output
    document = json.loads(run(*words, "--output", "json")[1])
    assert document["mode"] == "ipvs" and document["changed"] is changed


def test_the_control_socket_answers_and_is_private(tmp_path):
    path = str(tmp_path / "run" / "agent.sock")
    asked = []

    def deliver(ask: ControlRequest) -> None:
        asked.append(ask.question)
        ask.reply({"error": "not that"} if ask.question.get("command") == "bad" else {"agent": "running"})

    server = ControlServer(path, deliver)
    Supervisor(Log(io.StringIO())).start("control", server.run)
    try:
        assert ask_agent(path, {"command": "status"}) == {"agent": "running"}
        assert (tmp_path / "run" / "agent.sock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(ProxyError, match="not that"):
            ask_agent(path, {"command": "bad"})
        assert [question["command"] for question in asked] == ["status", "bad"]
    finally:
        server.close()
    with pytest.raises(NoAgent, match="no agent answers"):
        ask_agent(path, {"command": "status"})
    with pytest.raises(KernelError, match="cannot listen"):
        ControlServer("/proc/nowhere/agent.sock", deliver)


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


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"node": "\\u001b[2Jx\\r\\u202e", "\\u001b]0;": ["\\u009b"]}\n', ""),
        (b"[]\n", "is not an object"),
        (b"{\n", "is not valid"),
        (b"[" * 200_000 + b"\n", "is not valid"),
        (b'{"error": "\\u001b[31m\\nred"}\n', "red"),
        (b"", "is not valid"),
        (b"x" * (65 << 20), "is larger than"),
    ],
    ids=["escapes", "list", "cut", "deep", "error", "nothing", "endless"],
)
def test_answers_of_a_hostile_agent_are_bounded_and_printable(tmp_path, answer, said):
    path = str(tmp_path / "agent.sock")

    def serve(listener: socket.socket) -> None:
        for _connection in range(2):
            client = listener.accept()[0]
            with client, contextlib.suppress(OSError):
                client.recv(4096)
                client.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            if said:
                with pytest.raises(ProxyError, match=said) as caught:
                    ask_agent(path, {"command": "status"})
                assert str(caught.value).isprintable()
            else:
                assert ask_agent(path, {"command": "status"}) == {"node": "?[2Jx??", "?]0;": ["?"]}
            code, output, errors = run("status", "--control", path)
        finally:
            thread.join()
    text = (output + errors).replace("\n", "")
    assert code in (1, 4) and text.isprintable() and errors.count("\n") <= 1 and "Traceback" not in errors


def test_a_token_is_stored_and_described_but_never_shown(tmp_path, monkeypatch):
    path = str(tmp_path / "token")
    claims = {"sub": "system:serviceaccount:kube-system:kubenode-proxy", "iat": 1_000_000_000, "exp": 1_000_086_400}
    claims["kubernetes.io"] = {"node": {"name": "n1", "uid": "u1"}, "serviceaccount": {"uid": "s1"}}
    text = sign(claims)
    assert run("token", "--token", path) == (1, "", f"kubenode-proxy: {path}: there is no token\n")
    for expected in (True, False):
        monkeypatch.setattr("sys.stdin", io.StringIO(text + "\n"))
        code, output, errors = run("token", "--token", path, "--store", "--output", "json")
        assert (code, errors) == (0, "") and text not in output
        assert json.loads(output) == {
            "account": "kube-system/kubenode-proxy",
            "accountUid": "s1",
            "node": "n1",
            "nodeUid": "u1",
            "issued": "2001-09-09T01:46:40Z",
            "expires": "2001-09-10T01:46:40Z",
            "lifetimeSeconds": 86400,
            "renewalDue": True,
            "changed": expected,
        }
    said = "ServiceAccount kube-system/kubenode-proxy, bound to Node n1, expires at 2001-09-10T01:46:40Z\n"
    assert run("token", "--token", path) == (0, said, "")
    monkeypatch.setattr("sys.stdin", io.StringIO("no token"))
    assert run("token", "--token", path, "--store")[0] == 1


def test_completion_is_valid_shell_and_knows_commands_and_options():
    code, script, _errors = run("completion", "bash")
    assert code == 0
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    probe = script + (
        'COMP_WORDS=(kubenode-proxy exp); COMP_CWORD=1; _kubenode_proxy; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(kubenode-proxy converge --dif); COMP_CWORD=2; _kubenode_proxy; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(kubenode-proxy converge --mode ip); COMP_CWORD=3; _kubenode_proxy; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["explain", "--diff", "iptables ipvs"]
    assert "bashcompinit" in run("completion", "zsh")[1]


@pytest.mark.parametrize(
    ("lost", "first", "services"),
    [
        ({"services": 0.0, "nodes": 0.0}, "running for 40 s, healthy", "services: watching"),
        ({"services": 35.4, "nodes": 35.1}, "running for 40 s, healthy, without the API server for 35 s", "(for 35 s)"),
        ({"services": 0.0, "nodes": 12.0}, "running for 40 s, healthy", "services: watching"),
    ],
)
def test_status_reports_the_length_of_an_api_server_outage(lost, first, services):
    document = {
        "agent": "running",
        "uptimeSeconds": 40.0,
        "healthy": True,
        "node": "node1",
        "mode": "nftables",
        "modeReason": "set in the configuration",
        "behaviour": "kube-proxy",
        "apiServer": {name: "watching" if not seconds else "no route to host" for name, seconds in lost.items()},
        "apiServerLostSeconds": lost,
        "families": {},
        "syncs": 1,
        "driftRepaired": 0,
        "lastError": "",
        "refused": [],
    }
    lines = agent_commands._status_lines(document)
    assert lines[0] == f"agent:      {first}"
    (line,) = [line for line in lines if line.startswith("API server: services")]
    assert services in line
    (line,) = [line for line in lines if line.startswith("API server: nodes")]
    assert ("(for 12 s)" in line) == (lost["nodes"] == 12.0)
