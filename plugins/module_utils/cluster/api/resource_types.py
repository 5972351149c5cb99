# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collections of the API server that are read: their paths, and the selectors that exclude what no node needs."""

from __future__ import annotations

import urllib.parse
from typing import NamedTuple

from ..parsing.cluster_network_policy import VERSIONS
from ..parsing.service import HEADLESS_LABEL, SERVICE_PROXY_NAME_LABEL


class ResourceType(NamedTuple):
    """A collection of objects: its path on the server, plural name, kind, and default selectors.

    ``older``: versions of its API group in which a server may have it instead, the preferred one first.
    """

    path: str
    name: str
    kind: str
    label_selector: str = ""
    field_selector: str = ""
    older: tuple[str, ...] = ()

    @property
    def group_version(self) -> str:
        """The version in the path, with its API group."""
        return self.path.rpartition("/")[0].partition("/apis/")[2]

    @property
    def versions(self) -> tuple[ResourceType, ...]:
        """The collection in each version that is read here, the preferred one first."""
        return (self, *(self._replace(path=f"/apis/{version}/{self.name}") for version in self.older))

    def in_namespace(self, namespace: str) -> ResourceType:
        """Return the part of the collection that is in one namespace."""
        base, _slash, plural = self.path.rpartition("/")
        return self._replace(path=f"{base}/namespaces/{urllib.parse.quote(namespace, safe='')}/{plural}")

    def with_label(self, label: str, value: str) -> ResourceType:
        """Return the part of the collection that has a label of this value."""
        return self._replace(label_selector=f"{label}={value},{self.label_selector}".rstrip(","))


SERVICES = ResourceType(
    "/api/v1/services", "services", "Service", f"!{SERVICE_PROXY_NAME_LABEL}", "spec.clusterIP!=None"
)
ENDPOINT_SLICES = ResourceType(
    "/apis/discovery.k8s.io/v1/endpointslices", "endpointslices", "EndpointSlice", f"!{HEADLESS_LABEL}"
)
NODES = ResourceType("/api/v1/nodes", "nodes", "Node")
SERVICE_CIDRS = ResourceType("/apis/networking.k8s.io/v1/servicecidrs", "servicecidrs", "ServiceCIDR")
PODS = ResourceType("/api/v1/pods", "pods", "Pod")
NAMESPACES = ResourceType("/api/v1/namespaces", "namespaces", "Namespace")
NETWORK_POLICIES = ResourceType("/apis/networking.k8s.io/v1/networkpolicies", "networkpolicies", "NetworkPolicy")
CLUSTER_NETWORK_POLICIES = ResourceType(
    f"/apis/{VERSIONS[0]}/clusternetworkpolicies", "clusternetworkpolicies", "ClusterNetworkPolicy", older=VERSIONS[1:]
)
#: Collections that an API server need not have.
OPTIONAL = (SERVICE_CIDRS, CLUSTER_NETWORK_POLICIES)
