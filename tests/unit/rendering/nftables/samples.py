# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Service ports and settings that use every feature of nftables mode."""

from __future__ import annotations

from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import ServicePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.hashing import JHASH
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import (
    Endpoint,
    ServicePortInfo,
    ServicePortName,
)
from tests.unit.rendering.iptables.routes import PLAIN

MAGLEV = ServicePolicy(scheduler="mh")


def sample_route(family: str, number: int, endpoints: int = 0, **changes: Any) -> ServicePortInfo:
    """Return a numbered Service with ``endpoints`` endpoints, every other of which is on this node."""
    form = "fd00:10:244::{:x}" if family == "IPv6" else "10.244.1.{}"
    chosen = tuple(Endpoint(form.format(each + 1), 8080, is_local=each % 2 == 0) for each in range(endpoints))
    local = tuple(endpoint for endpoint in chosen if endpoint.is_local)
    fields: dict[str, Any] = {
        "key": ServicePortName("ns", f"svc{number}", "http", "TCP"),
        "family": family,
        "cluster_ip": ("fd00:10:96::{:x}" if family == "IPv6" else "10.96.0.{}").format(number),
        "port": 80,
        **PLAIN,
        "externally_accessible": False,
        "uses_cluster_endpoints": True,
        "uses_local_endpoints": False,
        "endpoints": chosen,
        "cluster": chosen,
        "local": local if changes.get("external_local") or changes.get("internal_local") else (),
        "reachable": chosen,
        "has_any": bool(chosen),
    }
    fields.update(changes)
    return ServicePortInfo(**fields)


def vip(family: str) -> str:
    """Return a load balancer address."""
    return "2001:db8:51::1" if family == "IPv6" else "198.51.100.1"


def sample_routes(family: str) -> dict[ServicePortName, ServicePortInfo]:
    """Return service ports of all kinds."""
    six = family == "IPv6"
    ranges = ("2001:db8::/32", "fd00::/9") if six else ("10.0.0.0/8", "192.168.0.0/16", "10.1.2.0/23", "10.0.0.1/32")
    external = "2001:db8:52::1" if six else "203.0.113.1"
    open_to = {"externally_accessible": True}
    routes = [
        sample_route(family, 1, 5),
        sample_route(family, 2, 1, key=ServicePortName("ns", "dns", "dns", "UDP"), port=53),
        sample_route(family, 3, 2, external_ips=(external,), node_port=30003, **open_to),
        sample_route(
            family, 4, 4, external_local=True, node_port=30004, load_balancer_ips=(vip(family),), source_ranges=ranges,
            node_port_sources=ranges[:3], **open_to,
        ),
        sample_route(family, 5, 3, internal_local=True, node_port=30005, **open_to),
        sample_route(family, 6, 3, affinity_seconds=10800, node_port=30006, external_local=True, **open_to),
        sample_route(family, 7, 0, node_port=30007, key=ServicePortName("ns", "none", "", "SCTP"), **open_to),
        sample_route(family, 8, 2, affinity_seconds=90, node_port=30008, **open_to),
        sample_route(family, 9, 1, local=(), external_local=True, node_port=30009, **open_to),
        sample_route(family, 10, 6, policy=MAGLEV, external_local=True, node_port=30010, **open_to),
        sample_route(
            family, 11, 3, policy=MAGLEV._replace(scheduler_flags=("mh-port",)), node_port=30011,
            external_ips=("2001:db8:52::2" if six else "203.0.113.2",), **open_to,
        ),
    ]  # fmt: skip
    return {route.key: route for route in routes}


def sample_settings(family: str, **changes: Any) -> DataplaneSettings:
    """Return settings of a node that detects pods by their addresses, with node ports on one address."""
    six = family == "IPv6"
    node = "fd00:172:18::2" if six else "172.18.0.2"
    fields: dict[str, Any] = {
        "node_name": "node1",
        "node_ip": node,
        "local_traffic": LocalTraffic("cidr", "fd00:10:244::/47" if six else "10.244.0.0/15"),
        "node_port_cidrs": (f"{node}/{128 if six else 32}",),
        "node_port_addresses": (node,),
        "service_cidrs": ("fd00:10:96::/112",) if six else ("10.96.0.0/12", "10.200.0.0/16"),
        "localhost_rejected": ("tcp", "udp", "sctp"),
        "schedulers": frozenset((JHASH,)),
    }
    fields.update(changes)
    return DataplaneSettings(family, **fields)


def settings_of_other_rules() -> list[dict[str, Any]]:
    """Return changes of :func:`sample_settings` that give each rule which depends on settings its other forms."""
    return [
        {"masquerade_ports": (1024, 29999)},
        {"masquerade_all": True, "masquerade_mark": 1},
        {"local_traffic": LocalTraffic("name", "cni0"), "node_port_cidrs": (), "node_port_addresses": ()},
        {"local_traffic": LocalTraffic("prefix", "veth"), "service_cidrs": ()},
        {"local_traffic": None},
        {"count_connections": True},
        {"count_bytes": True},
        {"localhost_rejected": ("udp", "sctp")},
    ]
