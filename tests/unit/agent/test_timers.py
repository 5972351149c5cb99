# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Timers of the agent's loop."""

from __future__ import annotations

import math

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def timers(clock):
    return Timers(lambda: clock[0])


def test_nothing_is_due_without_a_start(timers):
    ran = []
    timers.add("a", lambda: ran.append("a"))
    timers.run()
    assert ran == [] and timers.delay() == math.inf


def test_a_timer_runs_once_when_it_is_due(timers, clock):
    ran = []
    timers.add("a", lambda: ran.append("a")).start(5)
    assert timers.delay() == 5
    clock[0] += 4.9
    timers.run()
    assert ran == []
    clock[0] += 0.2
    assert timers.delay() == 0
    timers.run()
    timers.run()
    assert ran == ["a"] and timers.delay() == math.inf


def test_a_later_start_does_not_postpone_a_timer_but_a_restart_does(timers, clock):
    timer = timers.add("a", lambda: None)
    timer.start(5)
    timer.start(50)
    assert timers.delay() == 5
    timer.restart(50)
    assert timers.delay() == 50


def test_an_action_can_start_its_timer_again_without_running_at_once(timers, clock):
    ran = []
    timer = timers.add("a", lambda: (ran.append(clock[0]), timer.start(0)))
    timer.start(0)
    timers.run()
    assert ran == [100.0] and timers.delay() == 0


def test_due_timers_run_in_the_order_in_which_they_were_added(timers):
    ran = []
    first, second = timers.add("first", lambda: ran.append(1)), timers.add("second", lambda: ran.append(2))
    second.start(0)
    first.start(0)
    timers.run()
    assert ran == [1, 2]


def test_a_cancelled_timer_does_not_run_until_it_is_started_again(timers, clock):
    ran = []
    timer = timers.add("a", lambda: ran.append("a"))
    timer.start(5)
    timer.cancel()
    assert timers.delay() == math.inf
    timer.start(7)
    assert timers.delay() == 7
