# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The packets and bytes that nftables mode counts, compared with what connection tracking counts of the same flows."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
from pathlib import Path
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import unpacked
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import NETLINK_NETFILTER
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.traffic.element_counters import (
    counted_elements,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import PROTOCOL_NAMES
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortName
from tests.kernel.packet_network import CLUSTER_IPS, FAMILIES, NAMES, VIPS, Network, network, program, route, settings
from tests.waiting import wait_for

__all__ = ["network"]  # a fixture
NODE_PORT = 30080
#: Address (empty for node ports), protocol, port and direction -> packets and bytes.
Counts = dict[tuple[str, str, int, str], tuple[int, int]]
END = r"src=(\S+) dst=(\S+) sport=(\d+) dport=(\d+) packets=(\d+) bytes=(\d+)"
CONNECTION = re.compile(rf"^(\S+) .*?{END} .*?{END}", re.MULTILINE)


def counted(family: str) -> Counts:
    """Return what the elements have counted, without those that no packet has looked up."""
    found: Counts = {}
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        for name in ("service-traffic", "nodeport-traffic"):
            for element in counted_elements(sock, family, "kube-proxy", name):
                address, rest = element.key[:-12], element.key[-12:]
                place = (PROTOCOL_NAMES[rest[0]], int.from_bytes(rest[4:6], "big"), ("in", "out")[rest[8]])
                if element.packets:
                    found[(unpacked(address) if address else "", *place)] = (element.packets, element.bytes)
    return found


def tracked(family: str) -> Counts:
    """Return what connection tracking has counted of the connections whose destination was replaced."""
    words = ["conntrack", "-L", "-f", family.lower()]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found: Counts = {}
    for protocol, *ends in CONNECTION.findall(text):
        _client, address, _port, port, *sent = ends[:6]
        endpoint, _to, endpoint_port, _to_port, *answered = ends[6:]
        if (address, port) == (endpoint, endpoint_port):
            continue
        place = ("" if int(port) == NODE_PORT else address, protocol, int(port))
        for direction, (packets, size) in (("in", sent), ("out", answered)):
            before = found.get((*place, direction), (0, 0))
            found[(*place, direction)] = (before[0] + int(packets), before[1] + int(size))
    return found


@contextlib.contextmanager
def program_of_the_node(family: str) -> Iterator[None]:
    """Answer connections to the node itself."""
    kind = socket.AF_INET6 if family == "IPv6" else socket.AF_INET
    server = socket.create_server((NAMES[family]["N"], 9090), family=kind, backlog=64)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, client = server.accept()
                with connection:
                    connection.sendall(f"n:9090 {client[0]}".encode())

    threading.Thread(target=serve, daemon=True).start()
    yield
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_packet_is_counted_once(network: Network, family: str) -> None:
    vip = VIPS[family].format(3)
    sole, many, dns, sticky, here = (CLUSTER_IPS[family].format(number) for number in (1, 2, 3, 4, 5))
    udp = ServicePortName("ns", "dns", "dns", "UDP")
    routes = [
        route(family, 1, "L"),
        route(family, 2, port=8080, target=8443, node_port=NODE_PORT, load_balancer_ips=(vip,)),
        route(family, 3, "R", port=53, target=5353, key=udp),
        route(family, 4, affinity_seconds=60),
        route(family, 5, "N", target=9090),
    ]
    chosen = settings(family, count_bytes=True)
    program(routes, chosen)
    Path("/proc/sys/net/netfilter/nf_conntrack_acct").write_text("1")
    flows = [
        # Through the node, from a pod to itself, from the node, and to the node.
        *(("X", sole, 80, "tcp"), ("L", sole, 80, "tcp"), ("N", sole, 80, "tcp")),
        ("X", here, 80, "tcp"),
        *(("X", many, 8080, "tcp"), ("X", vip, 8080, "tcp"), ("X", NAMES[family]["N"], NODE_PORT, "tcp")),
        *(("P", dns, 53, "udp"), ("N", dns, 53, "udp"), ("P", sticky, 80, "tcp")),
        # To no Service.
        ("P", NAMES[family]["R"], 80, "tcp"),
    ]
    with program_of_the_node(family):
        for outcomes in network.outcomes(family, flows, tries=4):
            assert not outcomes & {"drop", "reject"}

    def is_equal() -> bool:
        """Return whether both have counted the same."""
        return counted(family) == tracked(family)

    wait_for(is_equal, 10)
    found = counted(family)
    places = {(sole, "tcp", 80), (many, "tcp", 8080), (vip, "tcp", 8080), ("", "tcp", NODE_PORT), (dns, "udp", 53)}
    assert {place[:3] for place in found} == places | {(sticky, "tcp", 80), (here, "tcp", 80)}
    # The counters do not depend on endpoints.
    program([route(family, 1, ""), *routes[1:4], route(family, 5, "LR")], chosen)
    assert counted(family) == found
    program(routes[:4], chosen)
    assert counted(family) == {place: counts for place, counts in found.items() if place[0] != here}


def test_a_connection_between_programs_of_the_node_is_counted_once() -> None:
    """Its packets leave the node and arrive at it; only what leaves is counted."""
    address = CLUSTER_IPS["IPv4"].format(1)
    here = NAMES["IPv4"]["L"]
    subprocess.run(["ip", "address", "add", f"{here}/32", "dev", "lo"], check=True)
    subprocess.run(["ip", "route", "add", "172.30.0.0/16", "dev", "lo", "src", here], check=True)
    program([route("IPv4", 1, "L")], settings("IPv4", count_bytes=True))
    Path("/proc/sys/net/netfilter/nf_conntrack_acct").write_text("1")
    with socket.create_server((here, 80)) as server, socket.create_connection((address, 80), 10) as client:
        accepted, _peer = server.accept()
        with accepted:
            client.sendall(b"x" * 1000)
            assert accepted.recv(2000)
    wait_for(lambda: counted("IPv4") == tracked("IPv4"), 10)
    assert counted("IPv4")[address, "tcp", 80, "in"][1] > 1000
