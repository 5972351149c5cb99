# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node for rollback tests: it converges to a conformance case, rolls back, and dumps the programmed state."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any, Optional, Sequence

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.restore import (
    RollbackReport,
    RollbackRequest,
    rollback,
)
from tests.conformance.wirelab.cases import load_case
from tests.kernel.external_rules import has_nftables
from tests.lab import recorded
from tests.lab.system import run
from tests.netpol import cases as netpol

ROOT = Path(__file__).resolve().parents[2]
CASE = load_case(str(ROOT / "tests" / "conformance" / "cases" / "nodeport-cluster"))
EXTERNAL_RULES = """\
*nat
:OTHER - [0:0]
-A PREROUTING -p tcp -m tcp --dport 1 -j OTHER
-A OUTPUT -p tcp -m tcp --dport 2 -j OTHER
-A OTHER -p tcp -m tcp --dport 3 -j RETURN
COMMIT
*filter
:OTHER - [0:0]
-A INPUT -j OTHER
-A FORWARD -p tcp -m tcp --dport 4 -j ACCEPT
-A OTHER -p tcp -m tcp --dport 5 -j DROP
COMMIT
"""
POLICIES_OFF = {"clusterNetworkPolicies": True}
POLICIES_ON = {**POLICIES_OFF, "enabled": True}
POLICY_TABLE = "table inet kubenode-network-policy"


def blocks(listing: str) -> list[str]:
    """Return the sets and chains of an nft listing sorted by name; the kernel lists them in order of creation."""
    found: list[str] = []
    for line in listing.splitlines():
        if re.match(r"\t(chain|set|map) ", line) or not found or not line.startswith("\t"):
            found.append(line)
        else:
            found[-1] += f"\n{line}"
    return sorted(text.rstrip() for text in found if text.strip())


def saved_lines(program: str) -> list[str]:
    """Return the output of iptables-save without counters and without empty tables."""
    text = re.sub(r"^#.*\n|\[\d+:\d+\]", "", run([program]), flags=re.MULTILINE)
    tables = re.findall(r"^\*\w+\n.*?^COMMIT$", text, re.MULTILINE | re.DOTALL)
    return [table for table in tables if re.search(r"^-A |^:\S+ -", table, re.MULTILINE)]


def dump() -> dict[str, Any]:
    """Return everything a service proxy may have changed, as the usual tools print it."""
    found: dict[str, Any] = {}
    variants = ("legacy", "nft") if has_nftables() else ("legacy",)
    for program in (f"{family}-{variant}-save" for family in ("iptables", "ip6tables") for variant in variants):
        found[program] = saved_lines(program)
    if has_nftables():
        for table in run(["nft", "list", "tables"]).splitlines():
            found[table] = blocks(run(["nft", "-s", "list", *table.split()]))
    if Path("/proc/net/ip_vs").exists():
        found["ipvs"] = sorted(run(["ipvsadm", "-Sn"]).splitlines())
        # The kernel draws the seed of a set's hash when the set is created.
        found["ipset"] = sorted(re.sub(r" initval \S+", "", run(["ipset", "save"])).splitlines())
        found["timeouts"] = run(["ipvsadm", "-L", "--timeout"])
    found["addresses"] = sorted(
        " ".join(line.split(":", 1)[1].split()[:4]) for line in run(["ip", "-o", "addr", "show"]).splitlines()
    )
    parameters = ("net.ipv4.conf.all.route_localnet", "net.ipv4.ip_forward", "net.ipv4.conf.all.arp_ignore")
    found["sysctls"] = run(["sysctl", *parameters])
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return how two dumps differ, in readable form; empty if they do not."""
    old, new = (
        json.dumps(item, indent=1, sort_keys=True).replace(r"\n", "\n").splitlines() for item in (before, after)
    )
    return "\n".join(difflib.unified_diff(old, new, lineterm="", n=1))


class Node:
    """The test's network namespace as a node of the conformance case."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.history = str(directory / "history")

    def load(self, start: str, variant: str) -> None:
        """Load what kube-proxy had programmed; ``start``: its mode, with ``-1.38`` as that version would have."""
        for family in ("iptables", "ip6tables"):
            run([f"{family}-{variant}-restore", "--noflush"], stdin=EXTERNAL_RULES)
        mode, _dash, later = start.partition("-")
        if mode != "none":
            path = Path(CASE.file(f"state-{mode}.txt"))
            recorded.load(path, lambda command, text: run([*command], stdin=text), variant, later=bool(later))

    def converge(self, mode: str, **fields: Any) -> Report:
        request = Request(
            ClusterState.from_objects(CASE.snapshots()[0]),
            load(CASE.proxy_configuration(mode, "", None)).configuration,
            node_name=CASE.node,
            state_directory=str(self.directory / "run"),
            history_directory=self.history,
            whole_cluster=False,
        )
        return converge(request._replace(**fields))

    def roll_back(self, to: Optional[int] = None, **fields: Any) -> RollbackReport:
        request = RollbackRequest(
            to, self.history, stop_units=False, state_directory=str(self.directory / "run"), **fields
        )
        return rollback(request)


def names(report: Sequence[Any]) -> list[str]:
    return [change.table for change in report]


def many_ranges() -> dict[str, Any]:
    """Return a NetworkPolicy whose address and port ranges need several netlink messages."""
    few = [f"10.{second}.{third}.{2 * last}/32" for second in (1, 2) for third in range(8) for last in range(128)]
    ports = [{"protocol": "TCP", "port": 10 * each, "endPort": 10 * each + 5} for each in range(1, 1500)]
    peers = [{"ipBlock": {"cidr": "10.0.0.0/8", "except": few}}, {"ipBlock": {"cidr": "10.2.0.0/16"}}]
    rules = [{"from": peers}, {"from": peers[1:], "ports": ports}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "many", "namespace": "shop"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules},
    }


def policies(settings: dict[str, Any], *cases: str) -> dict[str, Any]:
    """Return the request fields with the objects of network policy cases, and the settings that enable policies."""
    objects = {key: item for case in cases for key, item in netpol.steps(case)[0].objects.items()}
    source = CASE.proxy_configuration("nftables", "", None)
    return {
        "cluster": ClusterState.from_objects([*objects.values(), many_ranges()]),
        "configuration": load(source, node_source={"networkPolicy": settings}).configuration,
        "node_name": "node1",
    }
