# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test which sources may use external addresses and node ports, and that restrictions fail closed."""

from __future__ import annotations

import ipaddress
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import ServicePolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.service_ports import both, sources_of_family
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports

#: As in a YAML manifest that has nothing behind the name of the annotation.
NULL = object()


def sources(value, family=IPV4, policy=None, ranges=()):
    """Return the sources of external IPs, load balancer addresses and the node port; and what was skipped."""
    raw = {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"namespace": "shop", "name": "web", "annotations": {}},
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": "10.96.0.1",
            "clusterIPs": ["10.96.0.1", "fd00::1"],
            "ipFamilies": [IPV4, IPV6],
            "ports": [{"port": 80, "nodePort": 30080}],
            "loadBalancerSourceRanges": list(ranges),
        },
    }
    if value is not None:
        raw["metadata"]["annotations"] = {"kubenode.proxy/allowed-sources": None if value is NULL else value}
    state = ClusterState.from_objects([prune(raw)])
    context = NodeContext(family, "n", policy=policy or ServicePolicySettings())
    (info,) = all_service_ports(state, context).values()
    return (info.external_ip_sources, info.source_ranges, info.node_port_sources), [str(item) for item in state.skipped]


@pytest.mark.parametrize(
    ("value", "v4", "v6", "skipped"),
    [
        (None, None, None, 0),
        ("10.0.0.0/8", ("10.0.0.0/8",), (), 0),
        ("10.1.2.3 , fd00::/8", ("10.1.2.3/32",), ("fd00::/8",), 0),
        ("0.0.0.0/0", None, (), 0),
        ("junk", (), (), 1),
        ("junk,10.0.0.0/33,10.0.0.0/8", ("10.0.0.0/8",), (), 2),
        ("", (), (), 1),
        (7, (), (), 1),
        (True, (), (), 1),
        (["10.0.0.0/8"], (), (), 1),
        ({"10.0.0.0/8": ""}, (), (), 1),
        (NULL, (), (), 1),
        (",", (), (), 2),
        ("10.0.0.0/-1", (), (), 1),
        ("10.0.0.0/255.0.0.0", (), (), 1),
        ("\u0661\u0660.0.0.0/8", (), (), 1),
        ("10.0.0.0/8\x00", (), (), 1),
        ("10.0.0.0/8 10.1.0.0/16", (), (), 1),
        ("fe80::1%eth0/64", (), (), 1),
        ("9" * 5000, (), (), 1),
    ],
)
def test_the_annotation_restricts_and_fails_closed(value, v4, v6, skipped):
    found, lines = sources(value)
    assert found == (v4, v4, v4) and sources(value, IPV6)[0] == (v6, v6, v6)
    assert len(lines) == skipped
    assert all("shop/web" in line and "kubenode.proxy/allowed-sources" in line for line in lines)


def test_the_number_of_sources_is_limited():
    many = [f"10.{number >> 8}.{number & 255}.1/32" for number in range(1500)]
    found, lines = sources(",".join(many))
    assert found[0] == tuple(many[:1000])
    field = "metadata.annotations[kubenode.proxy/allowed-sources]"
    assert lines == [f"Service shop/web: {field}: has 1500 entries; those after the first 1000 allow no source"]


def test_every_restriction_must_allow_a_source():
    policy = ServicePolicySettings(node_port_sources=("10.1.0.0/16",))
    found, _lines = sources("10.0.0.0/8,192.0.2.0/24", policy=policy, ranges=["10.2.0.0/16", "192.0.2.7/32"])
    assert found == (("10.0.0.0/8", "192.0.2.0/24"), ("10.2.0.0/16", "192.0.2.7/32"), ("10.1.0.0/16",))
    assert sources(None, IPV6, policy)[0] == (None, None, ())


@pytest.mark.parametrize(
    "policy", [ServicePolicySettings(annotations_enabled=False), ServicePolicySettings(annotated_namespaces=("x",))]
)
def test_annotations_can_be_disabled(policy):
    assert sources("10.0.0.0/8", policy=policy)[0] == (None, None, None)
    assert sources("10.0.0.0/8", policy=ServicePolicySettings(annotated_namespaces=("shop",)))[0][0] == ("10.0.0.0/8",)


def test_sources_that_both_allow():
    assert both(None, None) is None and both(("10.0.0.0/8",), None) == ("10.0.0.0/8",) == both(None, ("10.0.0.0/8",))
    assert (
        both(("10.0.0.0/8",), ("10.1.0.0/16", "11.0.0.0/8"))
        == ("10.1.0.0/16",)
        == both(("10.1.0.0/16", "11.0.0.0/8"), ("10.0.0.0/8",))
    )
    assert both((), ("10.0.0.0/8",)) == ()
    assert sources_of_family(("fd00::/8",), IPV4) == ()


NETWORKS = st.lists(
    st.builds(
        lambda value, length: str(ipaddress.IPv4Network((0x0A000000 | value << 20, length), strict=False)),
        st.integers(0, 7),
        st.integers(8, 12),
    ),
    max_size=6,
)


@given(NETWORKS, NETWORKS)
def test_sources_that_both_allow_are_those_in_both(first, second):
    def members(sources):
        return {
            number
            for number in range(64)
            if any(ipaddress.ip_address(0x0A000000 | number << 18) in ipaddress.ip_network(item) for item in sources)
        }

    found = both(tuple(first), tuple(second))
    assert members(found) == members(first) & members(second)
    assert len(set(found)) == len(found)


def test_the_cost_of_many_sources_is_linear():
    first = tuple(f"10.{number >> 8}.{number & 255}.0/24" for number in range(20_000))
    second = tuple(f"10.{number >> 8}.{number & 255}.7/32" for number in range(20_000))
    began = time.process_time()
    assert set(both(first, second)) == set(second)
    assert time.process_time() - began < 5.0
