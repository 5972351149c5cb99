# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No request is lost while a node is taken over, changes its mode, gets a new agent, and goes back.

500 requests a second (100 in user-mode Linux) go through the node of the conformance lab over new and over kept TCP
connections and over UDP, in both families, from a pod, from outside and from the node itself. Every one has to be
answered by an endpoint, and every connection be made at the first attempt, while the node goes through what operators
fear. User-mode Linux is judged less strictly, see ``judge``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Iterator, List, Optional, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.converge import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.restore import (
    RollbackRequest,
    rollback,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.archive import pack
from tests.conformance.wirelab.cases import load_case
from tests.conformance.wirelab.topology import Topology
from tests.kernel.agent_node import AgentNode
from tests.lab import recorded, system
from tests.lab.load import Endpoint, Flow, Load, Tally

ROOT = Path(__file__).resolve().parents[2]
CASE = load_case(str(ROOT / "tests" / "conformance" / "cases" / "nodeport-cluster"))
LOST = re.compile(r": (no answer within|Connection timed out)")
COUNTERS = re.compile(r"\[\d+:\d+\]")
IN_GUEST = os.path.exists("/proc/net/ip_vs")
RATE = 100.0 if IN_GUEST else 500.0
# (place, kind, address, port, whether the endpoint sees the client's own address, share of the rate)
ALL_FLOWS = (
    ("pod2", "new", "10.96.2.1", 80, True, 0.2),
    ("pod2", "new", "fd00:10:96::201", 80, True, 0.1),
    ("client", "new", "172.18.0.2", 30201, False, 0.1),
    ("client", "new", "fd00:172:18::2", 30201, False, 0.05),
    ("node", "new", "10.96.2.1", 80, None, 0.05),
    ("pod2", "kept", "10.96.2.1", 80, True, 0.2),
    ("client", "kept", "172.18.0.2", 30201, False, 0.1),
    ("client", "kept", "fd00:172:18::2", 30201, False, 0.05),
    ("pod2", "udp", "10.96.2.1", 53, True, 0.1),
    ("client", "udp", "172.18.0.2", 30202, False, 0.05),
)
# In ipvs mode the node has the ClusterIP itself, and asks from it: a connection that it opens while another mode takes
# over loses its own address (docs/migration.md). All others have to be answered.
FLOWS = [flow for flow in ALL_FLOWS if flow[0] != "node" or not IN_GUEST]
# As many are told apart in a tally.
KINDS = len({(kind, to) for _place, kind, to, *_rest in FLOWS})
IPVS_SYSCTLS = {"conntrack": 1, "expire_nodest_conn": 1, "expire_quiescent_template": 1}


def judge(what: str, tally: Tally) -> None:
    """Nothing is lost; in user-mode Linux nothing is refused, reset or answered wrongly, and little is lost.

    Its kernel is held up where the machine is busy, and some first packets are lost with ipvs then.
    """
    problems = [text for text in tally.problems if not (IN_GUEST and LOST.search(text))]
    assert problems == [], f"{what}: {problems[:20]}"
    assert len(tally.problems) <= max(10, tally.requests // 20), f"{what}: {tally.problems[:20]}"


class LoadedNode:
    """The node of the conformance lab with the load on it; the test's own process is in its network namespace."""

    def __init__(self, topology: Topology, scratch: Path) -> None:
        self.topology = topology
        self.scratch = scratch
        self.rounds: List[str] = []
        system.enter(self.path("node"), system.CLONE_NEWNET)
        self.load = Load(
            [Flow(self.path(place), kind, to, port, RATE * share, own) for place, kind, to, port, own, share in FLOWS],
            [
                Endpoint(self.path(place), protocol, address, port)
                for place in ("pod1", "peer")
                for protocol, port in (("tcp", 8080), ("udp", 5353))
                # The pods of a peer are one route and no addresses, so the kernel would answer from another one.
                for address in ("10.244.2.11" if (place, protocol) == ("peer", "udp") else "0.0.0.0", "::")
            ],
            patient=IN_GUEST,
        )

    def path(self, place: str) -> str:
        return f"/run/netns/{self.topology.full_name(place)}"

    def run(self, command: Sequence[str], text: Optional[str] = None) -> str:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def load_recorded(self, mode: str, variant: str) -> None:
        """Program what kube-proxy had programmed."""
        recorded.load(Path(CASE.file(f"state-{mode}.txt")), self.run, variant)
        if mode == "ipvs":
            for name, value in IPVS_SYSCTLS.items():
                Path("/proc/sys/net/ipv4/vs", name).write_text(str(value), encoding="ascii")

    def all_answered(self, what: str) -> Tally:
        """Nothing was lost since the last call, and every flow goes on."""
        tally = self.load.take(KINDS, 5)
        self.rounds.append(f"{what}: {tally}")
        print(self.rounds[-1])
        judge(what, tally)
        assert tally.complete, f"{what}: {tally.answers}"
        return tally

    def converge(self, mode: str) -> Report:
        return converge(
            Request(
                cluster=ClusterState.from_objects(CASE.snapshots()[0]),
                configuration=load(CASE.proxy_configuration(mode, "", None)).configuration,
                node_name=CASE.node,
                mode=mode,
                state_directory=str(self.scratch / "state"),
                history_directory=str(self.scratch / "history"),
                keep_states=20,
            )
        )

    def back_to(self, number: int) -> None:
        """Go back to a saved state."""
        rollback(
            RollbackRequest(
                to=number,
                history_directory=str(self.scratch / "history"),
                keep=20,
                stop_units=False,
                state_directory=str(self.scratch / "state"),
            )
        )

    def programmed(self, mode: str, variant: str) -> List[str]:
        """What is programmed, as the mode's own tools print it, without counters and in no order."""
        if mode == "nftables":
            return sorted(self.run(["nft", "-s", "list", "ruleset"]).splitlines())
        texts = [self.run([f"{family}-{variant}-save"]) for family in ("iptables", "ip6tables")]
        if mode == "ipvs":
            texts += [self.run(["ipvsadm", "-Sn"]), self.run(["ipset", "save"])]
        lines = [COUNTERS.sub("", line) for text in texts for line in text.splitlines() if not line.startswith("#")]
        return sorted(re.sub(r" initval 0x\w+", "", line) for line in lines)

    def close(self) -> None:
        self.load.close()


class UpgradedAgent(AgentNode):
    """The agent on the loaded node, run from an archive as the role agent installs it."""

    def __init__(self, scratch: Path, mode: str) -> None:
        super().__init__(scratch, mode)
        for item in CASE.snapshots()[0]:
            self.store.put(item)
        addresses = {name: self.configuration[name] for name in ("healthzBindAddress", "metricsBindAddress")}
        self.configuration = {**CASE.proxy_configuration(mode, "", None), **addresses}
        self.write_configuration()

    def _command(self, *words: str) -> List[str]:
        return [sys.executable, str(self.scratch / "kubenode-proxy.pyz"), *words]

    def install(self, stamp: bytes) -> None:
        """Put an archive in place of the one that is there; ``stamp`` makes it another one."""
        content = pack(str(ROOT / "plugins" / "module_utils")).content
        fresh = self.scratch / "new.pyz"
        fresh.write_bytes(content)
        with zipfile.ZipFile(fresh, "a") as archive:
            archive.comment = stamp
        fresh.rename(self.scratch / "kubenode-proxy.pyz")


@pytest.fixture()
def node(tmp_path) -> Iterator[LoadedNode]:
    topology = Topology(f"-load{os.getpid()}")
    topology.build()
    made = None
    try:
        made = LoadedNode(topology, tmp_path)
        yield made
    finally:
        if made is not None:
            made.close()
        topology.destroy()


def go_through(node: LoadedNode, recorded_mode: str, variant: str, modes: Sequence[str]) -> None:
    """Adopt what kube-proxy has programmed, change through the modes, go back to what kube-proxy had programmed."""
    node.load_recorded(recorded_mode, variant)
    node.load.settle(KINDS)
    first = node.programmed(recorded_mode, variant)
    node.converge(recorded_mode)
    node.all_answered(f"adopt {recorded_mode}")
    saved: List[int] = []
    for mode in modes:
        report = node.converge(mode)
        assert report.saved_state is not None
        saved.append(report.saved_state)
        node.all_answered(f"change to {mode}")
    node.back_to(saved[-1])
    node.all_answered("roll back to the mode before")
    node.back_to(saved[0])
    node.all_answered(f"roll back to what was adopted in {recorded_mode}")
    if recorded_mode != "nftables":
        last = node.programmed(recorded_mode, variant)
        assert [line for line in first if line not in last] == []
    tally = node.load.rest()
    judge("the end", tally)
    assert tally.waiting == 0


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_from_iptables_mode_to_nftables_mode_and_back(node, variant):
    go_through(node, "iptables", variant, ("nftables", "iptables", "nftables"))


def test_from_kube_proxy_in_nftables_mode_to_iptables_mode_and_back(node):
    go_through(node, "nftables", "nft", ("iptables", "nftables"))


def upgrade(node: LoadedNode, mode: str, variant: str) -> None:
    """Start the agent on what kube-proxy has programmed, then put a new one in its place, gently and by force."""
    node.load_recorded(mode, variant)
    node.load.settle(KINDS)
    agent = UpgradedAgent(node.scratch, mode)
    try:
        for number, ending in enumerate((signal.SIGTERM, signal.SIGKILL)):
            agent.install(b"%d" % number)
            agent.start()
            node.all_answered(f"agent {number} in {mode} mode")
            agent.stop(ending)
            node.all_answered(f"agent {number} ended by {ending.name}")
    finally:
        agent.close()
    tally = node.load.rest()
    judge("the end", tally)
    assert tally.waiting == 0


@pytest.mark.parametrize(("mode", "variant"), [("iptables", "nft"), ("iptables", "legacy"), ("nftables", "nft")])
def test_agent_is_upgraded(node, mode, variant):
    upgrade(node, mode, variant)


@pytest.mark.uml
def test_agent_is_upgraded_in_ipvs_mode(node):
    upgrade(node, "ipvs", "legacy")


@pytest.mark.uml
def test_from_iptables_mode_to_ipvs_mode_and_back(node):
    go_through(node, "iptables", "legacy", ("ipvs", "iptables", "ipvs"))


@pytest.mark.uml
def test_from_kube_proxy_in_ipvs_mode_to_iptables_mode_and_back(node):
    go_through(node, "ipvs", "legacy", ("iptables", "ipvs"))
