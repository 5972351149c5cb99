# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Common parts of the agent's benchmarks: arguments, and a node with the agent for each number of Services."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kernel.agent_node import AgentNode, endpoint_slice, service
from tests.lab import system


def parser(description: str | None, mode: str) -> argparse.ArgumentParser:
    """Return a parser of the common arguments; ``mode`` is the default one."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--mode", default=mode, choices=["iptables", "ipvs", "nftables"])
    found.add_argument("--variant", default="", choices=["", "nft", "legacy"], help="which iptables")
    found.add_argument("--services", default="100,1000,5000")
    found.add_argument("--endpoints", type=int, default=5, help="for each Service")
    return found


def fill(node: AgentNode, services: int, endpoints: int) -> None:
    """Add Services, each with the given number of endpoints."""
    for number in range(1, services + 1):
        node.store.put(service(number))
        node.store.put(endpoint_slice(number, count=endpoints))


def run(arguments: argparse.Namespace, variant: str, measure: Callable[[AgentNode, int], dict[str, Any]]) -> int:
    """Give each number of Services a filled node, and print what ``measure`` returns as a line of JSON.

    ``measure`` gets the node, whose agent it must start, and the number of Services. Everything programmed is removed
    after it. ``variant``: which iptables. Returns 0.
    """
    system.ip_batch(["link set lo up"])
    for services in map(int, arguments.services.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            node = AgentNode(Path(scratch), arguments.mode, variant)
            try:
                fill(node, services, arguments.endpoints)
                sys.stdout.write(json.dumps(measure(node, services)) + "\n")
                sys.stdout.flush()
                node.stop()
                node.run("cleanup", "--state-directory", str(Path(scratch) / "run"))
            finally:
                node.close()
    return 0
