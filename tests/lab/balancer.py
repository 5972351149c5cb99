# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A load balancer that sends connections to nodes whose health check answers, as those of clouds do."""

from __future__ import annotations

import http.client
import threading
from typing import Mapping, NamedTuple

from tests.lab import system

PROBE_SECONDS, FALL = 0.2, 2


class Target(NamedTuple):
    """Where the connections to an address and port go: a port of the nodes, and the port and path of their health."""

    address: str
    port: int
    node_port: int
    health_port: int
    health_path: str = "/"


def answer_of(address: str, port: int, path: str = "/", timeout: float = 5.0) -> tuple[int, str]:
    """Return status and body of an HTTP answer; status 0 without one."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


class LoadBalancer:
    """Sends new connections to the nodes whose health check answers 200, in turn, until closed.

    It works in the caller's network namespace, for what the hook (prerouting or output) sees. The kernel translates
    addresses and remembers which node each connection uses. ``addresses`` are those of the nodes by their numbers.
    ``patience``: the seconds after which a node without an answer is taken for one that is down. While no node is
    healthy it keeps the last ones, as those of clouds do: kube-proxy's DaemonSet replaces a pod before the health check
    of the last one answers.
    """

    def __init__(
        self, target: Target, addresses: Mapping[int, str], hook: str = "prerouting", patience: float = 1.0
    ) -> None:
        self.nodes: tuple[int, ...] = ()
        self._target = target
        self._patience = patience
        self._addresses = addresses
        self._table = f"ip lb-{target.health_port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failed: dict[int, int] = dict.fromkeys(addresses, FALL)
        system.run(["nft", "-f", "-"], f"table {self._table} {{ chain in {{ type nat hook {hook} priority -100; }}; }}")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PROBE_SECONDS):
            for number, address in self._addresses.items():
                place = (address, self._target.health_port, self._target.health_path)
                status, _body = answer_of(*place, timeout=self._patience)
                self._failed[number] = 0 if status == 200 else self._failed[number] + 1
            chosen = tuple(number for number in self._addresses if self._failed[number] < FALL)
            if chosen and chosen != self.nodes:
                self._send_to(chosen)

    def _send_to(self, nodes: tuple[int, ...]) -> None:
        places = ", ".join(f"{place} : {self._addresses[number]}" for place, number in enumerate(nodes))
        chosen = f"numgen inc mod {len(nodes)} map {{ {places} }}"
        matched = f"ip daddr {self._target.address} tcp dport {self._target.port}"
        rule = f"add rule {self._table} in {matched} dnat to {chosen} : {self._target.node_port}"
        system.run(["nft", "-f", "-"], f"flush chain {self._table} in\n{rule}")
        self.nodes = nodes

    def close(self) -> None:
        """Stop probing."""
        self._stop.set()
        self._thread.join()
