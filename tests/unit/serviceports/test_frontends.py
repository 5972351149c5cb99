# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which ServicePort an address and port, or a node port, belongs to."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import ServicePolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.frontends import Frontends
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortName
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext
from tests.lab import manifests

WEB = ServicePortName("default", "web", "http", "TCP")
DNS = ServicePortName("default", "dns", "", "UDP")


def state() -> ClusterState:
    http = [manifests.port(80, name="http", nodePort=30080)]
    external = {"type": "LoadBalancer", "externalIPs": ["198.51.100.7", "2001:db8::7"]}
    first = {"metadata": {"creationTimestamp": "2024-01-01T00:00:00Z"}}
    return ClusterState.from_objects(
        [
            manifests.service("web", ["10.96.0.7", "fd00::7"], http, ingress=["203.0.113.7"], **first, **external),
            manifests.service("dns", "10.96.0.10", [manifests.port(53, protocol="UDP")]),
            # It wants an address that an older Service has.
            manifests.service("thief", "10.96.0.66", http[:1], externalIPs=["198.51.100.7"]),
        ]
    )


def test_all_addresses_and_the_node_port_lead_to_the_port() -> None:
    found = Frontends(state(), NodeContext(IPV4, "n"))
    assert {found.at("tcp", address, 80) for address in ("10.96.0.7", "198.51.100.7", "203.0.113.7")} == {WEB}
    assert found.at_node_port("tcp", 30080) == WEB
    assert found.at("udp", "10.96.0.10", 53) == DNS
    assert found.at("tcp", "10.96.0.10", 53) is None
    assert found.at("tcp", "fd00::7", 80) is None
    assert found.at_node_port("udp", 30080) is None


def test_families_are_apart() -> None:
    found = Frontends(state(), NodeContext(IPV6, "n"))
    assert {found.at("tcp", address, 80) for address in ("fd00::7", "2001:db8::7")} == {WEB}
    assert found.at("tcp", "10.96.0.7", 80) is None
    assert found.names == [WEB]


def test_services_left_to_programs_on_the_node_have_none() -> None:
    settings = ServicePolicySettings(local_services=("default/dns",))
    found = Frontends(state(), NodeContext(IPV4, "n", policy=settings))
    assert found.at("udp", "10.96.0.10", 53) is None
    assert DNS not in found.names
