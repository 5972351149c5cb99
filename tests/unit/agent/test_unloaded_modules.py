# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node whose IPVS was unloaded is set up again, which loads the module and opens sockets with its new number."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError, PreflightError
from tests.unit.agent.sync_bench import SyncBench, service


class Socket:
    """A socket to IPVS."""

    def __init__(self):
        self.lost = self.closed = False

    def close(self):
        self.closed = True


class Bench(SyncBench):
    """A node whose tables can be changed only through a socket to IPVS that is not lost."""

    def __init__(self, monkeypatch):
        self.setups = 0
        self.problem = ""
        self.handles = None
        super().__init__(monkeypatch)
        apply = self.mode.resource.apply

        def checked(change):
            sock = self.socket
            if sock.closed or not self.loaded:
                sock.lost = True
                raise KernelError("IPVS: the module ip_vs was unloaded")
            apply(change)

        monkeypatch.setattr(self.mode.resource, "apply", checked)

    def set_up(self, request, handles):
        self.setups += 1
        if self.problem:
            raise PreflightError(self.problem)
        self.handles = handles
        self.loaded = True
        self.socket = handles._ipvs = Socket()
        return super().set_up(request, handles)


@pytest.fixture
def bench(monkeypatch):
    made = Bench(monkeypatch)
    made.put(service("s1", 1))
    made.sync.sync(first=True)
    assert made.setups == 1 and not made.sync.syncer.last_error
    return made


def test_a_sync_that_finds_ipvs_unloaded_is_followed_at_once_by_one_that_sets_the_node_up(bench):
    lost, watch, before = bench.socket, bench.sync.watching.drift, len(bench.table)
    bench.loaded = False
    bench.put(service("s2", 2))
    bench.sync.sync()
    assert "unloaded" in bench.sync.syncer.last_error and lost.closed
    assert bench.sync.schedule.delay(bench.now) == bench.sync.schedule.min_interval
    bench.sync.sync()
    assert bench.setups == 2 and not bench.sync.syncer.last_error
    assert watch.closed and bench.sync.watching.drift is not watch
    assert len(bench.table) > before
    bench.put(service("s3", 3))
    bench.sync.sync()
    assert bench.setups == 2 and not bench.sync.syncer.last_error


def test_a_loss_that_another_request_finds_causes_a_sync(bench):
    bench.sync.request_if_needed()
    assert not bench.sync.schedule.requested
    bench.socket.lost = True
    bench.sync.request_if_needed()
    assert bench.sync.schedule.requested
    bench.sync.sync()
    assert bench.setups == 2 and not bench.sync.syncer.last_error


def test_without_the_module_the_node_is_set_up_at_intervals_until_it_can_be_loaded(bench):
    bench.loaded = False
    bench.problem = "ip_vs is not available"
    bench.put(service("s2", 2))
    bench.sync.sync()
    for number in range(3):
        bench.sync.sync()
        assert bench.setups == 2 + number
        assert bench.sync.syncer.last_error == bench.problem
        assert bench.sync.schedule.delay(bench.now) == bench.sync.schedule.retry_interval
    bench.problem = ""
    bench.sync.sync()
    assert not bench.sync.syncer.last_error and bench.setups == 5


def test_a_reload_that_fails_after_a_loss_is_followed_by_a_set_up(bench):
    bench.socket.lost = True
    bench.problem = "the node lacks something"
    with pytest.raises(PreflightError):
        bench.sync.rebuild(bench.request())
    bench.problem = ""
    bench.sync.sync()
    assert not bench.sync.syncer.last_error and not bench.socket.closed
    assert bench.setups == 3


def test_a_reload_after_a_loss_sets_the_node_up_only_once(bench):
    bench.socket.lost = True
    bench.sync.rebuild(bench.request())
    bench.sync.sync()
    assert bench.setups == 2 and not bench.sync.syncer.last_error
