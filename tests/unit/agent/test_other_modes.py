# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of the mode, and what other modes have left on the node."""

from __future__ import annotations

import re

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import other_modes
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.setup import Leftovers
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from tests.unit.agent.sync_bench import SyncBench, service


@pytest.fixture
def bench(monkeypatch):
    synced = SyncBench(monkeypatch)
    synced.put(service("web", 1))
    synced.sync.sync(first=True)
    return synced


def test_a_change_of_the_mode_is_reported_once(bench, monkeypatch):
    found = Leftovers(removed=7, draining=0)
    monkeypatch.setattr(other_modes, "remove_leftovers", lambda _proxiers, _handles: found)
    bench.sync.rebuild(bench.request(load({"mode": "ipvs"}, "").configuration))
    bench.sync.sync()
    bench.sync.other_modes.clean_up()
    # Later, as after a start in another mode than before.
    bench.sync.other_modes.clean_up()
    assert [event[2] for event in bench.events] == ["ModeChanged"] * 2
    notes = [event[4] for event in bench.events]
    assert re.fullmatch(r"the mode was changed from \w+ to ipvs: requested", notes[0])
    assert notes[1] == "the node serves in ipvs mode: 7 entries that it does not use were removed"


def test_leftovers_that_cannot_be_removed_are_no_failure(bench, monkeypatch):
    def fail(_proxiers, _progress):
        raise ProxyError("busy")

    monkeypatch.setattr(other_modes, "remove_leftovers", fail)
    bench.sync.other_modes.clean_up()
    assert "leftovers of another mode cannot be removed" in bench.text.getvalue()


def test_removal_of_another_modes_draining_real_servers_is_retried(bench, monkeypatch):
    leftovers = iter([Leftovers(0, 2), Leftovers(2, 0)])
    monkeypatch.setattr(other_modes, "remove_leftovers", lambda _proxiers, _handles: next(leftovers))
    bench.sync.other_modes.clean_up()
    bench.now += other_modes.DRAIN_SECONDS
    bench.timers.run()
    assert "real servers of ipvs mode are kept" in bench.text.getvalue()
    assert "removed leftovers of another mode" in bench.text.getvalue()
    assert next(leftovers, None) is None
