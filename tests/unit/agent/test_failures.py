# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A defect that one object triggers, wherever it is processed, affects that object only; one of many stops the sync."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.failures import MOST_FAILURES
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.sync import proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from tests.lab import manifests
from tests.unit.agent.sync_bench import DictMode, SyncBench, service

METRIC = "kubenode_proxy_objects_failed"


def endpoints(name, *addresses):
    return manifests.endpoint_slice(
        name, [manifests.endpoint(address) for address in addresses], [manifests.port(80)], namespace="d"
    )


def names_in(*arguments):
    """Return the names of the Services that a function is called with."""
    for argument in arguments:
        for value in (argument, getattr(argument, "value", None)):
            if isinstance(value, tuple) and hasattr(value, "key"):
                yield getattr(value.key, "name", "")
            if hasattr(value, "service_key"):
                yield value.service_key.name
        key = getattr(argument, "key", argument)
        yield getattr(getattr(key, "service", key), "name", "")


def let_fail(monkeypatch, step, names):
    """Let a step raise a KeyError for Services of these names."""
    where, name = STEPS[step]
    original = getattr(where, name)

    def wrapped(*arguments, **options):
        if names.intersection(names_in(*arguments)):
            raise KeyError("IPv4")
        return original(*arguments, **options)

    monkeypatch.setattr(where, name, wrapped)


STEPS = {
    "state": (ClusterState, "put"),
    "ServicePorts": (proxier, "service_ports_of"),
    "rendering": (type(DictMode.rendering), "entries"),
}


def bench_with(monkeypatch, count=3):
    bench = SyncBench(monkeypatch)
    bench.put(*[service(f"s{number}", number) for number in range(1, count + 1)])
    return bench


@pytest.fixture(params=STEPS)
def step(request):
    return request.param


def test_other_objects_are_programmed(monkeypatch, step):
    expected = bench_with(monkeypatch)
    expected.put(endpoints("s1", "10.1.0.1"), endpoints("s3", "10.1.0.3"))
    expected.sync.sync(first=True)

    bench = bench_with(monkeypatch)
    bench.sync.sync(first=True)
    failing = {"s2"}
    let_fail(monkeypatch, step, failing)
    bench.put(endpoints("s1", "10.1.0.1"), endpoints("s2", "10.1.0.2"), endpoints("s3", "10.1.0.3"))
    bench.sync.sync()
    assert not bench.sync.syncer.last_error
    assert bench.table == expected.table, "s2 is served as before"
    assert bench.text.getvalue().count("this is a defect of the agent") == 1
    assert "KeyError" in bench.text.getvalue() and "d/s2" in bench.text.getvalue()
    assert bench.metrics.registry.get_sample_value(METRIC) == 1

    bench.put(endpoints("s1"))
    bench.sync.sync()
    assert bench.text.getvalue().count("this is a defect of the agent") == 1, "it is logged once"

    failing.clear()
    bench.put(endpoints("s1", "10.1.0.1"), endpoints("s2", "10.1.0.2", "10.1.0.4"))
    bench.sync.sync()
    expected.put(endpoints("s2", "10.1.0.2", "10.1.0.4"))
    expected.sync.sync()
    assert bench.table == expected.table
    assert bench.metrics.registry.get_sample_value(METRIC) == 0


def test_a_first_sync_serves_the_other_objects(monkeypatch, step):
    let_fail(monkeypatch, step, {"s2"})
    bench = bench_with(monkeypatch)
    bench.sync.sync(first=True)
    assert bench.sync.syncer.started and not bench.sync.syncer.last_error
    monkeypatch.undo()
    expected = SyncBench(monkeypatch)
    expected.put(service("s1", 1), service("s3", 3))
    expected.sync.sync(first=True)
    assert bench.table == expected.table


def test_a_deleted_object_has_not_failed(monkeypatch, step):
    let_fail(monkeypatch, step, {"s2"})
    bench = bench_with(monkeypatch)
    bench.sync.sync(first=True)
    assert bench.metrics.registry.get_sample_value(METRIC) == 1
    monkeypatch.undo()
    bench.delete(service("s2", 2))
    bench.sync.sync()
    assert bench.metrics.registry.get_sample_value(METRIC) == 0


@pytest.mark.parametrize("first", [True, False])
def test_a_defect_that_affects_many_objects_leaves_the_kernel_as_it_is(monkeypatch, step, first):
    count = MOST_FAILURES + 1
    served = bench_with(monkeypatch, count)
    served.sync.sync(first=True)
    table = dict(served.table)
    bench = served
    if first:
        bench = SyncBench(monkeypatch)
        bench.mode.resource.table = dict(table)
    failing = {f"s{number}" for number in range(1, count + 1)}
    let_fail(monkeypatch, step, failing)
    for number in range(1, count + 1):
        bench.put(service(f"s{number}", number), endpoints(f"s{number}", f"10.1.0.{number}"))
    bench.sync.sync(first=first)
    assert bench.table == table
    assert "objects cannot be processed" in bench.sync.syncer.last_error
    assert "KeyError" in bench.text.getvalue()
    failing.clear()
    for number in range(1, count + 1):
        bench.put(service(f"s{number}", number), endpoints(f"s{number}"))
    bench.sync.sync(first=first)
    assert not bench.sync.syncer.last_error and bench.table == table
