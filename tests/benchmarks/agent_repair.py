# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure how fast the agent repairs what other programs alter, and what it costs while nothing happens.

    unshare -n python -m tests.benchmarks.agent_repair --mode nftables
    unshare -n python -m tests.benchmarks.agent_repair --mode iptables --variant legacy --services 100,1000,5000
    python -m tests.lab.uml --memory 2G -- python -m tests.benchmarks.agent_repair --mode ipvs [--without-tap]

The agent is the real process, the API server the test one. For each number of Services: one line of JSON with the
processor seconds (user and system, children included) that a minute of idleness takes, and the seconds from each
command's start until everything is as before. ``--without-tap``: ipvs without a netlink monitoring device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any, Callable, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from tests.benchmarks import agent_runs
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_ip
from tests.waiting import wait_for

SETTLE_SECONDS, IDLE_SECONDS, GIVE_UP_SECONDS = 45.0, 60.0, 120.0

Commands = list[Sequence[str]]


def ipvs_commands() -> dict[str, Commands]:
    """Return the commands that alter virtual servers, ipsets and addresses."""
    server, real = f"{cluster_ip(2)}:80", f"{endpoint_ip(2, 0)}:8080"
    return {
        "virtual server deleted": [("ipvsadm", "-D", "-t", server)],
        "virtual server altered": [("ipvsadm", "-E", "-t", server, "-s", "lc")],
        "real server deleted": [("ipvsadm", "-d", "-t", server, "-r", real)],
        "weight altered": [("ipvsadm", "-e", "-t", server, "-r", real, "-m", "-w", "7")],
        "ipset entry deleted": [("ipset", "del", "KUBE-CLUSTER-IP", f"{cluster_ip(2)},tcp:80")],
        "ipset entry exchanged": [
            ("ipset", "add", "KUBE-CLUSTER-IP", "10.99.9.9,tcp:80"),
            ("ipset", "del", "KUBE-CLUSTER-IP", f"{cluster_ip(2)},tcp:80"),
        ],
        "address deleted": [("ip", "address", "del", f"{cluster_ip(3)}/32", "dev", "kube-ipvs0")],
    }


def iptables_commands(program: str) -> dict[str, Commands]:
    """Return the commands that alter chains and rules of every mode with iptables."""
    chain = ("-t", "nat", "KUBE-MARK-MASQ")
    return {
        "jump deleted": [(program, "-t", "nat", "-D", "PREROUTING", "1")],
        "chain flushed": [(program, "-t", "nat", "-F", "KUBE-POSTROUTING")],
        "rule deleted": [(program, "-t", "nat", "-D", "KUBE-MARK-MASQ", "1")],
        "rule altered, same size": [(program, *chain[:2], "-R", chain[2], "1", "-j", "MARK", "--or-mark", "0x1000")],
    }


def nftables_commands() -> dict[str, Commands]:
    """Return the commands that alter the table."""
    table = ("ip", "kube-proxy")
    return {
        "map flushed": [("nft", "flush", "map", *table, "service-frontends")],
        "chain flushed": [("nft", "flush", "chain", *table, "services")],
        "rule added": [("nft", "insert", "rule", *table, "services", "ip", "daddr", "198.51.100.9", "drop")],
        "table deleted": [("nft", "delete", "table", *table)],
    }


def _digest(*command: str) -> tuple[str, ...]:
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Chains of built-in tables and counters vary; the order of chains and elements too.
    return tuple(sorted(line for line in text.splitlines() if not line.startswith((":", "#"))))


def content(mode: str, variant: str) -> tuple[tuple[str, ...], ...]:
    """Return everything that the mode has programmed."""
    if mode == "nftables":
        # A line lists several elements, in an order that may differ after they were created again.
        lines = _digest("nft", "-s", "list", "table", "ip", "kube-proxy")
        return (tuple(sorted(word.strip(",") for line in lines for word in line.split())),)
    found = (_digest(f"iptables-{variant}-save"),)
    if mode == "ipvs":
        addresses = _digest("ip", "-4", "-o", "address", "show", "dev", "kube-ipvs0")
        words = tuple(line.split()[3] for line in addresses)
        found += (_digest("ipvsadm", "-Sn"), _digest("ipset", "save"), tuple(sorted(words)))
    return found


def repaired(node: AgentNode, commands: Commands) -> float:
    """Return the seconds until the agent has counted a repair; then everything is as before."""
    known = node.status()["driftRepaired"]
    started = time.monotonic()
    for command in commands:
        subprocess.run(command, check=True)
    wait_for(lambda: node.status()["driftRepaired"] > known, GIVE_UP_SECONDS, 0.02)
    return round(time.monotonic() - started, 2)


def measure(node: AgentNode, services: int, commands: dict[str, Commands]) -> dict[str, Any]:
    """Start the agent, let it idle, and then damage the node in every way."""
    node.start()
    time.sleep(SETTLE_SECONDS)
    load, processor = os.getloadavg()[0], node.processor_seconds()
    time.sleep(IDLE_SECONDS)
    idle = node.processor_seconds() - processor
    before = content(node.mode, node.kernel_variant)
    seconds = {}
    for what, lines in commands.items():
        seconds[what] = repaired(node, lines)
        if content(node.mode, node.kernel_variant) != before:
            raise SystemExit(f"{what}: not everything is as before")
    return {
        "mode": node.mode,
        "variant": node.kernel_variant,
        "services": services,
        "idle_processor_s_per_minute": round(idle * 60 / IDLE_SECONDS, 2),
        "repair_s": seconds,
        "rss_mib": round(node.resident_mebibytes(), 1),
        "load": round(load, 1),
    }


def main() -> int:
    """Measure as the arguments say."""
    parser = agent_runs.parser(__doc__, "nftables")
    parser.add_argument("--without-tap", action="store_true", help="ipvs: no netlink monitoring device")
    arguments = parser.parse_args()
    if arguments.without_tap:
        # The agent keeps a device of that name that is of another kind.
        system.ip_batch(["link add kube-nlmon0 type dummy"])
    variant = arguments.variant or ("legacy" if arguments.mode == "ipvs" else "")
    make: dict[str, Callable[[], dict[str, Commands]]] = {
        "nftables": nftables_commands,
        "iptables": lambda: iptables_commands(f"iptables-{variant}"),
        "ipvs": lambda: {**ipvs_commands(), **iptables_commands(f"iptables-{variant}")},
    }
    return agent_runs.run(arguments, variant, lambda node, services: measure(node, services, make[arguments.mode]()))


if __name__ == "__main__":
    sys.exit(main())
