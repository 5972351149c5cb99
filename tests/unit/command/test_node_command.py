# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node command: its arguments, answers, exit codes and completion."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.control import ControlRequest, ControlServer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.command import agent_commands, commands
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, TableChange
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime import agent_client
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import (
    BUSY,
    AgentBusy,
    NoAgent,
    ask_agent,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.identity import identity
from tests.apiserver.accounts import sign
from tests.conftest import ROOT
from tests.unit.command.node_command import ENDPOINTS, SERVICE, STATUS, run


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "a command is missing"),
        (("nonsense",), 2, "invalid choice"),
        (("converge", "--mode", "fast"), 2, "invalid choice"),
        (("explain",), 2, "give either a Service, or both --from and --to"),
        (("explain", "shop/web", "--from", "shop/db"), 2, "with a Service, --from is the address of a client"),
        (("explain", "shop/web", "--from", "10.0.0.1:5"), 2, "with a Service, --from is the address of a client"),
        (("explain", "--from", "shop/web"), 2, "give either a Service, or both --from and --to"),
        (("explain", "shop/web", "--from", "shop/web", "--to", "shop/db:80"), 2, "give either a Service"),
        (("explain", "shop/web", "--why-not"), 2, "--why-not needs --from and --to"),
        (("explain", "--from", "shop/web", "--to", "shop/db"), 2, "the destination needs :PORT"),
        (("explain", "shop/web", "--live"), 2, "--live needs --from and --to"),
        (("explain", "--from", "10.0.0.1", "--to", "10.0.0.2:1", "--live", "nan"), 2, "--live lasts at most 600"),
        (("explain", "--from", "10.0.0.1:5/udp", "--to", "10.0.0.2:1"), 2, "the protocol belongs to the destination"),
        (("--config", "/etc/x.yaml", "status"), 2, "--config: options follow the command"),
        (("-v", "run"), 2, "-v: options follow the command"),
        (("--snapshot=/x", "converge"), 2, "--snapshot: options follow the command"),
        (("explain", "nonsense", "--snapshot", "/nowhere"), 2, "is not ADDRESS:PORT"),
        (("converge", "--snapshot", "/nowhere.json"), 1, "/nowhere.json: No such file"),
        (("converge", "--config", "/nowhere.yaml"), 1, "/nowhere.yaml: No such file"),
        *(
            ((*words, "--lock-timeout", "1"), 2, "--lock-timeout")
            for words in (("diff",), ("status",), ("explain", "shop/web"))
        ),
        *(
            (("cleanup", "--check", option, value), 2, option)
            for option, value in (
                ("--kubeconfig", "/x"),
                ("--node-name", "x"),
                ("--mode", "ipvs"),
                ("--fallback", "iptables"),
            )
        ),
    ],
)
def test_wrong_usage_and_failures_have_their_exit_codes(words, code, said):
    found, _output, errors = run(*words)
    assert found == code and said in errors and errors.count("\n") == 1


def test_help_and_version_go_to_the_output():
    assert "converge" in run("--help")[1]
    assert run("explain", "--help")[0] == 0
    code, output, _errors = run("--version")
    assert (code, output) == (0, f"kubenode-proxy {identity().text}\n")
    assert run("version") == (code, output, "")
    for command in ("run", "converge", "status"):
        assert "{," not in run(command, "--help")[1]


HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
NODE_HEAD = "---\napiVersion: kubenode.proxy/v1alpha1\nkind: NodeProxyConfiguration\n"


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (">/dev/full", 1, "kubenode-proxy: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("| true; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line_and_one_that_nobody_reads_is_none(output, code, said):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}", "PYTHONUNBUFFERED": ""}
    module = "ansible_collections.kubenode.proxy.plugins.module_utils.command.cli"
    text = f"{sys.executable} -m {module} --version {output}"
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_configuration_is_checked_as_the_agent_loads_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"{HEAD}mode: nftables\nhostnameOverride: Node1\nunknownField: 1\n")
    code, output, errors = run("check-configuration", str(file))
    assert (code, output) == (0, f"{file}: valid, mode nftables, node node1\n")
    assert errors.startswith("kubenode-proxy: warning: ") and "unknownField" in errors
    code, output, _errors = run("check-configuration", str(file), "--output", "json")
    assert (code, json.loads(output)) == (0, {"file": str(file), "mode": "nftables", "node": "node1"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{HEAD}{NODE_HEAD}healthChecks: {{maximum: 500}}\n", "healthChecks.maximum: 500 is not between 0 and 200"),
        ("mode: [", "YAML"),
    ],
)
def test_a_configuration_that_the_agent_refuses_is_refused_in_one_line(tmp_path, text, reason):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    code, output, errors = run("check-configuration", str(file))
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert reason in errors


def sample_report(**more: Any) -> Report:
    """Return the report of a convergence in ipvs mode that has changed nothing."""
    fields: dict[str, Any] = {
        "mode": "ipvs",
        "mode_reason": "",
        "node_name": "node1",
        "families": ("IPv4",),
        "xtables_variant": "",
        "changed": False,
        "changes": (),
        "counts": {},
        "programmed": {},
        "refused": (),
        "warnings": (),
        "durations": {},
    }
    return Report(**{**fields, **more})


@pytest.mark.parametrize(("check", "changed", "code"), [(False, True, 0), (True, True, 3), (True, False, 0)])
def test_converge_prints_its_changes(monkeypatch, tmp_path, check, changed, code):
    requests = []

    def converge(request, next_boot=None):
        requests.append(request)
        change = TableChange(table="virtual servers", added=2, replaced=1, removed=0, before=("old",), after=("new",))
        counts = {"services": 1, "without_endpoints": 0, "service_ports": 1, "endpoints": 4}
        changes = (change,) if changed else ()
        return sample_report(changed=changed, changes=changes, counts=counts, warnings=("take care",))

    monkeypatch.setattr(commands, "converge", converge)
    snapshot = tmp_path / "cluster.json"
    snapshot.write_text(json.dumps({"kind": "List", "items": [SERVICE, ENDPOINTS]}))
    words = ["converge", "--mode", "ipvs", "--snapshot", str(snapshot), *(["--check", "--diff"] if check else [])]
    found, output, errors = run(*words)
    assert found == code and requests[0].check is check and requests[0].describe is check
    assert errors == "kubenode-proxy: warning: take care\n"
    assert ("no differences" in output) is not changed
    if changed and check:
        assert "-old\n+new\n" in output
    document = json.loads(run(*words, "--output", "json")[1])
    assert document["mode"] == "ipvs" and document["changed"] is changed


@pytest.fixture
def cluster_file(tmp_path):
    """Provide a snapshot, as the options of a command without an agent."""
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"kind": "List", "items": [SERVICE, ENDPOINTS]}))
    return ("--snapshot", str(path))


class _Seen(ProxyError):
    """Raised in place of the work of a command, with its request."""


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize(
    ("words", "function"),
    [
        (("converge",), "converge"),
        (("diff",), "inspect"),
        (("status", "--control", "/nowhere"), "inspect"),
        (("explain", "10.96.0.7:80"), "choose_mode"),
        (("explain", "--from", "10.0.0.1", "--to", "10.96.0.7:80"), "choose_mode"),
    ],
)
def test_a_host_outside_the_cluster_is_declared_to_every_command(monkeypatch, cluster_file, words, function, outside):
    requests = []

    def work(request, next_boot=None):
        requests.append(request)
        raise _Seen("seen")

    monkeypatch.setattr(commands, function, work)
    run(*words, *cluster_file, *(["--outside-host"] if outside else []))
    assert [request.outside_host for request in requests] == [outside]


@pytest.mark.parametrize(("words", "seconds"), [((), 30.0), (("--lock-timeout", "0.2"), 0.2)])
@pytest.mark.parametrize("command", ["converge", "cleanup"])
def test_commands_that_change_the_node_wait_for_the_lock(monkeypatch, cluster_file, command, words, seconds):
    requests = []

    def converge(request, next_boot=None):
        requests.append(request)
        return sample_report(changed=False, mode="")

    monkeypatch.setattr(commands, "converge", converge)
    source = cluster_file if command == "converge" else ()
    assert run(command, *source, *words)[0] == 0
    assert [request.lock_timeout for request in requests] == [seconds]
    assert requests[0].state == ("absent" if command == "cleanup" else "present")


def test_the_control_socket_answers_and_is_private(tmp_path):
    path = str(tmp_path / "run" / "agent.sock")
    asked = []

    def deliver(ask: ControlRequest) -> None:
        asked.append(ask.question)
        ask.reply({"error": "not that"} if ask.question.get("command") == "bad" else {"agent": "running"})

    server = ControlServer(path, deliver)
    Supervisor(Log(io.StringIO())).start("control", server.run)
    try:
        assert ask_agent(path, {"command": "status"}) == {"agent": "running"}
        assert (tmp_path / "run" / "agent.sock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(ProxyError, match="not that"):
            ask_agent(path, {"command": "bad"})
        assert [question["command"] for question in asked] == ["status", "bad"]
    finally:
        server.close()
    with pytest.raises(NoAgent, match="no agent answers"):
        ask_agent(path, {"command": "status"})
    with pytest.raises(KernelError, match="cannot listen"):
        ControlServer("/proc/nowhere/agent.sock", deliver)


def answering(path, answers):
    """Return a control server whose answers to questions are these, in turn; and the questions, as they come."""
    asked, left = [], list(answers)

    def deliver(ask: ControlRequest) -> None:
        asked.append(ask.question)
        ask.reply(left.pop(0))

    server = ControlServer(path, deliver)
    Supervisor(Log(io.StringIO())).start("control", server.run)
    return server, asked


def test_a_busy_agent_is_asked_again_whether_it_has_reloaded(tmp_path, monkeypatch):
    path = str(tmp_path / "agent.sock")
    server, asked = answering(path, [BUSY, BUSY, {"node": "n1", "mode": "nftables"}, {"error": "no"}, BUSY])
    try:
        found = run("reload", "--control", path)
        assert found == (0, "the configuration is in effect: node n1, mode nftables\n", "")
        assert asked == [{"command": "reload"}] * 3
        assert run("reload", "--control", path) == (1, "", "kubenode-proxy: no\n")
        monkeypatch.setattr(agent_commands, "RELOAD_SECONDS", -1.0)
        code, output, errors = run("reload", "--control", path)
        assert (code, output, errors.count("\n")) == (1, "", 1) and "the agent is busy" in errors
    finally:
        server.close()
    assert run("reload", "--control", path)[0] == 4


def test_an_agent_that_does_not_answer_in_time_is_busy_and_not_absent(tmp_path, monkeypatch):
    path = str(tmp_path / "agent.sock")
    monkeypatch.setattr(agent_client, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(agent_client, "CLIENT_SECONDS", 0.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        # The first client waits forever, so the second one cannot even connect.
        listener.listen(0)
        with pytest.raises(AgentBusy, match="the agent is busy"):
            ask_agent(path, {"command": "status"})
        code, output, errors = run("status", "--control", path)
    assert (code, output, errors.count("\n")) == (1, "", 1) and "the agent is busy" in errors


def test_a_control_socket_that_another_program_removed_is_created_again(tmp_path):
    path = tmp_path / "run" / "agent.sock"
    server = ControlServer(str(path), lambda ask: ask.reply({"agent": "running"}))
    supervisor = Supervisor(Log(io.StringIO()))
    supervisor.start("control", server.run)
    try:
        assert not server.renew()
        for _repetition in range(3):
            shutil.rmtree(path.parent)
            assert server.renew()
            assert ask_agent(str(path), {"command": "status"}) == {"agent": "running"}
            assert path.stat().st_mode & 0o777 == 0o600
        assert not supervisor.check()
    finally:
        server.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"node": "\\u001b[2Jx\\r\\u202e", "\\u001b]0;": ["\\u009b"]}\n', ""),
        (b"[]\n", "is not an object"),
        (b"{\n", "is not valid"),
        (b"[" * 200_000 + b"\n", "is not valid"),
        (b'{"error": "\\u001b[31m\\nred"}\n', "red"),
        (b"", "is not valid"),
        (b"x" * (65 << 20), "is larger than"),
    ],
    ids=["escapes", "list", "cut", "deep", "error", "nothing", "endless"],
)
def test_answers_of_a_hostile_agent_are_bounded_and_printable(tmp_path, answer, said):
    path = str(tmp_path / "agent.sock")

    def serve(listener: socket.socket) -> None:
        for _connection in range(2):
            client = listener.accept()[0]
            with client, contextlib.suppress(OSError):
                client.recv(4096)
                client.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            if said:
                with pytest.raises(ProxyError, match=said) as caught:
                    ask_agent(path, {"command": "status"})
                assert str(caught.value).isprintable()
            else:
                assert ask_agent(path, {"command": "status"}) == {"node": "?[2Jx??", "?]0;": ["?"]}
            code, output, errors = run("status", "--control", path)
        finally:
            thread.join()
    text = (output + errors).replace("\n", "")
    assert code in (1, 4) and text.isprintable() and errors.count("\n") <= 1 and "Traceback" not in errors


def test_a_token_is_stored_and_described_but_never_shown(tmp_path, monkeypatch):
    path = str(tmp_path / "token")
    claims = {"sub": "system:serviceaccount:kube-system:kubenode-proxy", "iat": 1_000_000_000, "exp": 1_000_086_400}
    claims["kubernetes.io"] = {"node": {"name": "n1", "uid": "u1"}, "serviceaccount": {"uid": "s1"}}
    text = sign(claims)
    assert run("token", "--token", path) == (1, "", f"kubenode-proxy: {path}: there is no token\n")
    for expected in (True, False):
        monkeypatch.setattr("sys.stdin", io.StringIO(text + "\n"))
        code, output, errors = run("token", "--token", path, "--store", "--output", "json")
        assert (code, errors) == (0, "") and text not in output
        assert json.loads(output) == {
            "account": "kube-system/kubenode-proxy",
            "accountUid": "s1",
            "node": "n1",
            "nodeUid": "u1",
            "issued": "2001-09-09T01:46:40Z",
            "expires": "2001-09-10T01:46:40Z",
            "lifetimeSeconds": 86400,
            "renewalDue": True,
            "changed": expected,
        }
    said = "ServiceAccount kube-system/kubenode-proxy, bound to Node n1, expires at 2001-09-10T01:46:40Z\n"
    assert run("token", "--token", path) == (0, said, "")
    monkeypatch.setattr("sys.stdin", io.StringIO("no token"))
    assert run("token", "--token", path, "--store")[0] == 1


def test_completion_is_valid_shell_and_knows_commands_and_options():
    code, script, _errors = run("completion", "bash")
    assert code == 0
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    probe = script + (
        'COMP_WORDS=(kubenode-proxy exp); COMP_CWORD=1; _kubenode_proxy; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(kubenode-proxy converge --dif); COMP_CWORD=2; _kubenode_proxy; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(kubenode-proxy converge --mode ip); COMP_CWORD=3; _kubenode_proxy; echo "${COMPREPLY[@]}"\n'
        "COMP_WORDS=(kubenode-proxy check-configuration /etc/host); COMP_CWORD=2; _kubenode_proxy\n"
        'echo "${COMPREPLY[@]}" | tr " " "\\n" | grep -x /etc/hosts\n'
    )
    done = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["explain", "--diff", "iptables ipvs", "/etc/hosts"]
    assert "bashcompinit" in run("completion", "zsh")[1]


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({}, "mode:       nftables (set in the configuration)"),
        (
            {"mode": "ipvs", "ipvsFilterBackend": "nftables"},
            "mode:       ipvs, filter backend nftables (set in the configuration)",
        ),
        (
            {"mode": "", "modeReason": "", "ipvsFilterBackend": ""},
            "mode:       not chosen yet (waiting for the cluster)",
        ),
    ],
)
def test_status_shows_the_mode_and_its_filter_backend(state, line):
    assert line in agent_commands._status_lines({**STATUS, **state})


@pytest.mark.parametrize(
    ("mode", "code", "first"), [("nftables", 0, "healthy"), ("", agent_commands.NOT_RUNNING, "waits for the cluster")]
)
def test_status_succeeds_once_something_is_programmed(monkeypatch, mode, code, first):
    monkeypatch.setattr(agent_commands, "ask_status", lambda _path: {**STATUS, "mode": mode})
    found, output, errors = run("status")
    assert (found, output.splitlines()[0], errors) == (code, f"agent:      running for 40 s, {first}", "")


def test_status_shows_a_reload_that_failed():
    assert not any(line.startswith("reload") for line in agent_commands._status_lines(STATUS))
    lines = agent_commands._status_lines({**STATUS, "reloadError": "mode: no such mode"})
    assert "reload:     failed, the previous configuration is in effect: mode: no such mode" in lines


@pytest.mark.parametrize(
    ("filter_backend", "mode"),
    [("", "mode ipvs on node1: "), ("nftables", "mode ipvs, filter backend nftables, on node1: ")],
)
def test_a_report_shows_the_filter_backend(filter_backend, mode):
    report = sample_report(mode_reason="requested", ipvs_filter_backend=filter_backend, families=())
    assert commands._report_lines(report, True, False) == [f"{mode}requested", "no differences"]


@pytest.mark.parametrize(
    ("lost", "first", "services"),
    [
        ({"services": 0.0, "nodes": 0.0}, "running for 40 s, healthy", "services: watching"),
        ({"services": 35.4, "nodes": 35.1}, "running for 40 s, healthy, without the API server for 35 s", "(for 35 s)"),
        ({"services": 0.0, "nodes": 12.0}, "running for 40 s, healthy", "services: watching"),
    ],
)
def test_status_reports_the_length_of_an_api_server_outage(lost, first, services):
    states = {name: "watching" if not seconds else "no route to host" for name, seconds in lost.items()}
    lines = agent_commands._status_lines({**STATUS, "apiServer": states, "apiServerLostSeconds": lost})
    assert lines[0] == f"agent:      {first}"
    (line,) = [line for line in lines if line.startswith("API server: services")]
    assert services in line
    (line,) = [line for line in lines if line.startswith("API server: nodes")]
    assert ("(for 12 s)" in line) == (lost["nodes"] == 12.0)


@pytest.mark.parametrize(("name", "head"), [("refused", "skipped:    "), ("conflicts", "conflict:   ")])
def test_status_names_some_of_many_objects_and_counts_the_others(name, head):
    count = {"refused": "refusedCount", "conflicts": "conflictCount"}[name]
    lines = agent_commands._status_lines({**STATUS, name: ["a", "b"], count: 7})
    assert lines[-3:] == [f"{head}a", f"{head}b", "            and 5 more"]
    assert agent_commands._status_lines({**STATUS, name: ["a", "b"], count: 2})[-1] == f"{head}b"
