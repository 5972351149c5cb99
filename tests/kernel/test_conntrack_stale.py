# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stale conntrack entries: exactly those are deleted, verified with the conntrack tool."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED, KUBE_PROXY
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack import messages, stale
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.socket import ConntrackSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.flows import Frontend
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import (
    Endpoint,
    ServicePortInfo,
    ServicePortName,
)
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_ip, endpoint_slice, service
from tests.lab import manifests
from tests.lab.system import ip_batch
from tests.waiting import wait_for

FAMILIES = ("IPv4", "IPv6")


def delete_stale(sock, family, routes, behaviour=KUBE_PROXY, released=()):
    return stale.delete_stale(sock, family, routes, behaviour, released)


ADDRESSES = {
    "IPv4": {"client": "192.0.2.1", "cluster": "10.96.0.10", "vip": "198.51.100.1", "external": "203.0.113.1",
             "node": "172.18.0.2", "live": "10.244.1.5", "dead": "10.244.9.9", "other": "10.96.0.99"},
    "IPv6": {"client": "2001:db8::1", "cluster": "fd00:96::10", "vip": "2001:db8:51::1", "external": "2001:db8:2::1",
             "node": "fd00:172::2", "live": "fd00:244:1::5", "dead": "fd00:244:9::9", "other": "fd00:96::99"},
}  # fmt: skip


def route_to(family: str, endpoints: tuple[Endpoint, ...], protocol: str = "UDP") -> ServicePortInfo:
    names = ADDRESSES[family]
    return ServicePortInfo(
        key=ServicePortName("kube-system", "dns", "dns", protocol),
        family=family,
        cluster_ip=names["cluster"],
        port=53,
        node_port=30053,
        external_ips=(names["external"],),
        load_balancer_ips=(names["vip"],),
        source_ranges=None,
        affinity_seconds=0,
        internal_local=False,
        external_local=False,
        externally_accessible=True,
        uses_cluster_endpoints=True,
        uses_local_endpoints=False,
        health_check_node_port=0,
        endpoints=endpoints,
        cluster=endpoints,
        local=(),
        reachable=endpoints,
        has_any=bool(endpoints),
    )


def insert(family: str, protocol: str, to: str, port: int, source: str, source_port: int, client_port: int) -> None:
    client = ADDRESSES[family]["client"]
    command = ["conntrack", "-I", "-p", protocol, "-t", "600", "-s", client, "-d", to]
    command += ["--sport", str(client_port), "--dport", str(port), "-r", source, "-q", client]
    command += ["--reply-port-src", str(source_port), "--reply-port-dst", str(client_port)]
    if protocol in ("tcp", "sctp"):
        command += ["--state", "ESTABLISHED", "-u", "SEEN_REPLY,ASSURED"]
    if protocol == "sctp":
        command += ["--orig-vtag", "1", "--reply-vtag", "2"]
    subprocess.run(command, check=True, capture_output=True, text=True)


def client_ports(family: str) -> set[int]:
    listed = subprocess.run(["conntrack", "-L", "-f", family.lower()], check=True, capture_output=True, text=True)
    ports: list[str] = re.findall(r"sport=(\d+)", listed.stdout)
    return set(map(int, ports[::2]))


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_stale_entries_are_deleted(family):
    names = ADDRESSES[family]
    live, dead = names["live"], names["dead"]
    keep = [
        ("udp", names["cluster"], 53, live, 5353),
        ("udp", names["node"], 30053, live, 5353),
        ("udp", names["other"], 53, dead, 5353),
        ("udp", names["cluster"], 54, dead, 5353),
        ("tcp", names["cluster"], 53, dead, 5353),
    ]
    gone = [
        ("udp", names["cluster"], 53, dead, 5353),
        ("udp", names["cluster"], 53, live, 53),
        ("udp", names["cluster"], 53, names["cluster"], 53),
        ("udp", names["vip"], 53, dead, 5353),
        ("udp", names["external"], 53, dead, 5353),
        ("udp", names["node"], 30053, dead, 5353),
        ("udp", names["other"], 30053, dead, 5353),
    ]
    for number, (protocol, to, port, source, source_port) in enumerate(keep + gone, 40000):
        insert(family, protocol, to, port, source, source_port, number)
    assert client_ports(family) == set(range(40000, 40000 + len(keep) + len(gone)))
    routes = [route_to(family, (Endpoint(live, 5353, ready=False), Endpoint(dead, 5353, serving=False)))]
    with ConntrackSocket() as sock:
        assert delete_stale(sock, family, routes) == len(gone)
        assert client_ports(family) == set(range(40000, 40000 + len(keep)))
        assert delete_stale(sock, family, routes) == 0


def udp_service(number: int, **spec: Any) -> manifests.Object:
    port = manifests.port(53, name="p53", protocol="UDP")
    return manifests.service(f"svc-{number}", cluster_ip(number), [port], namespace="default", **spec)


def begin_without_nat(address: str, client_port: int) -> None:
    insert("IPv4", "udp", address, 53, address, 53, client_port)
    subprocess.run(["nft", "delete", "table", "ip", "kube-proxy"], check=True)


def test_all_udp_services_are_examined_after_one_lost_something_or_tables_were_repaired(tmp_path):
    """A client that sends to an address before it is a Service's has an entry that leads nowhere."""
    external = ADDRESSES["IPv4"]["external"]
    node = AgentNode(tmp_path, "nftables")
    try:
        for number in (1, 2, 3):
            node.store.put(udp_service(number))
        for number in (1, 2):
            node.store.put(endpoint_slice(number, ports=(53,), target=5353, protocol="UDP"))
        node.start()
        insert("IPv4", "udp", external, 53, external, 53, 40000)
        node.store.put(udp_service(1, externalIPs=[external]))
        wait_for(lambda: external in node.kernel_text("nftables"))
        assert 40000 in client_ports("IPv4")
        node.store.put(endpoint_slice(2, count=1, ports=(53,), target=5353, protocol="UDP"))
        wait_for(lambda: 40000 not in client_ports("IPv4"), 20.0)
        for number in (2, 3):
            insert("IPv4", "udp", cluster_ip(number), 53, cluster_ip(number), 53, 40000 + number)
        node.store.delete("Service", "default", "svc-3")
        wait_for(lambda: not client_ports("IPv4") & {40002, 40003}, 20.0)

        # While a table is missing, flows begin without NAT; they must not keep their entries once it is repaired.
        begin_without_nat(cluster_ip(1), 40001)
        wait_for(lambda: 40001 not in client_ports("IPv4"), 10.0)
        assert cluster_ip(1) in node.kernel_text("nftables")
        node.stop()
        node.converge()
        begin_without_nat(cluster_ip(1), 40002)
        node.converge()
        assert 40002 not in client_ports("IPv4")
    finally:
        node.close()


@pytest.mark.parametrize("start", ["agent", "run"])
def test_a_port_that_was_used_while_no_endpoint_answered_connects_once_the_cluster_is_followed_again(tmp_path, start):
    """After a rollback to a state whose pods are gone, clients repeat requests that lead nowhere."""
    node, frontend = AgentNode(tmp_path, "nftables"), (cluster_ip(1), 80)
    serving = endpoint_ip(1, 1)
    ip_batch(["link add pods type veth peer name end", "link set end up", "link set pods up arp off"])
    ip_batch([f"address add {address}/32 dev lo" for address in (serving, "192.0.2.1")])
    ip_batch(["route add 10.0.0.0/8 dev pods"])

    def connects(seconds: float) -> bool:
        """Return whether the client, with the port that it always uses, is answered."""
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.bind(("192.0.2.1", 40000))
            client.settimeout(seconds)
            return client.connect_ex(frontend) == 0

    try:
        node.store.put(service(1))
        node.store.put(udp_service(2))
        node.store.put(endpoint_slice(2, ports=(53,), target=5353, protocol="UDP"))
        node.store.put(endpoint_slice(1, count=1))
        node.start()
        node.stop()
        assert not connects(0.1) and 40000 in client_ports("IPv4")
        node.store.put(endpoint_slice(1, count=1, first=1))
        with socket.create_server((serving, 8080)):
            if start == "agent":
                node.start()
            else:
                node.converge()
            assert connects(5.0)
    finally:
        node.close()


def test_only_the_entry_of_the_matching_zone_is_deleted():
    names = ADDRESSES["IPv4"]
    common = ["-p", "udp", "-t", "600", "-s", names["client"], "-d", names["cluster"]]
    common += ["--sport", "40000", "--dport", "53"]
    for zone, source in (("7", names["dead"]), ("8", names["live"])):
        answer = ["-r", source, "-q", names["client"], "--reply-port-src", "5353", "--reply-port-dst", "40000"]
        subprocess.run(["conntrack", "-I", "-w", zone, *common, *answer], check=True, capture_output=True)
    with ConntrackSocket() as sock:
        assert delete_stale(sock, "IPv4", [route_to("IPv4", (Endpoint(names["live"], 5353),))]) == 1
    listed = subprocess.run(["conntrack", "-L"], check=True, capture_output=True, text=True).stdout
    assert "zone=8" in listed and "zone=7" not in listed


def test_of_a_large_table_only_stale_entries_are_parsed_completely(monkeypatch):
    """Parsing every attribute of each entry would multiply the time that a table with a million entries takes."""
    names = ADDRESSES["IPv4"]
    lines = []
    for number in range(5000):
        client, port = f"192.0.{number // 250}.{number % 250 + 1}", 1024 + number
        source = names["dead"] if number % 500 == 0 else names["live"]
        lines.append(
            f"-I -p udp -t 600 -s {client} -d {names['cluster']} --sport {port} --dport 53 "
            f"-r {source} -q {client} --reply-port-src 5353 --reply-port-dst {port}"
        )
    loaded = subprocess.run(["conntrack", "-R", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    parsed, original = [], messages.parse_attributes

    def counted(*arguments):
        parsed.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(messages, "parse_attributes", counted)
    with ConntrackSocket() as sock:
        assert delete_stale(sock, "IPv4", [route_to("IPv4", (Endpoint(names["live"], 5353),))]) == 10
    assert len(parsed) == 10


@pytest.mark.parametrize("is_serving", [None, False])
@pytest.mark.parametrize(
    ("protocol", "behaviour", "kept"),
    [
        ("udp", KUBE_PROXY, set()),
        ("udp", CORRECTED, set()),
        ("tcp", KUBE_PROXY, {40000, 40001, 40002}),
        ("sctp", KUBE_PROXY, {40000, 40001, 40002}),
        # The node's port is also one of another host, to which an association was forwarded without being redirected.
        ("sctp", CORRECTED, {40002}),
    ],
)
def test_flows_of_services_without_serving_endpoints_are_deleted(protocol, behaviour, kept, is_serving):
    """As by kube-proxy since 1.37 for UDP."""
    names = ADDRESSES["IPv4"]
    insert("IPv4", protocol, names["cluster"], 53, names["dead"], 5353, 40000)
    insert("IPv4", protocol, names["node"], 30053, names["dead"], 5353, 40001)
    insert("IPv4", protocol, names["other"], 30053, names["other"], 30053, 40002)
    endpoints = () if is_serving is None else (Endpoint(names["dead"], 5353, serving=is_serving),)
    with ConntrackSocket() as sock:
        assert delete_stale(sock, "IPv4", [route_to("IPv4", endpoints, protocol.upper())], behaviour) == 3 - len(kept)
    assert client_ports("IPv4") == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_flows_to_released_addresses_are_deleted(family):
    names = ADDRESSES[family]
    for number, protocol in enumerate(("udp", "sctp", "tcp", "tcp"), 40000):
        insert(family, protocol, names["cluster"], 53 + (number == 40003), names["live"], 5353, number)
    insert(family, "udp", names["cluster"], 53, names["cluster"], 53, 40004)
    insert(family, "udp", names["vip"], 53, names["live"], 5353, 40005)
    released = [Frontend(protocol, names["cluster"], 53) for protocol in ("UDP", "SCTP", "TCP")]
    # Another Service, or another port of this one, has the address now.
    taken = Frontend("UDP", names["vip"], 53)
    with ConntrackSocket() as sock:
        routes = [route_to(family, (Endpoint(names["live"], 5353),))._replace(cluster_ip=names["other"])]
        assert delete_stale(sock, family, routes, CORRECTED, [*released, taken]) == 4
    assert client_ports(family) == {40003, 40005}


def test_tcp_connections_through_other_services_are_kept_when_one_is_released():
    names = ADDRESSES["IPv4"]
    insert("IPv4", "tcp", names["cluster"], 53, names["dead"], 5353, 40000)
    insert("IPv4", "tcp", names["other"], 53, names["dead"], 5353, 40001)
    routes = [route_to("IPv4", (Endpoint(names["live"], 5353),), protocol="TCP")]
    with ConntrackSocket() as sock:
        assert delete_stale(sock, "IPv4", routes, CORRECTED, [Frontend("TCP", names["other"], 53)]) == 1
    assert client_ports("IPv4") == {40000}
