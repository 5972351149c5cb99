# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Obstacles to enforcing network policies: bridges that hide packets, and other programs that enforce policies."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, Iterable, Iterator, Sequence

from ..base.addresses import FAMILIES, IPV4, IPV6, Network, family_of
from ..base.errors import KernelError, some_of
from ..kernel import facts
from ..kernel.netlink.protocol import NETLINK_NETFILTER
from ..kernel.netlink.socket import NetlinkSocket
from ..kernel.nftables.listing import nft_chains, nft_tables
from ..kernel.xtables.legacy_tables import TableReader
from ..kernel.xtables.variant import table_names
from .findings import BRIDGE_NETFILTER, BRIDGE_PORTS, ERROR, OTHER_POLICIES, UNKNOWN_PODS, WARNING, Finding
from .processes import Process, option, programs

#: Tables and the beginnings of names of chains that other implementations create.
_TABLES = {"kube-network-policies": "kube-network-policies", "calico": "Calico"}
_CHAINS = {"KUBE-NWPLCY-": "kube-router", "KUBE-POD-FW-": "kube-router", "cali-": "Calico", "CILIUM_": "Cilium"}
_PROGRAMS = {
    "kube-network-policies": "kube-network-policies",
    "calico-felix": "Calico",
    "calico-node": "Calico",
    "kube-router": "kube-router",
    "cilium-agent": "Cilium",
    "antrea-agent": "Antrea",
}
_NAMED = 5
_CALLS = {IPV4: "net.bridge.bridge-nf-call-iptables", IPV6: "net.bridge.bridge-nf-call-ip6tables"}


def other_implementations(running: Sequence[Process]) -> list[Finding]:
    """Return a warning for each other implementation of network policies on this node."""
    found: dict[str, str] = {}
    for process in running:
        for program in programs(process):
            name = _PROGRAMS.get(program)
            if name == "kube-router" and option(process, "run-firewall") in ("false", "0", "f"):
                continue
            if name:
                found.setdefault(name, f"process {process.number}")
    for name, where in (*_in_nftables(), *_in_legacy_tables()):
        found.setdefault(name, where)
    return [
        Finding(
            OTHER_POLICIES,
            WARNING,
            f"{name} enforces network policies on this node too ({where}), or left its rules behind",
            "a packet passes only if both allow it; disable the policies of one, and remove its leftovers",
        )
        for name, where in sorted(found.items())
    ]


def _in_nftables() -> Iterator[tuple[str, str]]:
    """Yield the traces in the tables and chains of the kernel, those of iptables-nft included."""
    # Without nf_tables there are none. A table that cannot be listed is reported where it is needed.
    with contextlib.suppress(KernelError), NetlinkSocket(NETLINK_NETFILTER) as sock:
        for family in ("inet", *FAMILIES):
            for table in nft_tables(sock, family):
                if table.name in _TABLES:
                    yield _TABLES[table.name], f"nftables table {table.name}"
            for chain in nft_chains(sock, family):
                for prefix, name in _CHAINS.items():
                    if chain.name.startswith(prefix):
                        yield name, f"chain {chain.name}"


def _in_legacy_tables() -> Iterator[tuple[str, str]]:
    """Yield the traces in legacy iptables, which the kernel applies as well. Load nothing."""
    for family in FAMILIES:
        names = table_names(family)
        with contextlib.suppress(KernelError), contextlib.closing(TableReader(family)) as reader:
            for table in names:
                for prefix, name in _CHAINS.items():
                    chain = reader.chain_beginning(table, prefix)
                    if chain:
                        yield name, f"chain {chain} of legacy iptables"


def bridge_findings(
    addresses: Iterable[str], root: str = "", judges_frames: Callable[[], bool] = lambda: True
) -> list[Finding]:
    """Return an error if pods of this node share a bridge whose packets the table does not see.

    ``addresses``: of the pods. The kernel shows packets between ports of one bridge to IP hooks only if br_netfilter
    is loaded and its parameter for the family is 1. It is a warning if the ports must be known, and ``judges_frames``
    returns that nf_tables does not see frames.
    """
    every, findings = list(addresses), []
    shared: set[str] = set()
    for family in FAMILIES:
        own = [address for address in every if family_of(address) == family]
        bridges = {
            device
            for device, network in _routes(family, root)
            if network.prefix_length
            and os.path.isdir(f"{root}/sys/class/net/{device}/bridge")
            and any(map(network.contains, own))
        }
        shared |= bridges
        key = _CALLS[family]
        value = (facts.read_text(f"{root}/proc/sys/{key.replace('.', '/')}") or "").strip()
        if bridges and value != "1":
            state = f"is {value}" if value else "does not exist, since br_netfilter is not loaded"
            what = f"pods of this node share the bridge {', '.join(sorted(bridges))}, and {key} {state}, so that"
            what += f" policies between them have no effect ({family})"
            findings.append(Finding(BRIDGE_NETFILTER, ERROR, what, f"modprobe br_netfilter, and set {key} to 1"))
    if shared and not judges_frames():
        what = f"pods of this node share the bridge {', '.join(sorted(shared))}, and nf_tables of this kernel sees no"
        what += " frames of bridges, so that a pod can send with the addresses of others on its bridge"
        remedy = "boot a kernel with CONFIG_NF_TABLES_BRIDGE; all else is enforced without"
        findings.append(Finding(BRIDGE_PORTS, WARNING, what, remedy))
    return findings


def unknown_pod_findings(addresses: Sequence[str], ranges: Sequence[Network]) -> list[Finding]:
    """Return an error if traffic of unknown pods cannot be denied: their addresses are in no known range.

    ``addresses``: of the known pods of this node. ``ranges``: those in which unknown addresses are denied.
    """
    setting = "networkPolicy.unknownPods: deny"
    if not ranges:
        remedy = "set networkPolicy.podCIDRs, or let the cluster assign spec.podCIDRs to its Nodes"
        return [Finding(UNKNOWN_PODS, ERROR, f"{setting}: the ranges of this node's pods are not known", remedy)]
    outside = sorted(address for address in addresses if not any(network.contains(address) for network in ranges))
    if not outside:
        return []
    known = ", ".join(map(str, ranges))
    what = f"{setting}: pods of this node have addresses outside of {known}: {some_of(outside, _NAMED)}"
    remedy = "set networkPolicy.podCIDRs to the ranges that the network plugin uses, or unknownPods: allow"
    return [Finding(UNKNOWN_PODS, ERROR, what, remedy)]


def _routes(family: str, root: str) -> Iterator[tuple[str, Network]]:
    """Yield (interface, range) of the routes of the main table. Sources: net/ipv4/fib_trie.c, net/ipv6/route.c."""
    if family == IPV4:
        for line in (facts.read_text(f"{root}/proc/net/route") or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 7:
                first = int.from_bytes(bytes.fromhex(words[1])[::-1], "big")
                yield words[0], Network(first, bin(int(words[7], 16)).count("1"), family)
    else:
        for line in (facts.read_text(f"{root}/proc/net/ipv6_route") or "").splitlines():
            words = line.split()
            if len(words) > 9:
                yield words[9], Network(int(words[0], 16), int(words[1], 16), family)
