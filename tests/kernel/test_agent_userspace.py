# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent in userspace mode: it forwards real connections and datagrams, and its listeners are resources."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip, node_object
from tests.kernel.userspace_node import (
    Backend,
    addresses_on,
    answering,
    ask,
    descriptors,
    endpoints_of,
    service_of,
    userspace_node,
)
from tests.lab import manifests, system
from tests.waiting import wait_for

DEVICE = "kube-userspace0"
FIRST, SECOND, SIX = "10.244.1.11", "10.244.1.12", "fd00:10:244:1::11"
DEAD = "10.244.1.99"
REMOTE_SERVER = "203.0.113.30"
OUTSIDE, OTHER = "203.0.113.10", "203.0.113.20"
NODE_IP = "192.0.2.1"


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    agent_node = userspace_node(tmp_path)
    system.ip_batch(
        [
            f"address add {NODE_IP}/32 dev lo",
            f"address add {OUTSIDE}/32 dev lo",
            f"address add {OTHER}/32 dev lo",
            f"address add {DEAD}/32 dev lo",
            "-6 address add fd00:192::1/128 dev lo nodad",
            # Other modes rewrite packets that have a route.
            "route add 10.96.0.0/12 dev lo",
        ]
    )
    addresses = [{"type": "InternalIP", "address": address} for address in (NODE_IP, "fd00:192::1")]
    agent_node.store.put(node_object(status={"addresses": addresses}))
    yield agent_node
    agent_node.close()


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    servers = [Backend(FIRST), Backend(SECOND), Backend(SIX)]
    yield servers
    for item in servers:
        item.close()


def dual(item):
    """Return a Service with an IPv6 address beside its IPv4 address."""
    spec = item["spec"]
    six = "fd00:10:96::" + spec["clusterIP"].rpartition(".")[2]
    spec.update(clusterIPs=[spec["clusterIP"], six], ipFamilies=["IPv4", "IPv6"], ipFamilyPolicy="RequireDualStack")
    return item


def refusal(address: str, port: int, kind: int = socket.SOCK_STREAM) -> bool:
    """Return whether the address refuses connections."""
    try:
        ask(address, port, kind=kind)
    except ConnectionRefusedError:
        return True
    return False


def test_every_frontend_of_a_service(node, backends):
    both = ("TCP", "UDP")
    node.store.put(dual(service_of(1, both)))
    node.store.put(endpoints_of(1, [FIRST, SECOND], both))
    node.store.put(endpoints_of(1, [SIX], both))
    # A node port, a load balancer address with source ranges, an external IP that the node has itself.
    outside = service_of(2, type="LoadBalancer", loadBalancerSourceRanges=[f"{OUTSIDE}/32"], externalIPs=[OTHER])
    outside["spec"]["ports"][0]["nodePort"] = 30080
    outside["status"] = {"loadBalancer": {"ingress": [{"ip": "198.51.100.2"}]}}
    node.store.put(outside)
    node.store.put(endpoints_of(2, [FIRST, SECOND]))
    # Policy Local with one endpoint here and one elsewhere.
    local = service_of(3, type="NodePort", externalTrafficPolicy="Local", internalTrafficPolicy="Local")
    local["spec"]["ports"][0]["nodePort"] = 30081
    node.store.put(local)
    slice_of_local = endpoints_of(3, [FIRST, SECOND])
    slice_of_local["endpoints"][1]["nodeName"] = "node2"
    node.store.put(slice_of_local)
    # Affinity; no endpoints; SCTP; an endpoint that does not answer; an endpoint that is a Service.
    affinity = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
    node.store.put(service_of(4, **affinity))
    node.store.put(endpoints_of(4, [FIRST, SECOND]))
    node.store.put(service_of(5, both))
    node.store.put(service_of(6, ("SCTP",)))
    node.store.put(service_of(7))
    node.store.put(endpoints_of(7, [DEAD, FIRST]))
    # With policy Local, a failed connect is retried on the node's own endpoints only.
    node.store.put(service_of(9, internalTrafficPolicy="Local"))
    retried = endpoints_of(9, [DEAD, FIRST, SECOND])
    retried["endpoints"][2]["nodeName"] = "node2"
    node.store.put(retried)
    node.store.put(service_of(8))
    node.store.put(endpoints_of(8, [cluster_ip(8)], port=80))
    node.start()

    udp = socket.SOCK_DGRAM
    assert answering(cluster_ip(1), 80) == {FIRST, SECOND}
    assert answering(cluster_ip(1), 80, kind=udp) == {FIRST, SECOND}
    assert answering("fd00:10:96::1", 80) == {SIX} == answering("fd00:10:96::1", 80, kind=udp)
    assert answering(NODE_IP, 30080) == answering("127.0.0.1", 30080) == answering(OTHER, 80) == {FIRST, SECOND}
    assert answering("198.51.100.2", 80, source=OUTSIDE) == {FIRST, SECOND}
    with pytest.raises(ConnectionResetError):
        ask("198.51.100.2", 80, source=OTHER)
    assert answering(cluster_ip(3), 80) == answering(NODE_IP, 30081) == {FIRST}
    assert answering(cluster_ip(9), 80, 12) == {FIRST}
    for source in (OUTSIDE, OTHER, NODE_IP):
        assert len(answering(cluster_ip(4), 80, source=source)) == 1
    assert refusal(cluster_ip(5), 80)
    assert refusal(cluster_ip(5), 80, udp)
    assert answering(cluster_ip(7), 80, tries=6) == {FIRST}
    with pytest.raises(ConnectionResetError):
        ask(cluster_ip(8), 80)
    reason = "is not served: userspace mode forwards TCP and UDP only, not SCTP"
    assert node.log.count(f"default/svc-6:p80-sctp (80/SCTP) {reason}") == 1
    assert "endpoints see the address of this node" in node.log

    status = node.status()
    assert status["mode"] == "userspace"
    assert status["forwarding"]["connectFailures"] >= 1
    assert status["forwarding"]["refusedBySourceRange"] == 1
    assert status["forwarding"]["unbound"] == []
    assert node.metric("kubenode_proxy_forwarding_connections_total") == status["forwarding"]["accepted"]
    assert node.metric("kubenode_proxy_table_entries") > 10
    # Only IPv6 addresses are avoided as the source of the node's own connections; IPv4 ones are never chosen anyway.
    assert dict(addresses_on(DEVICE))["fd00:10:96::1"] is True

    explained = node.run("explain", "default/svc-2", "--control", str(node.scratch / "agent.sock"))
    assert f"listen tcp 198.51.100.2:80 from {OUTSIDE}/32 forward {FIRST}:8080,{SECOND}:8080" in explained.stdout
    assert "the agent forwards the connection" in explained.stdout
    assert node.differences()["changed"] is False


def test_an_address_of_an_api_server_stays_where_it_is(node, backends):
    """On an interface of the node it would hide the server at every port, also from the agent."""
    node.store.put(manifests.api_servers([OTHER, REMOTE_SERVER], 6443))
    node.store.put(service_of(1, externalIPs=[OUTSIDE, OTHER, REMOTE_SERVER, "203.0.113.40"]))
    node.store.put(endpoints_of(1, [FIRST]))
    node.start()
    wait_for(lambda: answering(cluster_ip(1), 80) == {FIRST}, 20.0)
    assert {address for address, _deprecated in addresses_on(DEVICE)} == {cluster_ip(1), "203.0.113.40"}
    assert answering(OTHER, 80) == answering("203.0.113.40", 80) == {FIRST}
    node.store.delete("EndpointSlice", "default", "kubernetes")
    wait_for(lambda: REMOTE_SERVER in dict(addresses_on(DEVICE)))


def test_external_changes_are_repaired_and_cleanup_leaves_nothing(node, backends):
    before = system.run(["ip", "address"])
    node.store.put(service_of(1))
    node.store.put(endpoints_of(1, [FIRST]))
    node.start()
    assert answering(cluster_ip(1), 80) == {FIRST}
    system.ip_batch([f"address del {cluster_ip(1)}/32 dev {DEVICE}", f"address add 10.96.9.9/32 dev {DEVICE}"])
    wait_for(lambda: [address for address, _avoided in addresses_on(DEVICE)] == [cluster_ip(1)], 30.0)
    assert answering(cluster_ip(1), 80) == {FIRST}
    system.ip_batch([f"link del {DEVICE}"])
    wait_for(lambda: [address for address, _avoided in addresses_on(DEVICE)] == [cluster_ip(1)], 30.0)
    assert answering(cluster_ip(1), 80) == {FIRST}
    # Deleting the Service removes its address and closes the connections through it.
    with socket.create_connection((cluster_ip(1), 80)) as sock:
        sock.settimeout(10)
        sock.sendall(b"x")
        assert sock.recv(100)
        node.store.delete("Service", "default", "svc-1")
        wait_for(lambda: not addresses_on(DEVICE), 30.0)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    assert node.stop() == 0
    assert node.run("cleanup", "--state-directory", str(node.scratch / "run")).returncode == 0
    assert system.run(["ip", "address"]) == before


def test_a_port_in_use_by_another_program_costs_one_listener(node, backends):
    node.store.put(service_of(1, externalIPs=[OUTSIDE]))
    node.store.put(endpoints_of(1, [FIRST]))
    with socket.create_server((OUTSIDE, 80)):
        node.start()
        assert answering(cluster_ip(1), 80) == {FIRST}
        wait_for(lambda: f"listener={OUTSIDE}:80/TCP" in node.log, 20.0)
        assert "another program uses this address and port" in node.log
        assert node.status()["forwarding"]["unboundCount"] == 1
        assert "error" not in node.status()["lastError"]
    wait_for(lambda: node.status()["forwarding"]["unboundCount"] == 0, 20.0)
    assert answering(OUTSIDE, 80) == {FIRST}


def test_stopping_drains_open_connections_and_leaks_no_descriptor(node, backends):
    node.store.put(service_of(1, ("TCP", "UDP")))
    node.store.put(endpoints_of(1, [FIRST, SECOND], ("TCP", "UDP")))
    node.start()
    answering(cluster_ip(1), 80)
    process = node.process.pid
    known = len(descriptors(process))
    for _round in range(50):
        answering(cluster_ip(1), 80, 4)
    wait_for(lambda: node.status()["forwarding"]["connections"] == 0)
    assert len(descriptors(process)) <= known + 2
    sock = socket.create_connection((cluster_ip(1), 80))
    sock.settimeout(10)
    sock.sendall(b"one")
    assert sock.recv(100)
    ended: list[int] = []
    stopping = threading.Thread(target=lambda: ended.append(node.stop()))
    stopping.start()
    wait_for(lambda: refusal(cluster_ip(1), 80))
    sock.sendall(b"two")
    assert sock.recv(100).endswith(b"two")
    sock.close()
    stopping.join(20)
    assert ended == [0]
    assert "stopped; nothing is forwarded until the next start" in node.log
    # A restarted agent serves again.
    node.start()
    assert answering(cluster_ip(1), 80) == {FIRST, SECOND}


def test_a_change_of_mode_ends_connections_and_leaves_nothing(node, backends):
    node.store.put(service_of(1))
    node.store.put(endpoints_of(1, [FIRST]))
    node.start()
    with socket.create_connection((cluster_ip(1), 80)) as sock:
        sock.settimeout(10)
        sock.sendall(b"one")
        assert sock.recv(100)
        node.write_configuration(mode="nftables")
        node.process.send_signal(signal.SIGHUP)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    wait_for(lambda: node.status().get("mode") == "nftables", 30.0)
    wait_for(lambda: DEVICE not in system.run(["ip", "link"]), 30.0)
    assert node.status()["forwarding"]["listeners"] == 0
    assert answering(cluster_ip(1), 80) == {FIRST}
    node.write_configuration(mode="userspace")
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: node.status().get("mode") == "userspace", 30.0)
    wait_for(lambda: "kube-proxy" not in system.run(["nft", "list", "tables"]), 30.0)
    assert answering(cluster_ip(1), 80) == {FIRST}


def test_one_shot_convergence_refuses(node):
    done = node.converge("-o", "json")
    assert done.returncode not in (0, 3)
    assert "userspace mode needs the agent, which forwards the connections itself" in done.stderr + done.stdout
    assert DEVICE not in system.run(["ip", "link"])


def test_a_rollback_removes_the_addresses_of_a_dead_agent(node, backends):
    node.store.put(service_of(1))
    node.store.put(endpoints_of(1, [FIRST]))
    done = node.converge("--mode", "nftables", "--keep-states", "5")
    assert done.returncode == 0, done.stderr
    node.start()
    assert answering(cluster_ip(1), 80) == {FIRST}
    node.stop()
    assert addresses_on(DEVICE)
    # In that state nothing was programmed.
    done = node.run("rollback", "--to", "1", "--accept-loss", *node.places)
    assert done.returncode == 0, done.stderr
    assert DEVICE not in system.run(["ip", "link"])
    assert "kube-proxy" not in system.run(["nft", "list", "tables"])
