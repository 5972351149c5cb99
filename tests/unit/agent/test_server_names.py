# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses of API servers that are known by name."""

from __future__ import annotations

import io
import socket
import threading

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.servers import ApiServers, ServerNames
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access import names
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.servers import KUBECONFIG, Candidate
from tests.waiting import wait_for

OWN = Candidate("", KUBECONFIG)
NAME, OTHER = "api.example.com", "other.example.com"


class Setup:
    """API servers by name, with a resolver whose answers the test gives."""

    def __init__(self):
        self.answers = {}
        self.asked = []
        self.changes = 0
        self.log = Log(io.StringIO())
        self.servers = ApiServers(self.log)
        self.names = ServerNames(self.servers, self._changed, self._resolve)

    def _changed(self):
        self.changes += 1

    def _resolve(self, name):
        self.asked.append(name)
        return self.answers.get(name, ())

    @property
    def claimed(self):
        return sorted((claim.address, claim.port) for claim in self.servers.claims())


@pytest.fixture
def setup():
    return Setup()


def test_each_server_claims_the_addresses_of_its_name(setup):
    setup.servers.opened(OWN, f"https://{NAME}:6443")
    setup.servers.configure([(OTHER, 443), ("192.0.2.9", 6443)], True)
    setup.answers = {NAME: ("192.0.2.11", "2001:db8::11"), OTHER: ("192.0.2.12",)}
    assert setup.claimed == [("192.0.2.9", 6443)] and setup.servers.unresolved
    setup.names.resolve()
    assert setup.asked == [NAME, OTHER] and setup.changes == 1 and not setup.servers.unresolved
    expected = [("192.0.2.11", 6443), ("192.0.2.12", 443), ("192.0.2.9", 6443), ("2001:db8::11", 6443)]
    assert setup.claimed == expected
    setup.servers.configure([], True)
    assert setup.claimed == [("192.0.2.11", 6443), ("2001:db8::11", 6443)]


def test_a_resolver_that_fails_takes_no_address_away(setup):
    setup.servers.opened(OWN, f"https://{NAME}:6443")
    setup.answers = {NAME: ("192.0.2.11",)}
    setup.names.resolve()
    setup.answers = {}
    setup.names.resolve()
    assert setup.claimed == [("192.0.2.11", 6443)] and setup.changes == 1


def test_addresses_in_turn_are_all_kept_up_to_a_limit(setup):
    setup.servers.opened(OWN, f"https://{NAME}:6443")
    for number in [*range(20), 19, 4]:
        setup.answers = {NAME: (f"192.0.2.{number}",)}
        setup.names.resolve()
    assert {address for address, _port in setup.claimed} == {f"192.0.2.{number}" for number in range(4, 20)}
    assert setup.changes == 20


def test_a_new_name_is_resolved_at_once_and_the_thread_ends(setup):
    supervisor = Supervisor(setup.log)
    task = supervisor.start("names", setup.names.run)
    setup.answers = {NAME: ("192.0.2.11",)}
    setup.servers.opened(OWN, f"https://{NAME}:6443")
    setup.names.follow()
    wait_for(lambda: setup.claimed)
    asked = len(setup.asked)
    setup.names.follow()
    setup.names.stop()
    wait_for(lambda: not task.alive)
    assert len(setup.asked) == asked


def test_a_thread_waits_while_another_one_changes_the_servers(setup):
    setup.servers.opened(OWN, f"https://{NAME}:6443")
    calls = [setup.servers.claims, setup.servers.names, lambda: setup.servers.named(NAME, ["192.0.2.1"])]
    for call in calls:
        thread = threading.Thread(target=call)
        with setup.servers._lock:
            thread.start()
            thread.join(0.1)
            assert thread.is_alive()
        thread.join()


def test_the_node_s_resolver():
    assert "127.0.0.1" in names.addresses_of_name("localhost")
    assert names.addresses_of_name("") == names.addresses_of_name("a" * 300) == names.addresses_of_name("a..b") == ()
    servers = [("192.0.2.1", 1), ("localhost", 2), ("2001:db8::1", 3), ("no-such-name.invalid", 4)]
    found = names.with_addresses(servers)
    assert ("127.0.0.1", 2) in found and {port for _address, port in found} == {1, 2, 3}


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), OSError(24, "files"), UnicodeError("label")])
def test_a_resolver_that_raises_finds_nothing(monkeypatch, error):
    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert names.addresses_of_name(NAME) == ()
