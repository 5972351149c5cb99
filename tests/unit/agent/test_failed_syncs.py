# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A sync that fails, in whichever step, removes nothing from the kernel, and the next one programs everything."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift import watch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import other_modes, proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.losses import EndpointLossWatch
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import RESOURCE
from tests.lab import manifests
from tests.unit.agent.sync_bench import Drift, SyncBench, service

#: The steps of a sync that use the kernel, or may.
STEPS = ("is_cold", "apply_services", "_find_schedulers", "full", "partial")


def fail(*_arguments, **_options):
    raise KernelError("no buffer space")


def failing(monkeypatch, step):
    """Let a step of each family fail until the returned function is called."""
    original = getattr(proxier.Proxier, step)
    monkeypatch.setattr(proxier.Proxier, step, fail)
    return lambda: monkeypatch.setattr(proxier.Proxier, step, original)


def endpoints(name, *addresses):
    return manifests.endpoint_slice(
        name, [manifests.endpoint(address) for address in addresses], [manifests.port(80)], namespace="d"
    )


@pytest.fixture
def served(monkeypatch):
    """Return the table of a node that serves three Services."""
    bench = SyncBench(monkeypatch)
    bench.put(*[service(f"s{number}", number) for number in (1, 2, 3)])
    bench.sync.sync(first=True)
    assert bench.sync.syncer.started
    return dict(bench.table)


def test_a_service_that_is_deleted_before_the_next_attempt_is_not_programmed(monkeypatch):
    """The desired tables have it, since the attempt that has failed."""
    bench = SyncBench(monkeypatch)
    bench.put(service("s1", 1), service("s2", 2))
    works_again = failing(monkeypatch, "full")
    bench.sync.sync(first=True)
    works_again()
    bench.delete(service("s2", 2))
    bench.sync.sync()
    assert bench.sync.syncer.started
    alone = SyncBench(monkeypatch)
    alone.put(service("s1", 1))
    alone.sync.sync(first=True)
    assert bench.table == alone.table


@pytest.mark.parametrize("families", [("IPv4",), ("IPv4", "IPv6")])
@pytest.mark.parametrize("step", STEPS)
def test_a_first_sync_that_fails_removes_nothing(served, monkeypatch, step, families):
    bench = SyncBench(monkeypatch, families=families)
    bench.mode.resource.table = dict(served)
    bench.put(*[service(f"s{number}", number) for number in (1, 2, 3)])
    works_again = failing(monkeypatch, step)
    for _attempt in range(2):
        bench.sync.sync(first=not bench.sync.syncer.syncs)
        assert bench.table == served
    works_again()
    bench.put(endpoints("s1", "10.0.0.1"))
    bench.sync.sync()
    assert bench.sync.syncer.started and not bench.sync.syncer.last_error
    assert len(bench.sync.proxiers.families[0].summaries) == 3
    bench.delete(endpoints("s1", "10.0.0.1"))
    bench.sync.sync()
    assert bench.table == served


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("step", STEPS[1:])
def test_the_services_of_a_later_sync_that_fails_are_applied_by_the_next_one(served, monkeypatch, step, rebuilt):
    expected = SyncBench(monkeypatch)
    expected.put(*[service(f"s{number}", number) for number in (1, 2, 4)])
    expected.sync.sync(first=True)
    # The last bench sets up the node.
    bench = SyncBench(monkeypatch)
    bench.put(*[service(f"s{number}", number) for number in (1, 2, 3)])
    bench.sync.sync(first=True)
    if rebuilt:
        bench.sync.rebuild(bench.request())
    bench.put(service("s4", 4))
    bench.delete(service("s3", 3))
    works_again = failing(monkeypatch, step)
    bench.sync.sync()
    if step == "apply_services":
        assert bench.table == served
    works_again()
    bench.sync.sync()
    assert not bench.sync.syncer.last_error
    assert bench.table == expected.table


def test_a_loss_is_held_back_no_longer_when_the_node_is_set_up_again(monkeypatch):
    numbers = range(1, 13)
    without = SyncBench(monkeypatch)
    without.put(*[service(f"s{number}", number) for number in numbers])
    without.sync.sync(first=True)
    # The last bench sets up the node.
    bench = SyncBench(monkeypatch)
    bench.sync.syncer.losses = EndpointLossWatch(50.0, 300.0, bench.timers.clock)
    bench.put(*[service(f"s{number}", number) for number in numbers])
    bench.put(*[endpoints(f"s{number}", f"10.1.0.{number}") for number in numbers])
    bench.sync.sync(first=True)
    before = dict(bench.table)
    bench.put(*[endpoints(f"s{number}") for number in numbers])
    bench.now += 5
    bench.sync.sync()
    assert bench.table == before and bench.sync.syncer.losses.held_until

    bench.now += 5
    bench.sync.rebuild(bench.request())
    bench.sync.sync()
    assert bench.table == without.table, "all Services are still there, without endpoints"
    assert "no longer held back" in bench.text.getvalue() and not bench.sync.syncer.losses.held_until
    bench.put(endpoints("s1", "10.1.0.1"))
    bench.sync.sync()
    assert not bench.sync.syncer.last_error and len(bench.table) > len(without.table)


def test_what_serves_is_only_removed_after_a_sync_that_succeeds(served, monkeypatch):
    removals = []

    def remove(*_arguments):
        removals.append(bench.sync.syncer.last_error)
        return node_removed

    node_removed = type("Found", (), {"removed": 0, "draining": 0})
    monkeypatch.setattr(other_modes, "remove_leftovers", remove)
    bench = SyncBench(monkeypatch)
    bench.put(service("s1", 1))
    works_again = failing(monkeypatch, "full")
    bench.sync.sync(first=True)
    bench.sync.clean_up_once_serving()
    bench.sync.sync()
    assert not removals
    works_again()
    bench.sync.sync()
    bench.sync.sync()
    assert removals == [""]
    bench.sync.clean_up_once_serving()
    assert removals == ["", ""]


def test_without_a_watch_the_node_is_synced_and_compared_later(served, monkeypatch):
    bench = SyncBench(monkeypatch)
    bench.put(service("s1", 1))
    monkeypatch.setattr(watch, "DriftWatch", fail)
    bench.sync.sync(first=True)
    assert bench.sync.watching.drift is None and bench.table and not bench.sync.syncer.last_error
    assert "cannot be watched" in bench.text.getvalue()
    monkeypatch.setattr(watch, "DriftWatch", Drift)
    bench.now += 60
    bench.timers.run()
    assert bench.sync.watching.drift is not None and "IPv4" in bench.sync.syncer.suspects


def test_a_change_of_what_another_program_has_just_deleted_does_not_wait_for_the_retry(served, monkeypatch):
    """The partial sync fails where the table is gone; the repair that is due anyway has the change, too."""
    bench = SyncBench(monkeypatch)
    bench.put(*[service(f"s{number}", number) for number in (1, 2, 3)])
    bench.sync.sync(first=True)
    bench.table.clear()
    bench.put(endpoints("s1", "10.0.0.1"))
    bench.mode.resource.failure = "another program deleted it meanwhile"
    bench.sync.syncer.suspects["IPv4"] = "a notification"
    bench.sync.sync()
    (proxier,) = bench.sync.proxiers.families
    assert bench.table == dict(proxier.tables.desired[RESOURCE]) and not bench.sync.syncer.last_error
    assert [event[2] for event in bench.events] == ["DriftRepaired"]
