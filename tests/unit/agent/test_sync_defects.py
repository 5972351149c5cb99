# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An unexpected exception, in any step of a sync or of the loop, does not end the agent."""

from __future__ import annotations

import io

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import node, proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.losses import EndpointLossWatch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.slow_start import SlowStart
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.stale_flows import StaleFlows
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.sync_metrics import SyncMetrics
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.failures import Fatal, Steps
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import AFTER_FAILURE_SECONDS, Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from tests.unit.agent.sync_bench import DictResource, Drift, SyncBench, service

#: The steps of a sync that read the kernel's answers or the objects.
STEPS = {
    "cold": (proxier.Proxier, "is_cold"),
    "observation": (DictResource, "observe"),
    "application": (DictResource, "apply"),
    "conntrack": (StaleFlows, "delete"),
    "slow start": (SlowStart, "update"),
    "losses": (EndpointLossWatch, "programmed"),
    "metrics": (SyncMetrics, "measure"),
}


def fail(*_arguments, **_options):
    raise KeyError("a defect")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_sync_with_a_defect_is_repeated_with_new_tables(monkeypatch, step, first):
    expected = SyncBench(monkeypatch)
    expected.put(*[service(f"s{number}", number) for number in (1, 2, 4)])
    expected.sync.sync(first=True)
    # The last bench sets up the node.
    bench = SyncBench(monkeypatch)
    bench.put(*[service(f"s{number}", number) for number in (1, 2, 3)])
    if not first:
        bench.sync.sync(first=True)
        # A partial sync does not observe, and only the first one examines whether the table is empty.
        bench.sync.syncer.started = step != "cold"
        bench.sync.proxiers.families[0].needs_full = step == "observation"
    with monkeypatch.context() as patched:
        patched.setattr(*STEPS[step], fail)
        bench.put(service("s4", 4))
        bench.sync.sync(first=first)
        assert "KeyError: 'a defect'" in bench.sync.syncer.last_error
        assert bench.sync.schedule.delay(bench.now) == bench.sync.schedule.retry_interval > 1
        bench.now += 1000
        assert not bench.health.healthy
        bench.sync.sync()
        assert bench.sync.syncer.last_error
    bench.delete(service("s3", 3))
    bench.sync.sync()
    assert not bench.sync.syncer.last_error and bench.health.healthy
    assert bench.table == expected.table


def test_a_node_that_cannot_be_set_up_again_is_tried_again(monkeypatch):
    bench = SyncBench(monkeypatch)
    bench.put(service("s1", 1))
    with monkeypatch.context() as patched:
        patched.setattr(DictResource, "apply", fail)
        bench.sync.sync(first=True)

        def refuse(*_arguments):
            raise ProxyError("no such module")

        patched.setattr(node, "set_up", refuse)
        bench.sync.sync()
        assert bench.sync.syncer.last_error == "no such module"
    bench.sync.sync()
    assert not bench.sync.syncer.last_error and bench.table


def test_a_watch_with_a_defect_is_opened_again(monkeypatch):
    bench = SyncBench(monkeypatch)
    monkeypatch.setattr(Drift, "poll", fail, raising=False)
    bench.put(service("s1", 1))
    bench.sync.sync(first=True)
    watch = bench.sync.watching.drift
    bench.sync.watching.poll()
    assert watch.closed and bench.sync.watching.drift is None
    bench.now += 60
    bench.timers.run()
    assert bench.sync.watching.drift is not None and bench.sync.syncer.suspects == {"IPv4": "regular check"}


def test_a_step_of_the_loop_may_fail():
    log = io.StringIO()
    steps = Steps(LimitedLog(Log(log)))
    assert steps.run("do nothing", lambda: None)
    assert not steps.run("fail", fail)
    assert "step=fail" in log.getvalue() and "KeyError: 'a defect'" in log.getvalue()
    for error in (Fatal("restart"), MemoryError()):

        def end(raised=error):
            raise raised

        with pytest.raises(type(error)):
            steps.run("end", end)


def test_a_timer_that_fails_runs_again_and_does_not_keep_others_from_running():
    now = [0.0]
    timers = Timers(lambda: now[0])
    ran = []
    first, second = timers.add("first", fail), timers.add("second", lambda: ran.append(now[0]))
    first.start(0)
    second.start(0)
    timers.run(Steps(LimitedLog(Log(io.StringIO()))).run)
    assert ran == [0.0] and timers.delay() == AFTER_FAILURE_SECONDS
