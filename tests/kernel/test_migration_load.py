# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No request is lost in a takeover, a change of mode or filter backend, an agent upgrade, and a rollback.

525 requests a second or more pass the node of the conformance lab over new and persistent TCP connections and over UDP,
in both families, from a pod, from outside and from the node itself. Every request must be answered by an endpoint
during each of these operations.

The node is a network namespace, where every connection must succeed at the first attempt. For IPVS it is a machine on
Debian's kernel (:mod:`tests.lab.qemu`), through which the load of the other places goes; since its emulated processors
stall while this machine is busy, a connection may be retried, but UDP requests are sent only once.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import pytest

from tests.conformance.wirelab.topology import Topology
from tests.kernel.loaded_node import KERNEL_MODULES, LoadedNode
from tests.lab import system
from tests.lab.load import Endpoint, Flow, Load, Tally
from tests.lab.node import Specification
from tests.lab.qemu import CALLS, Machine, open_tap

FULL = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
RATE = 500.0
# (place, kind, address, port, whether the endpoint sees the client's own address, share of the rate)
FLOWS = (
    ("pod2", "new", "10.96.2.1", 80, True, 0.2),
    ("pod2", "new", "fd00:10:96::201", 80, True, 0.1),
    ("client", "new", "172.18.0.2", 30201, False, 0.1),
    ("client", "new", "fd00:172:18::2", 30201, False, 0.05),
    ("pod2", "kept", "10.96.2.1", 80, True, 0.2),
    ("client", "kept", "172.18.0.2", 30201, False, 0.1),
    ("client", "kept", "fd00:172:18::2", 30201, False, 0.05),
    ("pod2", "udp", "10.96.2.1", 53, True, 0.1),
    ("client", "udp", "172.18.0.2", 30202, False, 0.05),
    ("pod2", "kept-udp", "10.96.2.1", 53, True, 0.05),
    ("client", "kept-udp", "172.18.0.2", 30202, False, 0.05),
)
# In ipvs mode the node itself has the ClusterIP and connects from it: a connection that it opens while another mode
# takes over loses its own address (docs/migration.md). So the node is a client only in runs without ipvs mode.
FLOWS_OF_NODE = (("node", "new", "10.96.2.1", 80, None, 0.05),)
# The number of distinct flows in a tally.
KINDS = len({(kind, to) for _place, kind, to, *_rest in FLOWS})
MODULES = ("ip_vs", "ip_vs_rr", "nf_conntrack", "ip_set", "dummy", "veth")


def judge(what: str, tally: Tally) -> None:
    """Fail if any request was lost."""
    assert tally.problems == [], f"{what}: {tally.problems[:20]}"


class Loaded:
    """A node and the load through it; ``call(method, *arguments)`` invokes a method of LoadedNode.

    The load starts once the node serves. An earlier connection attempt would leave a conntrack entry of an unanswered
    packet; IPVS leaves that alone, and drops the connection when the entry expires after two minutes.
    """

    def __init__(self, topology: Topology, flows: Sequence[Any], call: Any, patient: bool = False) -> None:
        self.call = call
        self._topology = topology
        self._flows = flows
        self._patient = patient
        self._load: Optional[Load] = None

    @property
    def load(self) -> Load:
        """Return the load, which must have started."""
        assert self._load is not None
        return self._load

    def _path(self, place: str) -> str:
        return f"/run/netns/{self._topology.full_name(place)}"

    def begin(self) -> None:
        """Start the load, and wait until every flow works."""
        self._load = Load(
            [
                Flow(self._path(place), kind, to, port, RATE * share, own)
                for place, kind, to, port, own, share in self._flows
            ],
            [
                Endpoint(self._path(place), protocol, address, port)
                for place in ("pod1", "peer")
                for protocol, port in (("tcp", 8080), ("udp", 5353))
                # A peer's pods are one route without addresses, so the kernel would answer from another address.
                for address in ("10.244.2.11" if (place, protocol) == ("peer", "udp") else "0.0.0.0", "::")
            ],
            self._patient,
        )
        self._load.settle(KINDS)

    def all_answered(self, what: str) -> None:
        """Fail if a request was lost since the last call, or if a flow has stopped."""
        tally = self.load.take(KINDS, 5)
        print(f"{time.monotonic():.3f} {what}: {tally}")
        judge(what, tally)
        assert tally.complete, f"{what}: {tally.answers}"

    def end(self) -> None:
        """End the load; fail if a request was lost or is still pending."""
        tally = self.load.rest()
        judge("the end", tally)
        assert tally.waiting == 0

    def close(self) -> None:
        """Stop the load and the node."""
        if self._load is not None:
            self._load.close()


@pytest.fixture()
def node(tmp_path: Path) -> Iterator[Loaded]:
    """Provide a node in the test's own network namespace."""
    topology = Topology(f"-load{os.getpid()}")
    topology.build()
    inside = LoadedNode(str(tmp_path))
    try:
        system.enter(f"/run/netns/{topology.full_name('node')}", system.CLONE_NEWNET)

        def call(method: str, *arguments: Any) -> Any:
            return getattr(inside, method)(*arguments)

        loaded = Loaded(topology, [*FLOWS, *FLOWS_OF_NODE], call)
        try:
            yield loaded
        finally:
            loaded.close()
    finally:
        inside.close()
        topology.destroy()


@contextlib.contextmanager
def booted(scratch: Path, modules: Sequence[str] = MODULES, disk: Sequence[str] = ()) -> Iterator[Loaded]:
    """Provide a node that is a virtual machine with its own kernel.

    ``modules``: those that are loaded at once. ``disk``: directories that outlive the machine.
    """
    taps: list[int] = []
    topology = Topology(f"-load{os.getpid()}", plug=lambda namespace, name: taps.append(open_tap(namespace, name)))
    with contextlib.ExitStack() as stack:
        stack.callback(topology.destroy)
        topology.build()
        specification = Specification(
            hostname="node1",
            scratch=str(scratch),
            writable=list(disk),
            modules=list(modules),
            sysctls=topology.node_sysctls(),
            network=topology.node_lines(),
            environment={"PYTHONPATH": f"{ROOT}:{ROOT}/collections", "HOME": "/root", "LANG": "C.UTF-8"},
            # Not in the scratch directory: one that is shared with the host cannot hold sockets.
            command=[
                sys.executable,
                "-m",
                "tests.lab.calls",
                CALLS,
                LoadedNode.__module__,
                "LoadedNode",
                '"/run/node"',
            ],
            directory=str(ROOT),
        )
        guest = stack.enter_context(Machine(specification, taps, "1G"))
        remote = guest.remote(600)
        stack.callback(remote.close)
        loaded = Loaded(topology, FLOWS, remote.call, patient=True)
        stack.callback(loaded.close)
        yield loaded


@pytest.fixture()
def machine(tmp_path: Path) -> Iterator[Loaded]:
    """Provide a node that is a virtual machine."""
    with booted(tmp_path) as loaded:
        yield loaded


# What is on the node of the packet filters beside IPVS, in ipvs mode. When that is left, parts of them identify virtual
# servers until the last connection has ended.
FILTER_BACKEND = {"ipvs": ["ipsets", "chains"], "ipvs/nftables": ["tables"]}


def served_with(node: Loaded, mode: str, done: str) -> None:
    """Fail if a request was lost, or if ipvs mode has left anything of the other filter backend."""
    node.all_answered(f"{done} {mode}")
    if mode in FILTER_BACKEND:
        assert node.call("filter_backends") == FILTER_BACKEND[mode], f"{done} {mode}"


def migrate_and_roll_back(node: Loaded, recorded_mode: str, variant: str, modes: Sequence[str]) -> None:
    """Adopt what kube-proxy has programmed, change through the modes, and roll back to kube-proxy's state.

    Mode ``ipvs/nftables`` is ipvs mode without iptables.
    """
    node.call("load_recorded", recorded_mode, variant)
    node.begin()
    first = node.call("programmed", recorded_mode, variant)
    node.call("converge", recorded_mode)
    served_with(node, recorded_mode, "adopt")
    saved: list[int] = []
    for mode in modes:
        saved.append(node.call("converge", *mode.split("/")))
        served_with(node, mode, "change to")
    for number, mode in reversed([*zip(saved, [recorded_mode, *modes])]):
        node.call("roll_back", number)
        served_with(node, mode, "roll back to")
    if recorded_mode != "nftables":
        last = node.call("programmed", recorded_mode, variant)
        assert [line for line in first if line not in last] == []
    node.end()


@pytest.mark.parametrize("variant", ["nft", pytest.param("legacy", marks=FULL)])
def test_from_iptables_mode_to_nftables_mode_and_back(node, variant):
    migrate_and_roll_back(node, "iptables", variant, ("nftables", "iptables"))


@FULL
def test_from_kube_proxy_in_nftables_mode_to_iptables_mode_and_back(node):
    migrate_and_roll_back(node, "nftables", "nft", ("iptables", "nftables"))


@FULL
@pytest.mark.parametrize(
    "modes",
    [
        ("ipvs", "nftables"),
        ("ipvs/nftables", "nftables", "ipvs", "iptables"),
        # The state of nftables mode is saved while connections through IPVS are still ending.
        ("ipvs/nftables", "nftables", "ipvs/nftables"),
    ],
    ids="-".join,
)
def test_from_iptables_mode_to_ipvs_mode_to_others_and_back(machine, modes):
    """Each change to and from ipvs mode is made by a convergence and by a rollback."""
    migrate_and_roll_back(machine, "iptables", "nft", modes)


@FULL
def test_from_kube_proxy_in_ipvs_mode_to_the_other_modes_and_back(machine):
    migrate_and_roll_back(machine, "ipvs", "legacy", ("nftables", "iptables"))


@FULL
def test_from_kube_proxy_in_ipvs_mode_to_ipvs_mode_without_iptables_and_back(machine):
    migrate_and_roll_back(machine, "ipvs", "nft", ("ipvs/nftables",))


def upgrade(node: Loaded, mode: str, variant: str, found: str = "") -> None:
    """Start the agent on what kube-proxy has programmed, then upgrade it, first after a stop and then after a kill."""
    node.call("load_recorded", found or mode, variant)
    node.begin()
    for number, ending in enumerate((signal.SIGTERM, signal.SIGKILL)):
        node.call("start_agent", mode, str(number))
        node.all_answered(f"agent {number} in {mode} mode")
        node.call("stop_agent", ending)
        node.all_answered(f"agent {number} ended by {ending.name}")
    node.end()


@pytest.mark.parametrize(
    ("mode", "variant", "found"),
    [
        pytest.param("iptables", "nft", "", marks=FULL),
        pytest.param("iptables", "legacy", "", marks=FULL),
        pytest.param("nftables", "nft", "", marks=FULL),
        ("nftables", "nft", "nftables-1.38"),
    ],
)
def test_agent_is_upgraded(node, mode, variant, found):
    upgrade(node, mode, variant, found)


@FULL
def test_agent_is_upgraded_in_ipvs_mode(machine):
    upgrade(machine, "ipvs", "nft")


@FULL
def test_a_node_without_iptables_and_ipset_serves_ipvs_mode_after_each_boot(tmp_path):
    """The agent loads what it needs; after the second boot it has only what the first one has kept on disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for boot in ("first", "second"):
        scratch = tmp_path / boot
        scratch.mkdir()
        with booted(scratch, ("veth",), [str(disk)]) as node:
            node.call("remove_iptables")
            status = node.call("boot_agent", str(disk))
            assert (status["mode"], status["ipvsFilterBackend"]) == ("ipvs", "nftables")
            assert status["startedFromCache"] is (boot == "second")
            node.begin()
            node.all_answered(f"{boot} boot")
            node.end()
            loaded = node.call("kernel_modules")
            assert {"ip_vs", "nf_tables"} <= set(loaded)
            assert [name for name in loaded for pattern in KERNEL_MODULES if fnmatch.fnmatch(name, pattern)] == []
