# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The bounded-frequency schedule of the agent."""

from __future__ import annotations

import math

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.sync.schedule import Schedule


def schedule(minimum=1.0, retry=30.0, maximum=3600.0):
    return Schedule(minimum, retry, maximum)


def test_nothing_is_planned_before_the_first_request():
    assert schedule().delay(0.0) == math.inf


def test_the_first_run_has_no_delay():
    runs = schedule()
    runs.request()
    assert runs.delay(5.0) == 0.0


def test_requests_while_queued_are_merged():
    runs = schedule()
    runs.request()
    runs.request()
    runs.started()
    runs.ended(10.0, succeeded=True)
    assert runs.delay(10.0) == 3600.0


def test_a_request_during_a_run_waits_for_the_cool_down_after_its_end():
    runs = schedule()
    runs.request()
    runs.started()
    runs.request()
    runs.ended(10.0, succeeded=True)
    assert runs.delay(10.25) == 0.75
    assert runs.delay(11.0) == 0.0


def test_a_failed_run_is_tried_again_after_the_retry_interval():
    runs = schedule()
    runs.request()
    runs.started()
    runs.ended(10.0, succeeded=False)
    assert runs.delay(10.0) == 30.0


def test_a_successful_run_cancels_the_retry():
    runs = schedule()
    runs.request()
    runs.started()
    runs.ended(10.0, succeeded=False)
    runs.request()
    runs.started()
    runs.ended(12.0, succeeded=True)
    assert runs.delay(12.0) == 3600.0


def test_a_retry_never_comes_before_the_cool_down_is_over():
    runs = schedule(minimum=10.0, retry=2.0)
    runs.request()
    runs.started()
    runs.ended(0.0, succeeded=False)
    assert runs.delay(2.0) == 8.0


def test_the_retry_interval_is_bounded_by_the_maximum():
    runs = schedule(retry=100.0, maximum=50.0)
    runs.request()
    runs.started()
    runs.ended(0.0, succeeded=False)
    assert runs.delay(0.0) == 50.0
