# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Takeover from a real kube-proxy, and changes of mode, while clients connect as fast as they can.

The node of the conformance lab starts with what kube-proxy programmed when the case was recorded, or with what 1.38
would have programmed by its source. Then it converges to nftables mode, to iptables mode and back again. No connection
may fail or have the wrong source, and nothing of the old layout may be left but named counters, which the first change
to another mode removes with the table.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Iterator, NamedTuple, Optional, Sequence

import pytest

from tests.conformance.wirelab.cases import load_case
from tests.conformance.wirelab.topology import Topology
from tests.lab import recorded, system

ROOT = Path(__file__).resolve().parents[2]
CASE = load_case(str(ROOT / "tests" / "conformance" / "cases" / "nodeport-cluster"))
SERVERS = ("pod1", "peer")
SERVED = {"tcp": 8080, "udp": 5353}
# TCP retransmits a lost SYN after a second: a connection that takes longer lost a packet.
CONNECT_SECONDS = 0.9
UDP_SECONDS = 5.0
# Leave processor time for the convergence: some thousand connections a second in all.
PAUSE_SECONDS = 0.001


class Flow(NamedTuple):
    """New connections from a place to a frontend; ``own``: whether the endpoint must see the client's own address."""

    place: str
    protocol: str
    address: str
    port: int
    own: bool


FLOWS = (
    Flow("pod2", "tcp", "10.96.2.1", 80, True),
    Flow("pod2", "udp", "10.96.2.1", 53, True),
    Flow("client", "tcp", "172.18.0.2", 30201, False),
    Flow("client", "udp", "172.18.0.2", 30202, False),
    Flow("pod2", "tcp", "fd00:10:96::201", 80, True),
    Flow("client", "tcp", "fd00:172:18::2", 30201, False),
)


def connect(flow: Flow) -> str:
    """Open one connection and return what is wrong with it; empty if nothing is."""
    family = socket.AF_INET6 if ":" in flow.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if flow.protocol == "tcp" else socket.SOCK_DGRAM) as sock:
        try:
            if flow.protocol == "tcp":
                # Close with a reset: a masqueraded port in TIME_WAIT would make a new connection count as lost.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.settimeout(CONNECT_SECONDS)
            sock.connect((flow.address, flow.port))
            sock.settimeout(30.0 if flow.protocol == "tcp" else UDP_SECONDS)
            if flow.protocol == "udp":
                sock.send(b"x")
            seen = sock.recv(100).decode()
        except OSError as error:
            return str(error) or type(error).__name__
        own = sock.getsockname()[0]
    return "" if (seen == own) == flow.own else f"the endpoint saw {seen}, the client is {own}"


class Traffic:
    """Endpoints that answer with the source they see, and a thread per flow that opens one connection after another."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._end = threading.Event()
        self._asked = threading.Event()
        self._clients: list[threading.Thread] = []
        self._servers: list[threading.Thread] = []
        self.wrong: list[str] = []
        self.made: dict[Flow, int] = dict.fromkeys(FLOWS, 0)
        for place in SERVERS:
            ready = threading.Event()
            self._servers.append(self._start(self._serve, place, ready))
            assert ready.wait(10)
        for flow in FLOWS:
            self._clients.append(self._start(self._ask, flow))
        self._warm_up()

    def _warm_up(self) -> None:
        """Wait until every flow has worked for a while: before that, neighbours are still unresolved."""
        deadline = time.monotonic() + 20
        while any(made < 50 for made in self.made.values()):
            assert time.monotonic() < deadline, (self.made, self.wrong)
            time.sleep(0.05)
        assert all(" timed out" in problem for problem in self.wrong) and len(self.wrong) <= len(FLOWS), self.wrong
        self.wrong.clear()

    @staticmethod
    def _start(target, *arguments) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread

    def _enter(self, place: str) -> None:
        system.enter(f"/run/netns/{self._topology.full_name(place)}", system.CLONE_NEWNET)

    def _serve(self, place: str, ready: threading.Event) -> None:
        self._enter(place)
        with selectors.DefaultSelector() as chooser:
            for protocol, port in SERVED.items():
                kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
                for family, everything in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                    sock = socket.socket(family, kind)
                    if family == socket.AF_INET6:
                        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    # A peer's pods are one route without addresses, so the kernel would answer from another address.
                    if protocol == "udp" and place == "peer" and family == socket.AF_INET:
                        sock.bind(("10.244.2.11", port))
                    else:
                        sock.bind((everything, port))
                    if protocol == "tcp":
                        sock.listen(1024)
                    chooser.register(sock, selectors.EVENT_READ, protocol)
            ready.set()
            while not self._end.is_set():
                for key, _events in chooser.select(0.1):
                    self._answer(chooser, key.fileobj, key.data)
            for key in list(chooser.get_map().values()):
                key.fileobj.close()

    @staticmethod
    def _answer(chooser, sock, what: str) -> None:
        """Send a client its address; the client closes first."""
        if what == "tcp":
            accepted, peer = sock.accept()
            accepted.sendall(peer[0].encode())
            chooser.register(accepted, selectors.EVENT_READ, "accepted")
        elif what == "udp":
            _data, peer = sock.recvfrom(100)
            sock.sendto(peer[0].encode(), peer)
        else:
            chooser.unregister(sock)
            sock.close()

    def _ask(self, flow: Flow) -> None:
        self._enter(flow.place)
        while not self._asked.wait(PAUSE_SECONDS):
            started = time.monotonic()
            problem = connect(flow)
            if problem:
                self.wrong.append(f"{started:.3f} {flow.place} -> {flow.protocol} {flow.address}: {problem}")
            self.made[flow] += 1

    def close(self) -> None:
        self._asked.set()
        for thread in self._clients:
            thread.join(40)
        self._end.set()
        for thread in self._servers:
            thread.join(10)


class TakenOver:
    """The node under test: loads recorded state, and converges."""

    def __init__(self, topology: Topology, directory: Path) -> None:
        self._inside = ["ip", "netns", "exec", topology.full_name("node")]
        self._directory = directory
        snapshot = {"apiVersion": "v1", "kind": "List", "items": CASE.snapshots()[0]}
        (directory / "snapshot.json").write_text(json.dumps(snapshot))

    def run(self, *command: str, text: Optional[str] = None) -> str:
        done = subprocess.run([*self._inside, *command], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def load(self, mode: str, variant: str, later: bool) -> None:
        """Load what kube-proxy had programmed."""

        def run(command: Sequence[str], text: Optional[str]) -> str:
            return self.run(*command, text=text)

        recorded.load(Path(CASE.file(f"state-{mode}.txt")), run, variant, later=later)

    def converge(self, mode: str) -> None:
        """Run one convergence as the conformance suite does."""
        configuration = CASE.proxy_configuration(mode, "", None)
        (self._directory / "config.yaml").write_text(json.dumps(configuration))
        environment = {
            "LAB_CONFIG": str(self._directory / "config.yaml"),
            "LAB_SNAPSHOT": str(self._directory / "snapshot.json"),
            "LAB_NODE": CASE.node,
            "LAB_MODE": mode,
            "LAB_DIR": str(self._directory),
        }
        runner = ROOT / "tests" / "conformance" / "runners" / "oneshot"
        self.run("env", *(f"{name}={value}" for name, value in environment.items()), str(runner))

    def left_of_iptables(self) -> list[str]:
        """Return the chains and rules of iptables mode, in either variant and family."""
        return [
            line
            for family in ("iptables", "ip6tables")
            for variant in ("legacy", "nft")
            for line in self.run(f"{family}-{variant}-save").splitlines()
            if "KUBE-" in line
        ]

    def tables(self) -> list[str]:
        """Return the families of the tables named kube-proxy."""
        return re.findall(r"^table (\S+) kube-proxy$", self.run("nft", "list", "tables"), re.MULTILINE)

    def check(self, mode: str) -> None:
        """Check that only state of this mode exists."""
        if mode == "nftables":
            assert self.left_of_iptables() == []
            assert sorted(self.tables()) == ["ip", "ip6"]
            listed = self.run("nft", "list", "ruleset")
            # Maps and chains that kube-proxy has and this project does not.
            assert not re.search(r"(map (service-ips|service-nodeports|firewall-ips)|chain \S+default/web\S*) ", listed)
            assert not re.search(r"chain localhost-nodeport-reject-", listed)
            assert "10.244.1.11 . 8080" in listed
        else:
            assert self.tables() == []
            assert any("10.244.1.11:8080" in line for line in self.left_of_iptables())


@pytest.fixture()
def topology() -> Iterator[Topology]:
    made = Topology(f"-takeover{os.getpid()}")
    made.build()
    try:
        yield made
    finally:
        made.destroy()


@pytest.mark.parametrize(
    ("found", "variant", "later"),
    [
        ("nftables", "", False),
        pytest.param("nftables", "", True, id="nftables-1.38"),
        ("iptables", "nft", False),
        pytest.param("iptables", "legacy", False, marks=pytest.mark.full),
    ],
    ids=lambda item: item or "-",
)
def test_no_connection_is_lost_from_kube_proxy_to_nftables_mode_to_iptables_mode_and_back(
    topology, tmp_path, found, variant, later
) -> None:
    node = TakenOver(topology, tmp_path)
    node.load(found, variant, later)
    traffic = Traffic(topology)
    try:
        for mode in ("nftables", "iptables", "nftables"):
            before = dict(traffic.made)
            time.sleep(0.3)
            node.converge(mode)
            time.sleep(0.3)
            assert traffic.wrong == [], mode
            node.check(mode)
            assert all(traffic.made[flow] - before[flow] >= 20 for flow in FLOWS), traffic.made
    finally:
        traffic.close()
    assert traffic.wrong == []
    assert sum(traffic.made.values()) >= 500
