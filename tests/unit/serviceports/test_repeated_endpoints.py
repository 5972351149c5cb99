# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One endpoint in two EndpointSlices, which disagree about it."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED, KUBE_PROXY
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.explain import refused_parts
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.target import ServiceTarget
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, service_ports_of
from tests.lab import manifests

WEB = NamespacedName("default", "web")
CHANGED = "endpoints.kubernetes.io/last-change-trigger-time"


def state_of(*slices: dict) -> ClusterState:
    return ClusterState.from_objects(
        [manifests.service("web", "10.96.0.1", [manifests.port(80, name="http")]), *slices]
    )


def slice_of(name: str, *, ready: bool = True, changed: str = "", port: str = "http") -> dict:
    endpoints = [manifests.endpoint("10.244.1.1", "node1", ready=ready)]
    found = manifests.endpoint_slice("web", endpoints, [manifests.port(8080, name=port)])
    metadata = {**found["metadata"], "name": name, **({"annotations": {CHANGED: changed}} if changed else {})}
    return {**found, "metadata": metadata}


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ("2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z"),
        ("2026-01-01T00:00:00.5Z", "2026-01-01T00:00:00Z"),
        ("2026-01-01T00:00:00Z", ""),
    ],
)
@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_the_later_slice_decides_with_corrected_behaviour(newer: str, older: str, ready: bool, names: str) -> None:
    state = state_of(slice_of(names[0], ready=ready, changed=newer), slice_of(names[1], ready=not ready, changed=older))
    for behaviour, expected in ((CORRECTED, ready), (KUBE_PROXY, ready if names[0] == "b" else not ready)):
        (port,) = service_ports_of(state, WEB, NodeContext("IPv4", "node1", behaviour=behaviour))
        assert [endpoint.ready for endpoint in port.endpoints] == [expected]


def test_without_times_the_last_name_decides() -> None:
    state = state_of(slice_of("a", ready=False), slice_of("b"))
    (port,) = service_ports_of(state, WEB, NodeContext("IPv4", "node1", behaviour=CORRECTED))
    assert port.endpoints[0].ready


def test_explain_names_a_slice_whose_ports_have_other_names() -> None:
    target = ServiceTarget("default", "web", "", "")
    (line,) = refused_parts(state_of(slice_of("a"), slice_of("b", port="metrics")), target)
    assert line.startswith("EndpointSlice default/b: not used")
    assert not list(refused_parts(state_of(slice_of("a")), target))
