# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Merged tables equal a full rendering, whatever the order of changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.merged import ABSENT, MergedTables

ENTRIES = st.lists(
    st.tuples(st.sampled_from(("a", "b")), st.integers(0, 5), st.integers(0, 2)),
    max_size=6,
)
STEPS = st.lists(st.tuples(st.integers(0, 4), ENTRIES), max_size=25)


def whole(contributions):
    """Return the tables built from scratch: the first entry of the first owner in order decides a key's value."""
    tables = {"a": {}, "b": {}}
    for owner in sorted(contributions):
        for table, key, value in contributions[owner]:
            tables[table].setdefault(key, value)
    return tables


@given(STEPS)
def test_incremental_changes_equal_a_full_rendering(steps):
    merged = MergedTables(("a", "b"))
    contributions = {}
    for owner, entries in steps:
        before = {name: dict(table) for name, table in merged.tables.items()}
        merged.replace(owner, entries)
        contributions[owner] = entries
        assert merged.tables == whole(contributions)
        journal = merged.pop_journal()
        for name, table in merged.tables.items():
            differing = {key for key in {*before[name], *table} if before[name].get(key) != table.get(key)}
            assert differing <= journal.get(name, {}).keys()
            assert all(before[name].get(key, ABSENT) == value for key, value in journal.get(name, {}).items())


def test_an_unchanged_contribution_touches_nothing():
    merged = MergedTables(("a",))
    merged.replace("x", [("a", 1, True), ("a", 2, True)])
    merged.pop_journal()
    merged.replace("x", [("a", 1, True), ("a", 2, True)])
    assert merged.pop_journal() == {}


def test_a_shared_key_is_kept_until_its_last_contributor_is_removed():
    merged = MergedTables(("a",))
    merged.replace("x", [("a", 1, True)])
    merged.replace("y", [("a", 1, True)])
    merged.replace("x", [])
    assert merged.tables == {"a": {1: True}}
    merged.replace("y", [])
    assert merged.tables == {"a": {}}
