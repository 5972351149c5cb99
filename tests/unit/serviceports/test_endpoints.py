# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Endpoints of slices and of ServicePorts are made without their constructors: they have every field, at its place."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import EndpointSlice, SliceEndpoint
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.service import parse_endpoint_slice
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import Endpoint
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import expand
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.weights import Weights

SLICE = {
    "metadata": {"namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
    "addressType": "IPv4",
    "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    "endpoints": [
        {
            "addresses": ["10.0.0.1"],
            "conditions": {"ready": False, "serving": True, "terminating": True},
            "nodeName": "node-1",
            "hints": {"forZones": [{"name": "a"}], "forNodes": [{"name": "node-1"}]},
        },
        {"addresses": ["10.0.0.2"]},
    ],
}
PARSED = (
    SliceEndpoint("10.0.0.1", "node-1", False, True, True, zone_hints=("a",), node_hints=("node-1",)),
    SliceEndpoint("10.0.0.2", "", True, True, False),
)


def parsed() -> EndpointSlice:
    found = parse_endpoint_slice(SLICE, [])
    assert found is not None
    return found


def test_endpoints_of_a_slice() -> None:
    endpoints = parsed().endpoints
    assert endpoints == PARSED
    assert all(type(each) is SliceEndpoint and len(each) == len(SliceEndpoint._fields) for each in endpoints)


def test_endpoints_of_a_service_port() -> None:
    first = Endpoint(
        "10.0.0.1", 8080, is_local=True, ready=False, terminating=True, zone_hints=("a",), node_hints=("node-1",)
    )
    assert expand([parsed()], "IPv4", "node-1") == {("http", "TCP"): (first, Endpoint("10.0.0.2", 8080))}


def test_endpoints_with_weights() -> None:
    (endpoints,) = expand([parsed()], "IPv4", "node-2", Weights({"web-1": 3}, {"node-1": 2})).values()
    assert [(each.weight, each.is_local) for each in endpoints] == [(6, False), (3, False)]
    assert all(type(each) is Endpoint and each == Endpoint(*each) for each in endpoints)
