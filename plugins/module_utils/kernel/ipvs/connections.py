# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connections of IPVS, from /proc/net/ip_vs_conn; netlink does not report them.

The connection counts of a real server include connections that both sides have closed: IPVS keeps them for two minutes
for late packets (TIME_WAIT). Only the state of each connection identifies those still in use.

The kernel resumes reading this list by counting (ip_vs_conn_array), so for each connection that ends during the read
another one may be missed.
"""

from __future__ import annotations

import socket
from collections import Counter
from typing import Callable, Iterable, Iterator, NamedTuple, Optional, TypeVar

from ...base.addresses import IPV4, packed_place, unpacked
from ...base.errors import KernelError
from ...rendering.ipvs.model import RealServerKey, VirtualServerKey
from ..client_flow import ClientFlow, Wanted

# The connections of the calling thread's network namespace.
PROC_CONNECTIONS = "/proc/thread-self/net/ip_vs_conn"
_PROTOCOLS = frozenset(("TCP", "UDP", "SCTP"))
Parsed = TypeVar("Parsed")
# Closed by both sides (TCP; SCTP), or a record of a client's affinity and no connection (NONE).
_OVER = frozenset(("TIME_WAIT", "CLOSE", "CLOSED", "NONE"))


class IpvsConnection(NamedTuple):
    """A connection, or a record of a client's affinity: then its client has port 0, and its address is a prefix.

    ``seconds``: until it expires if no packet comes.
    """

    client: tuple[str, int]
    real_server: RealServerKey
    state: str
    seconds: int

    @property
    def is_affinity(self) -> bool:
        """Return whether it is a record of a client's affinity."""
        return not self.client[1]


def _reader(family: str) -> Callable[[str], str]:
    if family == IPV4:
        return lambda text: unpacked(bytes.fromhex(text))
    return lambda text: unpacked(socket.inet_pton(socket.AF_INET6, text))


def _lines() -> Iterator[str]:
    """Yield the lines of the file; none without IPVS. Raises KernelError."""
    try:
        with open(PROC_CONNECTIONS, encoding="ascii") as lines:
            yield from lines
    except FileNotFoundError:
        return
    except OSError as error:
        raise KernelError(f"{PROC_CONNECTIONS}: {error.strerror}") from error


def _parsed(lines: Iterable[str], family: str, parse: Callable[[list[str]], Optional[Parsed]]) -> Iterator[Parsed]:
    """Yield what ``parse`` makes of the words of each line about a connection of a family, without None.

    Raises KernelError if a line cannot be parsed.
    """
    for line in lines:
        words = line.split()
        if words and words[0] in _PROTOCOLS and (":" in words[3]) != (family == IPV4):
            try:
                found = parse(words)
            except (ValueError, IndexError, OSError, OverflowError) as error:
                raise KernelError(f"{PROC_CONNECTIONS}: cannot parse line: {line.strip()!r}") from error
            if found is not None:
                yield found


def parse_connections(lines: Iterable[str], family: str) -> dict[RealServerKey, int]:
    """Return how many connections in use each real server of a family has, from the lines of the file.

    A line holds protocol, client, virtual server and real server as address and port in hexadecimal, and the state.
    Raises KernelError if a line cannot be parsed.
    """
    address = _reader(family)

    def used(words: list[str]) -> Optional[RealServerKey]:
        if words[7] in _OVER:
            return None
        server = VirtualServerKey(words[0].lower(), address(words[3]), int(words[4], 16))
        return RealServerKey(server, address(words[5]), int(words[6], 16))

    return dict(Counter(_parsed(lines, family, used)))


def connections_of(lines: Iterable[str], family: str, server: VirtualServerKey) -> list[IpvsConnection]:
    """Return the connections of a virtual server, from the lines of the file. Raises KernelError."""
    address = _reader(family)

    def of_server(words: list[str]) -> Optional[IpvsConnection]:
        if (words[0].lower(), address(words[3]), int(words[4], 16)) != server:
            return None
        key = RealServerKey(server, address(words[5]), int(words[6], 16))
        return IpvsConnection((address(words[1]), int(words[2], 16)), key, words[7].lower(), int(words[8]))

    return list(_parsed(lines, family, of_server))


def open_connections(family: str, server: VirtualServerKey) -> list[IpvsConnection]:
    """Return the connections of a virtual server, and the affinity of its clients. Raises KernelError."""
    return connections_of(_lines(), family, server)


def used_connections(family: str) -> dict[RealServerKey, int]:
    """Return how many connections in use each real server of a family has. Raises KernelError."""
    return parse_connections(_lines(), family)


def client_connections(family: str, wanted: Wanted) -> list[ClientFlow]:
    """Return the connections of a family to virtual servers that are wanted; none without IPVS. Raises KernelError."""
    return [flow for flow in parse_clients(_lines(), family) if wanted(flow.protocol, flow.destination)]


def parse_clients(lines: Iterable[str], family: str) -> Iterator[ClientFlow]:
    """Yield the clients' connections from the lines of the file. Raises KernelError if a line cannot be parsed."""
    address = _reader(family)

    def place(words: list[str], number: int) -> bytes:
        return packed_place(address(words[number]), int(words[number + 1], 16))

    def of_client(words: list[str]) -> Optional[ClientFlow]:
        source, destination = place(words, 1), place(words, 3)
        # A client's affinity has no port.
        return ClientFlow(words[0], source, destination, words[7] not in _OVER) if int(words[2], 16) else None

    return _parsed(lines, family, of_client)
