# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``top`` and the metrics of traffic with real connections, in each mode."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, Iterator

import pytest

from tests.kernel import backends
from tests.kernel.agent_node import AgentNode, node_object
from tests.kernel.userspace_node import node_in_mode
from tests.lab import manifests
from tests.lab.system import run
from tests.waiting import wait_for

PORT = manifests.port(backends.PORT, name="https")
COUNT = 12
NODE_PORT = 30643


def with_endpoints(node: AgentNode, numbers: Any = (1, 2)) -> None:
    found = [manifests.endpoint(backends.endpoint(number), "node1") for number in numbers]
    node.store.put(manifests.endpoint_slice("web", found, [PORT], name="web-a"))


@pytest.fixture(
    params=(
        "nftables",
        "iptables",
        pytest.param("iptables nft", marks=pytest.mark.full),
        pytest.param("ipvs", marks=pytest.mark.uml),
    ),
)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentNode]:
    mode, *words = request.param.split()
    backends.make_network()
    made = AgentNode(tmp_path, mode, "nft") if words else node_in_mode(tmp_path, mode)
    made.node_configuration["traffic"] = {"countConnections": True, "countBytes": True, "metricsPorts": 1}
    made.write_configuration()
    made.store.put(node_object(status={"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}))
    made.store.put(manifests.service("web", backends.ADDRESS, [{**PORT, "nodePort": NODE_PORT}], type="NodePort"))
    made.store.put(manifests.service("idle", "10.103.97.9", [PORT]))
    with_endpoints(made)
    with backends.three_backends():
        made.start()
        yield made
    made.close()


def top(node: AgentNode, *words: str) -> dict[str, Any]:
    done = node.run("top", "--json", "--control", str(node.scratch / "agent.sock"), *words)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def web(node: AgentNode) -> dict[str, Any]:
    return next(row for row in top(node)["ports"] if row["name"] == "web")


def counted(node: AgentNode, connections: int) -> dict[str, Any]:
    """Wait until the given number of connections is counted; IPVS updates its numbers every two seconds."""
    wait_for(lambda: web(node)["connections"] == connections, 10.0, 0.2)
    return web(node)


def counts(row: dict[str, Any]) -> dict[str, int]:
    return {item["endpoint"]: item["connections"] or 0 for item in row["endpoints"]}


def connect(times: int = COUNT) -> dict[str, int]:
    """Open connections; return how many each endpoint has answered."""
    answers = Counter(backends.ask() for _time in range(times))
    assert set(answers) <= {"1", "2", "3"}, answers
    return {f"{backends.endpoint(int(number))}:{backends.PORT}": count for number, count in answers.items()}


_COUNTERS = (("map", "ip", "kube-proxy", "service-frontends"), ("set", "ip", "kube-proxy", "service-traffic"))
_SIZES = ("packetsIn", "packetsOut", "bytesIn", "bytesOut")


def nft_sets() -> str:
    return run(["nft", "list", "sets"])


def remove_counters(node: AgentNode) -> None:
    """Delete what counts the connections, as another program might."""
    if node.mode == "nftables":
        # In one transaction, which the agent repairs as a whole.
        command = ["nft", "; ".join(f"flush {' '.join(words)}" for words in _COUNTERS)]
    elif node.mode == "iptables":
        program = f"iptables-{node.kernel_variant}" if node.kernel_variant else "iptables"
        command = [program, "-t", "nat", "-F"]
    else:
        command = ["ipvsadm", "-D", "-t", f"{backends.ADDRESS}:{backends.PORT}"]
    subprocess.run(command, check=True)


def test_connections_are_counted_by_endpoint_and_kept_over_repairs(node: AgentNode) -> None:
    assert (web(node)["connections"] or 0, sum(counts(web(node)).values())) == (0, 0)
    made = Counter(connect())
    first = counted(node, COUNT)
    sizes = [first[name] for name in _SIZES]
    assert all(size > COUNT for size in sizes) if node.mode in ("ipvs", "nftables") else set(sizes) == {None}
    assert {key: count for key, count in counts(first).items() if count} == made
    assert first["resetAt"] == 0

    # A regular comparison with the kernel repairs nothing: counters are not part of the desired state.
    assert not node.differences()["changed"]

    repaired = node.status()["driftRepaired"]
    remove_counters(node)
    wait_for(lambda: node.status()["driftRepaired"] > repaired)
    made.update(connect())
    second = counted(node, 2 * COUNT)
    assert {key: count for key, count in counts(second).items() if count} == made
    assert second["resetAt"] > 0
    assert all(second[name] is None or second[name] > size for name, size in zip(_SIZES, sizes))


@pytest.mark.parametrize("node", ["nftables"], indirect=True)
def test_bytes_are_counted_as_long_as_the_configuration_says_so(node: AgentNode) -> None:
    connect()
    found = counted(node, COUNT)

    def configure(value: bool) -> None:
        node.node_configuration["traffic"]["countBytes"] = value
        node.write_configuration()
        node.process.send_signal(signal.SIGHUP)
        wait_for(lambda: ("service-traffic" in nft_sets()) == value)

    configure(False)
    connect()
    without = counted(node, 2 * COUNT)
    assert [without[name] for name in _SIZES] == [found[name] for name in _SIZES]
    configure(True)
    connect()
    again = counted(node, 3 * COUNT)
    assert all(again[name] > found[name] for name in _SIZES)
    # What was counted before is part of the totals, and connections were counted all the time.
    assert (sum(counts(again).values()), node.status()["driftRepaired"]) == (3 * COUNT, 0)


def test_counters_of_the_kernel_are_kept_over_a_restart_of_the_agent(node: AgentNode) -> None:
    connect()
    before = counted(node, COUNT)
    node.stop()
    connect()
    node.start()
    after = counted(node, 2 * COUNT)
    assert all(after[name] is None or after[name] > before[name] for name in _SIZES)


@pytest.mark.parametrize("node", [pytest.param("ipvs", marks=pytest.mark.uml)], indirect=True)
def test_a_real_server_that_ipvs_revives_with_its_counters_is_counted_once(node: AgentNode) -> None:
    made = Counter(connect())
    counted(node, COUNT)
    repaired = node.status()["driftRepaired"]
    first = f"{backends.endpoint(1)}:{backends.PORT}"
    server = ["-t", f"{backends.ADDRESS}:{backends.PORT}", "-r", first]
    subprocess.run(["ipvsadm", "-d", *server], check=True)
    wait_for(lambda: node.status()["driftRepaired"] > repaired)
    made.update(connect())
    found = counted(node, 2 * COUNT)
    # IPVS has continued to count.
    assert f"{first} {made[first]}" in " ".join(run(["ipvsadm", "-Ln", "--stats"]).split())
    assert (counts(found), found["resetAt"]) == (made, 0)
    assert [item["resetAt"] for item in found["endpoints"]] == [0, 0]


@pytest.mark.parametrize("node", ["userspace"], indirect=True)
def test_connections_that_the_agent_forwards_are_counted(node: AgentNode) -> None:
    made = connect()
    with backends.connected_to("1"):
        made[f"{backends.endpoint(1)}:{backends.PORT}"] += 1
        wait_for(lambda: web(node)["active"] == 1)
        found = web(node)
    while sum(made.values()) < found["connections"]:
        # Backend 2 answered before backend 1 did.
        made[f"{backends.endpoint(2)}:{backends.PORT}"] += 1
    assert counts(found) == made
    assert (found["bytesIn"], found["inactive"]) == (None, None)
    wait_for(lambda: web(node)["active"] == 0)


def test_connections_to_a_node_port_are_counted_with_those_to_the_cluster_ip(node: AgentNode) -> None:
    connect()
    for _time in range(COUNT):
        with socket.create_connection(("192.0.2.1", NODE_PORT), 10) as connection:
            assert connection.recv(16) in (b"1", b"2")
    found = counted(node, 2 * COUNT)
    assert sum(counts(found).values()) == 2 * COUNT


@pytest.mark.parametrize("node", ["nftables", pytest.param("ipvs", marks=pytest.mark.uml)], indirect=True)
def test_only_so_many_ports_as_configured_have_metrics(node: AgentNode) -> None:
    # The agent reads the counters for metrics at its start, and every 15 seconds.
    connect()
    node.stop()
    node.start()
    name = 'kubenode_proxy_service_connections_total{ip_family="IPv4",namespace="default",port="https",protocol="TCP"'
    wait_for(lambda: f'{name},service="web"}} {COUNT:.1f}' in node.fetch("/metrics"), 60.0, 0.5)
    assert 'service="idle"' not in node.fetch("/metrics")
    assert (
        node.metric("kubenode_proxy_service_bytes_total") > node.metric("kubenode_proxy_service_packets_total") > COUNT
    )
    assert node.metric("kubenode_proxy_service_ports_without_metrics") == 1


def test_top_fits_a_terminal(node: AgentNode) -> None:
    connect()
    counted(node, COUNT)
    done = node.run("top", "--endpoints", "--control", str(node.scratch / "agent.sock"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines), lines
    assert lines[1].split()[:2] == ["SERVICE", "CONNS"]
    assert lines[2].split()[:2] == ["default/web:https", str(COUNT)]
