# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory limit: reading it, warning before it is reached, and refusing what does not fit."""

from __future__ import annotations

import io
import itertools
import json

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.memory import (
    BASE_BYTES,
    HEALTH,
    MOST,
    POLL_SECONDS,
    MemoryBudget,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import ProxyHealth
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch, Known
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.packed import (
    Packed,
    pack,
    parsed_items,
    text_in,
    text_of,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.room import NoRoom, Room
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import ObjectKey
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.memory_group import memory_group
from tests.benchmarks.large_cluster import large_cluster
from tests.lab.clock import Clock
from tests.unit.agent.reports_in_memory import reports_to
from tests.unit.agent.scripted_reflector import Run, events, page
from tests.unit.agent.scripted_reflector import event as event_of
from tests.unit.agent.scripted_reflector import service as item

MIB = 1 << 20
FACTOR = 10.0


def service(name, port=80, **metadata):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "default", "name": name, **metadata},
        "spec": {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [{"port": port}]},
    }


# ---- the control group


def write_group(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def found_group(tmp_path, own):
    (tmp_path / "own").write_text(own)
    return memory_group(str(tmp_path / "groups"), str(tmp_path / "own"))


def test_the_limit_of_version_2_is_the_smallest_from_the_group_upwards(tmp_path):
    top = tmp_path / "groups"
    write_group(top / "system.slice" / "a.service", memory__max="max", memory__current="9")
    stat = "anon 1000\ninactive_file 200\nactive_file 100\n"
    write_group(top / "system.slice", memory__max=str(64 * MIB), memory__current="2000", memory__stat=stat)
    group = found_group(tmp_path, "0::/system.slice/a.service\n")
    assert (group.limit, group.directory) == (64 * MIB, str(top / "system.slice"))
    assert group.used() == 1700


def test_the_limit_of_version_1_is_that_of_the_memory_controller(tmp_path):
    top = tmp_path / "groups" / "memory"
    write_group(top, memory__limit_in_bytes="9223372036854771712")
    stat = "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n"
    write_group(top / "a", memory__limit_in_bytes=str(MIB), memory__usage_in_bytes="900", memory__stat=stat)
    group = found_group(tmp_path, "5:memory:/a\n2:cpu,cpuacct:/b\n0::/c\n")
    assert group.limit == MIB and group.used() == 600


def test_a_container_sees_its_own_group_as_the_topmost_one(tmp_path):
    write_group(tmp_path / "groups", memory__max=str(MIB))
    assert found_group(tmp_path, "0::/../../pod\n").limit == MIB


@pytest.mark.parametrize("own", ["0::/\n", ""])
def test_without_a_limit_there_is_no_group(tmp_path, own):
    (tmp_path / "groups").mkdir()
    assert found_group(tmp_path, own) is None
    assert memory_group(str(tmp_path / "groups"), str(tmp_path / "missing")) is None


# ---- the budget


class Group:
    """A control group whose use the test sets."""

    def __init__(self, limit):
        self.limit = limit
        self.in_use = 0

    def used(self):
        return self.in_use


class Bench:
    """A budget with a clock, whose group and cluster the test sets."""

    def __init__(self, limit=100 * MIB):
        self.clock = Clock()
        self.log = io.StringIO()
        self.health = ProxyHealth(60.0, lambda: self.clock.now, lambda: self.clock.now)
        self.posted = []
        self.group = Group(limit) if limit else None
        self.size = self.held = self.lists = 0
        self.timers = Timers(self.clock)
        self.budget = MemoryBudget(
            timers=self.timers,
            health=self.health,
            reports=reports_to(self.log, lambda about, kind, reason, action, note: self.posted.append(reason)),
            size=lambda: self.size,
            held_back=lambda: self.held,
            factor=lambda: FACTOR,
            list_held_back=self.list_held_back,
            find_group=lambda: self.group,
        )

    def list_held_back(self, has_room):
        self.lists += has_room and self.held > 0

    def poll(self):
        self.clock.wait(POLL_SECONDS)
        self.budget.poll()

    @property
    def lines(self):
        return self.log.getvalue().splitlines()


def test_the_capacity_follows_from_the_limit_and_the_mode():
    bench = Bench(100 * MIB)
    assert bench.budget.capacity == int((100 * MIB * MOST - BASE_BYTES) / FACTOR)
    assert bench.budget.carries(bench.budget.capacity) and not bench.budget.carries(bench.budget.capacity + 1)
    bench.size = 1
    assert not bench.budget.carries(bench.budget.capacity)


def test_without_a_limit_everything_is_carried_and_nothing_is_reported():
    bench = Bench(0)
    bench.budget.admit("Service", 1 << 40)
    bench.poll()
    assert bench.budget.status()["limit"] == 0 and not bench.lines and not bench.posted


def test_a_limit_that_carries_no_agent_has_no_capacity():
    assert Bench(10 * MIB).budget.capacity == 0


def test_the_warning_comes_before_the_limit_and_once():
    bench = Bench()
    bench.group.in_use = 79 * MIB
    bench.poll()
    assert not bench.lines
    for used in (81, 90, 75, 85):
        bench.group.in_use = used * MIB
        bench.poll()
    assert len(bench.lines) == 1 and "81" in bench.lines[0] and "agent_memory_max" in bench.lines[0]
    assert bench.posted == ["MemoryLow"]
    bench.group.in_use = 60 * MIB
    bench.poll()
    bench.group.in_use = 81 * MIB
    bench.poll()
    assert bench.posted == ["MemoryLow", "MemoryLow"]


def test_the_warning_does_not_wait_for_the_next_poll():
    """A sync of what has just arrived may need all of the memory."""
    bench = Bench()
    bench.poll()
    bench.size = int(bench.budget.capacity * 0.85)
    bench.budget.check()
    assert bench.posted == ["MemoryLow"]
    bench.size = 0
    bench.budget.check()
    bench.clock.wait(1.0)
    bench.group.in_use = 85 * MIB
    bench.budget.check()
    assert bench.posted == ["MemoryLow", "MemoryLow"]


def test_a_namespace_may_take_as_much_as_is_left():
    bench = Bench()
    half = bench.budget.capacity // 2
    bench.size = half
    assert bench.budget.shares(half) and not bench.budget.shares(half + 2)
    bench.budget.admit("Service", half // 2)
    assert bench.budget.shares(half // 2) and not bench.budget.shares(half)
    assert Bench(0).budget.shares(1 << 40)


def test_the_warning_also_comes_for_a_cluster_whose_worst_moment_would_reach_the_limit():
    bench = Bench()
    bench.size = int(bench.budget.capacity * 0.85)
    bench.poll()
    assert bench.posted == ["MemoryLow"] and "cluster_percent=85" in bench.lines[0]


def test_a_refused_list_makes_the_agent_unhealthy_until_one_is_complete():
    bench = Bench()
    with pytest.raises(NoRoom, match="limit of 100 MiB"):
        bench.budget.admit("EndpointSlice", bench.budget.capacity + 1)
    bench.poll()
    bench.poll()
    assert bench.posted == ["MemoryLimit"] and bench.budget.status()["refusedLists"] == ["EndpointSlice"]
    assert bench.health.healthy
    bench.clock.wait(61)
    assert not bench.health.healthy
    assert HEALTH in json.loads(bench.health.answer(False).body)["status"]
    bench.budget.admitted("EndpointSlice")
    bench.poll()
    assert bench.health.healthy and b"status" not in bench.health.answer(False).body


def test_lists_that_are_read_at_the_same_time_are_carried_together():
    bench = Bench()
    half = bench.budget.capacity // 2
    bench.budget.admit("Service", half)
    bench.budget.admit("EndpointSlice", half)
    with pytest.raises(NoRoom, match="list of EndpointSlices"):
        bench.budget.admit("EndpointSlice", half + 2)
    bench.budget.admit("Service", half + 2)
    # What is known counts once.
    bench.budget.applied("Service", half)
    bench.size = half
    bench.budget.admit("EndpointSlice", half - 2)
    bench.budget.release("Service")
    assert bench.budget.carries(2) and not bench.budget.carries(4)


def test_objects_that_are_held_back_are_reported_and_listed_again_when_there_is_room():
    bench = Bench()
    bench.size, bench.held = bench.budget.capacity, 3
    bench.poll()
    assert "MemoryLimit" in bench.posted and "objects=3" in bench.log.getvalue() and bench.lists == 0
    bench.size = int(bench.size * 0.89)
    bench.poll()
    assert bench.lists == 1


def test_a_limit_that_was_raised_counts_from_the_next_poll():
    bench = Bench()
    before = bench.budget.capacity
    bench.group = Group(200 * MIB)
    bench.poll()
    assert bench.budget.capacity > before


# ---- what is held


class Bytes(Room):
    """Room for a total number of bytes."""

    def __init__(self, most):
        self.most = most
        self.view = None
        self.listed = []

    def carries(self, more, reserve=0.0):
        return self.view.size + more <= self.most

    def admit(self, kind, held):
        if not self.carries(held):
            raise NoRoom(f"list of {kind}s: too large")

    def admitted(self, kind):
        self.listed.append(kind)


def view_with(most):
    room = Bytes(most)
    room.view = ClusterView(room)
    return room.view


def test_packed_objects_are_those_that_were_packed():
    first, second = service("a", resourceVersion="7"), service("b")
    deep = service("deep")
    for _level in range(100_000):
        deep = {"kind": "Service", "metadata": {"name": "deep"}, "spec": deep}
    packed = Packed()
    for raw in (first, second, deep):
        packed.append(pack(raw, text_of(raw)))
    assert (packed[0], packed[1]) == (service("a"), second) and packed[2] is deep and len(packed) == 3
    assert packed[:2] == [service("a"), second] == list(packed)[:2]
    assert packed.size == len(text_of(first)) + len(text_of(second))
    assert list(parsed_items(packed))[:2] == list(parsed_items([service("a"), second]))
    assert (packed.items[2].packed, packed.items[2].size) == (b"", 0)
    assert text_in(packed.items[0].packed) == text_of(first) and text_in(b"") == b""


def test_objects_of_a_cluster_take_a_tenth_of_their_json():
    items = [pack(raw, text_of(raw)) for raw in map(prune, large_cluster(100, 5))]
    assert sum(len(item.packed) for item in items) < 0.2 * sum(item.size for item in items)


def size_of(view):
    return sum(len(text_in(item)) for item in view.objects())


def test_the_size_of_a_view_is_that_of_its_objects():
    view = ClusterView()
    view.apply(Batch("Service", [service("a"), service("b")], []))
    assert view.size == size_of(view)
    view.apply(Batch("Service", [service("a", 8080)], [service("b")]))
    assert view.size == size_of(view) > 0
    view.apply(Batch("Service", [], [service("a"), service("never seen")]))
    assert view.size == 0


def test_an_object_without_room_keeps_its_previous_version_and_others_do_not_wait():
    view = view_with(len(text_of(service("a"))) + len(text_of(service("b"))) + 2)
    view.apply(Batch("Service", [service("a"), service("b")], []))
    view.apply(Batch("Service", [service("a", 8081), service("c"), service("b", 81)], []))
    keys = {key.name: info.ports[0].port for key, info in view.state.services.items()}
    assert keys == {"a": 8081, "b": 81} and {key.name for key in view.held_back} == {"c"}
    view.apply(Batch("Service", [service("a", 44444)], []))
    assert {key.name for key in view.held_back} == {"a", "c"}
    # Smaller than before: there is room for it again.
    view.apply(Batch("Service", [service("a", 80)], [service("c")]))
    assert not view.held_back


def test_a_complete_list_is_applied_as_a_whole():
    view = view_with(1)
    view.apply(Batch("Service", [service("a"), service("b")], [], True))
    assert len(view.state.services) == 2 and not view.held_back


def test_objects_to_be_listed_again_are_delivered_with_known_content():
    known = Known("Service")
    raw = service("a")
    known.replace([known.listed(raw)])
    assert known.listed(raw).item is None
    known.forget([ObjectKey("Service", "default", "a"), ObjectKey("Service", "default", "unknown")])
    assert known.listed(raw).item is not None and known.listed(service("unknown")).item


def test_only_an_object_that_is_not_held_yet_is_parsed_as_soon_as_it_is_listed():
    """Of another one the parsed form of two versions would be held until the list is complete."""
    versions = iter(["5", "6"])
    created = iter(["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"])
    run = Run(lambda query: page([item("a", next(versions), creationTimestamp=next(created))]), lambda query: events())
    held = []
    run.reflector._hand_on = lambda batch: held.extend(batch.changed.items) or run.view.apply(batch)
    run.reflector._bytes_held = run.view.size_of
    run.go(0.5)
    run.reflector._ending.clear()
    run.reflector._version = ""
    run.go(0.5)
    first, second = held[0], held[-1]
    assert first.parsed is not None and second.parsed is None and first.decoded() != second.decoded()
    assert run.names == ["a"] and first.parsed.value.key in run.view.state.services


def test_a_list_without_room_is_given_up_with_one_line_and_tried_again_after_a_long_pause():
    names = [f"service-{number:04}" for number in range(400)]
    run = Run(lambda query: page([item(name) for name in names]), lambda query: events())
    room = run.reflector._room = Bytes(50_000)
    room.view = run.view
    run.go(1000.0)
    assert run.log.count("too large") == 1 and not run.names and not room.listed
    assert 3 <= len(run.lists) <= 5 and not run.watches
    room.most = 10**9
    run.reflector._ending.clear()
    run.go(400.0)
    assert run.names == names and room.listed == ["Service"]


def test_a_cluster_that_is_carried_is_carried_when_every_version_is_a_new_one():
    """An API server restored from a backup, or a start from the copy on disk: nothing is added to what is known."""
    versions = itertools.count(5)
    names = [f"service-{number:04}" for number in range(1000)]
    run = Run(lambda query: page([item(name, str(next(versions))) for name in names]), lambda query: events())
    room = run.reflector._room = Bytes(10**9)
    room.view = run.view
    run.reflector._bytes_held = run.view.size_of
    run.go(0.5)
    room.most = run.view.size + 100
    run.reflector._version = ""
    run.reflector._ending.clear()
    run.go(0.5)
    assert len(room.listed) == len(run.lists) >= 2 and "too large" not in run.log


def test_a_collection_is_listed_again_when_its_watch_ends():
    run = Run(lambda query: page([item("a")]), lambda query: events(event_of("ADDED", item("b", "11"))))
    run.reflector.list_again([ObjectKey("Service", "default", "a")])
    run.reflector._version = "9"
    run.go(0.5)
    assert run.lists and run.names[0] == "a" and not run.reflector._lists_again
