# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The values of userspace mode's resource tables: listeners, and the device that has the service addresses.

Addresses are canonical text, ports and seconds plain numbers, protocols lower case (tcp, udp).
"""

from __future__ import annotations

from typing import NamedTuple

from ...base.addresses import address_and_port
from ...resources import Kind

DEVICE = "kube-userspace0"
"""The dummy device that has the service addresses. An interface name has at most 15 characters."""

DEVICES = Kind.DEVICES
ADDRESSES = Kind.ADDRESSES
LISTENERS = Kind.LISTENERS

TCP, UDP = "tcp", "udp"

Endpoint = tuple[str, int]
"""Address and port to which connections are forwarded."""


class ListenerKey(NamedTuple):
    """Identity of a listener: the protocol, address and port at which clients reach a ServicePort."""

    protocol: str
    address: str
    port: int

    def __str__(self) -> str:
        """Return ``10.96.0.1:443/TCP``, as kube-proxy writes it."""
        return f"{address_and_port(self.address, self.port)}/{self.protocol.upper()}"


class Listener(NamedTuple):
    """The settings of a listener for connections or datagrams.

    ``owner``: the ServicePort, ``namespace/name:port``. Its listeners share the turn of endpoints and the affinity of
    clients. ``endpoints``: sorted, or in the order of turns where one has several; without any, the agent opens no
    socket, so that the kernel itself refuses clients.
    ``affinity_seconds``: for how long a client keeps its endpoint, 0 without affinity. ``sources``: CIDRs of the
    clients that are served; empty for all.
    """

    owner: str
    endpoints: tuple[Endpoint, ...]
    affinity_seconds: int = 0
    sources: tuple[str, ...] = ()


def listener_line(key: ListenerKey, value: Listener) -> str:
    """Return a readable line for a listener; no program has a syntax for it."""
    words = [f"listen {key.protocol} {address_and_port(key.address, key.port)}"]
    if value.sources:
        words.append(f"from {','.join(value.sources)}")
    if value.affinity_seconds:
        words.append(f"affinity {value.affinity_seconds}s")
    endpoints = ",".join(address_and_port(*endpoint) for endpoint in value.endpoints)
    words.append(f"forward {endpoints}" if endpoints else "refuse")
    return " ".join([*words, f"# {value.owner}"])
