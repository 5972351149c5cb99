# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API servers of a cluster: which there may be, and how to connect to each.

Candidates are the kubeconfig's server, those of the NodeProxyConfiguration, and those that the cluster itself names in
the EndpointSlice ``default/kubernetes``, which the API servers keep up to date (kube-apiserver, option
``--endpoint-reconciler-type``).
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from ....base.addresses import address_and_port
from ...model import EndpointSlice
from ..connection import ApiConnection

KUBECONFIG, CONFIGURATION, CLUSTER = "kubeconfig", "configuration", "cluster"
#: The certificate of every API server has this name, and no kubelet's has it: a node that the cluster's data wrongly
#: names as an API server cannot impersonate one with the certificate of its kubelet.
SERVER_NAME = "kubernetes.default.svc"
#: The time limit to connect to one of several API servers.
CONNECT_SECONDS = 5.0
#: The time limit for an answer to a check whether a server works.
ANSWER_SECONDS = 5.0
_MOST_SERVERS = 64


class Candidate(NamedTuple):
    """An API server. ``url``: empty for the kubeconfig's own. ``origin``: where it is named."""

    url: str
    origin: str

    def connection(self, kubeconfig: Optional[str]) -> ApiConnection:
        """Return how to connect to it with the credentials and the certificate authority of a kubeconfig."""
        if self.origin == KUBECONFIG:
            return ApiConnection(kubeconfig=kubeconfig)
        if self.origin == CONFIGURATION:
            return ApiConnection(kubeconfig=kubeconfig, host=self.url)
        return ApiConnection(kubeconfig=kubeconfig, host=self.url, validate_certs=True, server_name=SERVER_NAME)


def _url(host: str, port: int) -> str:
    return f"https://{address_and_port(host, port)}"


def configured_servers(servers: Sequence[tuple[str, int]]) -> tuple[Candidate, ...]:
    """Return the candidates of a configuration, given by host and port."""
    return tuple(Candidate(_url(host, port), CONFIGURATION) for host, port in servers)


def named_servers(found: EndpointSlice) -> tuple[Candidate, ...]:
    """Return the candidates that the EndpointSlice ``default/kubernetes`` names."""
    port = next((item.port for item in found.ports if item.protocol == "TCP" and item.port), 0)
    addresses = [endpoint.address for endpoint in found.endpoints if endpoint.ready]
    return tuple(Candidate(_url(address, port), CLUSTER) for address in addresses[:_MOST_SERVERS] if port)
