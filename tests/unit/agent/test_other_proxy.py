# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Another service proxy beside the agent: it is named, and not fought without end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.answers.status import status_document, status_text
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.components import Components
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import other_modes
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.setup import Leftovers
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.settings import AgentOptions
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import API_VERSION, KIND
from tests.unit.agent.sync_bench import SyncBench, service

AGAIN = "another program writes the rules of Services again and again (IPv4, nf_tables (iptables-restore))"


@pytest.fixture
def bench(monkeypatch):
    synced = SyncBench(monkeypatch)
    synced.put(service("web", 1))
    synced.sync.sync(first=True)
    return synced


def write(bench):
    """Let another program replace an entry of ours; return whether the next sync repairs it."""
    key = min((key for key in bench.table if key.kind == "element"), key=str)
    bench.table[key] = "written by another program"
    bench.sync.watching.suspect({"IPv4": "nf_tables (iptables-restore)"})
    if bench.sync.syncer.suspects:
        bench.sync.sync()
    return bench.table[key] != "written by another program"


def reasons(bench):
    return [reason for _about, _kind, reason, _action, _note in bench.events if reason.startswith("Other")]


def pass_seconds(bench, seconds):
    bench.now += seconds
    bench.timers.run()
    if bench.sync.syncer.suspects:
        bench.sync.sync()


def test_a_program_that_writes_again_and_again_is_named_and_reverted_less_often(bench):
    assert [write(bench) for _time in range(5)] == [True, True, True, False, False]
    assert bench.other_proxy.text == AGAIN and reasons(bench) == ["OtherServiceProxy"]
    pass_seconds(bench, 30)
    assert "written by another program" not in bench.table.values()
    # It continues: the pause grows, and nothing is reported twice, whatever another family has.
    assert not write(bench)
    assert 30 < bench.other_proxy.pause <= 60
    bench.other_proxy.lose("IPv6")
    pass_seconds(bench, 60)
    assert bench.other_proxy.pause > 60 and reasons(bench) == ["OtherServiceProxy"]
    pass_seconds(bench, 120)
    assert bench.other_proxy.text == "" and reasons(bench) == ["OtherServiceProxy", "OtherServiceProxyGone"]
    assert write(bench)


def test_rules_of_another_mode_that_come_back_are_named_and_kept(bench, monkeypatch):
    removed, held = [], [False]
    monkeypatch.setattr(other_modes, "remove_leftovers", lambda *_: removed.append(bench.now) or Leftovers(0, 0))
    monkeypatch.setattr(other_modes, "holds_other_mode", lambda chains, table: not chains and table and held[0])
    bench.sync.other_modes.clean_up()
    shown = []
    for held[0] in (False, True, True, False):
        pass_seconds(bench, 30)
        shown.append("serves Services in another mode" in bench.other_proxy.text)
        bench.sync.other_modes.clean_up()
    assert shown == [False, True, True, False] and reasons(bench) == ["OtherServiceProxy", "OtherServiceProxyGone"]
    assert removed == [1000, 1030, 1120]


def test_rules_of_another_mode_that_cannot_be_removed_are_none_that_came_back(bench, monkeypatch):
    monkeypatch.setattr(other_modes, "remove_leftovers", lambda *_: Leftovers(0, 0))
    monkeypatch.setattr(other_modes, "holds_other_mode", lambda chains, table: True)
    bench.sync.other_modes.clean_up()
    for _look in range(3):
        pass_seconds(bench, 30)
    assert bench.other_proxy.text == ""


def test_leftovers_are_kept_while_another_program_answers_at_a_port(bench, monkeypatch):
    removed = []
    monkeypatch.setattr(other_modes, "remove_leftovers", lambda *_: removed.append(1) or Leftovers(0, 0))
    bench.other_proxy.port_in_use("healthz", 10256)
    bench.sync.other_modes.clean_up()
    pass_seconds(bench, 61)
    assert removed == []
    bench.other_proxy.lose("healthz")
    pass_seconds(bench, 61)
    assert removed == [1]


@contextlib.contextmanager
def as_user(number):
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(
    ("user", "listens", "holder"), [(65534, True, "a program of user id 65534"), (0, False, "another program")]
)
def test_a_port_that_no_service_proxy_holds_is_named_and_leaves_the_agent_healthy(tmp_path, user, listens, holder):
    with contextlib.ExitStack() as stack:
        with as_user(user):
            other = stack.enter_context(socket.socket())
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        port = other.getsockname()[1]
        path, log = tmp_path / "config.yaml", io.StringIO()
        given = {"healthzBindAddress": f"127.0.0.2:{port}", "metricsBindAddress": f"127.0.0.1:{port}"}
        path.write_text(json.dumps({"apiVersion": API_VERSION, "kind": KIND, **given}))
        components = Components(AgentOptions(configuration=str(path), cache="", control=""), Log(log), lambda: None)
        stack.callback(components.surface.close)
        components.ports.open()
        components.ports.open()
        failure = f"metrics: cannot listen on 127.0.0.1 port {port}: Address already in use by {holder}"
        document = status_document(components)
        assert document["closedPorts"] == [failure] and document["otherProxy"] == "" and document["healthy"]
        assert components.health.answer(with_eligibility=False).code == 200 and failure in status_text(components)
        assert log.getvalue().count("server not started, retrying") == 1
        other.close()
        components.ports.open()
        assert status_document(components)["closedPorts"] == [] and "server started" in log.getvalue()


@pytest.mark.parametrize(("ignored", "named"), [((), True), (("kube-proxy",), False)])
def test_another_program_at_a_port_of_the_agent_is_a_conflict(tmp_path, ignored, named):
    with socket.socket() as other, contextlib.ExitStack() as stack:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        path = tmp_path / "config.yaml"
        given = {"healthzBindAddress": f"127.0.0.1:{port}", "metricsBindAddress": f"127.0.0.2:{port}"}
        path.write_text(json.dumps({"apiVersion": API_VERSION, "kind": KIND, **given}))
        options = AgentOptions(configuration=str(path), cache="", control="", ignore_findings=ignored)
        with (tmp_path / "log").open("w") as log:
            components = Components(options, Log(log), lambda: None)
            stack.callback(components.surface.close)
            components.ports.open()
            document = status_document(components)
            assert document["healthy"] is not named and bool(document["otherProxy"]) is named
            # Nobody knows which program it is: other software must not be stopped as if it were a kube-proxy.
            for words in (f"port {port} (healthz) is in use", "healthzBindAddress can be changed"):
                assert (words in document["otherProxy"]) is named
            assert components.health.answer(with_eligibility=False).code == (503 if named else 200)
            other.close()
            components.ports.open()
            assert components.other_proxy.text == "" and components.health.healthy
