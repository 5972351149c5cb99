# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the agent applies its configuration at the start and at a reload, and answers questions."""

from __future__ import annotations

import io

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent import agent as module
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.agent import Agent
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.control import ControlRequest
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.settings import AgentOptions
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.systemd import Systemd
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads import timers
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from tests.lab import manifests

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


@pytest.mark.parametrize(
    ("text", "options", "shown", "as_json"),
    [
        ("logging: {verbosity: 3}", {}, False, False),
        ("logging: {verbosity: 4}", {}, True, False),
        ("logging: {format: json}", {"verbose": True}, True, True),
        ("logging: {format: json}", {"log_format": "text"}, False, False),
    ],
)
def test_logging_follows_the_configuration(tmp_path, text, options, shown, as_json):
    path = tmp_path / "config.conf"
    path.write_text(HEAD + text)
    log = Log(io.StringIO())
    agent = Agent(AgentOptions(configuration=str(path), **options), log)
    assert (log.verbose, log.as_json) == (shown, as_json)
    path.write_text(HEAD + "logging: {verbosity: 5, format: json}")
    agent.reload()
    agent._reload_if_requested()
    assert log.verbose is True and log.as_json is (options.get("log_format") != "text")


def test_a_change_queues_the_families_that_it_concerns(tmp_path, monkeypatch):
    path = tmp_path / "config.conf"
    path.write_text(HEAD)
    agent = Agent(AgentOptions(configuration=str(path)), Log(io.StringIO()))
    queued = []
    monkeypatch.setattr(agent.sync, "note_queued", queued.append)
    monkeypatch.setattr(agent.sync, "node_changed", lambda _name, _rebuild: None)
    agent._apply(Batch("Service", [manifests.service("a", "10.96.0.1", [])], []))
    assert queued == [{"IPv4"}]
    # A Node that changes nothing, while the Service is not programmed yet.
    agent._apply(Batch("Node", [manifests.node("n1", "192.0.2.1", "10.0.0.0/24")], []))
    assert queued == [{"IPv4"}]


def test_each_address_in_a_known_range_of_pods_is_a_client(tmp_path):
    path = tmp_path / "config.conf"
    path.write_text(HEAD)
    agent = Agent(AgentOptions(configuration=str(path), node_name="n1"), Log(io.StringIO()))

    def are_clients():
        rule = agent.components.clients
        return [len(rule.path(f"2001:db8:{number}::1")) == 1 for number in range(4)]

    assert are_clients() == [False] * 4
    agent._apply(Batch("Node", [manifests.node("n1", "192.0.2.1", "2001:db8:1::/64")], []))
    agent._apply(Batch("Node", [manifests.node("n2", "192.0.2.2", "2001:db8:3::/64")], []))
    assert are_clients() == [False, True, False, False]
    node = "{apiVersion: kubenode.proxy/v1alpha1, kind: NodeProxyConfiguration, networkPolicy: {podCIDRs: [RANGE]}}"
    path.write_text(HEAD + "clusterCIDR: 2001:db8:2::/64\n---\n" + node.replace("RANGE", "'2001:db8:0::/64'"))
    agent.reload()
    agent._reload_if_requested()
    assert are_clients() == [True, True, True, False]


@pytest.mark.parametrize("preliminary", [False, True])
def test_the_watchdog_is_fed_while_objects_are_applied(tmp_path, monkeypatch, preliminary):
    path = tmp_path / "config.conf"
    path.write_text(HEAD)
    systemd, calls = Systemd({}), []
    monkeypatch.setattr(systemd, "progress", lambda: calls.append(1))
    agent = Agent(AgentOptions(configuration=str(path)), Log(io.StringIO()), systemd)
    if preliminary:
        agent.views.begin_preliminary()
    calls.clear()
    services = [manifests.service(f"s{number}", f"10.96.0.{number}", []) for number in range(1, 11)]
    agent.views.current.apply(Batch("Service", services, []))
    assert len(calls) == len(services)


def test_a_configuration_that_cannot_be_read_leaves_the_previous_one_in_effect(tmp_path):
    path = tmp_path / "config.conf"
    path.write_text(HEAD + "mode: nftables")
    text = io.StringIO()
    agent = Agent(AgentOptions(configuration=str(path)), Log(text))
    path.write_text(HEAD + "mode: carrier-pigeon")
    agent.reload()
    agent._reload_if_requested()
    assert agent.components.configuration.mode == "nftables"
    assert "reload failed; keeping the previous configuration" in text.getvalue()


def test_a_configuration_that_is_corrected_while_the_agent_waits_for_the_cluster_is_read(tmp_path, monkeypatch):
    path = tmp_path / "config.conf"
    path.write_text(HEAD + "mode: nftables\nclientConnection: {kubeconfig: /nowhere}")
    agent = Agent(AgentOptions(configuration=str(path)), Log(io.StringIO()))
    sent = []
    monkeypatch.setattr(agent.systemd, "send", lambda *lines: sent.append(lines))
    path.write_text(HEAD + "mode: nftables\nclientConnection: {kubeconfig: /etc/kubeconfig}")
    agent.reload()
    monkeypatch.setattr(agent.components.ports, "open", agent.stop)
    agent._await_cluster()
    assert agent.components.configuration.client_connection.kubeconfig == "/etc/kubeconfig"
    assert ("READY=1",) not in sent, "the start has not ended"


@pytest.mark.parametrize("part", ["ports", "timer", "reload"])
def test_an_unexpected_exception_does_not_end_the_wait_for_the_cluster(tmp_path, monkeypatch, part):
    """Static Services are served meanwhile."""
    path = tmp_path / "config.conf"
    path.write_text(HEAD)
    text = io.StringIO()
    agent = Agent(AgentOptions(configuration=str(path)), Log(text))
    steps = []

    def fail():
        steps.append(part)
        if len(steps) == 2:
            agent.stop()
        raise KeyError("a defect")

    monkeypatch.setattr(module, "STEP_PAUSE_SECONDS", 0)
    monkeypatch.setattr(timers, "AFTER_FAILURE_SECONDS", 0)
    if part == "timer":
        agent.timers.add("a timer", fail).start(0)
    elif part == "ports":
        monkeypatch.setattr(agent.components.ports, "open", fail)
    else:
        monkeypatch.setattr(agent, "_reload_if_requested", fail)
    agent._await_cluster()
    assert len(steps) == 2 and "KeyError: 'a defect'" in text.getvalue()


@pytest.mark.parametrize(
    ("error", "reply", "logged"),
    [
        (KernelError("no buffer space"), "no buffer space", False),
        (KeyError("IPv4"), "the agent cannot answer because of a defect, please report it: KeyError: 'IPv4' (", True),
        (MemoryError(), "the agent cannot answer because of a defect, please report it: MemoryError: (", True),
    ],
)
def test_a_question_that_cannot_be_answered_gets_an_error(tmp_path, monkeypatch, error, reply, logged):
    def answer(_state, _question):
        raise error

    path = tmp_path / "config.conf"
    path.write_text(HEAD)
    text = io.StringIO()
    agent = Agent(AgentOptions(configuration=str(path)), Log(text))
    monkeypatch.setattr(module, "answer", answer)
    request = ControlRequest({"command": "status"})
    agent._inbox.deliver(request)
    agent._empty_inbox()
    assert request.wait()["error"].startswith(reply)
    assert ("a question cannot be answered" in text.getvalue()) is logged
