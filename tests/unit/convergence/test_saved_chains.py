# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Our rules among those of other programs in a built-in chain, and the text that restores chains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.listing import NftChain
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains as chains_module
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import saved as saved_module
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import (
    BUILTIN,
    CHAIN,
    SavedChainKey,
    SavedChainsResource,
    merged_rules,
    restore_lines,
    saved_portions,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import NFT, XtablesVariant
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.commit_order import Commit, commits
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.portions import PORTION
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey, Ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change

OTHERS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=6)
OURS = st.lists(st.sampled_from(["KUBE-1", "KUBE-2", "KUBE-3"]), max_size=3)


def is_ours(rule: str) -> bool:
    return "KUBE-" in rule


def is_jump(table: str, rule: str) -> bool:
    return is_ours(rule)


def mixed(draw, others, ours) -> list:
    rules = list(others)
    for rule in ours:
        rules.insert(draw(st.integers(0, len(rules))), rule)
    return rules


@given(data=st.data())
def test_external_rules_are_kept_and_ours_restored(data):
    saved = mixed(data.draw, data.draw(OTHERS), data.draw(OURS))
    observed = mixed(data.draw, data.draw(OTHERS), data.draw(OURS))
    merged = merged_rules(observed, saved, is_ours)
    assert [rule for rule in merged if not is_ours(rule)] == [rule for rule in observed if not is_ours(rule)]
    assert [rule for rule in merged if is_ours(rule)] == [rule for rule in saved if is_ours(rule)]
    assert merged_rules(merged, saved, is_ours) == merged


@given(data=st.data())
def test_without_external_changes_the_chain_is_restored_exactly(data):
    others = data.draw(OTHERS)
    saved = mixed(data.draw, others, data.draw(OURS))
    observed = mixed(data.draw, others, data.draw(OURS))
    assert merged_rules(observed, saved, is_ours) == tuple(saved)


@pytest.mark.parametrize(
    ("observed", "saved", "merged"),
    [
        (["a", "b"], ["a", "KUBE", "b"], ["a", "KUBE-", "b"]),
        (["new", "a", "b"], ["a", "KUBE", "b"], ["new", "a", "KUBE-", "b"]),
        (["b"], ["a", "KUBE", "b"], ["KUBE-", "b"]),
        (["a", "KUBE-old", "b", "new"], ["a", "b", "KUBE"], ["a", "b", "KUBE-", "new"]),
        ([], ["a", "KUBE"], ["KUBE-"]),
        (["KUBE-old", "a"], ["a"], ["a"]),
    ],
)
def test_our_rules_are_restored_behind_the_same_external_rule(observed, saved, merged):
    saved = [rule.replace("KUBE", "KUBE-") for rule in saved]
    assert merged_rules(observed, saved, is_ours) == tuple(merged)


def test_the_text_names_no_external_rule_and_creates_chains_before_their_jumps():
    change = Change(
        added={SavedChainKey(CHAIN, "nat", "KUBE-B"): ("-j KUBE-A",), SavedChainKey(CHAIN, "filter", "KUBE-C"): ()},
        replaced={
            SavedChainKey(CHAIN, "nat", "KUBE-A"): (("-j OLD",), ("-j RETURN",)),
            SavedChainKey(BUILTIN, "nat", "OUTPUT"): (
                ("-j KUBE-OLD", "-j THEIRS"),
                ("-j THEIRS", "-j KUBE-A", "-j KUBE-B"),
            ),
        },
        removed={SavedChainKey(CHAIN, "nat", "KUBE-OLD"): ("-j RETURN",)},
    )
    text = "".join(restore_lines(commit, is_jump) for commit in commits(change))
    assert text.splitlines() == [
        "*filter",
        ":KUBE-C - [0:0]",
        "COMMIT",
        "*nat",
        ":KUBE-OLD - [0:0]",
        ":KUBE-B - [0:0]",
        ":KUBE-A - [0:0]",
        "-D OUTPUT -j KUBE-OLD",
        "-A KUBE-A -j RETURN",
        "-I OUTPUT 2 -j KUBE-A",
        "-I OUTPUT 3 -j KUBE-B",
        "-A KUBE-B -j KUBE-A",
        "-X KUBE-OLD",
        "COMMIT",
    ]


def test_a_large_change_is_split_and_its_parts_together_are_the_change():
    """New chains come first, the rules of built-in chains in one step, and removed chains last, callers first."""
    count = 3 * PORTION
    added = {SavedChainKey(CHAIN, "nat", f"KUBE-N{number}"): (f"-j KUBE-N{number + 1}",) for number in range(count)}
    removed = {SavedChainKey(CHAIN, "nat", f"KUBE-O{number}"): (f"-j KUBE-O{number + 1}",) for number in range(count)}
    jump = (SavedChainKey(BUILTIN, "nat", "OUTPUT"), (("-j KUBE-O0", "-j THEIRS"), ("-j KUBE-N0", "-j THEIRS")))
    parts = [commit.change for run in saved_portions(Change(added, dict([jump]), removed)) for commit in run]
    assert max(map(len, parts)) <= PORTION
    assert [bool(part.replaced) for part in parts].count(True) == 1
    together = Change()
    for part in parts:
        together.added.update(part.added)
        together.replaced.update(part.replaced)
        together.removed.update(part.removed)
    assert together == Change(added, dict([jump]), removed)
    place = {key: number for number, part in enumerate(parts) for key in (*part.added, *part.replaced, *part.removed)}
    for number in range(count - 1):
        for letter in "NO":
            caller, callee = (SavedChainKey(CHAIN, "nat", f"KUBE-{letter}{index}") for index in (number, number + 1))
            assert (place[caller] >= place[callee]) if letter == "N" else (place[caller] <= place[callee])
    assert max(place[key] for key in added) < place[jump[0]] < min(place[key] for key in removed)


def test_a_small_change_is_not_split():
    change = Change({SavedChainKey(CHAIN, "nat", "KUBE-A"): ()}, {}, {SavedChainKey(CHAIN, "nat", "KUBE-B"): ()})
    assert saved_portions(change) == [[Commit("nat", change)]]


@pytest.mark.parametrize("rule", ["-j RETURN\nCOMMIT", "-j RETURN\r", "-j \0RETURN"])
def test_a_rule_cannot_inject_a_line(rule):
    change = Change(added={SavedChainKey(CHAIN, "nat", "KUBE-A"): (rule,)})
    with pytest.raises(KernelError, match="holds a line break or NUL"):
        restore_lines(Commit("nat", change), is_jump)


@pytest.mark.parametrize(
    ("existing", "saved", "refused"),
    [
        ([NftChain("nat", "KUBE-SERVICES", None)], None, True),
        ([NftChain("nat", "KUBE-SERVICES", None)], {}, True),
        ([NftChain("nat", "PREROUTING", 1)], {SavedChainKey(CHAIN, "nat", "KUBE-SERVICES"): ()}, True),
        ([NftChain("nat", "PREROUTING", 1), NftChain("filter", "KUBE-SERVICES", None)], None, False),
        ([NftChain("nat", "PREROUTING", 1)], {SavedChainKey(CHAIN, "filter", "KUBE-SERVICES"): ()}, False),
    ],
)
def test_a_table_that_the_save_program_does_not_show_is_an_error_where_it_matters(
    monkeypatch, existing, saved, refused
) -> None:
    """That is, where it contains our chains, or where they are to be restored."""
    text = "# Table `nat' is incompatible, use 'nft' tool.\n*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"
    monkeypatch.setattr(saved_module, "save", lambda variant, progress: text)
    monkeypatch.setattr(saved_module, "places_of_nft", lambda family: ())
    monkeypatch.setattr(chains_module, "nft_chains", lambda sock, family: existing)
    fixed = frozenset(ChainKey(table, "KUBE-SERVICES") for table in ("nat", "filter"))
    variant = XtablesVariant(
        family="IPv4",
        name=NFT,
        reason="",
        version=(1, 8, 9),
        main="iptables-nft",
        save="iptables-nft-save",
        restore="iptables-nft-restore",
    )
    resource = SavedChainsResource(variant, Ownership(fixed, {}), saved)
    if not refused:
        assert resource.observe() == {}
        return
    with pytest.raises(KernelError, match=r"table nat of IPv4: iptables-nft-save cannot show it, .* only nft"):
        resource.observe()
