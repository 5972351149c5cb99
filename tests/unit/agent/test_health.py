# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The answers of /healthz, /livez and the Services' health check node ports."""

from __future__ import annotations

import json

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import (
    ProxyHealth,
    service_health_answer,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName, Node
from tests.lab.clock import Clock


@pytest.fixture
def clock():
    return Clock(1_700_000_000.0)


@pytest.fixture
def health(clock):
    result = ProxyHealth(60.0, clock, clock)
    result.updated("IPv4")
    result.updated("IPv6")
    result.node_seen(Node("n"))
    return result


def codes(health):
    return health.answer(True).code, health.answer(False).code


def test_healthy_as_long_as_nothing_is_queued(health, clock):
    clock.now += 86400
    assert codes(health) == (200, 200)


def test_a_queued_change_is_unhealthy_only_after_the_timeout_until_an_update(health, clock):
    health.queued("IPv6")
    clock.now += 59.9
    assert codes(health) == (200, 200)
    clock.now += 0.1
    assert codes(health) == (503, 503)
    body = json.loads(health.answer(True).body)
    assert body["healthy"] is False
    assert body["status"]["IPv4"]["healthy"] is True
    assert body["status"]["IPv6"]["healthy"] is False
    health.updated("IPv6")
    assert codes(health) == (200, 200)


def test_the_oldest_queued_change_counts(health, clock):
    health.queued("IPv4")
    clock.now += 40
    health.queued("IPv4")
    clock.now += 20
    assert codes(health) == (503, 503)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (Node("n", taint_keys=("other",)), (200, 200)),
        (Node("n", taint_keys=("ToBeDeletedByClusterAutoscaler",)), (503, 200)),
        (Node("n", deleting=True), (503, 200)),
    ],
)
def test_eligibility_of_the_node_concerns_healthz_only(health, node, expected):
    health.node_seen(node)
    assert codes(health) == expected


def test_an_unknown_node_is_not_eligible(clock):
    health = ProxyHealth(60.0, clock, clock)
    health.updated("IPv4")
    answer = health.answer(True)
    assert answer.code == 503
    assert json.loads(answer.body)["nodeEligible"] is False
    assert json.loads(answer.body)["healthy"] is True


def test_body_has_the_keys_in_order(health):
    text = health.answer(True).body.decode()
    positions = [text.index(f'"{key}"') for key in ("lastUpdated", "currentTime", "nodeEligible", "healthy", "status")]
    assert positions == sorted(positions)
    assert '"nodeEligible"' not in health.answer(False).body.decode()


def test_status_is_omitted_before_the_first_update_and_last_updated_is_the_zero_time(clock):
    body = json.loads(ProxyHealth(60.0, clock, clock).answer(True).body)
    assert "status" not in body
    assert body["lastUpdated"] == "0001-01-01T00:00:00Z"


@pytest.mark.parametrize(("count", "proxy", "code"), [(0, True, 503), (3, True, 200), (3, False, 503)])
def test_service_health(count, proxy, code):
    answer = service_health_answer(NamespacedName("ns", "svc"), count, proxy)
    assert answer.code == code
    assert ("X-Load-Balancing-Endpoint-Weight", str(count)) in answer.headers
    flag = "true" if proxy else "false"
    assert answer.body.decode() == (
        '{\n\t"service": {\n\t\t"namespace": "ns",\n\t\t"name": "svc"\n\t},\n'
        f'\t"localEndpoints": {count},\n\t"serviceProxyHealthy": {flag}\n}}'
    )


def test_a_node_that_serves_only_the_first_services_is_alive_but_gets_no_traffic(health):
    health.preliminary = lambda: True
    assert codes(health) == (503, 200)
    assert json.loads(health.answer(True).body)["nodeEligible"] is False


def test_a_step_of_the_wall_clock_changes_no_answer():
    wall, steady = Clock(1_700_000_000.0), Clock(5.0)
    health = ProxyHealth(60.0, wall, steady)
    health.updated("IPv4")
    health.node_seen(Node("n"))
    health.queued("IPv4")
    wall.now += 86400
    assert codes(health) == (200, 200)
    wall.now -= 2 * 86400
    steady.now += 60
    assert codes(health) == (503, 503)
