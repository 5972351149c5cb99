# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Helpers to create service ports for tests of iptables mode; endpoints are selected as kube-proxy 1.36 does."""

from __future__ import annotations

from typing import Any, Iterable

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import family_of
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import (
    Endpoint,
    ServicePortInfo,
    ServicePortName,
)

#: The fields of a ServicePort with nothing but a cluster IP, beside its endpoints and what follows from these.
PLAIN: dict[str, Any] = {
    "node_port": 0,
    "external_ips": (),
    "load_balancer_ips": (),
    "source_ranges": None,
    "affinity_seconds": 0,
    "internal_local": False,
    "external_local": False,
    "health_check_node_port": 0,
}


def endpoint(ip: str, port: int = 80, local: bool = False, state: str = "R") -> Endpoint:
    """Return an endpoint; ``state``: R ready, ST serving and terminating, T terminating only."""
    return Endpoint(ip, port, local, ready=state == "R", serving=state in ("R", "ST"), terminating=state in ("ST", "T"))


def usable(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """Return the ready endpoints, or else those that still serve while they terminate."""
    every = tuple(endpoints)
    return tuple(one for one in every if one.ready) or tuple(one for one in every if one.serving and one.terminating)


def route(
    name: str = "svc1",
    endpoints: Iterable[Endpoint] = (),
    namespace: str = "ns1",
    port_name: str = "p80",
    protocol: str = "TCP",
    cluster_ip: str = "172.30.0.41",
    port: int = 80,
    **fields: Any,
) -> ServicePortInfo:
    """Return a service port with its endpoint lists derived from ``endpoints``; other fields as keyword arguments."""
    known = tuple(sorted(endpoints, key=lambda one: one.text))
    values = {**PLAIN, **fields}
    external = bool(values["node_port"] or values["external_ips"] or values["load_balancer_ips"])
    uses_cluster = not values["internal_local"] or external
    uses_local = values["internal_local"] or (external and values["external_local"])
    cluster = usable(known) if uses_cluster else ()
    local = usable(one for one in known if one.is_local) if uses_local else ()
    return ServicePortInfo(
        key=ServicePortName(namespace, name, port_name, protocol),
        family=family_of(cluster_ip),
        cluster_ip=cluster_ip,
        port=port,
        externally_accessible=external,
        uses_cluster_endpoints=uses_cluster,
        uses_local_endpoints=uses_local,
        endpoints=known,
        cluster=cluster,
        local=local,
        reachable=tuple(sorted({*cluster, *local}, key=lambda one: one.text)),
        has_any=bool(usable(known)),
        **values,
    )


def by_key(*routes: ServicePortInfo) -> dict[ServicePortName, ServicePortInfo]:
    """Return the service ports by key."""
    return {one.key: one for one in routes}
