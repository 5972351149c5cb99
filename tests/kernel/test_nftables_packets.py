# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nftables mode checked with real packets: which endpoint answers, which source it sees, how a connection is refused.

The test's own network namespace is the node. Connected to it are a pod with an endpoint (``l``), a pod that is a
client, another node's pod with an endpoint (``r``), and an external client. Every answer returns through the node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import (
    Endpoint,
    ServicePortInfo,
    ServicePortName,
)
from tests.lab.background import Background
from tests.lab.system import inside, ip_batch

FAMILIES = ("IPv4", "IPv6")
# Frontends that drop packets, which takes seconds to detect.
LONG = (pytest.param("IPv4", marks=pytest.mark.full), "IPv6")
NAMES: Dict[str, Dict[str, str]] = {
    "IPv4": {
        "N": "192.168.0.2", "N2": "192.168.1.2", "L": "10.0.0.1", "P": "10.0.0.2", "R": "10.1.0.1",
        "X": "203.0.113.2", "XB": "203.0.113.130", "pods": "10.0.0.0/8", "services": "172.30.0.0/16",
        "range": "203.0.113.0/25", "nodes": "192.168.0.0/24", "second": "192.168.1.0/24", "everything": "0.0.0.0/0",
    },
    "IPv6": {
        "N": "fd00:168::2", "N2": "fd00:169::2", "L": "fd00:10::1", "P": "fd00:10::2", "R": "fd00:10::101",
        "X": "2001:db8:113::2", "XB": "2001:db8:113:1::2", "pods": "fd00:10::/64", "services": "fd00:30::/112",
        "range": "2001:db8:113::/64", "nodes": "fd00:168::/64", "second": "fd00:169::/64", "everything": "::/0",
    },
}  # fmt: skip
CLUSTER_IPS = {"IPv4": "172.30.0.{}", "IPv6": "fd00:30::{}"}
VIPS = {"IPv4": "1.2.3.{}", "IPv6": "2001:db8:51::{}"}
PORTS = (80, 8443, 5353)

SERVER = """
import selectors, socket, sys
name, family, ports = sys.argv[1], int(sys.argv[2]), [int(port) for port in sys.argv[3].split(",")]
chooser = selectors.DefaultSelector()
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for port in ports:
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        if kind == socket.SOCK_STREAM:
            sock.listen(64)
        chooser.register(sock, 1, (kind, port))
print("ready", flush=True)
while True:
    for key, _ in chooser.select():
        kind, port = key.data
        if kind == socket.SOCK_STREAM:
            peer, address = key.fileobj.accept()
            peer.sendall(f"{name}:{port} {address[0]}".encode())
            peer.close()
        else:
            _, address = key.fileobj.recvfrom(100)
            key.fileobj.sendto(f"{name}:{port} {address[0]}".encode(), address)
"""

CLIENT = """
import concurrent.futures, json, socket, sys
def attempt(probe):
    # A refusal that is back before connect() is done counts only when the packet sent a second later is refused too.
    protocol, source, target, port = probe
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM) as sock:
        sock.settimeout(4)
        try:
            if source:
                sock.bind((source, 0))
            sock.connect((target, port))
            if protocol == "udp":
                sock.send(b"x")
            said = sock.recv(200).decode().split()
        except (ConnectionRefusedError, PermissionError):
            return "reject"
        except (TimeoutError, socket.timeout):
            return "drop"
        return said[0] + ("" if said[1] == sock.getsockname()[0] else "+M")
probes = json.load(sys.stdin)
with concurrent.futures.ThreadPoolExecutor(int(sys.argv[1])) as pool:
    print(json.dumps(list(pool.map(attempt, probes))))
"""


class Network:
    """The namespaces around the node and their servers."""

    def __init__(self) -> None:
        self.prefix = f"knft{os.getpid()}"
        self.servers: List[Background] = []
        # Duplicate address detection would keep link-local addresses unusable for a second.
        self._run("sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0")
        places = {"l": ["L"], "p": ["P"], "r": ["R"], "x": ["X", "XB"]}
        self.place = {name: place for place, names in places.items() for name in names}
        for place, names in places.items():
            self._attach(place, names)
        self._run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        # The tests count ICMP errors, so rate limiting must not suppress any.
        self._run("sysctl", "-qw", "net.ipv4.icmp_ratemask=0")
        Path("/proc/sys/net/ipv6/icmp/ratemask").write_text("\n", encoding="ascii")
        ip_batch([f"address add {names['N2']} dev lo" for names in NAMES.values()])
        for place in ("l", "r"):
            for family in FAMILIES:
                self._serve(place, family)

    @staticmethod
    def _run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    def _attach(self, place: str, names: List[str]) -> None:
        space = f"{self.prefix}-{place}"
        ip_batch([f"netns add {space}"])
        with inside(f"/run/netns/{space}"):
            Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0", encoding="ascii")
        ip_batch([f"link add v{place} type veth peer name eth0 netns {space}", f"link set v{place} up"])
        far, near = ["link set lo up", "link set eth0 up"], []
        for family in FAMILIES:
            own = NAMES[family]
            bits, nodad = ("128", " nodad") if family == "IPv6" else ("32", "")
            far += [f"address add {own[name]}/{bits} dev eth0{nodad}" for name in names]
            far += [f"route add {own['N']} dev eth0", f"route add default via {own['N']} dev eth0"]
            near.append(f"address add {own['N']}/{bits} dev v{place}{nodad}")
            near += [f"route add {own[name]} dev v{place} src {own['N']}" for name in names]
            if place == "x":
                near.append(f"route add default via {own['X']} dev vx onlink")
        ip_batch(far, space)
        ip_batch(near)

    def _serve(self, place: str, family: str) -> None:
        number = 10 if family == "IPv6" else 2
        words = ["ip", "netns", "exec", f"{self.prefix}-{place}", sys.executable, "-c", SERVER]
        if family == "IPv6":
            words[-1] = SERVER.replace("sock.bind", "sock.setsockopt(41, 26, 1); sock.bind")
        words += [place, str(number), ",".join(map(str, PORTS))]
        self.servers.append(Background(words))

    def close(self) -> None:
        for server in self.servers:
            server.close()
        ip_batch([f"netns delete {self.prefix}-{place}" for place in set(self.place.values())])

    def outcomes(
        self, family: str, flows: Sequence[Tuple[str, str, int, str]], tries: int = 16, at_once: int = 24
    ) -> List[Set[str]]:
        """Return the set of outcomes of each flow (sender, target address, port, protocol)."""
        by_place: Dict[str, List[Tuple[int, List[Any]]]] = {}
        for position, (sender, target, port, protocol) in enumerate(flows):
            source = "" if sender == "N" else NAMES[family].get(sender, sender)
            place = self.place.get(sender, "")
            probe = [protocol, source, target, port]
            by_place.setdefault(place, []).extend([(position, probe)] * tries)
        found: List[Set[str]] = [set() for _ in flows]
        for place, probes in by_place.items():
            words = ["ip", "netns", "exec", f"{self.prefix}-{place}"] if place else []
            said = subprocess.run(
                [*words, sys.executable, "-c", CLIENT, str(at_once)],
                input=json.dumps([probe for _position, probe in probes]),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for (position, _probe), outcome in zip(probes, json.loads(said.stdout)):
                found[position].add(outcome)
        return found


@pytest.fixture()
def network() -> Iterator[Network]:
    made = Network()
    try:
        yield made
    finally:
        made.close()


def route(
    family: str, number: int, endpoints: str = "LR", port: int = 80, target: int = 80, **changes: Any
) -> ServicePortInfo:
    """Return a service port with the named endpoints; ``local`` follows from the policies."""
    chosen = tuple(Endpoint(NAMES[family][name], target, is_local=name == "L") for name in endpoints)
    fields: Dict[str, Any] = {
        "key": ServicePortName("ns", f"svc{number}", f"p{port}", "TCP"),
        "family": family,
        "cluster_ip": CLUSTER_IPS[family].format(number),
        "port": port,
        "node_port": 0,
        "external_ips": (),
        "load_balancer_ips": (),
        "source_ranges": None,
        "affinity_seconds": 0,
        "internal_local": False,
        "external_local": False,
        "externally_accessible": True,
        "uses_cluster_endpoints": True,
        "uses_local_endpoints": True,
        "health_check_node_port": 0,
        "endpoints": chosen,
        "cluster": chosen,
        "local": (),
        "reachable": chosen,
        "has_any": bool(chosen),
    }
    if changes.get("external_local") or changes.get("internal_local"):
        fields["local"] = tuple(endpoint for endpoint in chosen if endpoint.is_local)
    fields.update(changes)
    return ServicePortInfo(**fields)


def settings(family: str, **changes: Any) -> DataplaneSettings:
    names = NAMES[family]
    fields: Dict[str, Any] = {
        "node_name": "test-node",
        "node_ip": names["N"],
        "local_traffic": LocalTraffic("cidr", names["pods"]),
        "node_port_cidrs": (f"{names['N']}/{128 if family == 'IPv6' else 32}",),
        "node_port_addresses": (names["N"],),
        "service_cidrs": (names["services"],),
    }
    fields.update(changes)
    return DataplaneSettings(family, **fields)


def program(routes: Sequence[ServicePortInfo], chosen: DataplaneSettings) -> None:
    """Program the kernel with the service ports, and check that it holds the desired state."""
    desired = RENDERING.desired_tables({item.key: item for item in routes}, chosen)["table objects"]
    with NftablesResource(chosen.family) as resource:
        resource.apply(difference(resource.observe(), desired))
        assert not difference(resource.observe(), desired)


def _as_seen(expected: Dict[Tuple[str, str, int, str], Set[str]]) -> Dict[Tuple[str, str, int, str], Set[str]]:
    """Connections of the node already have the source address that masquerading sets."""
    return {
        flow: {outcome.replace("+M", "") for outcome in outcomes} if flow[0] == "N" else outcomes
        for flow, outcomes in expected.items()
    }


def check(network: Network, family: str, expected: Dict[Tuple[str, str, int, str], Set[str]], tries: int = 16) -> None:
    """Check that flows have all the outcomes expected of them, and no other.

    The choice among endpoints is random: only flows that have not shown every expected outcome yet are tried again.
    """
    wanted = _as_seen(expected)
    found: Dict[Tuple[str, str, int, str], Set[str]] = {flow: set() for flow in wanted}
    for _round in range(4):
        unsettled = [flow for flow, outcomes in found.items() if outcomes < wanted[flow]]
        for flow, outcomes in zip(unsettled, network.outcomes(family, unsettled, tries)):
            found[flow] |= outcomes
    assert found == wanted


def with_port(outcomes: str, port: int = 80) -> Set[str]:
    """Expand ``l r +M`` to ``{l:80+M, r:80+M}``; ``reject`` and ``drop`` are kept."""
    words = outcomes.split()
    suffix = "+M" if "+M" in words else ""
    return {word if word in ("reject", "drop") else f"{word}:{port}{suffix}" for word in words if word != "+M"}


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
    subprocess.run(["ip", "address", "add", vips[1], "dev", "lo"], check=True)
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


def _matrix(detector: bool, masquerade_all: bool) -> Dict[Tuple[str, str], Tuple[str, str, str]]:
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
    policies: Tuple[Dict[str, Any], ...] = ({}, {"external_local": True}, {"internal_local": True})
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
    changes: Dict[str, Any] = {"masquerade_all": masquerade_all}
    if not detector:
        changes["local_traffic"] = None
    program(routes, settings(family, **changes))
    expected: Dict[Tuple[str, str, int, str], Set[str]] = {}
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
    wanted = _as_seen(expected)
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
