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
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

from ...base.addresses import IPV4, packed, unpacked
from ...base.errors import KernelError
from ...rendering.ipvs.model import RealServerKey, VirtualServerKey
from ..client_flow import ClientFlow, Wanted

# The connections of the calling thread's network namespace.
PROC_CONNECTIONS = "/proc/thread-self/net/ip_vs_conn"
_PROTOCOLS = frozenset(("TCP", "UDP", "SCTP"))
# Closed by both sides (TCP; SCTP), or a record of a client's affinity and no connection (NONE).
_OVER = frozenset(("TIME_WAIT", "CLOSE", "CLOSED", "NONE"))


class IpvsConnection(NamedTuple):
    """A connection, or a record of a client's affinity: then its client has port 0, and its address is a prefix.

    ``seconds``: until it expires if no packet comes.
    """

    client: Tuple[str, int]
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


def _rows(lines: Iterable[str], family: str) -> Iterator[Tuple[str, List[str]]]:
    """Yield the lines about connections of a family, each with its words."""
    for line in lines:
        words = line.split()
        if words and words[0] in _PROTOCOLS and (":" in words[3]) != (family == IPV4):
            yield line, words


def parse_connections(lines: Iterable[str], family: str) -> Dict[RealServerKey, int]:
    """Return how many connections in use each real server of a family has, from the lines of the file.

    A line holds protocol, client, virtual server and real server as address and port in hexadecimal, and the state.
    Raises KernelError if a line cannot be parsed.
    """
    found: Dict[RealServerKey, int] = {}
    address = _reader(family)
    for line, words in _rows(lines, family):
        try:
            if words[7] in _OVER:
                continue
            server = VirtualServerKey(words[0].lower(), address(words[3]), int(words[4], 16))
            key = RealServerKey(server, address(words[5]), int(words[6], 16))
        except (ValueError, IndexError, OSError) as error:
            raise KernelError(f"{PROC_CONNECTIONS}: cannot parse line: {line.strip()!r}") from error
        found[key] = found.get(key, 0) + 1
    return found


def _listed(lines: Iterable[str], family: str, server: VirtualServerKey) -> Iterator[IpvsConnection]:
    address = _reader(family)
    for line, words in _rows(lines, family):
        if words[0].lower() != server.protocol:
            continue
        try:
            if (address(words[3]), int(words[4], 16)) == (server.address, server.port):
                key = RealServerKey(server, address(words[5]), int(words[6], 16))
                yield IpvsConnection((address(words[1]), int(words[2], 16)), key, words[7].lower(), int(words[8]))
        except (ValueError, IndexError, OSError) as error:
            raise KernelError(f"{PROC_CONNECTIONS}: cannot parse line: {line.strip()!r}") from error


def connections_of(lines: Iterable[str], family: str, server: VirtualServerKey) -> List[IpvsConnection]:
    """Return the connections of a virtual server, from the lines of the file. Raises KernelError."""
    return list(_listed(lines, family, server))


def open_connections(family: str, server: VirtualServerKey) -> List[IpvsConnection]:
    """Return the connections of a virtual server, and the affinity of its clients. Raises KernelError."""
    return connections_of(_lines(), family, server)


def used_connections(family: str) -> Dict[RealServerKey, int]:
    """Return how many connections in use each real server of a family has. Raises KernelError."""
    return parse_connections(_lines(), family)


def client_connections(family: str, wanted: Wanted) -> List[ClientFlow]:
    """Return the connections of a family to virtual servers that are wanted; none without IPVS. Raises KernelError."""
    return [flow for flow in parse_clients(_lines(), family) if wanted(flow.protocol, flow.destination)]


def parse_clients(lines: Iterable[str], family: str) -> Iterator[ClientFlow]:
    """Yield the clients' connections from the lines of the file. Raises KernelError if a line cannot be parsed."""
    address = _reader(family)
    for line, words in _rows(lines, family):
        try:
            source, destination = (
                (packed(address(words[place])) or b"") + int(words[place + 1], 16).to_bytes(2, "big")
                for place in (1, 3)
            )
            # A client's affinity has no port.
            if int(words[2], 16):
                yield ClientFlow(words[0], source, destination, words[7] not in _OVER)
        except (ValueError, IndexError, OSError, OverflowError) as error:
            raise KernelError(f"{PROC_CONNECTIONS}: cannot parse line: {line.strip()!r}") from error
