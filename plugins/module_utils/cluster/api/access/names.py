# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses of API servers that are known by name."""

from __future__ import annotations

import socket
from typing import Iterable

from ....base.addresses import canonical_address


def is_name(host: str) -> bool:
    """Return whether a host is a name, not an address."""
    return canonical_address(host) is None


def addresses_of_name(name: str) -> tuple[str, ...]:
    """Return the addresses that the node's resolver finds for a name, in its order; none if it finds none.

    Waits as long as the resolver does (resolv.conf(5): by default 5 seconds for each attempt at each name server).
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # UnicodeError: the text cannot be a name in the DNS (RFC 3490).
        return ()
    # The first part of a socket address is the address, in both families.
    addresses = (canonical_address(str(sockaddr[0])) for _family, _type, _protocol, _name, sockaddr in found)
    return tuple(dict.fromkeys(address for address in addresses if address is not None))


def with_addresses(servers: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return servers, given by host and port, with the addresses of each name in its place. Waits for the resolver."""
    result: list[tuple[str, int]] = []
    for host, port in servers:
        result += [(address, port) for address in (addresses_of_name(host) if is_name(host) else (host,))]
    return result
