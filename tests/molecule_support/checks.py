# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Helpers of the scenarios' checks: testinfra's view of a node, and requests as users send them."""

from __future__ import annotations

import json
import time
from typing import Any, Callable, Optional

import testinfra  # type: ignore[import-untyped]

from tests.lab.probe import Answer
from tests.lab.topology import LabNode
from tests.molecule_support.scenario import Scenario

#: Enough requests that each of three endpoints misses all of them once in 100,000 runs.
MANY = 36


class Node:
    """A node: ``host`` is testinfra's."""

    def __init__(self, scenario: Scenario, node: LabNode) -> None:
        self.scenario = scenario
        self.lab = node
        self.name = node.name
        self.address = node.address
        self.host: Any = testinfra.get_host(scenario.testinfra(node))

    def ask(self, address: str, port: int, protocol: str = "TCP", timeout: float = 20.0) -> Answer:
        """Send one request from a client outside of the cluster through this node and return the answer."""
        return self.scenario.ask(self.name, protocol, address, port, timeout)

    def ask_often(self, address: str, port: int, protocol: str = "TCP") -> list[Answer]:
        """Send many such requests, all of which must be answered."""
        answers = [self.ask(address, port, protocol) for _ in range(MANY)]
        assert {answer.outcome for answer in answers} == {"answer"}, answers
        return answers

    def ask_inside(self, address: str, port: int, pod: Optional[str] = None, count: int = 1) -> list[Answer]:
        """Send requests from the node itself or from one of its pods."""
        place = f"--namespace /run/netns/{pod}" if pod else ""
        words = f"python3 -m tests.lab.probe TCP {address} {port} --count {count} --timeout 20 {place}"
        text = self.host.check_output(f"env PYTHONPATH=/opt/lab PYTHONDONTWRITEBYTECODE=1 {words}")
        return [Answer(**entry) for entry in json.loads(text)]

    @property
    def pods(self) -> list[str]:
        """Return the names of the node's two pods."""
        return [f"pod-{self.lab.number}-{last}" for last in (2, 3)]

    def rules(self, table: str = "nat") -> str:
        """Return the rules of a table with their counters."""
        return str(self.host.check_output(f"iptables-save -c -t {table}"))

    def packets(self, *words: str, table: str = "nat") -> int:
        """Return how many packets have matched the rule whose line contains all the words; exactly one rule must."""
        lines = [line for line in self.rules(table).splitlines() if line.startswith("[")]
        found = [line for line in lines if all(word in line for word in words)]
        assert len(found) == 1, f"{words}: {found}"
        return int(found[0][1:].split(":")[0])


def within(seconds: float, what: str, condition: Callable[[], bool]) -> None:
    """Fail unless the condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)
