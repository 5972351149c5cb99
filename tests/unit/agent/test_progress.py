# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Progress of long work: the messages to the service manager, which code reports, and that stuck work does not."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry import systemd as systemd_module
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.systemd import Systemd
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import programs
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import (
    Change,
    ObservedOnce,
    Resource,
    Stage,
    apply_plan,
    plan,
)


class Manager(Systemd):
    """Collects the messages instead of sending them."""

    def __init__(self, monkeypatch):
        super().__init__({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "60000000"})
        self.sent = []
        self.now = 1000.0
        monkeypatch.setattr(systemd_module.time, "monotonic", lambda: self.now)

    def send(self, *lines):
        self.sent.append(lines)


def test_progress_is_sent_once_a_second(monkeypatch):
    manager = Manager(monkeypatch)
    manager.ready()
    manager.sent.clear()
    for _ in range(100):
        manager.progress()
        manager.now += 0.1
    assert manager.sent == [("WATCHDOG=1",)] * 10


def test_progress_extends_a_start_and_a_reload_but_nothing_else(monkeypatch):
    manager = Manager(monkeypatch)

    def extension():
        manager.sent.clear()
        manager.now += 5
        manager.progress()
        return manager.sent

    extended = [("WATCHDOG=1", "EXTEND_TIMEOUT_USEC=60000000")]
    assert extension() == extended
    manager.ready()
    assert extension() == [("WATCHDOG=1",)]
    manager.reloading()
    assert extension() == extended
    manager.ready()
    assert extension() == [("WATCHDOG=1",)]


def test_waiting_for_a_program_is_progress_and_loses_none_of_its_input(monkeypatch):
    monkeypatch.setattr(programs, "PULSE_SECONDS", 0.01)
    calls = []
    # The program starts to read after a while, and its input is much larger than a pipe's buffer.
    text = "text" * 1000000
    done = programs.run(["sh", "-c", "sleep 0.2; cat; echo end >&2"], text, 30.0, lambda: calls.append(1))
    assert (done.status, done.output, done.errors) == (0, text, "end\n")
    assert len(calls) >= 3


def test_waiting_for_a_program_ends(monkeypatch):
    monkeypatch.setattr(programs, "PULSE_SECONDS", 0.01)
    calls = []
    with pytest.raises(KernelError, match=r"did not end within 0\.1 seconds"):
        programs.run(["sleep", "30"], timeout=0.1, progress=lambda: calls.append(1))
    assert 1 <= len(calls) <= 10


class Table(Resource):
    """A table that records its operations in a list."""

    def __init__(self, done, name):
        self.name = name
        self.done = done

    def observe(self):
        self.done.append(f"{self.name} read")
        return {}

    def apply(self, change: Change):
        self.done.append(f"{self.name} changed")


def test_progress_before_each_table_also_where_it_is_wrapped():
    done = []
    stages = [Stage(Table(done, "first"), {1: 1}), Stage(ObservedOnce(Table(done, "second")), {1: 1})]
    for stage in stages:
        stage.resource.report_to(lambda: done.append("progress"))
    apply_plan(plan(stages))
    steps = ["first read", "second read", "first changed", "second changed"]
    assert done == [item for step in steps for item in ("progress", step)]
    inner = Table(done, "inner")
    outer = ObservedOnce(inner)
    outer.report_to(lambda: done.append("inner progress"))
    inner.progress()
    assert done[-1] == "inner progress"
