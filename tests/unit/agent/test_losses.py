# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When the agent reports that most Services lose their endpoints, and which changes it holds back."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.losses import (
    WINDOW_SECONDS,
    EndpointLossWatch,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from tests.lab.clock import Clock

SERVICES = [NamespacedName("shop", f"web-{number:02}") for number in range(20)]


@pytest.fixture
def clock():
    return Clock()


def watch(clock, hold=0.0, percent=50.0, services=SERVICES):
    made = EndpointLossWatch(percent, hold, clock)
    made.programmed(services, lambda _service: True)
    return made


def nothing(_service):
    return False


def test_a_loss_of_most_is_reported_once_and_applied(clock):
    losses = watch(clock)
    loss = losses.judge(SERVICES[:11], nothing)
    assert len(loss.services) == 11 and loss.is_new and not loss.held and losses.held_until == 0
    assert loss.text.startswith("11 of the 20 Services that have endpoints on this node lose them: shop/web-00, ")
    losses.programmed(SERVICES[:11], nothing)
    assert not losses.judge(SERVICES[11:13], nothing).is_new
    clock.now += WINDOW_SECONDS
    assert losses.judge([], nothing).services == set()


def test_half_of_them_few_of_them_or_endpoints_that_stay_are_no_loss(clock):
    assert watch(clock).judge(SERVICES[:10], nothing).services == set()
    assert watch(clock, services=SERVICES[:9]).judge(SERVICES[:9], nothing).services == set()
    assert watch(clock).judge(SERVICES, lambda _service: True).services == set()
    assert watch(clock, percent=100.0).judge(SERVICES, nothing).services == set()


def test_services_lost_one_after_the_other_count_together(clock):
    losses, reported = watch(clock), []
    for service in SERVICES:
        loss = losses.judge([service], nothing)
        losses.programmed([service], nothing)
        reported += [loss.text] if loss.is_new else []
        clock.now += 1
    assert len(reported) == 1 and reported[0].startswith("11 of the 20 Services")


def test_a_slow_loss_is_not_reported(clock):
    losses = watch(clock)
    for service in SERVICES:
        assert not losses.judge([service], nothing).is_new
        losses.programmed([service], nothing)
        clock.now += WINDOW_SECONDS / 4


def test_losses_of_few_services_are_not_checked(clock):
    def never(service):
        raise AssertionError(service)

    assert watch(clock).judge(SERVICES[:10], never).services == set()


def test_a_loss_is_held_back_for_the_configured_time(clock):
    losses = watch(clock, hold=30.0)
    loss = losses.judge(SERVICES, nothing)
    assert loss.held and loss.is_new and losses.held_until == clock.now + 30
    clock.now += 29
    again = losses.judge(SERVICES, nothing)
    assert again.held and not again.is_new
    clock.now += 1
    assert not losses.judge(SERVICES, nothing).held and losses.held_until == 0


def test_endpoints_that_return_while_held_are_no_loss(clock):
    losses = watch(clock, hold=30.0)
    losses.judge(SERVICES, nothing)
    assert losses.judge(SERVICES, lambda _service: True).services == set() and losses.held_until == 0
    clock.now += 100
    assert losses.judge(SERVICES, nothing).held, "the next loss is held for the whole time again"
