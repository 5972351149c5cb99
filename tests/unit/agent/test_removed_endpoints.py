# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test which endpoints count as removed, and when their connections are due."""

from __future__ import annotations

import math
from typing import Optional, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.removed_endpoints import RemovedEndpoints
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import ServicePolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.lab import manifests

WEB = NamespacedName("default", "web")
READY = {"ready": True}
TERMINATING = {"ready": False, "serving": True, "terminating": True}
UNREADY = {"ready": False, "serving": False}
LOST = {"ready": False, "serving": False, "terminating": True}


def ports(*conditions: dict, policy: Optional[str] = "reset", protocol: str = "TCP"):
    """Return the ServicePorts of a Service whose endpoints 10.1.0.1 and so on have these conditions."""
    port = manifests.port(80, name="http", protocol=protocol)
    endpoints = [
        {"addresses": [f"10.1.0.{number}"], "conditions": item} for number, item in enumerate(conditions, 1) if item
    ]
    service = manifests.service("web", "10.96.0.1", [port])
    if policy is not None:
        service["metadata"]["annotations"] = {"kubenode.proxy/removed-endpoints": policy}
    state = ClusterState.from_objects([service, manifests.endpoint_slice("web", endpoints, [port])])
    return tuple(all_service_ports(state, NodeContext("IPv4", "node-a")).values())


class Followed:
    """A tracker whose clock the test moves, which knows what there was at the start."""

    def __init__(self, first: Sequence = (), default: float = math.inf) -> None:
        self.now = 100.0
        self.removed = RemovedEndpoints(ServicePolicySettings(removed_endpoints=default), lambda: self.now)
        self.removed.note(WEB, first)

    def due(self, seconds: float = 0.0) -> list[str]:
        self.now += seconds
        return [item.endpoint.ip if item.endpoint else f"not {sorted(item.kept)}" for item in self.removed.pop()]


def followed(*conditions: dict, policy: Optional[str] = "reset", default: float = math.inf) -> Followed:
    found = Followed(ports(*conditions, policy=policy), default)
    found.due(5000.0)
    return found


@pytest.mark.parametrize(
    ("now", "due"),
    [
        pytest.param((READY, None), ["10.1.0.2"], id="left the slices"),
        pytest.param((READY, UNREADY), ["10.1.0.2"], id="unready, as on a lost machine"),
        pytest.param((READY, LOST), ["10.1.0.2"], id="terminating, and no longer serving"),
        pytest.param((READY, TERMINATING), [], id="terminating, and still serving"),
        pytest.param((READY, READY, READY), [], id="one more"),
        pytest.param((None, None), ["10.1.0.1", "10.1.0.2"], id="all"),
    ],
)
def test_which_endpoints_are_removed(now, due):
    state = followed(READY, READY)
    state.removed.note(WEB, ports(*now))
    assert state.due() == due
    assert state.due(5000.0) == [] and state.removed.delay() == math.inf


def test_an_endpoint_that_is_back_in_time_keeps_its_connections():
    state = followed(READY, READY, policy="reset-after=30s")
    state.removed.note(WEB, ports(READY, UNREADY, policy="reset-after=30s"))
    assert state.removed.delay() == 30.0 and state.due(29.0) == []
    state.removed.note(WEB, ports(READY, READY, policy="reset-after=30s"))
    assert state.due(5000.0) == []
    state.removed.note(WEB, ports(READY, policy="reset-after=30s"))
    assert state.due(29.0) == [] and state.due(1.0) == ["10.1.0.2"]


def test_the_annotation_decides_against_the_default():
    for policy, default, due in (
        ("keep", 0.0, []),
        (None, 0.0, ["10.1.0.2"]),
        (None, math.inf, []),
        ("no", 0.0, ["10.1.0.2"]),
    ):
        state = followed(READY, READY, policy=policy, default=default)
        state.removed.note(WEB, ports(READY, policy=policy))
        assert state.due() == due, policy


def test_what_waits_is_kept_once_the_annotation_says_so():
    state = followed(READY, READY, policy="reset-after=30s")
    state.removed.note(WEB, ports(READY, policy="reset-after=30s"))
    state.removed.note(WEB, ports(READY, policy="keep"))
    assert state.removed.delay() == math.inf


def test_a_deleted_service_ends_all_of_its_connections_and_other_protocols_have_none():
    state = followed(READY, READY)
    state.removed.note(WEB, ())
    assert state.due() == ["10.1.0.1", "10.1.0.2"]
    datagrams = Followed(ports(READY, READY, protocol="UDP"))
    datagrams.removed.note(WEB, ())
    assert datagrams.due(5000.0) == []


def test_at_the_start_connections_to_anything_else_are_due_as_late():
    state = Followed(ports(READY, READY, policy="reset-after=30s"))
    assert state.due(10.0) == []
    state.removed.note(WEB, ports(READY, policy="reset-after=30s"))
    # The one that was removed since waits for its own time.
    assert state.due(20.0) == ["not [('10.1.0.1', 80), ('10.1.0.2', 80)]"]
    assert state.due(10.0) == ["10.1.0.2"]
    state.removed.note(WEB, ())
    state.removed.note(WEB, ports(READY))
    assert state.due() == []


def test_an_endpoint_that_fails_its_checks_is_due_at_once():
    state = followed(READY, READY, policy="keep")
    info = ports(READY, READY, policy="keep")[0]
    state.removed.end(info, info.endpoints[0])
    assert state.due() == ["10.1.0.1"]
