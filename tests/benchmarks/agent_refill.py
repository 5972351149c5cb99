# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what it costs the agent to fill iptables tables again, beside the first fill.

    unshare -n python -m tests.benchmarks.agent_refill --variant nft --services 5000,10000

For each number of Services one line of JSON with the seconds of processor time of the agent and the programs that it
runs, until each of these is done and nothing is left to do: the first fill of an empty node; the repair after
``iptables -t nat -F``, and after one chain of twenty was flushed; and a change to nftables mode and back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)

# isort: split

from tests.benchmarks import agent_runs
from tests.kernel.agent_node import AgentNode
from tests.waiting import wait_for

PATIENCE, QUIET_SECONDS = 1200.0, 3.0
SHARE = 20


def cost(node: AgentNode, act: Callable[[], None]) -> float:
    """Return the processor seconds from now until ``act`` has returned and the agent has become quiet."""
    before = node.processor_seconds()
    act()
    used = node.processor_seconds()
    while True:
        time.sleep(QUIET_SECONDS)
        now = node.processor_seconds()
        if now - used < 0.02 * QUIET_SECONDS:
            return round(now - before, 2)
        used = now


def repaired(node: AgentNode) -> int:
    """Return how many entries the agent has repaired; 0 if it is too busy to answer."""
    return int(node.status().get("driftRepaired", 0))


def flushed(node: AgentNode, *chains: str) -> None:
    """Flush chains of the table nat, or all, and wait until the agent has repaired them."""
    known = repaired(node)
    program = f"iptables-{node.kernel_variant}"
    if chains:
        lines = ["*nat", *(f"-F {chain}" for chain in chains), "COMMIT", ""]
        subprocess.run([f"{program}-restore", "--noflush"], input="\n".join(lines), text=True, check=True)
    else:
        subprocess.run([program, "-t", "nat", "-F"], check=True)
    wait_for(lambda: repaired(node) > known, PATIENCE, 0.2)


def change_mode(node: AgentNode, mode: str) -> None:
    """Have the agent change its mode, and wait until it has."""
    before = time.time()
    node.write_configuration(mode=mode)
    assert node.process is not None
    node.process.send_signal(1)

    def changed() -> bool:
        status = node.status()
        # An agent that is busy does not answer in time.
        return status.get("mode") == mode and status["lastSync"] > before and not status["lastError"]

    wait_for(changed, PATIENCE, 0.2)


def some_chains(node: AgentNode) -> list[str]:
    """Return every twentieth chain of a Service or an endpoint."""
    text = node.kernel_text(node.kernel_variant)
    names = [line[1:].split()[0] for line in text.splitlines() if line.startswith((":KUBE-SVC-", ":KUBE-SEP-"))]
    return names[::SHARE]


def measure(node: AgentNode, services: int) -> dict[str, Any]:
    """Return the cost of each step, and as multiples of the first fill."""
    node.start(wait=False)
    wait_for(lambda: node.status().get("syncs", 0) > 0, PATIENCE, 0.2)
    started = node.processor_seconds()
    steps = {"first fill": round(started + cost(node, lambda: None), 2)}
    load = os.getloadavg()[0]
    steps["all chains flushed"] = cost(node, lambda: flushed(node))
    steps["some chains flushed"] = cost(node, lambda: flushed(node, *some_chains(node)))
    steps["to nftables"] = cost(node, lambda: change_mode(node, "nftables"))
    steps["to iptables"] = cost(node, lambda: change_mode(node, "iptables"))
    first = steps["first fill"]
    return {
        "variant": node.kernel_variant,
        "services": services,
        "processor_s": steps,
        "of_first_fill": {name: round(seconds / first, 2) for name, seconds in steps.items()},
        "load": round(load, 1),
    }


def main() -> int:
    """Measure as the arguments say."""
    parser = agent_runs.parser(__doc__, "iptables")
    parser.set_defaults(services="5000,10000", variant="nft")
    arguments = parser.parse_args()
    return agent_runs.run(arguments, arguments.variant, measure)


if __name__ == "__main__":
    sys.exit(main())
