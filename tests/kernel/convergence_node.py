# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Convergences of the test's network namespace to a cluster with every kind of Service, beside rules of others."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.regular_files import open_regular
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime import ledger
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.external_rules import has_nftables, parameters, variants
from tests.lab import manifests
from tests.lab.system import run

UML = pytest.mark.uml
EXTERNAL_CHAINS = (
    ("nat", ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")),
    ("filter", ("INPUT", "FORWARD", "OUTPUT")),
    ("mangle", ("PREROUTING", "OUTPUT")),
)
EXTERNAL_TABLE = "table inet external { chain kept { type filter hook input priority 10; tcp dport 9 counter drop; }; }"


def has_ipvs() -> bool:
    """Return whether IPVS is loaded."""
    return os.path.exists("/proc/net/ip_vs")


def service(name: str, number: int, kind: str = "ClusterIP", protocol: str = "TCP", **spec: Any) -> dict[str, Any]:
    """Return a dual-stack Service."""
    port = manifests.port(80, name="main", protocol=protocol)
    if kind != "ClusterIP":
        port["nodePort"] = 30000 + number
    addresses = (f"10.96.0.{number}", f"fd00:96::{number}")
    return manifests.service(name, addresses, [port], namespace="shop", type=kind, **spec)


def endpoint_slices(name: str, number: int, count: int, protocol: str = "TCP") -> list[dict[str, Any]]:
    """Return the EndpointSlices of a Service, one of each family."""
    return [
        manifests.endpoint_slice(
            name,
            [manifests.endpoint(f"{prefix}{last}", f"node-{last % 2}") for last in range(1, count + 1)],
            [manifests.port(8080, name="main", protocol=protocol)],
            name=f"{name}-{family}",
            namespace="shop",
        )
        for family, prefix in (("ipv4", f"10.244.{number}."), ("ipv6", f"fd00:244:{number}::"))
    ]


def cluster() -> ClusterState:
    """Return the state of a cluster with every kind of Service, in both families."""
    affinity = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
    balanced = service(
        "balanced", 4, "LoadBalancer", loadBalancerSourceRanges=["192.0.2.0/24"], externalTrafficPolicy="Local"
    )
    balanced["spec"]["healthCheckNodePort"] = 31004
    balanced["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.4"}, {"ip": "2001:db8::4"}]}}
    objects = [
        service("plain", 1),
        service("sticky", 2, externalIPs=["198.51.100.2"], **affinity),
        service("node", 3, "NodePort", "UDP"),
        balanced,
        service("deserted", 5),
        *endpoint_slices("plain", 1, 3),
        *endpoint_slices("sticky", 2, 2),
        *endpoint_slices("node", 3, 2, "UDP"),
        *endpoint_slices("balanced", 4, 2),
        {"kind": "Node", "metadata": {"name": "node-1"}, "status": {"addresses": []}},
    ]
    state = ClusterState.from_objects(objects)
    assert state.refusals == ()
    return state


def request(mode: str, directory: Path, **more: Any) -> Request:
    """Return a request to converge this node to the cluster."""
    configuration = load({"mode": mode, "nodePortAddresses": ["primary"]}).configuration
    values = {"cluster": cluster(), "node_name": "node-1", "state_directory": str(directory / "state"), **more}
    return Request(configuration=configuration, whole_cluster=False, **values)


def remove(directory: Path) -> Report:
    """Remove everything that any mode programmed."""
    return converge(Request(ClusterState(), load({}).configuration, state="absent", state_directory=str(directory)))


def add_external_rules(preferred: str) -> None:
    """Add rules of other programs to every table and variant; the one with most of them is the variant in use."""
    for program in ("iptables", "ip6tables"):
        for variant in variants():
            for table, chains in EXTERNAL_CHAINS:
                for chain in chains:
                    words = ["-p", "tcp", "--dport", "9", "-m", "comment", "--comment", f'of "others" in {chain}']
                    run([f"{program}-{variant}", "-t", table, "-A", chain, *words])
        run([f"{program}-{preferred}", "-t", "filter", "-N", "OTHERS"])
        run([f"{program}-{preferred}", "-t", "filter", "-A", "OTHERS", "-j", "ACCEPT"])
    if has_nftables():
        run(["nft", EXTERNAL_TABLE])
    if has_ipvs():
        run(["ipvsadm", "-A", "-f", "7", "-s", "rr"])
        run(["ipset", "create", "EXTERNAL", "hash:ip"])
        run(["ipset", "add", "EXTERNAL", "192.0.2.99"])


def rules() -> list[str]:
    """Return everything in this network namespace that a mode may write to, as the usual tools print it."""
    commands = [[f"{program}-{variant}-save"] for program in ("iptables", "ip6tables") for variant in variants()]
    if has_nftables():
        commands.append(["nft", "list", "ruleset"])
    if has_ipvs():
        commands += [["ipvsadm", "-Sn"], ["ipset", "save"]]
    commands.append(["ip", "-o", "address"])
    lines = [line for command in commands for line in run(command).splitlines()]
    # Comments contain the time, and a recreated device or set has another number.
    return [re.sub(r"^\d+: | initval \w+", "", line) for line in lines if not line.startswith("#")]


def everything(directory: Path) -> tuple[list[Any], ...]:
    """Return everything that a check must not change: rules, kernel parameters, modules, files."""
    values = parameters(re.compile("count|expect"), re.compile("conntrack|vs|conf/(all|lo)"))
    modules = os.listdir("/sys/module")
    files = [str(path) for top in (directory, Path("/run")) for path in sorted(top.glob("**/kubenode*"))]
    return rules(), sorted(values.items()), sorted(modules), files, sorted(map(str, directory.rglob("*")))


def refuse_writes(patch: pytest.MonkeyPatch) -> None:
    """Make writes of the ledger fail, as on a full disk."""

    def opened(path: str, flags: int = os.O_RDONLY) -> int:
        if flags & os.O_WRONLY:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_regular(path, flags)

    patch.setattr(ledger, "open_regular", opened)
