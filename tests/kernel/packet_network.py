# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node between pods and clients in network namespaces, and checks of the packets that it passes on.

The test's own network namespace is the node. Connected to it are a pod with an endpoint (``l``), a pod that is a
client, another node's pod with an endpoint (``r``), and an external client. Every answer returns through the node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, Sequence

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
from tests.unit.rendering.iptables.routes import PLAIN

FAMILIES = ("IPv4", "IPv6")
NAMES: dict[str, dict[str, str]] = {
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
        self.servers: list[Background] = []
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
        ip_batch([f"address add {NAMES['IPv4']['N2']} dev lo", f"address add {NAMES['IPv6']['N2']} dev lo nodad"])
        for place in ("l", "r"):
            for family in FAMILIES:
                self._serve(place, family)

    @staticmethod
    def _run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    def _attach(self, place: str, names: list[str]) -> None:
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
        """Stop the servers and remove the namespaces."""
        for server in self.servers:
            server.close()
        ip_batch([f"netns delete {self.prefix}-{place}" for place in set(self.place.values())])

    def outcomes(
        self, family: str, flows: Sequence[tuple[str, str, int, str]], tries: int = 16, at_once: int = 24
    ) -> list[set[str]]:
        """Return the set of outcomes of each flow (sender, target address, port, protocol)."""
        by_place: dict[str, list[tuple[int, list[Any]]]] = {}
        for position, (sender, target, port, protocol) in enumerate(flows):
            source = "" if sender == "N" else NAMES[family].get(sender, sender)
            place = self.place.get(sender, "")
            probe = [protocol, source, target, port]
            by_place.setdefault(place, []).extend([(position, probe)] * tries)
        found: list[set[str]] = [set() for _ in flows]
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
    """Provide the network."""
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
    fields: dict[str, Any] = {
        "key": ServicePortName("ns", f"svc{number}", f"p{port}", "TCP"),
        "family": family,
        "cluster_ip": CLUSTER_IPS[family].format(number),
        "port": port,
        **PLAIN,
        "externally_accessible": True,
        "uses_cluster_endpoints": True,
        "uses_local_endpoints": True,
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
    """Return the settings of the node."""
    names = NAMES[family]
    fields: dict[str, Any] = {
        "node_name": "test-node",
        "node_ip": names["N"],
        "local_traffic": LocalTraffic("cidr", names["pods"]),
        "node_port_cidrs": (f"{names['N']}/{128 if family == 'IPv6' else 32}",),
        "node_port_addresses": (names["N"],),
        "service_cidrs": (names["services"],),
        "localhost_rejected": ("tcp", "udp", "sctp"),
    }
    fields.update(changes)
    return DataplaneSettings(family, **fields)


def program(routes: Sequence[ServicePortInfo], chosen: DataplaneSettings) -> None:
    """Program the kernel with the service ports, and check that it holds the desired state."""
    desired = RENDERING.desired_tables({item.key: item for item in routes}, chosen)["table objects"]
    with NftablesResource(chosen.family) as resource:
        resource.apply(difference(resource.observe(), desired))
        assert not difference(resource.observe(), desired)


def as_seen(expected: dict[tuple[str, str, int, str], set[str]]) -> dict[tuple[str, str, int, str], set[str]]:
    """Return expected outcomes as endpoints see them: the node already has the address that masquerading sets."""
    return {
        flow: {outcome.replace("+M", "") for outcome in outcomes} if flow[0] == "N" else outcomes
        for flow, outcomes in expected.items()
    }


def check(network: Network, family: str, expected: dict[tuple[str, str, int, str], set[str]], tries: int = 16) -> None:
    """Check that flows have all the outcomes expected of them, and no other.

    The choice among endpoints is random: only flows that have not shown every expected outcome yet are tried again.
    """
    wanted = as_seen(expected)
    found: dict[tuple[str, str, int, str], set[str]] = {flow: set() for flow in wanted}
    for _round in range(4):
        unsettled = [flow for flow, outcomes in found.items() if outcomes < wanted[flow]]
        for flow, outcomes in zip(unsettled, network.outcomes(family, unsettled, tries)):
            found[flow] |= outcomes
    assert found == wanted


def with_port(outcomes: str, port: int = 80) -> set[str]:
    """Expand ``l r +M`` to ``{l:80+M, r:80+M}``; ``reject`` and ``drop`` are kept."""
    words = outcomes.split()
    suffix = "+M" if "+M" in words else ""
    return {word if word in ("reject", "drop") else f"{word}:{port}{suffix}" for word in words if word != "+M"}
