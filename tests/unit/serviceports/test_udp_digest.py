# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test when stale conntrack entries are looked for, by the agent and from one convergence to the next."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.summaries import Summaries
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext, FamilyServices
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.ledger import flows_of, udp_digests
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.flows import FlowChanges, released_protocols
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports

DNS = NamespacedName("kube-system", "dns")
CONTEXT = NodeContext("IPv4", "node-a")


def ports(*endpoints: Dict[str, Any], protocol: str = "UDP"):
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


def endpoint(address: str, *, serving: bool = True, ready: bool = True) -> Dict[str, Any]:
    return {"addresses": [address], "conditions": {"ready": ready, "serving": serving}}


FIRST, SECOND = endpoint("10.1.0.1"), endpoint("10.1.0.2")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        pytest.param(ports(), ports(FIRST), True, id="first-endpoint"),
        pytest.param(ports(FIRST), ports(FIRST), False, id="unchanged"),
        pytest.param(ports(FIRST), ports(SECOND), True, id="replaced"),
        pytest.param(ports(FIRST, SECOND), ports(SECOND, FIRST), False, id="reordered"),
        pytest.param(ports(FIRST, SECOND), ports(FIRST), True, id="removed"),
        pytest.param(ports(FIRST), ports(), True, id="none-left"),
        pytest.param(ports(FIRST), {}, True, id="service-deleted"),
        pytest.param(ports(FIRST), ports(endpoint("10.1.0.1", ready=False)), False, id="not-ready-but-serving"),
        pytest.param(ports(FIRST, SECOND), ports(FIRST, endpoint("10.1.0.2", serving=False)), True, id="not-serving"),
        pytest.param(ports(FIRST, protocol="TCP"), ports(SECOND, protocol="TCP"), False, id="tcp"),
    ],
)
def test_agent_and_convergence_look_for_stale_entries_after_the_same_changes(before, now, expected):
    summaries = Summaries()
    summaries.put(DNS, list(before.values()))
    assert summaries.put(DNS, list(now.values())) is expected

    context = FamilyContext(DataplaneSettings("IPv4"), CONTEXT, None)
    earlier, later = (flows_of([FamilyServices(context, found)], ()) for found in (before, now))
    assert (earlier != later) is expected


def test_services_with_the_same_name_in_two_families_have_digests_of_their_own():
    contexts = [FamilyContext(DataplaneSettings(family), NodeContext(family, ""), None) for family in ("IPv4", "IPv6")]
    digests = udp_digests([FamilyServices(context, ports(FIRST)) for context in contexts])
    assert set(digests) == {"IPv4 kube-system/dns", "IPv6 kube-system/dns"}


@pytest.mark.parametrize(
    ("before", "now", "released", "stale"),
    [
        pytest.param(ports(FIRST), ports(FIRST), False, False, id="unchanged"),
        pytest.param(ports(FIRST), ports(), False, True, id="none-left"),
        pytest.param({}, ports(), False, True, id="service-later"),
        pytest.param(ports(FIRST), {}, True, True, id="service-deleted"),
        pytest.param(ports(FIRST, protocol="SCTP"), {}, True, True, id="sctp"),
        pytest.param(ports(FIRST, protocol="TCP"), {}, False, False, id="tcp"),
    ],
)
def test_corrected_behaviour_looks_after_every_change(before, now, released, stale):
    protocols = released_protocols(CORRECTED, False)
    context = FamilyContext(DataplaneSettings("IPv4"), CONTEXT, None)
    earlier, later = (flows_of([FamilyServices(context, found)], protocols) for found in (before, now))
    assert (earlier != later) is stale and bool(earlier.frontends - later.frontends) is released

    changes = FlowChanges(protocols)
    changes.note(DNS, before.values())
    changes.pop()
    changes.note(DNS, now.values())
    changed, gone = changes.pop()
    assert bool(changed or gone) is stale and bool(gone) is released
