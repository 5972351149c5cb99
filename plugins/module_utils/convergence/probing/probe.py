# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes and their results, and the probes of the API server and DNS, which every cluster needs."""

from __future__ import annotations

from typing import NamedTuple

from ...base.addresses import address_and_port
from ...cluster.model import NamespacedName
from ...cluster.state import ClusterState

#: The name that a DNS probe without a name queries. Any server answers, with an error if its domain is different.
DEFAULT_NAME = "kubernetes.default.svc.cluster.local"
_DNS_SERVICES = (
    NamespacedName("kube-system", "kube-dns"),
    NamespacedName("kube-system", "coredns"),
    NamespacedName("kube-system", "rke2-coredns-rke2-coredns"),
    NamespacedName("openshift-dns", "dns-default"),
)
#: The Service of the API servers, which every cluster has.
API_SERVER = NamespacedName("default", "kubernetes")


class Probe(NamedTuple):
    """One probe: ``scheme`` as in the URL, host, port, and ``path``: the path of HTTP or the name to query by DNS."""

    scheme: str
    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        path = f"/{self.path.lstrip('/')}" if self.path else ""
        return f"{self.scheme}://{address_and_port(self.host, self.port)}{path}"


class ProbeResult(NamedTuple):
    """The result of a probe: whether it was answered, the reason if not, and the number of attempts and seconds."""

    probe: Probe
    answered: bool
    reason: str
    attempts: int
    seconds: float


def default_services(cluster: ClusterState) -> tuple[NamespacedName, ...]:
    """Return those Services of this cluster that every cluster needs: the API server and the DNS."""
    dns = next((key for key in _DNS_SERVICES if key in cluster.services), None)
    return tuple(key for key in (API_SERVER, dns) if key is not None and key in cluster.services)


def default_probes(cluster: ClusterState) -> tuple[str, ...]:
    """Return URLs that probe what every cluster needs: the API server's ClusterIP, and the cluster's DNS if it has one.

    Services without a ready endpoint are not probed, because no proxy could make them answer.
    """
    found: list[str] = []
    api = cluster.services.get(API_SERVER)
    if api is not None and _is_served(cluster, API_SERVER):
        address = api.cluster_ip_v4 or api.cluster_ip_v6
        found += [str(Probe("tcp", address, port.port)) for port in api.ports if port.protocol == "TCP" and address]
    for key in _DNS_SERVICES:
        service = cluster.services.get(key)
        if service is None or not _is_served(cluster, key):
            continue
        address = service.cluster_ip_v4 or service.cluster_ip_v6
        port = next((item.port for item in service.ports if item.protocol == "UDP"), 0)
        if address and port:
            found.append(str(Probe("dns", address, port, DEFAULT_NAME)))
            break
    return tuple(found)


def _is_served(cluster: ClusterState, key: NamespacedName) -> bool:
    return any(endpoint.ready for item in cluster.slices_of(key).values() for endpoint in item.endpoints)
