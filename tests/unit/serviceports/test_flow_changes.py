# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test when stale conntrack entries are looked for, by the agent and from one convergence to the next."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED, KUBE_PROXY
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext, FamilyServices
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.ledger import flows_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.flows import FlowChanges, released_protocols
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports

DNS = NamespacedName("kube-system", "dns")
CONTEXT = NodeContext("IPv4", "node-a")


def ports(*endpoints: dict[str, Any], protocol: str = "UDP"):
    """Return the ServicePorts of one Service with these endpoints."""
    port = {"name": "dns", "port": 53, "protocol": protocol}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": DNS.namespace, "name": DNS.name},
        "spec": {"clusterIP": "10.96.0.10", "ports": [port]},
    }
    endpoint_slice = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": DNS.namespace,
            "name": "dns-1",
            "labels": {"kubernetes.io/service-name": DNS.name},
        },
        "addressType": "IPv4",
        "ports": [port],
        "endpoints": list(endpoints),
    }
    return all_service_ports(ClusterState.from_objects([service, endpoint_slice]), CONTEXT)


def endpoint(address: str, *, serving: bool = True, ready: bool = True) -> dict[str, Any]:
    return {"addresses": [address], "conditions": {"ready": ready, "serving": serving}}


FIRST, SECOND = endpoint("10.1.0.1"), endpoint("10.1.0.2")
NOT_READY, NOT_SERVING = endpoint("10.1.0.1", ready=False), endpoint("10.1.0.2", serving=False)


@pytest.mark.parametrize(
    ("before", "now", "released", "stale", "corrected"),
    [
        pytest.param(ports(), ports(FIRST), False, True, True, id="first-endpoint"),
        pytest.param(ports(FIRST), ports(FIRST), False, False, False, id="unchanged"),
        pytest.param(ports(FIRST), ports(SECOND), False, True, True, id="replaced"),
        pytest.param(ports(FIRST, SECOND), ports(SECOND, FIRST), False, False, False, id="reordered"),
        pytest.param(ports(FIRST, SECOND), ports(FIRST), False, True, True, id="removed"),
        pytest.param(ports(FIRST), ports(), False, True, True, id="none-left"),
        pytest.param({}, ports(), False, False, True, id="service-later"),
        pytest.param(ports(FIRST), {}, True, True, True, id="service-deleted"),
        pytest.param(ports(), {}, True, True, True, id="service-without-endpoints-deleted"),
        pytest.param(ports(FIRST), ports(NOT_READY), False, False, False, id="not-ready-but-serving"),
        pytest.param(ports(FIRST, SECOND), ports(FIRST, NOT_SERVING), False, True, True, id="not-serving"),
        pytest.param(ports(FIRST, protocol="SCTP"), {}, False, False, True, id="sctp"),
        pytest.param(ports(FIRST, protocol="TCP"), {}, False, False, False, id="tcp"),
    ],
)
@pytest.mark.parametrize("behaviour", [KUBE_PROXY, CORRECTED])
def test_agent_and_convergence_look_for_stale_entries_after_the_same_changes(
    before, now, released, stale, corrected, behaviour
):
    if behaviour is CORRECTED:
        stale, released = corrected, released or (before.keys() > now.keys() and corrected)
    protocols = released_protocols(behaviour, False)
    context = FamilyContext(DataplaneSettings("IPv4"), CONTEXT, None)
    earlier, later = (flows_of([FamilyServices(context, found)], protocols) for found in (before, now))
    gone = earlier.frontends - later.frontends
    examines = earlier.serving != later.serving or gone or (behaviour is CORRECTED and earlier != later)
    assert bool(examines) is stale and bool(gone) is released

    changes = FlowChanges(behaviour, False)
    changes.note(DNS, before.values())
    changes.pop()
    changes.note(DNS, now.values())
    changed, gone = changes.pop()
    assert bool(changed or gone) is stale and bool(gone) is released


def test_connections_of_deleted_services_end_only_with_corrected_behaviour():
    assert released_protocols(KUBE_PROXY, True) == ("UDP",)
    assert released_protocols(CORRECTED, True) == ("UDP", "SCTP", "TCP")
