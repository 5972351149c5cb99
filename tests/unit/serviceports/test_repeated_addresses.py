# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Service may name one of its addresses again, as another kind of address, with other rules for it."""

from __future__ import annotations

from typing import Any, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import OVER_NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import LISTENERS, ListenerKey
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, service_ports_of
from tests.lab import manifests

NAME = NamespacedName("default", "web")
SETTINGS = DataplaneSettings("IPv4", "node1", "192.0.2.1")
RENDERINGS = [*(mode_named(name).rendering for name in ("iptables", "ipvs", "nftables", "userspace")), OVER_NFTABLES]
CLUSTER_IP, SHARED = "10.96.0.1", "203.0.113.1"


def ports_of(**fields: Any) -> tuple[ServicePortInfo, ...]:
    """Return the ServicePorts of a load balancer with one endpoint on another node; ``fields`` are its spec's."""
    service = manifests.service(
        "web", CLUSTER_IP, [manifests.port(80, name="http")], type="LoadBalancer", **{"ingress": [], **fields}
    )
    if "allowed" in fields:
        service["metadata"]["annotations"] = {"kubenode.proxy/allowed-sources": service["spec"].pop("allowed")}
    endpoints = [manifests.endpoint("10.244.2.2", "node2")]
    slices = manifests.endpoint_slice("web", endpoints, [manifests.port(8080, name="http")])
    return service_ports_of(ClusterState.from_objects([service, slices]), NAME, NodeContext("IPv4", "node1"))


@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_the_cluster_ip_is_no_external_address(policy: str) -> None:
    (port,) = ports_of(
        externalIPs=[CLUSTER_IP, SHARED], ingress=["203.0.113.2", CLUSTER_IP], externalTrafficPolicy=policy
    )
    assert port.cluster_ip == CLUSTER_IP
    assert port.external_ips == (SHARED,) and port.load_balancer_ips == ("203.0.113.2",)
    (port,) = ports_of(externalIPs=[CLUSTER_IP], ingress=[CLUSTER_IP], externalTrafficPolicy=policy)
    assert not port.externally_accessible


def test_source_ranges_hold_for_a_load_balancer_address_that_is_also_an_external_ip() -> None:
    """In iptables mode, as in kube-proxy, the rule of the external IP comes first and has no source ranges."""
    ports = ports_of(externalIPs=[SHARED], ingress=[SHARED], loadBalancerSourceRanges=["10.0.0.0/8"])
    (port,) = ports
    assert port.external_ips == port.load_balancer_ips == (SHARED,)
    tables = mode_named("userspace").rendering.desired_tables({port.key: port}, SETTINGS)
    assert tables[LISTENERS][ListenerKey("tcp", SHARED, 80)].sources == ("10.0.0.0/8",)


ADDRESSES = st.lists(st.sampled_from([CLUSTER_IP, SHARED, "203.0.113.2"]), max_size=3)
FIELDS = st.fixed_dictionaries(
    {"externalIPs": ADDRESSES, "ingress": ADDRESSES, "externalTrafficPolicy": st.sampled_from(["Cluster", "Local"])},
    optional={
        "loadBalancerSourceRanges": st.just(["10.0.0.0/8"]),
        "allowed": st.sampled_from(["10.1.0.0/16", "192.0.2.0/24"]),
        "sessionAffinity": st.just("ClientIP"),
        "internalTrafficPolicy": st.just("Local"),
    },
)


@settings(deadline=None)
@given(st.lists(FIELDS, min_size=1, max_size=3))
@pytest.mark.parametrize("rendering", RENDERINGS, ids=["iptables", "ipvs", "nftables", "userspace", "ipvs-nftables"])
def test_the_tables_of_the_agent_and_of_a_run_are_equal(rendering: Any, versions: Sequence[dict[str, Any]]) -> None:
    followed = DesiredTables(rendering, SETTINGS)
    context = rendering.context(rendering.at_size(SETTINGS, 0))
    for fields in versions:
        ports = ports_of(**fields)
        followed.apply({NAME: ports}, lambda _service: ())
        followed.pop_changes()
        values: dict[tuple[str, Any], Any] = {}
        for table, key, value in rendering.entries(ports[0], context):
            assert values.setdefault((table, key), value) == value, "no key has two values"
        assert {name: dict(rows) for name, rows in followed.desired.items()} == rendering.desired_tables(
            {port.key: port for port in ports}, SETTINGS
        )
