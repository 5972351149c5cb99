# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's drain: which files keep it, when it ends, and what health checks answer meanwhile."""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drain import Drain
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import (
    ProxyHealth,
    service_health_answer,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName, Node
from ansible_collections.kubenode.proxy.plugins.module_utils.command import drain_command as command
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.drain import record as records
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.drain.record import (
    DrainError,
    DrainRecord,
    read_record,
    remove_record,
)
from tests.unit.agent.reports_in_memory import reports_to

NOW = 1_700_000_000.0
GOOD = {"since": NOW - 60, "until": NOW + 3600}


class Agent:
    """A drain with clocks that stand still, and what it reported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock, self.now = 100.0, NOW
        self.timers = Timers(lambda: self.clock)
        self.stream = io.StringIO()
        self.events = []
        self.drain = Drain(
            str(path),
            self.timers,
            reports_to(self.stream, lambda _about, _kind, reason, _action, _note: self.events.append(reason)),
            owner=os.getuid(),
            now=lambda: self.now,
        )

    def write(self, content: object = GOOD) -> None:
        self.path.write_text(content if isinstance(content, str) else json.dumps(content))
        self.path.chmod(0o644)

    def move(self, seconds: float) -> None:
        self.clock += seconds
        self.now += seconds
        self.timers.run()

    @property
    def log(self) -> str:
        return self.stream.getvalue()


@pytest.fixture
def agent(tmp_path):
    return Agent(tmp_path / "drain.json")


def test_a_drain_begins_is_changed_and_is_stopped(agent):
    agent.drain.read()
    assert not agent.drain.active and not agent.log and not agent.events
    agent.write()
    agent.drain.read()
    assert agent.drain.active and agent.drain.status() == {
        "drained": True,
        "since": NOW - 60,
        "until": NOW + 3600,
        "remainingSeconds": 3600.0,
        "problem": "",
    }
    assert "drained: health checks fail and traffic is served" in agent.log
    agent.drain.read()
    assert agent.events == ["DrainStarted"]
    agent.write({**GOOD, "until": NOW + 7200})
    agent.drain.read()
    assert "the drain was changed" in agent.log and agent.drain.status()["remainingSeconds"] == 7200
    agent.path.unlink()
    agent.drain.read()
    assert not agent.drain.active and "it was stopped" in agent.log
    assert agent.events == ["DrainStarted", "DrainStarted", "DrainEnded"]
    agent.move(8000)
    assert agent.events[3:] == []


def test_a_drain_ends_by_itself_and_the_log_says_so(agent):
    agent.write()
    agent.drain.read()
    agent.move(3599)
    assert agent.drain.active and agent.timers.delay() == 1
    agent.move(1)
    assert not agent.drain.active and 'reason="it has expired"' in agent.log and agent.events[1:] == ["DrainEnded"]
    assert agent.drain.status()["drained"] is False


def test_health_checks_do_not_wait_for_the_loop_to_end_a_drain(agent):
    agent.write()
    agent.drain.read()
    agent.clock += 3600
    assert not agent.drain.active


def test_an_expired_drain_is_none_at_the_start(agent):
    agent.write({"since": NOW - 100, "until": NOW - 1})
    agent.drain.read()
    assert not agent.drain.active and "the drain has expired" in agent.log and agent.events == []


def test_a_drain_that_is_shortened_to_the_past_has_expired(agent):
    agent.write()
    agent.drain.read()
    agent.write({**GOOD, "until": NOW - 1})
    agent.drain.read()
    assert not agent.drain.active and 'reason="it has expired"' in agent.log


def test_a_clock_that_is_set_back_prolongs_no_drain(agent):
    agent.write()
    agent.now -= 10 * 86400
    agent.drain.read()
    agent.move(3659)
    assert agent.drain.active
    agent.move(1)
    assert not agent.drain.active


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is damaged"),
        ("{", "is damaged"),
        ("[" * 4000, "is damaged"),
        ("x" * 5000, "larger than 4096 bytes"),
        ([], "it is not a JSON object"),
        ({}, "since is not a time"),
        ({**GOOD, "until": "soon"}, "until is not a time"),
        ({**GOOD, "until": True}, "until is not a time"),
        ('{"since": 0, "until": 1e999}', "until is not a time"),
        ('{"since": 0, "until": NaN}', "until is not a time"),
        (f'{{"since": 0, "until": {"9" * 400}}}', "until is not a time"),
        ({**GOOD, "until": GOOD["since"]}, "a drain lasts at most"),
        ({**GOOD, "until": GOOD["since"] + 8 * 86400}, "a drain lasts at most"),
    ],
)
def test_a_damaged_file_is_ignored_and_reported_once(agent, content, reason):
    agent.write(content)
    agent.drain.read()
    agent.drain.read()
    assert not agent.drain.active and reason in agent.drain.status()["problem"]
    assert agent.log.count("the drain file is ignored") == 1


def test_a_file_that_becomes_untrusted_ends_the_drain(agent):
    agent.write()
    agent.drain.read()
    agent.path.chmod(0o666)
    agent.drain.read()
    assert not agent.drain.active and "with mode 0666; only root may write it" in agent.drain.status()["problem"]
    assert agent.events == ["DrainStarted", "DrainEnded"]


def test_a_file_of_another_user_is_no_drain(agent):
    agent.write()
    with pytest.raises(DrainError, match=r"belongs to user \d+"):
        read_record(str(agent.path), owner=os.getuid() + 1)


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "directory"])
def test_anything_but_a_regular_file_is_no_drain(agent, kind):
    other = agent.path.with_name("other")
    other.write_text(json.dumps(GOOD))
    {
        "link": lambda: agent.path.symlink_to(other),
        "hard link": lambda: os.link(other, agent.path),
        "fifo": lambda: os.mkfifo(agent.path),
        "directory": agent.path.mkdir,
    }[kind]()
    agent.drain.read()
    assert not agent.drain.active and str(agent.path) in agent.drain.status()["problem"]


def test_root_writes_the_file_and_removes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "prepare_state_directory", lambda path: os.makedirs(path, exist_ok=True))
    path = str(tmp_path / "new" / "drain.json")
    records.write_record(path, DrainRecord(NOW, NOW + 60))
    assert os.stat(path).st_mode & 0o777 == 0o644
    assert read_record(path, os.getuid()) == DrainRecord(NOW, NOW + 60)
    assert remove_record(path) and not remove_record(path) and read_record(path) is None


@pytest.mark.parametrize(("saved", "since"), [(NOW - 60, NOW - 60), (NOW + 86400, NOW)])
def test_a_drain_continues_one_that_began_before_but_none_of_the_future(tmp_path, monkeypatch, saved, since):
    """The clock was set back after a drain of the future had been written."""
    path = tmp_path / "drain.json"
    written = []
    monkeypatch.setattr(command, "read_record", lambda _path: DrainRecord(saved, saved + 7200))
    monkeypatch.setattr(command, "write_record", lambda _path, record: written.append(record))
    monkeypatch.setattr(command.time, "time", lambda: NOW)
    command._write(argparse.Namespace(drain_file=str(path), seconds=3600.0))
    assert [(record.since, record.until) for record in written] == [(since, NOW + 3600)]


@pytest.mark.parametrize("days", [1, -1])
def test_setting_the_clock_changes_no_drain_of_this_boot(tmp_path, monkeypatch, days):
    """Neither a restart of the agent nor a reload reads another end from the file than the one that was requested."""
    monkeypatch.setattr(records, "prepare_state_directory", lambda path: os.makedirs(path, exist_ok=True))
    path = str(tmp_path / "drain.json")
    records.write_record(path, records.drain_until(NOW, NOW, 3600.0))
    record = read_record(path, os.getuid())
    assert 3590 < record.remaining(NOW + days * 86400.0) <= 3600
    # After a reboot only the clock is left.
    monkeypatch.setattr(records, "_this_boot", lambda: "another boot")
    assert record.remaining(NOW + days * 86400.0) == (0.0 if days > 0 else 3600.0)


def test_only_healthz_and_health_check_node_ports_fail_in_a_drain():
    health = ProxyHealth(60.0, lambda: NOW)
    health.updated("IPv4")
    health.node_seen(Node("n"))
    health.drained = lambda: True
    assert (health.answer(True).code, health.answer(False).code) == (503, 200)
    body = json.loads(health.answer(True).body)
    assert list(body) == ["lastUpdated", "currentTime", "nodeEligible", "healthy", "status"]
    assert body["nodeEligible"] is False and body["healthy"] is True and health.healthy
    good, drained = (service_health_answer(NamespacedName("a", "b"), 2, True, drain) for drain in (False, True))
    assert (good.code, drained.code) == (200, 503) and good[1:] == drained[1:]
