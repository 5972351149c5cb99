# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Declared rules are tried before anything is changed, those that refer to ipsets too, and without the node's lock."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import chain_changes
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.chain_changes import ChainChange, apply_changes
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.iptables_chains import ListedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.listed_chains import Jump, ListedChain
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.restore import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import (
    XtablesVariant,
    detect_variant,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.lab.system import LabError, run

VARIANTS = pytest.mark.parametrize("variant", ["legacy", "nft"])
KINDS = {
    "IPv4": ("hash:ip", "hash:net", "hash:ip,port", "hash:net,iface", "bitmap:port range 1-9", "list:set", "hash:mac"),
    "IPv6": ("hash:ip family inet6", "hash:net family inet6", "list:set", "hash:mac", "bitmap:port range 1-9"),
}


@contextlib.contextmanager
def held_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold the xtables lock, in a file that no program of the host uses."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def staged(family: str, variant: str, chain: ListedChain, wait: float = 5.0, removal: bool = False) -> ChainChange:
    resource = ListedChainsResource(detect_variant(family, variant), [chain], wait, removal)
    return ChainChange(resource, difference(*resource.stage()))


@VARIANTS
@pytest.mark.parametrize(("family", "kind"), [(family, kind) for family, kinds in KINDS.items() for kind in kinds])
def test_rules_of_any_kind_of_set_converge_in_any_spelling(variant: str, family: str, kind: str) -> None:
    try:
        run(["ipset", "create", "trusted", *kind.split()])
    except LabError as error:
        if "set type not supported" in str(error):
            pytest.skip(f"this kernel has no sets of type {kind}")
        raise
    rules = (
        "-p tcp --dport ssh -m set --match-set trusted src -j ACCEPT",
        "-j LOG --log-level 4 -m set --match-set trusted src,dst",
        "-m set ! --match-set trusted src -j SET --exist --add-set trusted src",
    )
    chain = ListedChain("filter", "SETS", rules, (Jump("INPUT", "-p tcp --syn -m set --match-set trusted dst"),))
    change = staged(family, variant, chain)
    change.resource.apply(change.change)
    assert not staged(family, variant, chain).change
    program = "iptables" if family == "IPv4" else "ip6tables"
    assert run([f"{program}-{variant}", "-S", "SETS"]).splitlines()[1:] == [
        "-A SETS -p tcp -m tcp --dport 22 -m set --match-set trusted src -j ACCEPT",
        "-A SETS -m set --match-set trusted src,dst -j LOG",
        "-A SETS -m set ! --match-set trusted src -j SET --add-set trusted src --exist",
    ]


@VARIANTS
@pytest.mark.parametrize(
    ("family", "rule", "reason"),
    [
        ("IPv4", "-m set --match-set missing src -j DROP", "Set missing doesn't exist"),
        ("IPv4", "-j SET --add-set missing src", "Set missing doesn't exist"),
        ("IPv6", "-m set --match-set trusted src -j DROP", "trusted is IPv4, which is not applicable"),
        ("IPv4", "-p tcp --dportt 22 -m set --match-set trusted src -j DROP", "unknown option .--dportt"),
        ("IPv4", "-m set --match-set trusted src -j BOGUS", "BOGUS"),
    ],
)
def test_a_bad_rule_of_a_set_is_refused_before_anything_is_changed(
    variant: str, family: str, rule: str, reason: str
) -> None:
    run(["ipset", "create", "trusted", "hash:ip"])
    with pytest.raises(KernelError, match=reason) as failure:
        staged(family, variant, ListedChain("filter", "BAD", ("-j RETURN", rule)))
    assert "\n" not in str(failure.value)
    assert run(["ipset", "list", "-n"]).split() == ["trusted"]
    # Not even an empty table is created.
    assert run([f"iptables-{variant}-save"]) == run([f"ip6tables-{variant}-save"]) == ""


def test_a_trial_does_not_wait_for_the_lock_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = ListedChain("filter", "TRIED", ("-p tcp --dport 22 -j DROP",))
    with held_lock(tmp_path / "xtables.lock", monkeypatch):
        change = staged("IPv4", "legacy", chain, wait=1)
        with pytest.raises(KernelError, match="gave up after 1 second"):
            change.resource.apply(change.change)
    change.resource.apply(change.change)
    assert not staged("IPv4", "legacy", chain).change


def test_a_rollback_waits_as_long_as_the_change_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def noted(variant: XtablesVariant, text: str, wait: float = 5.0) -> int:
        waits.append(wait)
        return restore(variant, text, wait=wait)

    chain = ListedChain("filter", "OLD", ("-j RETURN",), (Jump("FORWARD"),))
    for family in ("IPv4", "IPv6"):
        change = staged(family, "nft", chain)
        change.resource.apply(change.change)
    changes = [staged(family, "nft", chain, 7.0, removal=True) for family in ("IPv4", "IPv6")]
    run(["ip6tables-nft", "-A", "OUTPUT", "-j", "OLD"])
    monkeypatch.setattr(chain_changes, "restore", noted)
    with pytest.raises(KernelError, match="the changes made before were rolled back: IPv4"):
        apply_changes(changes, 0, str(tmp_path / "changes"))
    assert set(waits) == {7.0}
