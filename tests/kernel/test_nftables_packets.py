# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nftables mode checked with real packets: which endpoint answers, the source it sees, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import Endpoint, ServicePortName
from tests.kernel.packet_network import (
    CLIENT,
    CLUSTER_IPS,
    FAMILIES,
    NAMES,
    SERVER,
    VIPS,
    Network,
    as_seen,
    check,
    network,
    program,
    route,
    settings,
    with_port,
)
from tests.lab.background import Background
from tests.lab.system import ip_batch

__all__ = ["network"]  # a fixture
# Frontends that drop packets, which takes seconds to detect.
LONG = (pytest.param("IPv4", marks=pytest.mark.full), "IPv6")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_endpoints(network: Network, family: str) -> None:
    vip, external = VIPS[family].format(4), VIPS[family].format(5)
    cluster_ip = CLUSTER_IPS[family].format(41)
    program(
        [route(family, 41, "", node_port=3001, load_balancer_ips=(vip,), external_ips=(external,))], settings(family)
    )
    targets = [("P", cluster_ip, 80), ("X", external, 80), ("P", NAMES[family]["N"], 3001)]
    targets += [("X", NAMES[family]["N"], 3001), ("P", vip, 80), ("X", vip, 80), ("N", cluster_ip, 80)]
    check(network, family, {(*target, "tcp"): {"reject"} for target in targets}, tries=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_node_reaches_a_cluster_ip_that_ipvs_mode_has_left(network: Network, family: str) -> None:
    """Its connections come from that address; without a detector of pods nothing else masquerades them."""
    cluster_ip = CLUSTER_IPS[family].format(41)
    ip_batch([f"address add {cluster_ip}/{128 if family == 'IPv6' else 32} dev lo"])
    # An endpoint of another node answers the node's own address only.
    ip_batch([f"{'-6 ' if family == 'IPv6' else ''}route delete default"], f"{network.prefix}-r")
    program([route(family, 41, "R")], settings(family, local_traffic=None))
    assert network.outcomes(family, [("N", cluster_ip, 80, "tcp")], tries=2) == [{"r:80+M"}]


@pytest.mark.parametrize("family", FAMILIES)
def test_cluster_ips(network: Network, family: str) -> None:
    one, two, free = (CLUSTER_IPS[family].format(number) for number in (41, 42, 50))
    dns = ServicePortName("ns", "svc42", "dns", "UDP")
    routes = [
        route(family, 41, "L"),
        route(family, 42),
        route(family, 42, port=443, target=8443),
        route(family, 42, port=53, target=5353),
        route(family, 42, port=53, target=5353, key=dns),
    ]
    program(routes, settings(family))
    expected = {
        ("P", one, 80, "tcp"): {"l:80"},
        ("L", one, 80, "tcp"): {"l:80+M"},
        ("P", two, 80, "tcp"): {"l:80", "r:80"},
        ("P", two, 443, "tcp"): {"l:8443", "r:8443"},
        ("P", two, 53, "tcp"): {"l:5353", "r:5353"},
        ("P", two, 53, "udp"): {"l:5353", "r:5353"},
        ("P", two, 80, "udp"): {"reject"},
        ("P", one, 443, "tcp"): {"reject"},
        ("N", one, 443, "tcp"): {"reject"},
        ("P", free, 80, "tcp"): {"drop"},
    }
    check(network, family, expected)


@pytest.mark.parametrize("family", LONG)
def test_source_ranges(network: Network, family: str) -> None:
    names, vips = NAMES[family], (VIPS[family].format(4), VIPS[family].format(5))
    more = ["nodad"] if family == "IPv6" else []
    subprocess.run(["ip", "address", "add", vips[1], "dev", "lo", *more], check=True)
    service = route(
        family, 41, "R", node_port=3001, load_balancer_ips=vips, source_ranges=(names["nodes"], names["range"])
    )
    program([service], settings(family))
    expected = {
        ("P", CLUSTER_IPS[family].format(41), 80, "tcp"): {"r:80"},
        ("X", names["N"], 3001, "tcp"): {"r:80+M"},
        ("XB", names["N"], 3001, "tcp"): {"r:80+M"},
        (vips[1], vips[1], 80, "tcp"): {"r:80+M"},
    }
    for vip in vips:
        expected["X", vip, 80, "tcp"] = {"r:80+M"}
        expected["XB", vip, 80, "tcp"] = {"drop"}
        expected["P", vip, 80, "tcp"] = {"drop"}
    expected["N", vips[0], 80, "tcp"] = {"r:80+M"}
    check(network, family, expected, tries=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", ["primary", "several", "all"])
def test_node_ports(network: Network, family: str, variant: str) -> None:
    names = NAMES[family]
    chosen = {
        "primary": settings(family),
        "several": settings(
            family, node_port_cidrs=(names["nodes"], names["second"]), node_port_addresses=(names["N"], names["N2"])
        ),
        "all": settings(family, node_port_cidrs=(), node_port_addresses=(names["N"], names["N2"])),
    }[variant]
    program([route(family, 41, node_port=3001)], chosen)
    both = {"l:80+M", "r:80+M"}
    loopback = "::1" if family == "IPv6" else "127.0.0.1"
    expected = {
        ("P", CLUSTER_IPS[family].format(41), 80, "tcp"): {"l:80", "r:80"},
        ("X", names["N"], 3001, "tcp"): both,
        ("N", names["N"], 3001, "tcp"): both,
        ("X", names["N2"], 3001, "tcp"): {"reject"} if variant == "primary" else both,
        ("N", loopback, 3001, "tcp"): {"reject"},
    }
    check(network, family, expected)


def _matrix(detector: bool, masquerade_all: bool) -> dict[tuple[str, str], tuple[str, str, str]]:
    """Return the outcomes by (sender, frontend): for policies Cluster, external policy Local, internal policy Local."""
    marked = ("l r +M", "l r +M", "l +M")
    plain = ("l r", "l r", "l")
    outside = marked if detector or masquerade_all else plain
    circuit = "l r" if detector else "l"
    return {
        ("P", "cluster"): marked if masquerade_all else plain,
        ("P", "node"): ("l r +M", circuit, "l r +M"),
        ("P", "vip"): ("l r +M", circuit, "l r +M"),
        ("N", "cluster"): outside,
        ("N", "node"): ("l r +M", "l r +M", "l r +M"),
        ("N", "vip"): ("l r +M", "l r +M", "l r +M"),
        ("X", "cluster"): outside,
        ("X", "node"): ("l r +M", "l", "l r +M"),
        ("X", "vip"): ("l r +M", "l", "l r +M"),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("affinity", [0, 3600])
@pytest.mark.parametrize(("detector", "masquerade_all"), [(True, False), (False, False), (True, True), (False, True)])
def test_masquerading(network: Network, family: str, detector: bool, masquerade_all: bool, affinity: int) -> None:
    policies: tuple[dict[str, Any], ...] = ({}, {"external_local": True}, {"internal_local": True})
    routes = [
        route(
            family,
            number,
            node_port=3000 + number,
            load_balancer_ips=(VIPS[family].format(number),),
            affinity_seconds=affinity,
            **policy,
        )
        for number, policy in enumerate(policies, 1)
    ]
    changes: dict[str, Any] = {"masquerade_all": masquerade_all}
    if not detector:
        changes["local_traffic"] = None
    program(routes, settings(family, **changes))
    expected: dict[tuple[str, str, int, str], set[str]] = {}
    for (sender, frontend), outcomes in _matrix(detector, masquerade_all).items():
        for number, outcome in enumerate(outcomes, 1):
            target = {
                "cluster": (CLUSTER_IPS[family].format(number), 80),
                "node": (NAMES[family]["N"], 3000 + number),
                "vip": (VIPS[family].format(number), 80),
            }[frontend]
            expected[(sender, *target, "tcp")] = with_port(outcome)
    if not affinity:
        check(network, family, expected)
        return
    # First one connection after the other: concurrent first connections may each choose, as with kube-proxy. A client
    # that a Service's local-only frontend sent elsewhere than the other frontends then has an affinity to both.
    flows = list(expected)
    wanted = as_seen(expected)
    for flow, chosen in zip(flows, network.outcomes(family, flows, 1, at_once=1)):
        assert len(chosen) == 1 and chosen <= wanted[flow]
    for flow, found in zip(flows, network.outcomes(family, flows, 4)):
        assert len(found) == 1 and found <= wanted[flow]


@pytest.mark.parametrize("family", LONG)
def test_policy_local_without_local_endpoints(network: Network, family: str) -> None:
    vip, names = VIPS[family].format(4), NAMES[family]
    routes = [
        route(family, 41, "R", node_port=3001, load_balancer_ips=(vip,), external_local=True),
        route(family, 42, "R", internal_local=True),
    ]
    program(routes, settings(family))
    expected = {
        ("X", vip, 80, "tcp"): {"drop"},
        ("X", names["N"], 3001, "tcp"): {"drop"},
        ("P", vip, 80, "tcp"): {"r:80"},
        ("P", CLUSTER_IPS[family].format(41), 80, "tcp"): {"r:80"},
        ("P", CLUSTER_IPS[family].format(42), 80, "tcp"): {"drop"},
    }
    check(network, family, expected, tries=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_affinity_keeps_a_client_until_its_endpoint_is_removed(network: Network, family: str) -> None:
    target = CLUSTER_IPS[family].format(41)
    flow = [("P", target, 80, "tcp")]
    program([route(family, 41, "LR", affinity_seconds=60)], settings(family))
    first = network.outcomes(family, flow, 1)[0]
    assert network.outcomes(family, flow, 12)[0] == first
    kept, other = ("L", "r:80") if first == {"l:80"} else ("R", "l:80")
    program([route(family, 41, "LR".replace(kept, ""), affinity_seconds=60)], settings(family))
    assert network.outcomes(family, flow, 6)[0] == {other}
    program([route(family, 41, "LR", affinity_seconds=60)], settings(family))
    assert network.outcomes(family, flow, 12)[0] == {other}


@pytest.mark.parametrize("count", [3, 5, 9])
def test_every_endpoint_is_equally_likely(network: Network, count: int) -> None:
    """Cover endpoints on several ports of one server, and counts that are not powers of two."""
    ports = [8000 + number for number in range(count)]
    endpoints = tuple(Endpoint(NAMES["IPv4"]["L"], port, is_local=True) for port in ports)
    program([route("IPv4", 41, "", cluster=endpoints, reachable=endpoints, has_any=True)], settings("IPv4"))
    listening = ["l", "2", ",".join(map(str, ports))]
    words = ["ip", "netns", "exec", f"{network.prefix}-l", sys.executable, "-c", SERVER, *listening]
    network.servers.append(Background(words))
    probes = [["tcp", "", CLUSTER_IPS["IPv4"].format(41), 80]] * (200 * count)
    said = subprocess.run(
        ["ip", "netns", "exec", f"{network.prefix}-p", sys.executable, "-c", CLIENT, "24"],
        input=json.dumps(probes), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    answers = json.loads(said.stdout)
    seen = {name: answers.count(name) for name in set(answers)}
    assert set(seen) == {f"l:{port}" for port in ports}
    # Each is expected 200 times, with a standard deviation of 14.
    assert all(120 <= number <= 280 for number in seen.values()), seen
