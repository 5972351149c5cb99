# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Listed chains on a real kernel: whatever way rules are written, what was applied is what is wanted."""

from __future__ import annotations

import subprocess

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import iptables_chains as listed_chains
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.iptables_chains import (
    Jump,
    ListedChain,
    ListedChainsResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference

RULES = (
    "--protocol udp --source-port 53 -j ACCEPT",
    "-s 10.1.2.3/255.255.0.0 ! -d 192.0.2.1 -i eth+ -j DROP",
    "-m state --state NEW -m recent --set -j RETURN",
    "-m mark --mark 16 -m comment --comment 'it''s a \"quoted\" one' -j MARK --or-mark 0x4000",
    "-p icmp --icmp-type echo-request -m limit --limit 10/min -j REJECT",
)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def converge(variant: str, chains: list[ListedChain], removal: bool = False) -> int:
    resource = ListedChainsResource(detect_variant("IPv4", variant), chains, removal=removal)
    change = difference(*resource.stage())
    if change:
        resource.apply(change)
    assert not difference(*ListedChainsResource(resource.variant, chains, removal=removal).stage())
    return len(change)


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_any_spelling_converges_once(variant):
    table = "mangle"
    first = ListedChain(table, "FIRST", RULES[3:4], (Jump("PREROUTING", "-i lo"), Jump("OUTPUT", position="last")))
    assert converge(variant, [first]) == 3
    run(f"iptables-{variant}", "-t", table, "-A", "FIRST", "-j", "RETURN")
    run(f"iptables-{variant}", "-t", table, "-I", "OUTPUT", "-j", "FIRST")
    assert converge(variant, [first]) == 2
    assert run(f"iptables-{variant}-save", "-t", table).count("-A OUTPUT -j FIRST") == 1
    rules = ListedChain("filter", "RULES", RULES[:3] + RULES[4:])
    assert converge(variant, [first, rules]) == 1
    assert converge(variant, [first, rules], removal=True) == 4
    assert "FIRST" not in run(f"iptables-{variant}-save") and "RULES" not in run(f"iptables-{variant}-save")


def test_rules_that_refer_to_ipsets():
    run("ipset", "create", "allowed", "hash:ip")
    chain = ListedChain("filter", "SETS", ("-m set --match-set allowed src -j ACCEPT", "-p tcp --dport 80 -j DROP"))
    assert converge("nft", [chain]) == 1
    assert "-A SETS -m set --match-set allowed src -j ACCEPT" in run("iptables-nft-save")


def test_without_a_namespace_to_try_in_canonical_rules_still_converge(monkeypatch):
    def refuse():
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(listed_chains, "_unshare", refuse)
    rules = ("-d 192.0.2.1 -p tcp --dport 80 -j ACCEPT", "-m conntrack --ctstate ESTABLISHED,RELATED -j RETURN")
    assert converge("nft", [ListedChain("filter", "PLAIN", rules, (Jump("INPUT", "-i lo"),))]) == 2


def test_a_bad_rule_changes_nothing():
    before = run("iptables-nft-save")
    chain = ListedChain("filter", "BAD", ("-j RETURN", "-p tcp --dport nonsense -j DROP"))
    with pytest.raises(KernelError, match=r"nonsense.*-A BAD -p tcp --dport nonsense"):
        ListedChainsResource(detect_variant("IPv4", "nft"), [chain]).stage()
    assert run("iptables-nft-save") == before
