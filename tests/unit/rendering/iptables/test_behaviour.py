# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The effect of rendered chains on packets, traced: the behaviours that kube-proxy 1.36's own tests pin.

There is one node with the addresses NODE, and the pods' range 10.0.0.0/8. ``+M`` means masqueraded.
"""

from __future__ import annotations

from typing import Any, Iterable, Optional

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo

from .routes import by_key, endpoint, route
from .tracer import Tracer

POD, EXTERNAL, EXTERNAL_B, LOOPBACK = "10.0.0.2", "203.0.113.2", "203.0.113.130", "127.0.0.1"
NODE, NODE_2 = "192.168.0.2", "192.168.1.2"
LOCAL_ADDRESSES = (NODE, NODE_2, "192.168.99.11", "2001:db8::1", "2001:db8:1::2")
CLUSTER_IP, EXTERNAL_IP, VIP = "172.30.0.41", "192.168.99.11", "1.2.3.4"
DETECTOR = LocalTraffic("cidr", "10.0.0.0/8")


def settings(**fields: Any) -> DataplaneSettings:
    defaults: dict[str, Any] = {"family": "IPv4", "node_ip": NODE, "local_traffic": DETECTOR}
    return DataplaneSettings(**{**defaults, **fields})


def tracer(*routes: ServicePortInfo, facts: Optional[DataplaneSettings] = None) -> Tracer:
    return Tracer(RENDERING.desired_tables(by_key(*routes), facts or settings())["chains"], LOCAL_ADDRESSES)


def masqueraded(outcomes: Iterable[str]) -> set[str]:
    return {f"{outcome} +M" for outcome in outcomes}


# -- without endpoints


@pytest.mark.parametrize("source", [POD, EXTERNAL])
@pytest.mark.parametrize("destination, port", [(CLUSTER_IP, 80), (EXTERNAL_IP, 80), (NODE, 3001), (VIP, 80)])
def test_without_endpoints_everything_is_rejected(source: str, destination: str, port: int) -> None:
    one = route(node_port=3001, external_ips=(EXTERNAL_IP,), load_balancer_ips=(VIP,))
    assert tracer(one).trace(source, destination, port) == {"REJECT"}


# -- cluster IPs

LOCAL_1, REMOTE_1 = "10.180.0.1", "10.180.2.1"


def cluster_ip_services() -> Tracer:
    def both(port: int) -> list[Any]:
        return [endpoint(LOCAL_1, port, local=True), endpoint(REMOTE_1, port)]

    second: dict[str, Any] = {"namespace": "ns2", "cluster_ip": "172.30.0.42"}
    return tracer(
        route("svc1", [endpoint(LOCAL_1, local=True)], port_name="http"),
        route("svc2", both(80), port_name="http", **second),
        route("svc2", both(8443), port_name="https", port=443, **second),
        route("svc2", both(53), port_name="dns-udp", protocol="UDP", port=53, **second),
        route("svc2", both(5353), port_name="dns-tcp", port=53, **second),
        route("svc2", both(53), port_name="dns-sctp", protocol="SCTP", port=53, **second),
    )


@pytest.mark.parametrize(
    ("source", "destination", "port", "protocol", "expected"),
    [
        ("10.180.0.2", CLUSTER_IP, 80, "tcp", {"10.180.0.1:80"}),
        ("10.180.0.1", CLUSTER_IP, 80, "tcp", {"10.180.0.1:80 +M"}),
        ("10.180.0.2", "172.30.0.42", 80, "tcp", {"10.180.0.1:80", "10.180.2.1:80"}),
        ("10.180.0.2", "172.30.0.42", 443, "tcp", {"10.180.0.1:8443", "10.180.2.1:8443"}),
        ("10.180.0.2", "172.30.0.42", 53, "tcp", {"10.180.0.1:5353", "10.180.2.1:5353"}),
        ("10.180.0.2", "172.30.0.42", 53, "udp", {"10.180.0.1:53", "10.180.2.1:53"}),
        ("10.180.0.2", "172.30.0.42", 53, "sctp", {"10.180.0.1:53", "10.180.2.1:53"}),
        ("10.180.0.2", "172.30.0.42", 80, "udp", {"-"}),
        ("10.180.0.2", CLUSTER_IP, 443, "tcp", {"-"}),
        ("10.180.0.2", "172.30.0.50", 80, "tcp", {"-"}),
    ],
)
def test_cluster_ips(source: str, destination: str, port: int, protocol: str, expected: set[str]) -> None:
    assert cluster_ip_services().trace(source, destination, port, protocol) == expected


# -- source ranges


@pytest.mark.parametrize(
    ("source", "destination", "port", "expected"),
    [
        (POD, CLUSTER_IP, 80, "10.180.0.1:80"),
        (EXTERNAL, NODE, 3001, "10.180.0.1:80 +M"),
        (EXTERNAL_B, NODE, 3001, "10.180.0.1:80 +M"),
        (EXTERNAL, VIP, 80, "10.180.0.1:80 +M"),
        (EXTERNAL, "5.6.7.8", 80, "10.180.0.1:80 +M"),
        (EXTERNAL_B, VIP, 80, "DROP"),
        (EXTERNAL_B, "5.6.7.8", 80, "DROP"),
        (POD, VIP, 80, "DROP"),
        (POD, "5.6.7.8", 80, "DROP"),
        (NODE, VIP, 80, "10.180.0.1:80 +M"),
        (NODE, "5.6.7.8", 80, "10.180.0.1:80 +M"),
        (VIP, VIP, 80, "10.180.0.1:80 +M"),
        ("5.6.7.8", "5.6.7.8", 80, "10.180.0.1:80 +M"),
        (VIP, "5.6.7.8", 80, "10.180.0.1:80 +M"),
    ],
)
def test_source_ranges(source: str, destination: str, port: int, expected: str) -> None:
    one = route(
        endpoints=[endpoint(LOCAL_1)],
        node_port=3001,
        load_balancer_ips=(VIP, "5.6.7.8"),
        source_ranges=("192.168.0.0/24", "203.0.113.0/25"),
    )
    assert tracer(one).trace(source, destination, port) == {expected}


def test_source_ranges_that_do_not_cover_the_node() -> None:
    one = route(endpoints=[endpoint(LOCAL_1)], load_balancer_ips=(VIP,), source_ranges=("203.0.113.0/25",))
    assert tracer(one).trace(NODE, VIP, 80) == {"DROP"}
    assert tracer(one).trace(VIP, VIP, 80) == {"DROP"}


def test_a_source_range_of_length_zero_allows_all() -> None:
    one = route(endpoints=[endpoint(LOCAL_1)], load_balancer_ips=(VIP,), source_ranges=("0.0.0.0/0",))
    assert tracer(one).trace(EXTERNAL_B, VIP, 80) == {"10.180.0.1:80 +M"}


def test_refused_source_without_endpoints_is_rejected() -> None:
    one = route(load_balancer_ips=(VIP,), source_ranges=("203.0.113.0/25",))
    assert tracer(one).trace(EXTERNAL_B, VIP, 80) == {"REJECT"}


# -- node ports

TWO = {"10.180.0.1:80", "10.180.2.1:80"}
TWO_V6 = {"[fd00:10:180::1]:80", "[fd00:10:180::2:1]:80"}
NODE_PORT_VARIANTS: dict[str, dict[str, Any]] = {
    "IPv4, localhost on": {},
    "IPv4, localhost off": {"localhost_node_ports": False},
    "IPv4, localhost off, addresses with loopback": {
        "localhost_node_ports": False,
        "node_port_cidrs": ("192.168.0.0/24", "127.0.0.1/32"),
        "node_port_addresses": ("127.0.0.1", NODE),
    },
    "IPv4, addresses": {
        "localhost_node_ports": False,
        "node_port_cidrs": ("192.168.0.0/24", "192.168.1.0/24"),
        "node_port_addresses": (NODE, NODE_2),
    },
    "IPv4, localhost on, addresses with loopback": {
        "node_port_cidrs": ("192.168.0.0/24", "127.0.0.0/8"),
        "node_port_addresses": ("127.0.0.1", NODE),
    },
    "IPv6": {"family": "IPv6"},
    "IPv6, localhost off": {"family": "IPv6", "localhost_node_ports": False},
    "IPv6, addresses with loopback": {
        "family": "IPv6",
        "node_port_cidrs": ("2001:db8::/64", "::1/128"),
        "node_port_addresses": ("::1", "2001:db8::1"),
    },
}


def node_port_service(variant: str) -> Tracer:
    fields = NODE_PORT_VARIANTS[variant]
    if fields.get("family") == "IPv6":
        pods = LocalTraffic("cidr", "fd00:10::/64")
        facts = settings(**{**fields, "node_ip": "2001:db8::1", "local_traffic": pods})
        ends = [endpoint("fd00:10:180::1", local=True), endpoint("fd00:10:180::2:1")]
        return tracer(route(endpoints=ends, cluster_ip="fd00:172:30::41", node_port=3001), facts=facts)
    ends = [endpoint(LOCAL_1, local=True), endpoint(REMOTE_1)]
    return tracer(route(endpoints=ends, node_port=3001), facts=settings(**fields))


@pytest.mark.parametrize("variant", NODE_PORT_VARIANTS)
def test_node_ports_in_every_variant(variant: str) -> None:
    trace = node_port_service(variant).trace
    if "IPv6" in variant:
        assert trace("fd00:10::2", "fd00:172:30::41", 80) == TWO_V6
        assert trace("2600:5200::1", "2001:db8::1", 3001) == masqueraded(TWO_V6)
        assert trace("2001:db8::1", "2001:db8::1", 3001) == masqueraded(TWO_V6)
    else:
        assert trace(POD, CLUSTER_IP, 80) == TWO
        assert trace(EXTERNAL, NODE, 3001) == masqueraded(TWO)
        assert trace(NODE, NODE, 3001) == masqueraded(TWO)


@pytest.mark.parametrize(
    ("variant", "address", "answers"),
    [
        ("IPv4, localhost on", LOOPBACK, True),
        ("IPv4, localhost on, addresses with loopback", LOOPBACK, True),
        ("IPv4, localhost off", LOOPBACK, False),
        ("IPv4, localhost off, addresses with loopback", LOOPBACK, False),
        ("IPv4, addresses", LOOPBACK, False),
        ("IPv6", "::1", False),
        ("IPv6, localhost off", "::1", False),
        ("IPv6, addresses with loopback", "::1", False),
    ],
)
def test_node_ports_on_loopback(variant: str, address: str, answers: bool) -> None:
    expected = masqueraded(TWO) if answers else {"-"}
    assert node_port_service(variant).trace(address, address, 3001, interface="lo") == expected


@pytest.mark.parametrize(
    ("variant", "source", "address", "answers"),
    [
        ("IPv4, localhost on", EXTERNAL, NODE_2, True),
        ("IPv4, localhost off", EXTERNAL, NODE_2, True),
        ("IPv4, addresses", EXTERNAL, NODE_2, True),
        ("IPv4, localhost off, addresses with loopback", EXTERNAL, NODE_2, False),
        ("IPv6", "2600:5200::1", "2001:db8:1::2", True),
        ("IPv6, addresses with loopback", "2600:5200::1", "2001:db8:1::2", False),
    ],
)
def test_node_ports_on_a_second_address(variant: str, source: str, address: str, answers: bool) -> None:
    both = TWO_V6 if "IPv6" in variant else TWO
    assert node_port_service(variant).trace(source, address, 3001) == (masqueraded(both) if answers else {"-"})


def test_packets_to_loopback_from_elsewhere_are_dropped_where_node_ports_answer_there() -> None:
    firewall = ChainKey("filter", "KUBE-FIREWALL")
    assert tracer().trace(EXTERNAL, LOOPBACK, 8080) == {"DROP"}
    assert tracer().trace(LOOPBACK, LOOPBACK, 8080, interface="lo") == {"-"}
    assert isinstance(RENDERING.desired_tables({}, settings())["chains"][firewall], tuple)
    for fields in ({"localhost_node_ports": False}, {"family": "IPv6", "local_traffic": None}):
        assert not isinstance(RENDERING.desired_tables({}, settings(**fields))["chains"][firewall], tuple)


def test_health_check_node_port() -> None:
    one = route(node_port=3001, load_balancer_ips=(VIP,), external_local=True, health_check_node_port=30000)
    assert tracer(one).trace(EXTERNAL, NODE, 30000) == {"ACCEPT"}
    assert tracer().trace(EXTERNAL, NODE, 30000) == {"-"}


# -- traffic policies

REMOTE, LOCAL = "10.180.0.1:80", "10.180.2.1:80"


def policy_service(**fields: Any) -> Tracer:
    ends = [endpoint("10.180.0.1"), endpoint("10.180.2.1", local=True)]
    return tracer(
        route(endpoints=ends, node_port=3001, external_ips=(EXTERNAL_IP,), load_balancer_ips=(VIP,), **fields)
    )


@pytest.mark.parametrize("destination, port", [(EXTERNAL_IP, 80), (VIP, 80), (NODE, 3001)])
def test_external_traffic_policy(destination: str, port: int) -> None:
    assert policy_service(external_local=True).trace(POD, destination, port) == {REMOTE, LOCAL}
    assert policy_service(external_local=True).trace(EXTERNAL, destination, port) == {LOCAL}
    assert policy_service().trace(POD, destination, port) == masqueraded({REMOTE, LOCAL})
    assert policy_service().trace(EXTERNAL, destination, port) == masqueraded({REMOTE, LOCAL})


@pytest.mark.parametrize("external_local", [True, False])
def test_external_traffic_policy_leaves_cluster_ips_alone(external_local: bool) -> None:
    assert policy_service(external_local=external_local).trace(POD, CLUSTER_IP, 80) == {REMOTE, LOCAL}


@pytest.mark.parametrize(
    ("internal_local", "locality", "expected"),
    [
        (False, (True, False, False), {"10.0.1.1:80", "10.0.1.2:80", "10.0.1.3:80"}),
        (True, (True, False, False), {"10.0.1.1:80"}),
        (True, (True, True, False), {"10.0.1.1:80", "10.0.1.2:80"}),
        (True, (False, False, False), {"DROP"}),
    ],
)
def test_internal_traffic_policy(internal_local: bool, locality: Any, expected: set[str]) -> None:
    ends = [endpoint(f"10.0.1.{number}", local=local) for number, local in enumerate(locality, 1)]
    assert tracer(route(endpoints=ends, internal_local=internal_local)).trace(POD, CLUSTER_IP, 80) == expected
    assert tracer(route(internal_local=internal_local)).trace(POD, CLUSTER_IP, 80) == {"REJECT"}


def to(*numbers: int) -> set[str]:
    return {f"10.0.1.{number}:80" for number in numbers}


@pytest.mark.parametrize(
    ("external_local", "ends", "from_pod", "from_outside"),
    [
        (True, "1RL 2RL 3STL 4TL 5RO", to(1, 2, 5), to(1, 2)),
        (True, "2STL 3STL 4TL 5RO", to(5), to(2, 3)),
        (True, "5STO", to(5), {"DROP"}),
        (True, "4TL 5TO", {"REJECT"}, {"REJECT"}),
        (False, "1RL 2RL 3STO 4TO 5RO", to(1, 2, 5), masqueraded(to(1, 2, 5))),
        (False, "2STL 3STL 4TO 5STO", to(2, 3, 5), masqueraded(to(2, 3, 5))),
        (False, "5STO", to(5), masqueraded(to(5))),
        (False, "4TL 5TO", {"REJECT"}, {"REJECT"}),
        (True, "", {"REJECT"}, {"REJECT"}),
        (False, "", {"REJECT"}, {"REJECT"}),
    ],
)
def test_terminating_endpoints(external_local: bool, ends: str, from_pod: set[str], from_outside: set[str]) -> None:
    """Each endpoint is a number, a state (R, ST or T as in ``endpoint``) and L for local or O for elsewhere."""
    parsed = [endpoint(f"10.0.1.{end[0]}", local=end[-1] == "L", state=end[1:-1]) for end in ends.split()]
    trace = tracer(route(endpoints=parsed, load_balancer_ips=(VIP,), external_local=external_local)).trace
    assert trace(POD, CLUSTER_IP, 80) == from_pod
    assert trace(EXTERNAL, VIP, 80) == from_outside


# -- the masquerade matrix

L, R = "10.180.0.1:80", "10.180.1.1:80"
BASE = {
    ("pod", "cluster IP"): ("l r", "l r", "l"),
    ("pod", "node port"): ("l r +M", "l r", "l r +M"),
    ("pod", "VIP"): ("l r +M", "l r", "l r +M"),
    ("node", "cluster IP"): ("l r +M", "l r +M", "l +M"),
    ("node", "node port"): ("l r +M", "l r +M", "l r +M"),
    ("loopback", "node port"): ("l r +M", "l r +M", "l r +M"),
    ("node", "VIP"): ("l r +M", "l r +M", "l r +M"),
    ("external", "cluster IP"): ("l r +M", "l r +M", "l +M"),
    ("external", "node port"): ("l r +M", "l", "l r +M"),
    ("external", "VIP"): ("l r +M", "l", "l r +M"),
}
SHORT_CIRCUIT_GONE = {("pod", "node port"): ("l r +M", "l", "l r +M"), ("pod", "VIP"): ("l r +M", "l", "l r +M")}
POD_MASQUERADED = {("pod", "cluster IP"): ("l r +M", "l r +M", "l +M")}
NOT_MASQUERADED = {(source, "cluster IP"): ("l r", "l r", "l") for source in ("node", "external")}
MATRIX: dict[str, tuple[dict[str, Any], dict[Any, Any]]] = {
    "detector": ({}, BASE),
    "no detector": ({"local_traffic": None}, {**BASE, **NOT_MASQUERADED, **SHORT_CIRCUIT_GONE}),
    "masqueradeAll": ({"masquerade_all": True}, {**BASE, **POD_MASQUERADED}),
    "masqueradeAll, no detector": (
        {"masquerade_all": True, "local_traffic": None},
        {**BASE, **POD_MASQUERADED, **SHORT_CIRCUIT_GONE},
    ),
    "interface prefix": ({"local_traffic": LocalTraffic("prefix", "veth")}, BASE),
    "bridge": ({"local_traffic": LocalTraffic("bridge", "veth1")}, BASE),
}
SOURCES = {"pod": (POD, "veth1"), "node": (NODE, "lo"), "loopback": (LOOPBACK, "lo"), "external": (EXTERNAL, "eth0")}


def expected_of(text: str) -> frozenset[str]:
    suffix = " +M" if text.endswith("+M") else ""
    return frozenset(f"{ {'l': L, 'r': R}[word] }{suffix}" for word in text.split() if word != "+M")


@pytest.mark.parametrize("row", BASE, ids=" to ".join)
@pytest.mark.parametrize("case", MATRIX)
def test_masquerade_matrix(case: str, row: Any) -> None:
    fields, expected = MATRIX[case]
    ends = [endpoint("10.180.0.1", local=True), endpoint("10.180.1.1")]
    vips = ("1.2.3.4", "5.6.7.8", "9.10.11.12")
    trace = tracer(
        route("svc1", ends, cluster_ip="172.30.0.41", node_port=3001, load_balancer_ips=vips[:1]),
        route("svc2", ends, cluster_ip="172.30.0.42", node_port=3002, load_balancer_ips=vips[1:2], external_local=True),
        route("svc3", ends, cluster_ip="172.30.0.43", node_port=3003, load_balancer_ips=vips[2:], internal_local=True),
        facts=settings(**fields),
    ).trace
    source, kind = row
    address, interface = SOURCES[source]
    for number, text in enumerate(expected[row]):
        own = LOOPBACK if source == "loopback" else NODE
        destination, port = {
            "cluster IP": (f"172.30.0.4{number + 1}", 80),
            "node port": (own, 3001 + number),
            "VIP": (vips[number], 80),
        }[kind]
        assert trace(address, destination, port, interface=interface) == expected_of(text), number
