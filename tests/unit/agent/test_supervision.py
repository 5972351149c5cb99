# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Supervised threads with a manual clock: failures are retried, late threads interrupted, stuck ones detected."""

from __future__ import annotations

import io
import json
import queue
import sys
import threading

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import ProxyHealth
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import (
    GRACE_SECONDS,
    STUCK_SECONDS,
    Backoff,
    Supervisor,
)
from tests.lab.clock import Clock
from tests.waiting import wait_for


class AtOnce(Backoff):
    """A backoff without pauses."""

    def pause(self):
        return 0.0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def supervisor(clock, stream):
    return Supervisor(Log(stream), clock, AtOnce)


class Work:
    """A thread body that executes the test's orders one after the other."""

    def __init__(self):
        self.orders = queue.SimpleQueue()
        self.calls = 0
        self.interrupted = threading.Event()

    def run(self, task):
        self.calls += 1
        while True:
            order = self.orders.get()
            if order is None:
                return
            order(task)


def fail(error):
    def order(task):
        raise error

    return order


@pytest.mark.parametrize(
    "error",
    [
        ValueError("odd"),
        AttributeError("none"),
        RecursionError("deep"),
        MemoryError(),
        RuntimeError("no thread"),
        KeyError(1),
    ],
)
def test_any_exception_is_logged_with_its_traceback_and_the_body_called_again(supervisor, stream, error):
    work = Work()
    task = supervisor.start("worker", work.run)
    work.orders.put(fail(error))
    wait_for(lambda: work.calls == 2)
    assert task.alive and supervisor.check() == ()
    (line,) = stream.getvalue().splitlines()
    assert "thread=worker" in line and type(error).__name__ in line and "test_supervision.py" in line
    work.orders.put(None)


def test_the_same_failure_is_logged_once_and_another_one_again(supervisor, stream):
    work = Work()
    supervisor.start("worker", work.run)
    for _time in range(50):
        work.orders.put(fail(ValueError("odd")))
    work.orders.put(fail(KeyError("other")))
    wait_for(lambda: work.calls == 52)
    assert [word for line in stream.getvalue().splitlines() for word in ("ValueError", "KeyError") if word in line] == [
        "ValueError",
        "KeyError",
    ]
    work.orders.put(None)


def test_failures_in_a_row_are_paced_up_to_half_a_minute(clock, stream):
    pauses = []
    supervisor = Supervisor(Log(stream), clock, lambda: Backoff(lambda: 0.0))
    calls = []

    def body(task):
        calls.append(clock.now)
        if len(calls) < 10:
            raise ValueError("odd")

    task = supervisor.start("worker", lambda task: None)
    task.join(10)
    task._body = body
    task._closing.wait = lambda seconds: pauses.append(seconds)
    task._run()
    assert pauses[:3] == [0.8, 1.6, 3.2] and pauses[-1] == 30.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_started_again(supervisor, stream):
    work = Work()
    task = supervisor.start("worker", work.run)
    work.orders.put(lambda task: sys.exit(1))
    wait_for(lambda: not task.alive)
    assert supervisor.check() == ()
    wait_for(lambda: work.calls == 2)
    assert "a thread has died and is restarted" in stream.getvalue()
    work.orders.put(None)


def test_a_thread_that_cannot_be_started_is_started_later(supervisor, stream, monkeypatch):
    work = Work()
    original = threading.Thread.start

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    supervisor.start("worker", work.run)
    assert "cannot be started" in stream.getvalue() and supervisor.delay() == 1.0
    monkeypatch.setattr(threading.Thread, "start", original)
    supervisor.check()
    wait_for(lambda: work.calls == 1)
    work.orders.put(None)


def test_a_body_that_returns_is_not_called_again(supervisor):
    work = Work()
    task = supervisor.start("worker", work.run)
    work.orders.put(None)
    wait_for(lambda: task.ended)
    assert supervisor.check() == () and work.calls == 1


def test_a_late_thread_is_interrupted_once_and_a_stuck_one_makes_the_agent_unhealthy(supervisor, clock, stream):
    work, hang = Work(), threading.Event()
    announced = threading.Event()
    interrupts = []
    task = supervisor.start("worker", work.run, lambda: interrupts.append(clock.now))
    health = ProxyHealth(60.0)

    def block(task):
        task.busy(10.0)
        announced.set()
        hang.wait(30)
        task.idle()

    def check():
        health.threads_stuck(supervisor.check())
        return json.loads(health.answer(with_eligibility=False).body)["healthy"]

    work.orders.put(block)
    assert announced.wait(10)
    clock.now += 10 + GRACE_SECONDS - 1
    assert check() and interrupts == []
    clock.now += 2
    assert check() and check() and len(interrupts) == 1
    clock.now += STUCK_SECONDS
    assert not check() and not health.healthy and health.answer(with_eligibility=False).code == 503
    hang.set()
    wait_for(lambda: task.deadline is None)
    assert check() and health.healthy
    lines = stream.getvalue().splitlines()
    assert ["does not respond" in lines[0], "is stuck" in lines[1], "has recovered" in lines[2]] == [True] * 3
    work.orders.put(None)


def test_the_loop_wakes_up_for_the_next_deadline(supervisor, clock):
    work, announced = Work(), threading.Event()
    supervisor.start("worker", work.run)
    assert supervisor.delay() == GRACE_SECONDS

    def announce(task):
        task.busy(-20.0)
        announced.set()

    work.orders.put(announce)
    assert announced.wait(10)
    assert supervisor.delay() == pytest.approx(GRACE_SECONDS - 20.0)
    work.orders.put(None)
