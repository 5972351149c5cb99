# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""explain --from --to with real packets: what it says about a flow is what happens to it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import ask_agent
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.agent_node import AgentNode, cluster_ip, node_object
from tests.kernel.convergence_node import remove, request
from tests.kernel.explained import explain_everything
from tests.kernel.packet_network import CLIENT, NAMES, Network, network
from tests.kernel.userspace_node import Backend, endpoints_of, node_in_mode, service_of, userspace_node
from tests.lab import manifests
from tests.lab.system import ip_batch, run
from tests.waiting import wait_for

__all__ = ["network"]  # a fixture
#: Modes, and words about a variant of iptables, the filter backend of ipvs mode or the behaviour.
MODES = ("nftables", "iptables", pytest.param("ipvs", marks=pytest.mark.uml))
VARIANTS = (
    *MODES,
    pytest.param("nftables corrected", marks=pytest.mark.full),
    pytest.param("iptables nft corrected", marks=pytest.mark.full),
    pytest.param("ipvs corrected", marks=(pytest.mark.uml, pytest.mark.full)),
    pytest.param("ipvs nft filter-backend-nftables", marks=pytest.mark.ipvs),
)
IP, SIX, SOLE, NONE, STICKY, DNS = "172.30.0.7", "fd00:30::7", "172.30.0.8", "172.30.0.9", "172.30.0.10", "172.30.0.11"
VIP, NODE_PORT, DNS_PORT, CLIENT_PORT = "1.2.3.7", 30080, 5353, 5555
FOUR = NAMES["IPv4"]
ENDPOINTS = {FOUR["L"]: "l", FOUR["R"]: "r", NAMES["IPv6"]["L"]: "l", NAMES["IPv6"]["R"]: "r"}
HTTP = [manifests.port(80, name="http")]
ASK = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.settimeout(10)
    sock.bind((sys.argv[1], int(sys.argv[2])))
    sock.connect((sys.argv[3], int(sys.argv[4])))
    sock.send(b"x")
    print(sock.recv(100).decode().split()[0])
"""


def put(node: AgentNode, name: str, addresses: Any, endpoints: str, ports: Any = None, **more: Any) -> None:
    """Put a Service and its endpoints, given by their names in NAMES, in each family of its addresses."""
    listed = ports or HTTP
    node.store.put(manifests.service(name, addresses, listed, **more))
    slice_of(node, name, "IPv4", endpoints, listed)
    if not isinstance(addresses, str):
        slice_of(node, name, "IPv6", endpoints, listed)


def slice_of(node: AgentNode, name: str, family: str, endpoints: str, ports: Any) -> None:
    nodes = {"L": "node1", "R": "node2"}
    found = [manifests.endpoint(NAMES[family][place], nodes[place]) for place in endpoints]
    targets = [{key: value for key, value in port.items() if key != "nodePort"} for port in ports]
    node.store.put(manifests.endpoint_slice(name, found, targets, name=f"{name}-{family.lower()}"))


@pytest.fixture(params=MODES)
def node(request: pytest.FixtureRequest, tmp_path: Path, network: Network) -> Iterator[AgentNode]:
    mode, *words = request.param.split()
    made = AgentNode(tmp_path, mode, "nft") if "nft" in words else node_in_mode(tmp_path, mode)
    made.node_configuration["ipvsFilterBackend"] = next(
        (word[15:] for word in words if word.startswith("filter-backend-")), "auto"
    )
    made.node_configuration["behaviour"] = "corrected" if "corrected" in words else "kube-proxy"
    made.write_configuration(clusterCIDR="10.0.0.0/8,fd00:10::/64")
    addresses = [{"type": "InternalIP", "address": NAMES[family]["N"]} for family in ("IPv4", "IPv6")]
    made.store.put(node_object(status={"addresses": addresses}))
    ip_batch(["route add 172.30.0.0/16 dev vx", "route add 1.2.3.0/24 dev vx", "-6 route add fd00:30::/112 dev vx"])
    external = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "loadBalancerSourceRanges": [FOUR["range"]]}
    ports = [{**HTTP[0], "nodePort": NODE_PORT}]
    put(made, "web", [IP, SIX], "LR", ports, ingress=[VIP], **external)
    put(made, "sole", SOLE, "R")
    put(made, "none", NONE, "")
    put(made, "sticky", STICKY, "LR", sessionAffinity="ClientIP")
    put(made, "dns", DNS, "LR", [manifests.port(DNS_PORT, name="dns", protocol="UDP")])
    yield made
    made.close()


def explained(node: AgentNode, source: str, destination: str) -> dict[str, Any]:
    """Return the explanation of one flow, by the agent."""
    question = {"command": "explain", "from": source, "to": destination}
    document = ask_agent(str(node.scratch / "agent.sock"), question)
    assert document["problems"] == []
    (flow,) = document["flows"]
    return dict(flow)


def without_agent(node: AgentNode, source: str, destination: str, *more: str) -> subprocess.CompletedProcess[str]:
    return computed(node, "--from", source, "--to", destination, *more)


def computed(node: AgentNode, *more: str) -> subprocess.CompletedProcess[str]:
    """Run explain without an agent."""
    return node.run(
        *("explain", "--config", str(node.scratch / "config.yaml")),
        *("--kubeconfig", str(node.kubeconfig), "--state-directory", str(node.scratch / "run")),
        *("--control", str(node.scratch / "nobody.sock"), *more),
    )


def place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def expected(flow: dict[str, Any]) -> set[str]:
    """Return the outcomes that an explanation allows, as ``Network.outcomes`` names them."""
    if flow["verdict"] != "forwarded":
        return {{"refused": "reject", "dropped": "drop"}[flow["verdict"]]}
    mark = "+M" if flow["masqueraded"] else ""
    chosen = [item["endpoint"] for item in flow["endpoints"] if item["chosen"]]
    if flow["endpoint"]:
        chosen = [flow["endpoint"]]
    return {f"{ENDPOINTS[text.rpartition(':')[0].strip('[]')]}:80{mark}" for text in chosen}


def answers(network: Network, sender: str, target: str, port: int, tries: int) -> list[str]:
    words = ["ip", "netns", "exec", f"{network.prefix}-{network.place[sender]}", sys.executable, "-c", CLIENT, "4"]
    probes = json.dumps([["tcp", FOUR[sender], target, port]] * tries)
    return list(json.loads(subprocess.run(words, input=probes, stdout=subprocess.PIPE, text=True, check=True).stdout))


def ask(network: Network, sender: str, port: int, target: str, target_port: int) -> str:
    """Send one datagram from a port, and return which endpoint answers."""
    space = f"{network.prefix}-{network.place[sender]}"
    words = ["ip", "netns", "exec", space, sys.executable, "-c", ASK, FOUR[sender], str(port), target, str(target_port)]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("node", VARIANTS, indirect=True)
def test_flows_do_what_is_explained(node: AgentNode, network: Network) -> None:
    node.start()
    flows = [
        ("X", IP, 80),
        ("P", IP, 80),
        ("X", SOLE, 80),
        ("X", NONE, 80),
        ("X", VIP, 80),
        ("XB", VIP, 80),
        ("X", FOUR["N"], NODE_PORT),
        ("P", FOUR["N"], NODE_PORT),
    ]
    said = [explained(node, FOUR[sender], f"{place(target, port)}/tcp") for sender, target, port in flows]
    found = network.outcomes("IPv4", [(*flow, "tcp") for flow in flows])
    assert [expected(flow) for flow in said] == found
    assert [flow["verdict"] for flow in said[3:6]] == ["refused", "forwarded", "dropped"]
    assert all(flow["differences"] == [] and flow["kernel"] for flow in said if flow["verdict"] == "forwarded")
    six = explained(node, NAMES["IPv6"]["X"], f"[{SIX}]:80")
    assert [expected(six)] == network.outcomes("IPv6", [("X", SIX, 80, "tcp")])
    # Both endpoints are as likely: five standard deviations of 60 attempts are 19.
    assert {item["probability"] for item in said[1]["endpoints"]} == {0.5}
    assert 11 <= answers(network, "P", IP, 80, 60).count("l:80") <= 49
    assert explained(node, FOUR["N"], f"{IP}:80")["sourceIs"].startswith("this node itself")


def test_affinity_and_open_connections_are_shown(node: AgentNode, network: Network) -> None:
    node.start()
    assert explained(node, FOUR["P"], f"{STICKY}:80")["endpoint"] == ""
    (first,) = set(answers(network, "P", STICKY, 80, 1))
    flow = explained(node, FOUR["P"], f"{STICKY}:80")
    assert flow["endpointReason"] == "by the affinity of the client" and expected(flow) == {first}
    assert [item["endpoint"] for item in flow["affinity"]] == [flow["endpoint"]]
    assert 10700 < flow["affinity"][0]["seconds"] <= 10800
    assert set(answers(network, "P", STICKY, 80, 12)) == {first}
    assert explained(node, FOUR["X"], f"{STICKY}:80")["affinity"] == []
    answered = ask(network, "P", CLIENT_PORT, DNS, DNS_PORT)
    client = place(FOUR["P"], CLIENT_PORT)
    live = explained(node, client, f"{place(DNS, DNS_PORT)}/udp")["live"]
    assert live and {item["source"] for item in live} == {client}
    assert {f"{ENDPOINTS[item['endpoint'].rpartition(':')[0]]}:{DNS_PORT}" for item in live} == {answered}
    assert explained(node, place(FOUR["P"], CLIENT_PORT + 1), f"{place(DNS, DNS_PORT)}/udp")["live"] == []
    assert explained(node, FOUR["P"], f"{place(DNS, DNS_PORT)}/udp")["live"]
    shown = node.run(
        *("explain", "--control", str(node.scratch / "agent.sock"), "--from", client, "--to", f"{DNS}:{DNS_PORT}/udp")
    )
    assert shown.returncode == 0 and f"further packets of {client} go to" in " ".join(shown.stdout.split())
    # Entries of the kernel are kept in one line, so that they can be pasted.
    described = shown.stdout.partition("    kernel:\n")[0]
    assert described != shown.stdout and max(map(len, described.splitlines())) <= 80


def break_nftables() -> None:
    run(["nft", "delete", "element", "ip", "kube-proxy", "service-frontends", f"{{ {SOLE} . tcp . 80 }}"])


def break_iptables() -> None:
    rules = run(["iptables-legacy", "-t", "nat", "-S", "KUBE-SERVICES"]).splitlines()
    (rule,) = [line for line in rules if f"-d {SOLE}/32" in line]
    # Comments have no spaces that a shell would need to keep, except between these words.
    words = rule.replace('"', "").replace("default/sole:http cluster IP", "default/sole:http\0cluster\0IP").split()
    run(["iptables-legacy", "-t", "nat", "-D", *(word.replace("\0", " ") for word in words[1:])])


def break_ipvs() -> None:
    run(["ipvsadm", "-d", "-t", f"{SOLE}:80", "-r", f"{FOUR['R']}:80"])


BREAK = {"nftables": break_nftables, "iptables": break_iptables, "ipvs": break_ipvs}


def lines_with(flow: dict[str, Any], *texts: str) -> Sequence[str]:
    return [line for line in flow["differences"] if all(text in line for text in texts)]


def test_differences_are_shown(node: AgentNode, network: Network) -> None:
    node.start()
    words = ("explain", f"{SOLE}:80", "--control", str(node.scratch / "agent.sock"))
    whole = node.run(*words)
    assert whole.returncode == 0 and "\n    programmed:\n" in whole.stdout and "differs" not in whole.stdout
    for port in range(20):
        ask(network, "P", CLIENT_PORT + port, DNS, DNS_PORT)
    assert node.stop() == 0
    same = without_agent(node, FOUR["P"], f"{SOLE}:80")
    assert (same.returncode, same.stderr) == (0, ""), same.stdout
    BREAK[node.mode]()
    found = without_agent(node, FOUR["P"], f"{SOLE}:80", "-o", "json")
    (flow,) = json.loads(found.stdout)["flows"]
    assert found.returncode == 3 and lines_with(flow, "missing in the kernel: ")
    assert flow["verdict"] in ("unchanged", "uncertain") and flow["reason"].endswith("(desired: forwarded)")
    for target in (f"{SOLE}:80", "default/sole"):
        shown = computed(node, target)
        assert shown.returncode == 3 and "\n      missing in the kernel: " in shown.stdout, shown.stdout + shown.stderr
        assert "the kernel holds " in shown.stdout and "(desired: sent to its only endpoint)" in shown.stdout
        assert "programmed:" not in shown.stdout and "\n    desired:\n" in shown.stdout
        assert computed(node, target, "--no-kernel").returncode == 0
    slice_of(node, "dns", "IPv4", "L", [manifests.port(DNS_PORT, name="dns", protocol="UDP")])
    found = without_agent(node, FOUR["P"], f"{DNS}:{DNS_PORT}/udp", "-o", "json")
    (flow,) = json.loads(found.stdout)["flows"]
    gone = place(FOUR["R"], DNS_PORT)
    assert found.returncode == 3 and lines_with(flow, f"leads to {gone}, which is not an endpoint of the Service")
    assert lines_with(flow, "not desired: ", FOUR["R"])
    modelled = without_agent(node, FOUR["P"], f"{DNS}:{DNS_PORT}/udp", "--no-kernel")
    assert modelled.returncode == 0 and f"reaches {FOUR['L']}:{DNS_PORT}: it is the only one" in modelled.stdout


@pytest.mark.parametrize("mode", MODES)
def test_every_address_of_both_families_is_compared(mode: str, tmp_path: Path) -> None:
    wanted = request(mode, tmp_path)
    converge(wanted)
    found = explain_everything(wanted)
    assert {name: flow["differences"] for name, flow in found.items() if flow["differences"]} == {}
    assert {flow["family"] for flow in found.values()} == {"IPv4", "IPv6"}
    assert all(flow["kernel"] for flow in found.values())
    assert {flow["verdict"] for flow in found.values()} >= {"forwarded", "refused"}
    remove(tmp_path / "state")
    gone = explain_everything(wanted)
    assert all(flow["differences"] for flow in gone.values())


def tables() -> list[str]:
    return [line for line in run(["nft", "list", "tables"]).splitlines() if "kubenode-trace" in line]


@pytest.mark.parametrize("node", ["nftables"], indirect=True)
def test_packets_are_followed_without_drift_and_without_a_trace(node: AgentNode, network: Network) -> None:
    node.start()
    words = ("explain", "--control", str(node.scratch / "agent.sock"), "--from", FOUR["P"], "--to", f"{SOLE}:80")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        shown = pool.submit(node.run, *words, "--live", "4")
        wait_for(tables, 30)
        assert answers(network, "P", SOLE, 80, 1) == ["r:80"]
        assert answers(network, "X", SOLE, 80, 1) == ["r:80+M"]
        done = shown.result()
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert "packet 1 ip kube-proxy filter-prerouting-pre-dnat:" in text and "goto cluster-1" in text
    assert "ip kube-proxy cluster-1: accept (dnat ip to" in text and "kubenode-trace" not in text
    assert "masquerade" not in text.partition("followed for")[2].partition("packet 2")[0]
    assert tables() == [] and node.status()["driftRepaired"] == 0
    killed = subprocess.Popen(
        [sys.executable, "-m", "module_utils.command.cli", *words, "--live", "60"],
        env=node.environment,
        stdout=subprocess.DEVNULL,
    )
    wait_for(tables, 30)
    killed.kill()
    killed.wait()
    wait_for(lambda: not tables(), 10)


@pytest.mark.ipvs
@pytest.mark.parametrize(
    ("node", "table", "chains"),
    [
        ("ipvs nft filter-backend-iptables", "nat", ("PREROUTING", "POSTROUTING")),
        ("ipvs nft filter-backend-nftables", "kubenode-ipvs", ("nat-prerouting", "nat-postrouting")),
    ],
    indirect=["node"],
)
def test_packets_from_outside_are_followed_to_ipvs_and_behind_it(
    node: AgentNode, network: Network, table: str, chains: Sequence[str]
) -> None:
    node.start()
    for family, target in (("IPv4", IP), ("IPv6", SIX)):
        words = ("explain", "--control", str(node.scratch / "agent.sock"), "--from", NAMES[family]["X"])
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            shown = pool.submit(node.run, *words, "--to", place(target, 80), "--live", "20", "-o", "json")
            wait_for(tables, 60, 0.2)
            outcomes = network.outcomes(family, [("X", target, 80, "tcp")], tries=1)
            done = shown.result()
        found = json.loads(done.stdout)
        (flow,) = found["flows"]
        assert (done.returncode, flow["differences"], found["problems"]) == (0, [], []), done.stderr
        assert outcomes[0] < expected(flow) and len(expected(flow)) == 2
        full = f"{'ip6' if family == 'IPv6' else 'ip'} {table}"
        met = [hit["chain"] for hit in found["traced"] if (hit["packet"], hit["table"]) == (1, full)]
        before, behind = chains
        assert met.index(before) < met.index(behind)
        assert all(hit["table"].startswith(f"{full.split()[0]} ") for hit in found["traced"])
    assert tables() == [] and node.status()["driftRepaired"] == 0


@pytest.mark.parametrize("node", [pytest.param("ipvs", marks=pytest.mark.uml)], indirect=True)
def test_a_kernel_that_cannot_follow_packets_is_named_beside_the_explanation(node: AgentNode, network: Network) -> None:
    # That of user-mode Linux has no chains of nf_tables for IPv4.
    node.start()
    words = ("explain", "--control", str(node.scratch / "agent.sock"), "--from", FOUR["X"], "--to", f"{SOLE}:80")
    done = node.run(*words, "--live", "5", "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["flows"][0]["verdict"] == "forwarded"
    (problem,) = found["problems"]
    assert found["traced"] == [] and problem.startswith("packets cannot be traced: ")
    assert answers(network, "X", SOLE, 80, 1) == ["r:80+M"]
    assert tables() == [] and node.status()["driftRepaired"] == 0


def test_the_agent_shows_what_it_forwards_itself(tmp_path: Path) -> None:
    client, first, second = "192.0.2.1", "10.244.1.11", "10.244.1.12"
    ip_batch([f"address add {client}/32 dev lo", "route add 10.96.0.0/12 dev lo"])
    with contextlib.ExitStack() as stack:
        for address in (first, second):
            stack.callback(Backend(address).close)
        node = userspace_node(tmp_path)
        stack.callback(node.close)
        node.store.put(service_of(1, ("TCP", "UDP"), sessionAffinity="ClientIP"))
        node.store.put(endpoints_of(1, [first, second], ("TCP", "UDP")))
        node.start()
        for kind, protocol in ((socket.SOCK_STREAM, "tcp"), (socket.SOCK_DGRAM, "udp")):
            sock = stack.enter_context(socket.socket(socket.AF_INET, kind))
            sock.settimeout(10)
            sock.bind((client, 0))
            sock.connect((cluster_ip(1), 80))
            sock.sendall(b"hello")
            answered = sock.recv(100).decode().split()
            source = place(*sock.getsockname())
            flow = explained(node, source, f"{cluster_ip(1)}:80/{protocol}")
            (entry,) = flow["live"]
            assert (entry["by"], entry["source"], entry["endpoint"]) == ("agent", source, f"{answered[0]}:8080")
            assert (entry["seen_as"].rpartition(":")[0], flow["differences"]) == (answered[1], [])
            assert flow["endpoint"] == entry["endpoint"] and flow["endpointReason"] == "by the affinity of the client"
        assert explained(node, "198.51.100.1", f"{cluster_ip(1)}:80")["live"] == []
