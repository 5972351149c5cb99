# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test what the clients of the agent's threads have in common: the server in use, its kubeconfig, and warnings."""

from __future__ import annotations

import io
import json

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.access import ApiClients
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.servers import ApiServers
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metrics import Metrics
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError

OWN, OTHER = "https://192.0.2.11:6443", "https://192.0.2.12:6443"


def kubeconfig(path, server):
    cluster = {"server": server, "insecure-skip-tls-verify": True}
    path.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        ),
        encoding="utf-8",
    )
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def setup(tmp_path):
    class Setup:
        stream = io.StringIO()
        path = kubeconfig(tmp_path / "first", OWN)
        log = Log(stream)
        servers = ApiServers(log, choose=lambda candidates: candidates[0])
        clients = ApiClients(servers, lambda: Setup.path, Metrics(), log)

        def connect(self):
            client = self.clients.connect(lambda _seconds: None)
            client.close()
            return client

    return Setup()


def test_a_warning_is_logged_once_for_all_clients(setup):
    assert {setup.connect().host for _client in range(3)} == {OWN}
    assert setup.stream.getvalue().count("insecure-skip-tls-verify") == 1


def test_each_client_has_the_kubeconfig_that_is_valid_now(setup, tmp_path):
    assert setup.connect().host == OWN
    type(setup).path = kubeconfig(tmp_path / "second", OTHER)
    assert setup.connect().host == OTHER
    type(setup).path = str(tmp_path / "missing")
    with pytest.raises(ProxyError, match="missing"):
        setup.connect()


def test_clients_are_of_the_server_in_use(setup):
    setup.servers.configure([("192.0.2.12", 6443)], True)
    assert setup.connect().host == OWN
    setup.servers.failed(setup.servers.current(), "refused")
    assert setup.connect().host == OTHER
