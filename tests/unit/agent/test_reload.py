# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a changed configuration reaches the parts of the agent."""

from __future__ import annotations

import io
from unittest.mock import Mock, call

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.control import ControlRequest
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.reload import Reloads, reload
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.settings import AgentOptions, load_settings
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.failures import Fatal
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
OUTSIDE = """---
apiVersion: kubenode.proxy/v1alpha1
kind: NodeProxyConfiguration
outsideHost: {enabled: true}
"""


class Running:
    """The parts of an agent that runs with a configuration; all but the log and the settings record their calls."""

    def __init__(self, path, text, **options):
        self._path = path
        self.options = AgentOptions(configuration=str(path), **options)
        self.write(text)
        self.text = io.StringIO()
        self.components = Mock()
        self.components.options = self.options
        self.components.log = Log(self.text)
        self.components.settings = self.before = load_settings(self.options)[0]
        self.components.configuration = self.before.configuration

    def write(self, text):
        self._path.write_text(HEAD + text)

    def reload(self, text):
        self.write(text)
        self.components.reset_mock()
        return reload(self.components)

    @property
    def names(self):
        """The calls of parts, in their order, without arguments."""
        return [name for name, _arguments, _options in self.components.mock_calls]


@pytest.fixture
def running(tmp_path):
    return Running(tmp_path / "config.conf", "mode: nftables", node_name="n1")


def test_an_unchanged_configuration_reaches_no_part(running):
    assert running.reload("mode: nftables") is False
    # Manifests of static Services are read at each reload.
    assert running.names == ["views.poll_static"]
    assert "the configuration has not changed" in running.text.getvalue()


def test_a_changed_configuration_is_set_up_first_and_then_reaches_each_part(running):
    assert running.reload("mode: nftables\nnftables: {syncPeriod: 20s}\nlogging: {format: json}") is True
    changed = running.components.settings.configuration
    assert changed != running.before.configuration and changed.sync_period == 20
    assert running.components.request.mock_calls == [call(changed)]
    assert running.names.index("sync.rebuild") < running.names.index("policy.configure")
    running.components.api.configure.assert_called_once_with(changed.node_proxy.api_servers)
    running.components.check_follower.follow.assert_called_once_with(everything=True)
    running.components.surface.configure.assert_called_once()
    assert running.names[-1] == "ports.open"
    assert running.components.log.as_json is True
    assert "source.read_node" not in running.names and "source.follow_node" not in running.names


def test_a_mode_that_cannot_be_set_up_leaves_the_previous_configuration_in_effect(running):
    running.components.sync.rebuild.side_effect = ProxyError("no such table")
    assert running.reload("mode: iptables") is False
    assert running.components.settings is running.before
    assert running.names == ["views.poll_static", "views.confine", "request", "sync.rebuild", "views.confine"]
    assert "reload failed; keeping the previous configuration" in running.text.getvalue()
    assert running.components.reload_error == "no such table"
    running.components.sync.rebuild.side_effect = None
    assert running.reload("mode: iptables") is True and running.components.reload_error == ""


def test_the_previous_configuration_on_disk_ends_the_error(running):
    assert running.reload("mode: carrier-pigeon") is False
    assert "carrier-pigeon" in running.components.reload_error
    assert running.reload("mode: nftables") is False and running.components.reload_error == ""


def test_an_invalid_configuration_reaches_no_part(running):
    assert running.reload("mode: carrier-pigeon") is False
    assert running.names == [] and running.components.settings is running.before


def test_before_the_first_sync_the_configuration_is_only_replaced(running):
    running.components.sync.proxiers = None
    assert running.reload("mode: nftables\nnftables: {syncPeriod: 20s}") is True
    assert "sync.rebuild" not in running.names
    assert running.components.sync.configuration is running.components.settings.configuration


def test_another_node_name_reads_that_node_before_setting_up_and_follows_it(tmp_path):
    running = Running(tmp_path / "config.conf", "hostnameOverride: n1")
    assert running.reload("hostnameOverride: n2") is True
    assert running.names.index("source.read_node") < running.names.index("sync.rebuild")
    running.components.source.read_node.assert_called_once_with("n2")
    running.components.follow_nodes.assert_called_once_with("n1", running.components.settings)
    assert running.components.settings.followed_node == "n2"
    assert "the name of this node has changed" in running.text.getvalue()


def test_a_host_outside_the_cluster_follows_no_node(tmp_path):
    local = "hostnameOverride: n1\ndetectLocalMode: ClusterCIDR\nclusterCIDR: 10.244.0.0/16\n"
    running = Running(tmp_path / "config.conf", local)
    assert running.reload(local + OUTSIDE) is True
    assert "source.read_node" not in running.names
    running.components.follow_nodes.assert_called_once_with("n1", running.components.settings)
    assert running.components.settings.followed_node == ""


@pytest.fixture
def asked(running):
    """Provide requests to reload, a question of the node command among them, and what systemd is sent."""
    systemd = Mock(in_transition=False)
    reloads = Reloads(running.components, systemd)
    question = ControlRequest({"command": "reload"})
    reloads.request(question)
    return reloads, question, systemd


def test_a_question_is_answered_once_the_configuration_is_in_effect(running, asked):
    reloads, question, systemd = asked
    running.write("mode: nftables\nnftables: {syncPeriod: 20s}\nlaterField: 1")
    running.components.node_name = "n1"
    assert reloads.run() is True
    warnings = ['KubeProxyConfiguration: unknown field "laterField"']
    assert question.wait() == {"node": "n1", "mode": "nftables", "warnings": warnings}
    assert systemd.mock_calls == [call.reloading(), call.ready()]
    assert reloads.run() is False


def test_a_question_is_answered_with_the_reason_for_which_the_previous_configuration_is_kept(running, asked):
    reloads, question, _systemd = asked
    running.write("mode: iptables")
    running.components.sync.rebuild.side_effect = ProxyError("no such table")
    assert reloads.run() is False
    assert question.wait() == {"error": "the previous configuration is kept: no such table"}


def test_a_question_is_answered_before_the_agent_exits(running, asked):
    reloads, question, _systemd = asked
    running.write("mode: iptables")
    running.components.ports.open.side_effect = Fatal("cannot listen")
    with pytest.raises(Fatal):
        reloads.run()
    assert question.wait() == {"error": "the agent must be restarted: cannot listen"}


@pytest.mark.parametrize("started", [True, False])
def test_a_question_is_answered_after_any_exception_and_systemd_waits_no_longer(running, asked, started):
    reloads, question, systemd = asked
    systemd.in_transition = not started
    running.write("mode: iptables")
    running.components.sync.rebuild.side_effect = KeyError("a defect")
    with pytest.raises(KeyError):
        reloads.run()
    assert "because of a defect" in question.wait()["error"]
    assert systemd.mock_calls == ([call.reloading(), call.ready()] if started else [])


def test_a_question_is_answered_when_the_agent_stops(asked):
    reloads, question, _systemd = asked
    reloads.refuse("the agent is stopping")
    assert question.wait() == {"error": "the agent is stopping"}
