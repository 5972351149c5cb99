# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Health check node ports: which are opened and closed, and that unchanged ones are not touched."""

from __future__ import annotations

import io
import json
import socket
import urllib.error
import urllib.request

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.server import HttpServer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import ProxyHealth, ServiceHealthPorts
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.surface import health_addresses
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.clients import ClientRule
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from tests.lab.ports import free_port

WEB, SHOP = NamespacedName("default", "web"), NamespacedName("shop", "front")
ONE, TWO = "127.0.0.1", "127.0.0.2"


class Counting:
    """A server that records which ports are opened and closed."""

    def __init__(self, server):
        self.server = server
        self.opened = []
        self.closed = []

    def open(self, address, port, respond):
        found = self.server.open(address, port, respond)
        self.opened.append((address, port))
        close = found.close

        def noting():
            self.closed.append((address, port))
            close()

        found.close = noting
        return found

    def take(self):
        taken = (sorted(self.opened), sorted(self.closed))
        self.opened, self.closed = [], []
        return taken


@pytest.fixture
def server():
    running = HttpServer(Supervisor(Log(io.StringIO())), LimitedLog(Log(io.StringIO())), ClientRule())
    yield Counting(running)
    running.stop()


@pytest.fixture
def ports(server):
    health = ProxyHealth(60.0)
    health.updated("IPv4")
    return ServiceHealthPorts(server, health)


def fetch(address, port):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}:{port}/any", timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_each_service_answers_on_each_address_with_its_own_count(ports, server):
    first, second = free_port(), free_port()
    assert ports.sync((ONE, TWO), {WEB: first, SHOP: second}, {WEB: 2}) == []
    assert len(ports) == 4
    for address in (ONE, TWO):
        code, body = fetch(address, first)
        assert (code, body["localEndpoints"], body["service"]["name"]) == (200, 2, "web")
        assert fetch(address, second)[0] == 503
    assert ports.sync((ONE, TWO), {WEB: first, SHOP: second}, {SHOP: 1}) == []
    assert fetch(ONE, first)[0] == 503 and fetch(TWO, second)[1]["service"] == {"namespace": "shop", "name": "front"}


def test_only_what_changes_is_opened_or_closed(ports, server):
    first, second, third = free_port(), free_port(), free_port()
    ports.sync((ONE,), {WEB: first, SHOP: second}, {})
    assert server.take() == (sorted([(ONE, first), (ONE, second)]), [])
    ports.sync((ONE,), {WEB: first, SHOP: second}, {WEB: 5})
    ports.sync((ONE, ONE), {SHOP: second, WEB: first}, {})
    assert server.take() == ([], [])
    ports.sync((ONE, TWO), {WEB: first, SHOP: second}, {})
    assert server.take() == (sorted([(TWO, first), (TWO, second)]), [])
    ports.sync((TWO,), {WEB: first, SHOP: second}, {})
    assert server.take() == ([], sorted([(ONE, first), (ONE, second)]))
    ports.sync((TWO,), {WEB: third, SHOP: second}, {})
    assert server.take() == ([(TWO, third)], [(TWO, first)])
    ports.sync((TWO,), {WEB: second, SHOP: third}, {WEB: 1, SHOP: 1})
    assert server.take() == ([], [])
    assert fetch(TWO, second)[1]["service"]["name"] == "web"
    ports.close()
    assert server.take() == ([], sorted([(TWO, second), (TWO, third)]))


def test_a_port_in_use_affects_only_its_service_and_address(ports, server):
    first, second = free_port(), free_port()
    with socket.socket() as taken:
        taken.bind((ONE, first))
        taken.listen()
        ((service, reason),) = ports.sync((ONE, TWO), {WEB: first, SHOP: second}, {WEB: 1, SHOP: 1})
        assert service == WEB and "Address already in use" in reason and set(ports.failed) == {WEB}
        assert fetch(TWO, first)[0] == fetch(ONE, second)[0] == 200
        assert ports.sync((ONE, TWO), {WEB: first, SHOP: second}, {WEB: 1}) == [], "a failure is reported once"
        assert ports.retry() == [] and set(ports.failed) == {WEB}
    assert ports.retry() == [] and not ports.failed
    assert fetch(ONE, first)[0] == 200
    assert server.take()[1] == []


def test_of_two_services_with_one_port_the_first_has_it(ports, server):
    port = free_port()
    ((service, reason),) = ports.sync((ONE,), {SHOP: port, WEB: port}, {WEB: 1})
    assert service == SHOP and reason == f"port {port} is the health check node port of default/web"
    assert fetch(ONE, port)[1]["service"]["name"] == "web"
    assert ports.sync((ONE,), {SHOP: port}, {SHOP: 1}) == [] and not ports.failed
    assert fetch(ONE, port)[1]["service"]["name"] == "front"
    assert server.take() == ([(ONE, port)], [])


def test_no_port_is_looked_at_when_nothing_changes(ports, server, monkeypatch):
    wanted = {NamespacedName("n", f"s{number}"): number for number in range(20000, 22000)}
    server.open = lambda address, port, respond: socket.socket()
    ports.sync((ONE, TWO), wanted, {})
    assert len(ports) == 4000
    retries = []
    monkeypatch.setattr(ports, "retry", lambda: retries.append(1) or [])
    ports.sync((ONE, TWO), dict(wanted), {})
    assert retries == []
    del wanted[NamespacedName("n", "s20000")]
    ports.sync((ONE, TWO), dict(wanted), {})
    assert retries == [1] and len(ports) == 3998
    for sock in ports._open.values():
        sock.close()


@pytest.mark.parametrize(
    ("family", "cidrs", "addresses", "expected"),
    [
        ("IPv4", (), ("192.0.2.1",), ("0.0.0.0",)),
        ("IPv6", (), ("2001:db8::1",), ("::",)),
        ("IPv4", ("192.0.2.0/24",), ("192.0.2.1", "192.0.2.2"), ("192.0.2.1", "192.0.2.2")),
        ("IPv6", ("2000::/3", "fe80::/10"), ("2001:db8::1", "fe80::1"), ("2001:db8::1",)),
        ("IPv4", ("192.0.2.0/24",), (), ()),
    ],
)
def test_where_health_check_node_ports_listen(family, cidrs, addresses, expected):
    settings = DataplaneSettings(family, node_port_cidrs=cidrs, node_port_addresses=addresses)
    assert health_addresses(settings) == expected
