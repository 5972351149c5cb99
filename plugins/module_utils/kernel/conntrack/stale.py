# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Removal of stale connection tracking entries.

A UDP flow keeps the endpoint that received its first packet for as long as packets keep coming, even after that
endpoint was removed. So after endpoints changed, entries of served addresses that lead to anything but a serving
endpoint are deleted, and those of addresses that no Service has any more (kube-proxy 1.38, which does so for UDP alone;
see ``serviceports.flows``).

A TCP connection that was begun to an endpoint that is gone, for example after a rollback, is not answered for as long
as its client repeats the request, whatever serves by then. So such entries are deleted as well.
"""

from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple

from ...base.addresses import packed_place
from ...configuration.behaviour import Behaviour
from ...serviceports.flows import Frontend, examined_protocols, frontends_of
from ...serviceports.info import ServicePortInfo
from ..netlink.attributes import parse_attributes
from .messages import NFGENMSG, SYN_SENT, UNREPLIED, identity, identity_of, state_number
from .socket import ConntrackSocket, collected


class KnownFrontends(NamedTuple):
    """The frontends of one protocol and their serving endpoints; addresses and ports as bytes in network order.

    ``addresses`` maps address and port to endpoints, ``node_ports`` a port on any address. ``every``: all entries of a
    frontend without endpoints are stale, also those whose destination was never rewritten. That is harmless for UDP
    only: another host may use the port of a node port, and a connection to it would not survive.
    """

    every: bool
    addresses: dict[bytes, set[bytes]]
    node_ports: dict[bytes, set[bytes]]

    def is_stale(self, destination: bytes, reply_source: bytes) -> bool:
        """Return whether this source must not reply to a flow to this destination."""
        endpoints = self.addresses.get(destination)
        if endpoints is None:
            endpoints = self.node_ports.get(destination[-2:])
        if endpoints is None or reply_source in endpoints:
            return False
        return self.every or bool(endpoints) or reply_source != destination


_NOTHING = KnownFrontends(False, {}, {})


def frontends(
    protocols: Iterable[str], service_ports: Iterable[ServicePortInfo], released: Iterable[Frontend] = ()
) -> dict[str, KnownFrontends]:
    """Return the frontends of the ServicePorts of these protocols, and those that were ``released``, by protocol.

    All are of one family. Readiness, policies, topology and termination do not matter.
    """
    known: dict[str, KnownFrontends] = {}
    for info in service_ports:
        if info.key.protocol in protocols:
            serving = {packed_place(endpoint.ip, endpoint.port) for endpoint in info.endpoints if endpoint.serving}
            for frontend in frontends_of(info):
                _add(known, frontend, serving)
    for frontend in released:
        _add(known, frontend, set())
    return known


def _add(known: dict[str, KnownFrontends], frontend: Frontend, serving: set[bytes]) -> None:
    protocol = frontend.protocol
    found = known.setdefault(protocol, KnownFrontends(protocol == "UDP", {}, {}))
    if frontend.address:
        found.addresses.setdefault(packed_place(frontend.address, frontend.port), set()).update(serving)
    else:
        found.node_ports.setdefault(frontend.port.to_bytes(2, "big"), set()).update(serving)


def stale_identities(sock: ConntrackSocket, family: str, protocol: str, known: KnownFrontends) -> list[bytes]:
    """Return the identities of the stale entries. Raises KernelError."""
    return collected(
        lambda: (
            identity(entry)
            for entry in sock.entries(family, protocol)
            if known.is_stale(entry.destination, entry.reply_source)
        )
    )


def delete_stale(
    sock: ConntrackSocket,
    family: str,
    service_ports: Iterable[ServicePortInfo],
    behaviour: Behaviour,
    released: Iterable[Frontend] = (),
) -> int:
    """Delete the stale entries of ServicePorts, and of addresses that were ``released``, all of one family.

    Return their number. Raises KernelError.
    """
    # TCP connections through a Service that exists are kept: see ``endConnectionsOfDeletedServices``.
    known = frontends(examined_protocols(behaviour), service_ports, released)
    return sum(
        sock.delete(family, stale_identities(sock, family, protocol, found)) for protocol, found in known.items()
    )


def delete_half_open(sock: ConntrackSocket, family: str, service_ports: Iterable[ServicePortInfo]) -> int:
    """Delete the entries of TCP connections that no endpoint has answered and that lead to none that serves.

    ``service_ports``: all of a family. Return the number of entries. The kernel selects those without an answer (5.17):
    of 200,000 connections it does so in 50 ms. Raises KernelError.
    """
    found = collected(lambda: _half_open(sock, family))
    if not found:
        return 0
    known = frontends(("TCP",), service_ports).get("TCP", _NOTHING)
    return sock.delete(family, [item for ends, item in found if known.is_stale(*ends)])


def _half_open(sock: ConntrackSocket, family: str) -> Iterator[tuple[tuple[bytes, bytes], bytes]]:
    """Yield destination, replying source and identity of unanswered entries whose destination was rewritten."""
    for entry in sock.entries(family, "TCP", UNREPLIED):
        if entry.destination != entry.reply_source:
            found = parse_attributes(entry.view, entry.start + NFGENMSG.size, entry.end)
            if state_number(found, "TCP") == SYN_SENT:
                yield (entry.destination, entry.reply_source), identity_of(found)
