# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Large changes of chains in portions: reachable chains change at once, and no rule jumps to a missing chain."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.canonical import target_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.portions import (
    PORTION,
    WHOLE,
    callees_first,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.portions import portions as runs_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import PRESENT, ChainKey, JumpKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference

JUMP = JumpKey("nat", "PREROUTING", "-j KUBE-SERVICES")


def nat(name):
    return ChainKey("nat", name)


def table(services):
    """Return the chains of numbered Services in the order in which they are rendered: callers first."""
    found = {nat("KUBE-SERVICES"): tuple(f"-d 10.96.0.{n}/32 -j KUBE-SVC-{n}" for n in range(services)), JUMP: 1}
    for number in range(services):
        endpoints = [f"KUBE-SEP-{number}E{index}" for index in range(2)]
        found[nat(f"KUBE-SVC-{number}")] = tuple(f"-m comment --comment x -j {name}" for name in endpoints)
        for name in endpoints:
            found[nat(name)] = ("-s 10.0.0.1/32 -j KUBE-MARK-MASQ", "-j DNAT --to-destination 10.0.0.1:80")
    found[nat("KUBE-MARK-MASQ")] = ("-j MARK --or-mark 0x4000",)
    found[nat("KUBE-FIREWALL")] = PRESENT
    return found


def portions(change):
    """Return the changes that are committed one after the other."""
    return [commit.change for run in runs_of(change) for commit in run]


def applied(parts, before):
    """Yield the table after each part, checking that every jump has a target."""
    state = dict(before)
    for part in parts:
        for key in part.removed:
            del state[key]
        state.update(part.added)
        state.update({key: new for key, (_old, new) in part.replaced.items()})
        for key, rules in state.items():
            targets = [target_of(key.rule)] if isinstance(key, JumpKey) else map(target_of, rules)
            for target in targets if rules != PRESENT else ():
                assert not target.startswith("KUBE-") or nat(target) in state, (key, target)
        yield dict(state)


def reachable(state):
    return JUMP in state and state[nat("KUBE-SERVICES")]


@pytest.mark.parametrize("services", [1, WHOLE // 3 - 1])
def test_small_changes_stay_whole(services):
    change = Change(added=table(services))
    assert portions(change) == [change]
    change = Change(removed=table(services))
    assert portions(change) == [change]


def test_new_chains_come_first_and_are_unreachable_before_the_last_part():
    wanted = table(1000)
    parts = portions(Change(added=wanted))
    assert len(parts) > 3000 // PORTION and max(map(len, parts)) <= PORTION
    *earlier, last = applied(parts, {})
    assert last == wanted
    assert not any(map(reachable, earlier))


def test_removed_chains_become_unreachable_first():
    before = table(1000)
    parts = portions(Change(removed=before))
    first, *_others, last = applied(parts, before)
    assert JUMP not in first and last == {} and max(map(len, parts)) <= PORTION


def emptied(chains):
    """Return the table after ``iptables -F``: every chain exists without rules, and nothing jumps to any."""
    return {key: () if isinstance(value, tuple) else value for key, value in chains.items() if key != JUMP}


def test_flushed_chains_are_filled_in_portions_and_unreachable_before_the_last():
    wanted = table(1000)
    before = emptied(wanted)
    parts = portions(difference(before, wanted))
    assert len(parts) > 3000 // PORTION and max(map(len, parts)) <= PORTION
    *earlier, last = applied(parts, before)
    assert last == wanted
    assert not any(map(reachable, earlier))


def test_partly_emptied_table_with_missing_chains():
    wanted = table(1000)
    before = {key: value for key, value in emptied(wanted).items() if "KUBE-SEP-7" not in str(key)}
    parts = portions(difference(before, wanted))
    assert max(map(len, parts)) <= PORTION
    *earlier, last = applied(parts, before)
    assert last == wanted
    assert not any(map(reachable, earlier))


def test_called_chains_are_filled_before_those_that_call_them():
    wanted = table(1000)
    before = {**emptied(wanted), JUMP: 1}
    for state in applied(portions(difference(before, wanted)), before):
        for number in range(1000):
            if state[nat(f"KUBE-SVC-{number}")]:
                assert state[nat(f"KUBE-SEP-{number}E0")] and state[nat(f"KUBE-SEP-{number}E1")]
        if state[nat("KUBE-SERVICES")]:
            assert all(state[nat(f"KUBE-SVC-{number}")] for number in range(1000))


@pytest.mark.parametrize("services", [100, 1000])
def test_other_rules_in_very_many_chains(services):
    before, after = table(services), table(services)
    for key, rules in before.items():
        if rules not in (PRESENT, 1):
            after[key] = (*rules, "-m comment --comment more -j RETURN")
    change = difference(before, after)
    parts = portions(change)
    assert parts == [change] if services == 100 else max(map(len, parts)) <= PORTION
    assert list(applied(parts, before))[-1] == after


def test_altered_chains_that_lead_to_a_few_new_ones():
    before, after = table(1000), table(1000)
    for key, rules in before.items():
        if key not in (JUMP, nat("KUBE-MARK-MASQ")) and rules != PRESENT:
            after[key] = ("-s 10.0.0.9/32 -j KUBE-NEW", *rules)
    after[nat("KUBE-NEW")] = ("-j RETURN",)
    assert list(applied(portions(difference(before, after)), before))[-1] == after


def test_order_of_calls_also_where_siblings_call_each_other():
    chains = {nat(name): rules for name, rules in {"A": ("-j B", "-j C"), "B": (), "C": ("-j B",)}.items()}
    order = [key.chain for key in callees_first(chains)]
    assert order.index("B") < order.index("C") < order.index("A")
