# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A defect that one object triggers, wherever it is processed, affects that object only."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.notices import MOST_NAMED
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.summaries import Summaries
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Known
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.packed import items_of, text_of
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.failures import MOST_FAILURES
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.claims import Claims
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing import objects
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.merged import MergedTables
from tests.lab import manifests
from tests.unit.agent.sync_bench import DictMode, SyncBench, service

METRIC = "kubenode_proxy_objects_failed"
#: Functions that are called for each Service, in the order in which they are.
STATE = {
    "state": (ClusterState, "put"),
    "fit": (ClusterState, "_fit"),
    "claims": (Claims, "replace"),
}
SYNC = {
    "ServicePorts": (proxier, "service_ports_of"),
    "schedulers": (proxier, "requested"),
    "rendering": (type(DictMode.rendering), "entries"),
    "tables": (MergedTables, "replace"),
    "warnings": (proxier, "unserved"),
    "summaries": (Summaries, "put"),
}
STEPS = {**STATE, **SYNC}


def endpoints(name, *addresses):
    return manifests.endpoint_slice(
        name, [manifests.endpoint(address) for address in addresses], [manifests.port(80)], namespace="d"
    )


def names_in(value):
    """Return the names of the Services that an argument of a step is about."""
    if type(value) in (tuple, list, set, frozenset):
        return {name for item in value for name in names_in(item)}
    found = set()
    for item in (value, getattr(value, "key", None), getattr(value, "value", None)):
        key = getattr(item, "service_key", getattr(item, "key", getattr(item, "service", item)))
        found.add(getattr(getattr(key, "service", key), "name", ""))
    return found


def let_fail(monkeypatch, step, names, after=False):
    """Let a step raise a KeyError for Services of these names; ``after``: when it has done its work."""
    where, name = STEPS[step]
    original = getattr(where, name)

    def wrapped(*arguments, **options):
        concerned = {name for item in arguments for name in names_in(item)}
        if names.intersection(concerned):
            if after:
                original(*arguments, **options)
            raise KeyError("IPv4")
        return original(*arguments, **options)

    monkeypatch.setattr(where, name, wrapped)


def bench_with(monkeypatch, count=3):
    bench = SyncBench(monkeypatch)
    bench.put(*[service(f"s{number}", number) for number in range(1, count + 1)])
    return bench


def failed(bench):
    return bench.metrics.registry.get_sample_value(METRIC)


def programmed(bench, name):
    """Return the entries of a Service in the kernel."""
    tables = bench.sync.proxiers.families[0].tables
    entries = [entry for owner in tables._ports.get(("d", name), ()) for entry in tables.programmed(owner)]
    assert all(bench.table[key] == value for _table, key, value in entries)
    return entries


def retried(bench):
    """Return the bench after the next regular check."""
    bench.sync._check_everything()
    bench.sync.sync()
    return bench


@pytest.fixture(params=STEPS)
def step(request):
    return request.param


@pytest.mark.parametrize("after", [False, True])
def test_other_objects_are_programmed(monkeypatch, step, after):
    expected = bench_with(monkeypatch)
    expected.put(endpoints("s1", "10.1.0.1"), endpoints("s3", "10.1.0.3"))
    expected.sync.sync(first=True)

    bench = bench_with(monkeypatch)
    bench.put(endpoints("s1"), endpoints("s2"), endpoints("s3"))
    bench.sync.sync(first=True)
    failing = {"s2"}
    let_fail(monkeypatch, step, failing, after)
    bench.put(endpoints("s1", "10.1.0.1"), endpoints("s2", "10.1.0.2"), endpoints("s3", "10.1.0.3"))
    bench.sync.sync()
    assert not bench.sync.syncer.last_error
    for name in ("s1", "s3"):
        assert programmed(bench, name) == programmed(expected, name)
    lines = {"state": 2, "claims": 0}.get(step, 1)  # the slice and its Service; a change of endpoints makes no claim
    assert bench.text.getvalue().count("this is a defect of the agent") == failed(bench) == lines
    assert bench.text.getvalue().count("d/s2") == bench.text.getvalue().count("KeyError") == lines

    bench.put(endpoints("s1"))
    bench.sync.sync()
    assert bench.text.getvalue().count("this is a defect of the agent") == lines, "each is logged once"

    failing.clear()
    bench.put(endpoints("s1", "10.1.0.1"))
    retried(bench)
    expected.put(endpoints("s2", "10.1.0.2"))
    expected.sync.sync()
    assert bench.table == expected.table, "the object is processed again although it has not changed"
    assert failed(bench) == 0


@pytest.mark.parametrize("after", [False, True])
def test_a_first_sync_serves_the_other_objects(monkeypatch, step, after):
    let_fail(monkeypatch, step, {"s2"}, after)
    bench = bench_with(monkeypatch)
    bench.sync.sync(first=True)
    assert bench.sync.syncer.started and not bench.sync.syncer.last_error
    monkeypatch.undo()
    bench.delete(service("s2", 2))
    retried(bench)
    assert failed(bench) == 0
    expected = SyncBench(monkeypatch)
    expected.put(service("s1", 1), service("s3", 3))
    expected.sync.sync(first=True)
    assert bench.table == expected.table
    tables = bench.sync.proxiers.families[0].tables
    assert not tables._endpoints and not tables._ports.keys() - expected.view.state.services.keys()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["_drop_slice", "_replace_service", "_remove"])
def test_a_removal_that_fails_is_complete_all_the_same(monkeypatch, name, after):
    """The state is built again: it may have been half changed."""
    bench = bench_with(monkeypatch)
    bench.put(endpoints("s1", "10.1.0.1"), endpoints("s2", "10.1.0.2"))
    bench.sync.sync(first=True)
    original = getattr(ClusterState, name)

    def broken(*arguments):
        monkeypatch.setattr(ClusterState, name, original)
        if after:
            original(*arguments)
        raise KeyError(name)

    for deleted in (endpoints("s2", "10.1.0.2"), service("s2", 2)):
        monkeypatch.setattr(ClusterState, name, broken)
        bench.delete(deleted)
        monkeypatch.setattr(ClusterState, name, original)
    bench.sync.sync()
    expected = SyncBench(monkeypatch)
    expected.put(service("s1", 1), service("s3", 3))
    expected.put(endpoints("s1", "10.1.0.1"))
    expected.sync.sync(first=True)
    assert bench.table == expected.table
    assert f"KeyError: '{name}'" in bench.text.getvalue()
    assert failed(retried(bench)) == 0


def test_an_endpoint_slice_that_moves_while_that_fails_is_served_by_one_service(monkeypatch):
    bench = bench_with(monkeypatch)
    moving = endpoints("s1", "10.1.0.1")
    bench.put(moving)
    bench.sync.sync(first=True)
    failing = {"s2"}
    let_fail(monkeypatch, "fit", failing)
    moved = {**moving, "metadata": {**moving["metadata"], "labels": endpoints("s2")["metadata"]["labels"]}}
    bench.put(moved)
    bench.sync.sync()
    before = dict(bench.table)
    failing.clear()
    retried(bench)
    expected = bench_with(monkeypatch)
    expected.put(moved)
    expected.sync.sync(first=True)
    assert bench.table == expected.table != before


@pytest.mark.parametrize("step", SYNC)
def test_many_failures_leave_a_kernel_that_serves_as_it_is(monkeypatch, step):
    count = MOST_FAILURES + 1
    numbers = range(1, count + 1)
    served = bench_with(monkeypatch, count)
    served.sync.sync(first=True)
    bench = bench_with(monkeypatch, count)
    bench.mode.resource.table = dict(served.table)
    failing = {f"s{number}" for number in numbers}
    let_fail(monkeypatch, step, failing)
    bench.sync.sync(first=True)
    assert bench.table == served.table
    assert f"{count} Services cannot be processed" in bench.sync.syncer.last_error
    assert bench.text.getvalue().count("d/s") == count, "each is named"
    failing.clear()
    bench.sync.sync()
    assert not bench.sync.syncer.last_error and bench.table == served.table


@pytest.mark.parametrize("step", SYNC)
@pytest.mark.parametrize("started", [False, True])
def test_many_failures_do_not_keep_others_from_being_served(monkeypatch, step, started):
    """Neither on an empty node nor on one that serves them all from its tables."""
    count = MOST_NAMED + 5
    bench = SyncBench(monkeypatch)
    failing = set()
    let_fail(monkeypatch, step, failing)
    if started:
        bench.put(*[service(f"s{number}", number) for number in range(1, count + 1)])
        bench.sync.sync(first=True)
    failing.update(f"s{number}" for number in range(1, count + 1))
    bench.put(*[service(f"s{number}", number) for number in range(1, count + 1)], service("t", 200))
    slices = [endpoints(f"s{number}", f"10.1.0.{number}") for number in range(1, count + 1)]
    bench.put(*slices, endpoints("t", "10.1.1.1"))
    bench.sync.sync(first=not started)
    assert not bench.sync.syncer.last_error
    expected = SyncBench(monkeypatch)
    expected.put(service("t", 200))
    expected.put(endpoints("t", "10.1.1.1"))
    expected.sync.sync(first=True)
    assert programmed(bench, "t") == programmed(expected, "t") != []
    assert failed(bench) == count
    assert "further objects cannot be processed" in bench.text.getvalue()


@pytest.mark.parametrize("step", STATE)
def test_a_defect_of_every_object_ends_the_agent(monkeypatch, step):
    """Nothing is served from a state that lacks most objects."""
    bench = SyncBench(monkeypatch)
    count = MOST_FAILURES + 1
    let_fail(monkeypatch, step, {f"s{number}" for number in range(1, count + 1)})
    with pytest.raises(KeyError):
        bench.put(*[service(f"s{number}", number) for number in range(1, count + 1)])
        bench.put(*[endpoints(f"s{number}", f"10.1.0.{number}") for number in range(1, count + 1)])


@pytest.mark.parametrize("step", STEPS)
def test_a_lack_of_memory_is_not_about_one_object(monkeypatch, step):
    bench = bench_with(monkeypatch)
    bench.sync.sync(first=True)
    where, name = STEPS[step]

    def lacking(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr(where, name, lacking)
    with pytest.raises(MemoryError):
        bench.put(service("s4", 4))
        bench.put(endpoints("s1", "10.1.0.1"))
        bench.sync.sync()


def test_an_object_whose_parsing_fails_is_refused(monkeypatch):
    known = objects._KINDS["Service"]

    def parse(raw, skipped):
        if raw["metadata"]["name"] == "s2":
            raise KeyError("spec")
        return known.parse(raw, skipped)

    monkeypatch.setitem(objects._KINDS, "Service", known._replace(parse=parse))
    bench = bench_with(monkeypatch)
    bench.sync.sync(first=True)
    (refusal,) = bench.view.state.refusals
    assert str(refusal).startswith(
        "Service d/s2: cannot be read, which is a defect of this program: KeyError: 'spec' ("
    )
    assert set(bench.view.state.services) == {("d", "s1"), ("d", "s3")}
    assert Known("Service").listed(service("s2", 2), lambda _key: 0).item is not None
    assert len(list(items_of([text_of(service("s2", 2))], {"Service"}))) == 1


def test_a_change_by_another_program_is_repaired_after_a_sync_that_failed(monkeypatch):
    bench = bench_with(monkeypatch)
    bench.sync.sync(first=True)
    served = dict(bench.table)
    bench.table.pop(next(iter(bench.table)))
    bench.sync.syncer.suspects["IPv4"] = "test"
    bench.put(service("s1", 1))
    family = bench.sync.proxiers.families[0]
    with monkeypatch.context() as patched:
        patched.setattr(type(family), "apply_services", refuse)
        bench.sync.sync()
    assert bench.sync.syncer.last_error == "not now" and bench.table != served
    bench.sync.sync()
    assert bench.table == served


def refuse(*_arguments, **_options):
    raise ProxyError("not now")
