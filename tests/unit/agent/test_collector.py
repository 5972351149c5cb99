# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests of the collector of reference cycles while the cluster is loaded."""

from __future__ import annotations

import gc
import weakref

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.collector import begin_loading, end_loading


@pytest.fixture(autouse=True)
def usual():
    before = gc.get_threshold()
    yield before
    gc.unfreeze()
    gc.set_threshold(*before)


class Cycle:
    def __init__(self):
        self.own = self


def test_the_collector_is_rare_but_not_off_until_the_end(usual):
    begin_loading()
    assert gc.isenabled()
    assert gc.get_threshold()[0] > usual[0]
    end_loading()
    assert gc.get_threshold() == usual


def test_cycles_from_the_load_are_collected_and_the_rest_is_not_visited_again():
    begin_loading()
    cycle = weakref.ref(Cycle())
    end_loading()
    assert cycle() is None
    assert gc.get_freeze_count() > 0


def test_cycles_are_collected_while_the_load_waits():
    begin_loading()
    cycle = weakref.ref(Cycle())
    gc.collect()
    assert cycle() is None


def test_a_second_load_collects_cycles_that_the_first_one_left():
    end_loading()
    kept = Cycle()
    end_loading()
    cycle = weakref.ref(kept)
    del kept
    end_loading()
    assert cycle() is None
