# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Flows, endpoints and tallies of a load."""

from __future__ import annotations

import socket
from typing import NamedTuple, Optional

LOST_SECONDS = 15.0


class Flow(NamedTuple):
    """Requests from a place (the path of a namespace) to a frontend.

    ``kind``: new, kept (both TCP), udp (each request from a new socket) or kept-udp. ``own``: whether the endpoint must
    see the client's own address; None if either will do. ``rate``: requests a second.
    ``connections``: how many are kept.
    """

    place: str
    kind: str
    address: str
    port: int
    rate: float
    own: Optional[bool] = None
    connections: int = 4

    @property
    def is_udp(self) -> bool:
        """Whether requests go over UDP."""
        return self.kind.endswith("udp")

    @property
    def is_kept(self) -> bool:
        """Whether requests share sockets."""
        return self.kind.startswith("kept")


class Endpoint(NamedTuple):
    """A server: its place (empty for where its program runs), tcp or udp, the address to listen on and the port."""

    place: str
    protocol: str
    address: str
    port: int


class Tally(NamedTuple):
    """The results of requests since the last tally: answers by flow, problems in words, seconds, requests waiting.

    ``complete``: every flow that was waited for has had its answers.
    """

    answers: dict[str, int]
    problems: list[str]
    seconds: float
    waiting: int
    complete: bool = True

    @property
    def requests(self) -> int:
        """Answered requests."""
        return sum(self.answers.values())

    def __str__(self) -> str:
        rate = self.requests / self.seconds if self.seconds else 0.0
        return f"{self.requests} answers in {self.seconds:.1f} s ({rate:.0f}/s), {len(self.problems)} problems"


def family_of(address: str) -> int:
    """Return the address family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
