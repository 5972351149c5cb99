# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Removal of stale connection tracking entries.

A UDP flow keeps the endpoint that received its first packet for as long as packets keep coming, even after that
endpoint was removed. So after endpoints changed, entries of served addresses that lead to anything but a serving
endpoint are deleted (kube-proxy 1.36, which does so for UDP alone; see ``serviceports.flows``).
"""

from __future__ import annotations

from typing import Collection, Dict, Iterable, Iterator, List, NamedTuple, Set

from ...configuration.behaviour import Behaviour
from ...serviceports.flows import Frontend, examined_protocols, frontends_of
from ...serviceports.info import ServicePortInfo
from .messages import RawEntry, identity, place
from .socket import ConntrackSocket, collected


class Frontends(NamedTuple):
    """The frontends of one protocol and their serving endpoints; addresses and ports as bytes in network order.

    ``addresses`` maps address and port to endpoints, ``node_ports`` a port on any address. If a
    frontend has no endpoints, only its entries with a rewritten destination are stale.
    """

    addresses: Dict[bytes, Set[bytes]]
    node_ports: Dict[bytes, Set[bytes]]

    def is_stale(self, destination: bytes, reply_source: bytes) -> bool:
        """Return whether this source must not reply to a flow to this destination."""
        endpoints = self.addresses.get(destination)
        if endpoints is None:
            endpoints = self.node_ports.get(destination[-2:])
        if endpoints is None or reply_source in endpoints:
            return False
        return bool(endpoints) or reply_source != destination


def frontends(
    protocol: str,
    service_ports: Iterable[ServicePortInfo],
    released: Iterable[Frontend] = (),
    without_endpoints: bool = False,
) -> Frontends:
    """Return the frontends of the ServicePorts of a protocol, all of one family, and those that were ``released``.

    ServicePorts without a serving endpoint are omitted, so their entries are kept, unless ``without_endpoints``;
    readiness, policies, topology and termination do not matter.
    """
    found = Frontends({}, {})
    for info in service_ports:
        if info.key.protocol != protocol:
            continue
        serving = {place(endpoint.ip, endpoint.port) for endpoint in info.endpoints if endpoint.serving}
        if serving or without_endpoints:
            for frontend in frontends_of(info):
                _add(found, frontend, serving)
    for frontend in released:
        if frontend.protocol == protocol:
            _add(found, frontend, set())
    return found


def _add(found: Frontends, frontend: Frontend, serving: Set[bytes]) -> None:
    if frontend.address:
        found.addresses.setdefault(place(frontend.address, frontend.port), set()).update(serving)
    else:
        found.node_ports.setdefault(frontend.port.to_bytes(2, "big"), set()).update(serving)


def stale_entries(entries: Iterable[RawEntry], known: Frontends) -> Iterator[RawEntry]:
    """Yield the entries of the known frontends that lead to anything but a serving endpoint."""
    addresses, node_ports, is_stale = known.addresses, known.node_ports, known.is_stale
    for entry in entries:
        destination = entry[0]
        endpoints = addresses.get(destination)
        if endpoints is None:
            endpoints = node_ports.get(destination[-2:])
        if endpoints is not None and entry[1] not in endpoints and is_stale(destination, entry[1]):
            yield entry


def stale_identities(sock: ConntrackSocket, family: str, protocol: str, known: Frontends) -> List[bytes]:
    """Return the identities of the stale entries; nothing is read without frontends. Raises KernelError."""
    if not known.addresses and not known.node_ports:
        return []
    return collected(lambda: map(identity, stale_entries(sock.entries(family, protocol), known)))


def delete_stale(
    sock: ConntrackSocket,
    family: str,
    service_ports: Collection[ServicePortInfo],
    behaviour: Behaviour,
    released: Collection[Frontend] = (),
) -> int:
    """Delete the stale entries of ServicePorts, and of addresses that were ``released``, all of one family.

    Return their number. Raises KernelError.
    """
    deleted = 0
    examined = examined_protocols(behaviour)
    for protocol in dict.fromkeys((*examined, *(item.protocol for item in released))):
        # TCP connections through a Service that exists are kept: see ``endConnectionsOfDeletedServices``.
        ports = service_ports if protocol in examined else ()
        known = frontends(protocol, ports, released, behaviour.stale_flows_end)
        deleted += sock.delete(family, stale_identities(sock, family, protocol, known))
    return deleted
