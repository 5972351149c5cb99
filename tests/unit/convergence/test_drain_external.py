# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which connections are external, and which of them are in use."""

from __future__ import annotations

import json
import socket

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import Service, ServicePort
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.drain import external
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.client_flow import ClientFlow
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.connections import parse_clients
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic

SERVICE = Service(
    namespace="shop",
    name="web",
    type="LoadBalancer",
    cluster_ip_v4="10.96.0.7",
    cluster_ip_v6="fd00::7",
    ports=(ServicePort("http", "TCP", 80, 30080), ServicePort("dns", "UDP", 53)),
    external_ips=("198.51.100.1",),
    load_balancer_ips=("203.0.113.7", "2001:db8::7"),
)
SETTINGS = [
    DataplaneSettings(
        IPV4,
        local_traffic=LocalTraffic("cidr", "10.244.0.0/16"),
        node_port_addresses=("192.0.2.1",),
        node_addresses=(("lo", "127.0.0.1"), ("eth0", "192.0.2.1")),
    ),
    DataplaneSettings(IPV6, node_port_addresses=("fd00:192::1",), node_addresses=(("eth0", "fd00:192::1"),)),
]


def place(address: str, port: int) -> bytes:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.inet_pton(kind, address) + port.to_bytes(2, "big")


def document(tracked: bool = True):
    return json.loads(json.dumps(external.serving_document([SERVICE], SETTINGS, ["fd00:244::/64"], tracked)))


@pytest.mark.parametrize(
    ("protocol", "address", "port", "included"),
    [
        ("TCP", "203.0.113.7", 80, True),
        ("TCP", "2001:db8::7", 80, True),
        ("UDP", "198.51.100.1", 53, True),
        ("UDP", "198.51.100.1", 80, False),
        ("TCP", "192.0.2.1", 30080, True),
        ("TCP", "fd00:192::1", 30080, True),
        ("UDP", "192.0.2.1", 30080, False),
        ("TCP", "192.0.2.2", 30080, False),
        ("TCP", "10.96.0.7", 80, False),
        ("TCP", "203.0.113.8", 80, False),
    ],
)
def test_node_ports_of_this_node_and_external_addresses_are_counted(protocol, address, port, included):
    assert external.parse_serving(document()).includes(protocol, place(address, port)) is included


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("192.0.2.1", True),
        ("10.244.3.4", True),
        ("10.245.0.1", False),
        ("192.0.2.2", False),
        ("fd00:244::5", True),
        ("fd00:245::5", False),
    ],
)
def test_connections_of_this_node_and_of_pods_are_not_external(address, inside):
    assert external.parse_serving(document()).is_inside(place(address, 40000)) is inside


def test_a_connection_that_several_parts_know_counts_once(monkeypatch):
    web, client = place("203.0.113.7", 80), "198.51.100.200"
    tracked = [
        ClientFlow("TCP", place(client, 1), web, True),
        ClientFlow("TCP", place(client, 2), web, False),
        ClientFlow("TCP", place("10.244.0.9", 3), web, True),
    ]
    monkeypatch.setattr(external, "client_flows", lambda family, _wanted: tracked if family == IPV4 else [])
    monkeypatch.setattr(external, "client_connections", lambda family, _wanted: tracked[:1] if family == IPV4 else [])
    serving = external.parse_serving(document())
    found = external.external_connections(
        serving, [["TCP", client, 4, "203.0.113.7", 80], ["TCP", client, 5, "::1", 1]]
    )
    assert sorted(item[1][-1] for item in found.used) == [1, 4]
    assert sorted(item[1][-1] for item in found.known) == [1, 2, 4]
    assert external.describe(min(found.used)) == {
        "protocol": "TCP",
        "client": "198.51.100.200:1",
        "destination": "203.0.113.7:80",
    }
    untracked = external.external_connections(external.parse_serving(document(False))._replace(tracked=False), [])
    assert len(untracked.used) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"places": [["TCP", "203.0.113.7", 1 << 20]]},
        {"places": 7},
        {"nodePorts": [["TCP", "x"]]},
        {"nodeAddresses": [3]},
        {"inside": None},
    ],
)
def test_an_answer_that_is_not_valid_is_an_error(change):
    with pytest.raises(ProxyError, match="is not valid"):
        external.parse_serving({**document(), **change})
    with pytest.raises(ProxyError, match="is not valid"):
        external.parse_serving({})


def test_an_answer_about_connections_that_is_not_valid_is_an_error(monkeypatch):
    monkeypatch.setattr(external, "client_flows", lambda *_: [])
    monkeypatch.setattr(external, "client_connections", lambda *_: [])
    for forwarded in ([1], [["TCP"]], 5, [["TCP", "a", -1, "b", 2]]):
        with pytest.raises(ProxyError, match="is not valid"):
            external.external_connections(external.parse_serving(document()), forwarded)


def test_connections_of_ipvs():
    lines = [
        "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData",
        "TCP C6336464 C350 CB007107 0050 0AF40105 1F90 ESTABLISHED     899",
        "TCP C6336464 C351 CB007107 0050 0AF40105 1F90 TIME_WAIT        50",
        "TCP C6336464 0000 CB007107 0050 0AF40105 1F90 NONE           9000",
        "UDP C6336464 C352 CB007107 0035 0AF40105 1F90 UDP             299",
    ]
    found = list(parse_clients(lines, IPV4))
    client, web = "198.51.100.100", "203.0.113.7"
    assert found == [
        ClientFlow("TCP", place(client, 0xC350), place(web, 80), True),
        ClientFlow("TCP", place(client, 0xC351), place(web, 80), False),
        ClientFlow("UDP", place(client, 0xC352), place(web, 53), True),
    ]
    assert list(parse_clients(lines, IPV6)) == []
