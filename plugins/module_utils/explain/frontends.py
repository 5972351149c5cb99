# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses and ports at which a ServicePort is served, by kind."""

from __future__ import annotations

from typing import Iterator, NamedTuple

from ..base.addresses import address_and_port, is_loopback
from ..rendering.settings import DataplaneSettings
from ..serviceports.info import ServicePortInfo, Sources
from .target import Destination

INTERNAL, EXTERNAL = "internal", "external"
CLUSTER_IP, EXTERNAL_IP, LOAD_BALANCER_IP, NODE_PORT = "cluster IP", "external IP", "load balancer IP", "node port"


class Frontend(NamedTuple):
    """An address and port of a ServicePort. ``via``: the kind of address."""

    via: str
    address: str
    port: int

    @property
    def traffic(self) -> str:
        """Return which traffic policy applies, INTERNAL or EXTERNAL."""
        return INTERNAL if self.via == CLUSTER_IP else EXTERNAL

    def __str__(self) -> str:
        return address_and_port(self.address, self.port)


def frontends_of(port: ServicePortInfo, settings: DataplaneSettings) -> Iterator[Frontend]:
    """Yield all addresses and ports of a ServicePort."""
    yield Frontend(CLUSTER_IP, port.cluster_ip, port.port)
    for address in port.external_ips:
        yield Frontend(EXTERNAL_IP, address, port.port)
    for address in port.load_balancer_ips:
        yield Frontend(LOAD_BALANCER_IP, address, port.port)
    if port.node_port:
        for address in settings.node_port_addresses:
            yield Frontend(NODE_PORT, address, port.node_port)


def answering(port: ServicePortInfo, settings: DataplaneSettings, destination: Destination) -> tuple[Frontend, ...]:
    """Return the frontend that matches a destination, if the ServicePort has it."""
    if destination.protocol not in ("", port.protocol):
        return ()
    place = (destination.address, destination.port)
    for frontend in frontends_of(port, settings):
        if (frontend.address, frontend.port) == place:
            return (frontend,)
    if place[1] != port.node_port or not is_loopback(place[0]):
        return ()
    frontend = Frontend(NODE_PORT, *place)
    return (frontend,) if settings.localhost_node_ports or refused_at_loopback(frontend, port, settings) else ()


def refused_at_loopback(frontend: Frontend, port: ServicePortInfo, settings: DataplaneSettings) -> str:
    """Return why a node port does not answer at a loopback address, or empty text."""
    if frontend.via != NODE_PORT or port.protocol not in settings.localhost_rejected:
        return ""
    named = "of UDP and SCTP" if settings.localhost_listeners else "that nodePortAddresses do not name"
    return f"node ports {named} are refused at loopback addresses" if is_loopback(frontend.address) else ""


def sources_by_kind(port: ServicePortInfo) -> dict[str, Sources]:
    """Return the allowed sources of each kind of external address of a ServicePort."""
    return {
        EXTERNAL_IP: port.external_ip_sources,
        LOAD_BALANCER_IP: port.source_ranges,
        NODE_PORT: port.node_port_sources,
    }
