# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything is compared with the kernel, and repaired, in steps between which changes are programmed."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import portions, proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.sync import table_sync
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import NO_CHANGE, Change, Part
from tests.unit.agent.sync_bench import DictResource, SyncBench
from tests.unit.agent.test_portions import desired, giant, large, portion, put, served, small

KEYS_OF_PART = 60
DRIFT = "notification"


def parts(self: DictResource, expected: Mapping[Any, Any], urgent: Change[Any, Any] = NO_CHANGE) -> Iterator[Part]:
    """Read a table in parts, as that of nftables mode is."""
    self.observed += 1
    keys = [*self.table, *(key for key in expected if key not in self.table)]
    for begin in range(0, len(keys), KEYS_OF_PART):
        some = keys[begin : begin + KEYS_OF_PART]
        yield Part({key: self.table[key] for key in some if key in self.table}, some)
        if urgent and not begin:
            touched = [*urgent.added, *urgent.replaced, *urgent.removed]
            yield Part({key: self.table[key] for key in touched if key in self.table}, touched)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SyncBench:
    """Return a node that serves three large Services and a small one, and makes one step at a time."""
    monkeypatch.setattr(portions, "MOST_ENTRIES", 5_000)
    monkeypatch.setattr(table_sync, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(DictResource, "parts", parts)
    # As if the table were a large one.
    monkeypatch.setattr(proxier, "ELEMENTS_OF_PART", 0)
    made = SyncBench(monkeypatch)
    for number in range(1, 4):
        put(made, large(f"large{number}", number))
    put(made, small(1))
    made.sync.sync(first=True)
    assert made.table == desired(made)
    return made


def rest(bench: SyncBench, first: int) -> int:
    """Make all steps, with a change of another Service before each; return their number."""
    number = 0
    while bench.sync.syncer.is_waiting:
        number += 1
        assert number < 100
        put(bench, small(first + number))
        bench.sync.sync()
        assert f"10.96.0.{first + number}" in served(bench)
        portion(bench)
    return number


def drifted(bench: SyncBench) -> dict[Any, Any]:
    """Change the table as another program does: every ninth entry is missing, and others have been added."""
    table = bench.table
    for key in list(table)[::9]:
        del table[key]
    others = {key._replace(name="other", key=b"%d" % number) for number, key in enumerate(served_elements(bench))}
    table.update(dict.fromkeys(others, True))
    return dict(table)


def served_elements(bench: SyncBench) -> list[Any]:
    return [key for key in bench.table if key.kind == "element"]


def test_changes_are_programmed_between_the_steps_of_a_comparison(bench: SyncBench) -> None:
    drifted(bench)
    bench.sync.syncer.suspects["IPv4"] = DRIFT
    observed = bench.mode.resource.observed
    bench.sync.sync()
    assert bench.sync.syncer.is_waiting and bench.sync.watching.drift.syncs[-1][1] is False
    # What is compared already changes as well as what follows.
    put(bench, large("large1", 10))
    bench.delete(large("large2", 2)[0])
    assert rest(bench, 10) >= 4
    assert bench.table == desired(bench)
    assert bench.mode.resource.observed == observed + 1 and bench.sync.watching.drift.syncs[-1][1] is True
    assert bench.text.getvalue().count("repaired external changes") == 1


def test_a_table_that_was_lost_is_filled_with_small_services_first(bench: SyncBench) -> None:
    put(bench, giant(4, 1))
    bench.sync.sync()
    rest(bench, 10)
    bench.table.clear()
    bench.sync.syncer.suspects["IPv4"] = DRIFT
    put(bench, small(2))
    bench.mode.resource.failure = "the table is missing"
    bench.sync.sync()
    assert {"10.96.0.1", "10.96.0.2"} <= served(bench) and not {"10.97.0.1", "10.97.0.4"} & served(bench)
    portion(bench)
    # Some of what is missing changes, and some is not wanted any more.
    put(bench, giant(4, 2))
    bench.delete(large("large2", 2)[0])
    bench.sync.syncer.suspects["IPv4"] = "regular check"
    assert rest(bench, 30) >= 4
    assert bench.table == desired(bench)
    assert bench.text.getvalue().count("repaired external changes") == 1


def test_after_a_step_that_failed_everything_is_compared_at_once(bench: SyncBench) -> None:
    drifted(bench)
    bench.sync.syncer.suspects["IPv4"] = DRIFT
    bench.mode.resource.failure = "the kernel refuses"
    bench.sync.sync()
    while bench.sync.syncer.is_waiting:
        portion(bench)
    assert bench.sync.syncer.last_error == "the kernel refuses"
    bench.sync.sync()
    assert not bench.sync.syncer.last_error and bench.table == desired(bench)


def test_a_mode_that_cannot_be_divided_is_compared_in_one_sync(
    bench: SyncBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What watches its tables must know that they were observed just now, not some time before."""
    (proxier,) = bench.sync.proxiers.families
    (stage,) = proxier.stages
    monkeypatch.setattr(proxier, "stages", [stage._replace(desired=lambda _observed: stage.desired)])
    drifted(bench)
    bench.sync.syncer.suspects["IPv4"] = DRIFT
    bench.sync.sync()
    assert bench.table == desired(bench)
    assert bench.sync.watching.drift.syncs[-1][1] is True and not bench.sync.syncer.is_waiting


def test_what_could_not_be_programmed_comes_early_in_the_comparison(bench: SyncBench) -> None:
    put(bench, small(2))
    bench.mode.resource.failure = "the table is missing"
    bench.sync.syncer.suspects["IPv4"] = DRIFT
    bench.sync.sync()
    assert "10.96.0.2" not in served(bench)
    portion(bench)
    assert "10.96.0.2" in served(bench) and bench.sync.syncer.is_waiting
    rest(bench, 10)
    assert bench.table == desired(bench)


def test_another_change_meanwhile_is_a_reason_to_compare_again(bench: SyncBench) -> None:
    bench.sync.syncer.suspects["IPv4"] = DRIFT
    bench.sync.sync()
    portion(bench)
    drifted(bench)
    bench.sync.syncer.suspects["IPv4"] = DRIFT
    bench.sync.sync()
    while bench.sync.syncer.is_waiting:
        portion(bench)
        bench.sync.sync()
    assert bench.table == desired(bench)
