# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Other programs change the node while the agent runs: Services answer again, and external rules are kept.

No check depends on how long a repair takes; the durations are printed (``pytest -rP``).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

import pytest

from tests.kernel import external_rules
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_ip, endpoint_slice, service
from tests.kernel.external_rules import FIREWALLD
from tests.lab import system
from tests.lab.background import Background
from tests.lab.outage import Client
from tests.lab.system import run
from tests.waiting import wait_for

UML = pytest.mark.uml
SERVER = """
import socket, sys
sock = socket.create_server(("0.0.0.0", 8080), backlog=512)
print("ready", flush=True)
while True:
    sock.accept()[0].close()
"""
# While firewalld reloads, its own table drops everything except loopback traffic.
RELOADING = """table inet firewalld_policy_drop {
    chain filter_forward { type filter hook forward priority 9; policy drop; };
}"""
PATIENCE = 60.0
# kubelet has its own chains, whose names resemble ours.
OURS = re.compile("KUBE-(?!KUBELET-CANARY|IPTABLES-HINT)")
# The agent logs at least this many repairs in full.
LINES_IN_A_MINUTE = 5
COUNTERS = re.compile(r"\[\d+:\d+\]|counter packets \d+ bytes \d+")


class Event(NamedTuple):
    """An action of another program.

    ``log``: what the agent must log about it; empty if our state is unaffected. ``at_once``: whether the action takes
    several commands, and would fail if the agent repaired something between them.
    """

    name: str
    do: Callable[[str], None]
    log: str
    at_once: bool = False


def commands(*given: Sequence[str]) -> Callable[[str], None]:
    """Return a function that runs commands, with VARIANT in them replaced by the variant of iptables."""

    def do(variant: str) -> None:
        for words in given:
            run([*(word.replace("VARIANT", variant) for word in words)])

    return do


def restored(text: str, *options: str) -> Callable[[str], None]:
    """Return a function that loads rules with iptables-restore."""
    return lambda variant: run([f"iptables-{variant}-restore", *options], stdin=text) and None


def iptables(*given: str) -> Callable[[str], None]:
    return commands(*(("iptables-VARIANT", *words.split()) for words in given))


def firewalld_reload(_variant: str) -> None:
    """Drop all traffic, recreate firewalld's table, accept traffic again. The iptables tables are another event."""
    run(["nft", "-f", "-"], stdin=RELOADING)
    run(["nft", "delete", "table", "inet", "firewalld"])
    run(["nft", "-f", "-"], stdin=FIREWALLD)
    run(["nft", "delete", "table", "inet", "firewalld_policy_drop"])


FLUSHED = "*{table}\n-F\n-X\n-Z\nCOMMIT\n"


def flushed(*tables: str) -> Callable[[str], None]:
    """Return a function that flushes tables in one call: between two calls the agent would fill them again."""
    return restored("".join(FLUSHED.format(table=table) for table in tables), "--noflush")


def sets_destroyed(variant: str) -> None:
    """Remove all rules that use sets, and destroy the sets."""
    for program in ("iptables", "ip6tables"):
        flush = "".join(FLUSHED.format(table=table) for table in ("nat", "filter"))
        run([f"{program}-{variant}-restore", "--noflush"], stdin=flush)
    run(["ipset", "destroy"])


def without_ours(variant: str) -> None:
    """Restore a file saved before we programmed anything with ``iptables-restore``, which replaces all rules."""
    kept = [line for line in run([f"iptables-{variant}-save"]).splitlines() if not OURS.search(line)]
    run([f"iptables-{variant}-restore"], stdin="\n".join(kept) + "\n")


CHAINS = "KUBE-SERVICES"
IPTABLES: tuple[Event, ...] = (
    Event("iptables -F", iptables("-F"), "KUBE-FORWARD"),
    Event("iptables -t nat -F", iptables("-t nat -F"), CHAINS),
    Event("iptables -t nat -F and -X", flushed("nat"), CHAINS),
    Event("firewalld reload: the tables of iptables", flushed("mangle", "nat", "filter"), CHAINS),
    Event("iptables-restore of a file without our chains", without_ours, CHAINS),
    Event("jump deleted", iptables("-t nat -D PREROUTING 1"), "PREROUTING"),
)
GUESTS: tuple[Event, ...] = (
    Event("Docker inserts its chains", restored(external_rules.DOCKER, "--noflush"), ""),
    Event("a network plugin inserts its chains", restored(external_rules.NETWORK_PLUGIN, "--noflush"), ""),
)
NFT_FLUSH = Event("nft flush ruleset", commands(("nft", "flush", "ruleset")), "")
FIREWALLD_EVENT = Event("firewalld reload: its own table", firewalld_reload, "")
IPVS: tuple[Event, ...] = (
    Event("ipvsadm -C", commands(("ipvsadm", "-C")), "virtual server"),
    Event("ipset flush", commands(("ipset", "flush")), "KUBE-CLUSTER-IP"),
    Event("iptables -F and -X, ipset destroy", sets_destroyed, "KUBE-CLUSTER-IP", at_once=True),
    Event("ip link del kube-ipvs0", commands(("ip", "link", "del", "kube-ipvs0")), "kube-ipvs0"),
    Event("ip addr flush dev kube-ipvs0", commands(("ip", "addr", "flush", "dev", "kube-ipvs0")), "address"),
)


def events(mode: str, variant: str) -> list[Event]:
    """Return the events of a mode in order."""
    if mode == "nftables":
        command = ("nft", "delete", "table", "ip", "kube-proxy")
        deleted = Event(" ".join(command), commands(command), "1 table (kube-proxy)")
        return [FIREWALLD_EVENT, *GUESTS, deleted, NFT_FLUSH._replace(log="1 table (kube-proxy)")]
    found = [*GUESTS, *IPTABLES]
    if mode == "ipvs":
        # Its rules are repaired as in iptables mode.
        return [*(found if os.environ.get("FULL") else GUESTS), *IPVS]
    flush = NFT_FLUSH._replace(log=CHAINS if variant == "nft" else "")
    return [FIREWALLD_EVENT, *found, flush]


class Neighbour:
    """A network namespace connected to the node by a veth pair."""

    def __init__(self, name: str, node_address: str, addresses: Sequence[str], program: str = "") -> None:
        command = [sys.executable, "-c", program]
        wait = ["unshare", "-n", "sh", "-c", "echo ready; exec sleep infinity"]
        self._holder = Background(wait)
        number = str(self._holder.pid)
        self.namespace = f"/proc/{number}/ns/net"
        system.ip_batch(
            [
                f"link add {name} type veth peer name eth0 netns {number}",
                f"address add {node_address} dev {name}",
                f"link set {name} up",
            ]
        )
        inside = ["nsenter", "-t", number, "-n"]
        for words in (
            *(("ip", "address", "add", address, "dev", "eth0") for address in addresses),
            ("ip", "link", "set", "lo", "up"),
            ("ip", "link", "set", "eth0", "up"),
            ("ip", "route", "add", "default", "via", node_address.partition("/")[0]),
        ):
            run([*inside, *words])
        self._program = Background([*inside, *command]) if program else None

    def close(self) -> None:
        for process in (self._program, self._holder):
            if process is not None:
                process.close()


def settled_listing(*table: str) -> str:
    """Return the listing of a table once two in a row are equal.

    While another program's transaction is aborted, the kernel repeats or omits chains in a dump of several parts: it
    counts those of the transaction in one part and not in the next, and the generation does not change.
    """
    last = ""
    for _attempt in range(10):
        found = run(["nft", "list", "table", *table])
        if found == last:
            break
        last = found
    return found


class Node(AgentNode):
    """The node with its endpoints and an external client."""

    def __init__(self, scratch, mode: str, variant: str) -> None:
        super().__init__(scratch, mode, variant)
        for number in range(1, 6):
            self.store.put(service(number))
            self.store.put(endpoint_slice(number))
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        pods = [f"{endpoint_ip(1, index)}/16" for index in range(2)]
        self._others = [
            Neighbour("pods", "10.244.0.1/16", pods, SERVER),
            Neighbour("outside", "192.0.2.1/24", ["192.0.2.2/24"]),
        ]
        self.client = Client(self._others[1].namespace, cluster_ip(1))

    def close(self) -> None:
        self.client.close()
        super().close()
        for other in self._others:
            other.close()

    def ours(self) -> dict[str, list[str]]:
        """Return everything the mode has programmed, without counters."""
        if self.mode == "nftables":
            words = ["nft", "list", "table", "ip", "kube-proxy"]
            listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
            blocks = re.split(r"\n(?=\t(?:chain|map|set) )", listed)
            # Without blank lines, since a table that is filled again may have its chains in another order.
            lines = [
                "\n".join(sorted(filter(None, (line.strip(" \t,}") for line in each.splitlines())))) for each in blocks
            ]
            return {"nftables": sorted(COUNTERS.sub("", line) for line in lines)}
        rules = COUNTERS.sub("", run([f"iptables-{self.kernel_variant}-save"]))
        found = {"chains": sorted(line for line in rules.splitlines() if OURS.search(line))}
        if self.mode == "ipvs":
            # In this mode the chain whose name kubelet uses too belongs to kubelet alone.
            found["chains"] = [line for line in found["chains"] if "KUBE-FIREWALL" not in line]
            addresses = run(["ip", "-4", "-o", "address", "show"])
            found["servers"] = sorted(run(["ipvsadm", "-Sn"]).splitlines())
            sets = run(["ipset", "save"]).splitlines()
            found["elements"] = sorted(line for line in sets if line.startswith("add KUBE"))
            found["addresses"] = sorted(re.findall(r"kube-ipvs0 +inet (\S+)", addresses))
        return found

    def wait_until_all_is(self, expected: dict[str, list[str]], after: str) -> None:
        """Wait until the programmed state equals ``expected``. Raises AssertionError with the difference."""
        deadline = time.monotonic() + PATIENCE
        while True:
            began = time.monotonic()
            now = self.ours()
            if now == expected:
                return
            missing = [line for kind, lines in expected.items() for line in lines if line not in now.get(kind, [])]
            more = [line for kind, lines in now.items() for line in lines if line not in expected.get(kind, [])]
            assert time.monotonic() < deadline, f"after {after}: missing {missing}, more {more}:\n{self.log[-2000:]}"
            # As in wait_for: the agent may have the same processor.
            time.sleep(max(0.05, time.monotonic() - began))

    def rules_of_other_programs(self) -> list[str]:
        """Return all external rules in order; a built-in chain counts only if its policy is not ACCEPT."""
        rules = COUNTERS.sub("", run([f"iptables-{self.kernel_variant or 'nft'}-save"]))
        skipped = re.compile(r"#|\*|COMMIT|:[A-Z]+ ACCEPT")
        found = [line for line in rules.splitlines() if not skipped.match(line) and not OURS.search(line)]
        if external_rules.has_nftables():
            for name in re.findall(r"^table (inet \S+)$", run(["nft", "list", "tables"]), re.MULTILINE):
                found += COUNTERS.sub("", settled_listing(*name.split())).splitlines()
        return found

    def repairs(self) -> float:
        return float(self.status().get("driftRepaired", 0))

    def repair_lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if "repaired external changes" in line]


@pytest.fixture(
    params=[
        ("iptables", "nft"),
        ("iptables", "legacy"),
        ("nftables", ""),
        pytest.param(("ipvs", "legacy"), marks=UML, id="ipvs"),
    ],
    ids=lambda item: "-".join(filter(None, item)) if isinstance(item, tuple) else None,
)
def node(request, tmp_path, monkeypatch) -> Iterator[Node]:
    # Network namespaces have their own tables but share the machine's lock file of legacy iptables.
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    made = Node(tmp_path, *request.param)
    try:
        yield made
    finally:
        made.close()


def test_services_recover_from_changes_by_other_programs(node) -> None:
    variant = node.kernel_variant or "nft"
    if external_rules.has_nftables():
        run(["nft", "-f", "-"], stdin=FIREWALLD)
    external_rules.restore(variant, external_rules.UFW)
    external_rules.restore(variant, external_rules.KUBELET)
    node.start()
    wait_for(lambda: node.client.answered_since(time.monotonic() - 5.0), PATIENCE, 0.05)
    wait_for(lambda: node.differences()["changed"] is False, PATIENCE, 0.5)
    before = node.ours()
    for event in events(node.mode, variant):
        repaired, logged = node.repairs(), len(node.repair_lines())
        expected = node.rules_of_other_programs()
        moment = time.monotonic()
        with node.paused() if event.at_once else contextlib.nullcontext():
            event.do(variant)
        left = node.rules_of_other_programs()
        if event.log:
            wait_for(lambda known=repaired: node.repairs() > known, PATIENCE, 0.02)
            # The agent logs a few such lines per minute, and then only their number.
            if len(node.repair_lines()) < LINES_IN_A_MINUTE:
                word = event.log
                wait_for(lambda known=logged, word=word: word in " ".join(node.repair_lines()[known:]), PATIENCE, 0.02)
            assert node.metric("kubenode_proxy_drift_repaired_total") > repaired, event.name
        node.wait_until_all_is(before, event.name)
        restored_after = time.monotonic() - moment
        wait_for(lambda since=moment + restored_after: node.client.answered_since(since), PATIENCE, 0.05)
        assert node.rules_of_other_programs() == left, event.name
        outage = node.client.outage(moment)
        kind = "-".join(filter(None, (node.mode, node.kernel_variant)))
        print(f"{kind:16} {event.name:48} out {outage:5.2f} s, all back after {restored_after:5.2f} s")
        if not event.log:
            assert (node.repairs(), len(node.repair_lines())) == (repaired, logged), event.name
            assert set(expected) <= set(left) or event.name == NFT_FLUSH.name
    wait_for(lambda: node.differences()["changed"] is False, PATIENCE, 0.5)
    assert node.status()["lastError"] == ""
    for line in node.repair_lines():
        print(line)
