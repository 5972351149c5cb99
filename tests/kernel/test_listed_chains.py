# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User-declared chains on a real kernel: however rules are spelled, the applied rules equal the desired ones."""

from __future__ import annotations

import random

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import canonical_chains
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.iptables_chains import ListedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.listed_chains import (
    ANY,
    FIRST,
    LAST,
    Jump,
    ListedChain,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.restore import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.lab.system import run

RULES = (
    "--protocol udp --source-port 53 -j ACCEPT",
    "-s 10.1.2.3/255.255.0.0 ! -d 192.0.2.1 -i eth+ -j DROP",
    "-m state --state NEW -m recent --set -j RETURN",
    "-m mark --mark 16 -m comment --comment 'it''s a \"quoted\" one' -j MARK --or-mark 0x4000",
    "-p icmp --icmp-type echo-request -m limit --limit 10/min -j REJECT",
)
V4 = ("10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/16", "10.3.0.0/16")
V6 = ("fd00::/64", "fd01::/64", "fd02::/48", "fd03::/48")


def converge(variant: str, chains: list[ListedChain], removal: bool = False, family: str = "IPv4") -> int:
    resource = ListedChainsResource(detect_variant(family, variant), chains, removal=removal)
    change = difference(*resource.stage())
    if change:
        resource.apply(change)
    assert not difference(*ListedChainsResource(resource.variant, chains, removal=removal).stage())
    return len(change)


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_any_spelling_of_a_rule_converges_once(variant):
    table = "mangle"
    first = ListedChain(table, "FIRST", RULES[3:4], (Jump("PREROUTING", "-i lo"), Jump("OUTPUT", position="last")))
    assert converge(variant, [first]) == 3
    run([f"iptables-{variant}", "-t", table, "-A", "FIRST", "-j", "RETURN"])
    run([f"iptables-{variant}", "-t", table, "-I", "OUTPUT", "-j", "FIRST"])
    assert converge(variant, [first]) == 2
    assert run([f"iptables-{variant}-save", "-t", table]).count("-A OUTPUT -j FIRST") == 1
    rules = ListedChain("filter", "RULES", RULES[:3] + RULES[4:])
    assert converge(variant, [first, rules]) == 1
    assert converge(variant, [first, rules], removal=True) == 4
    assert "FIRST" not in run([f"iptables-{variant}-save"]) and "RULES" not in run([f"iptables-{variant}-save"])


@pytest.mark.parametrize("variant", ["legacy", "nft"])
@pytest.mark.parametrize(("family", "program", "networks"), [("IPv4", "iptables", V4), ("IPv6", "ip6tables", V6)])
def test_a_rule_with_several_addresses_becomes_several_rules(variant, family, program, networks):
    iptables = f"{program}-{variant}"
    one, two, three, four = networks
    rules = (f"-s {one},{two} -p tcp --dport 22 -j ACCEPT", f"-s {one},{two} -d {three},{four}", "-p tcp -j DROP")
    jumps = (
        Jump("INPUT", f"-s {three},{four}", FIRST),
        Jump("INPUT", "-i lo", FIRST),
        Jump("INPUT", f"-d {two},{one}"),
    )
    chain = ListedChain("filter", "SSH", rules, jumps)
    run([iptables, "-A", "INPUT", "-i", "eth9", "-j", "ACCEPT"])
    # A second chain with jumps from the same chain.
    other = ListedChain("filter", "OTHER", (), (Jump("INPUT", f"-d {one},{two}", LAST),))
    assert converge(variant, [chain, other], family=family) == 9
    wanted = [
        f"-A SSH -s {one} -p tcp -m tcp --dport 22 -j ACCEPT",
        f"-A SSH -s {two} -p tcp -m tcp --dport 22 -j ACCEPT",
        *(f"-A SSH -s {source} -d {destination}" for source in (one, two) for destination in (three, four)),
        "-A SSH -p tcp -j DROP",
    ]
    assert run([iptables, "-S", "SSH"]).splitlines()[1:] == wanted
    assert run([iptables, "-S", "INPUT"]).splitlines()[1:] == [
        f"-A INPUT -s {three} -j SSH",
        f"-A INPUT -s {four} -j SSH",
        "-A INPUT -i lo -j SSH",
        f"-A INPUT -d {two} -j SSH",
        f"-A INPUT -d {one} -j SSH",
        "-A INPUT -i eth9 -j ACCEPT",
        f"-A INPUT -d {one} -j OTHER",
        f"-A INPUT -d {two} -j OTHER",
    ]
    assert converge(variant, [chain, other], removal=True, family=family) == 9
    assert run([iptables, "-S", "INPUT"]).splitlines()[1:] == ["-A INPUT -i eth9 -j ACCEPT"]


@pytest.mark.parametrize(
    ("dropped", "where"),
    [
        ("-A SPLIT -j DROP", r"rules\[1\]"),
        ("-A INPUT -i lo -j SPLIT", r"jumps\[0\]"),
        ("*filter", r"rules\[0\]"),
    ],
)
def test_a_printed_rule_that_belongs_to_no_declared_one_is_an_error(monkeypatch, dropped, where):
    """The program prints less than was added, as iptables-nft-save does of a table that it cannot show."""
    printed = canonical_chains.printed_elsewhere
    monkeypatch.setattr(
        canonical_chains, "printed_elsewhere", lambda *given: printed(*given).replace(f"{dropped}\n", "")
    )
    chain = ListedChain("filter", "SPLIT", ("-s 10.0.0.1,10.0.0.2 -j ACCEPT", "-j DROP"), (Jump("INPUT", "-i lo"),))
    before = run(["iptables-nft-save"])
    with pytest.raises(KernelError, match=rf"^chain filter SPLIT: {where}: iptables-save does not print the rule"):
        ListedChainsResource(detect_variant("IPv4", "nft"), [chain]).stage()
    assert run(["iptables-nft-save"]) == before


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_rules_that_only_name_a_jump_in_a_text_are_left_alone(variant):
    iptables = f"iptables-{variant}"
    chain = ListedChain("filter", "TEST", (), (Jump("INPUT", "-m comment --comment 'not -j OTHER now'"),))
    assert converge(variant, [chain]) == 2
    run([iptables, "-A", "INPUT", "-j", "LOG", "--log-prefix", "x -j TEST y"])
    run([iptables, "-A", "INPUT", "-m", "comment", "--comment", "see -g TEST now"])
    run([iptables, "-N", "USER"])
    run([iptables, "-A", "USER", "-m", "comment", "--comment", "see -j TEST now", "-j", "RETURN"])
    before = run([iptables, "-S", "INPUT"]).splitlines()
    assert converge(variant, [chain]) == 0
    assert converge(variant, [chain], removal=True) == 2
    assert run([iptables, "-S", "INPUT"]).splitlines() == [line for line in before if not line.endswith("-j TEST")]


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_an_external_chain_is_a_target_in_every_spelling(variant):
    for name in "ABCDE":
        run([f"iptables-{variant}", "-N", name])
    rules = ("--jump A", "-j 'B'", "--goto C", "--goto=D", "-gE")
    assert converge(variant, [ListedChain("filter", "MINE", rules)]) == 1
    assert rules_of(variant, "MINE") == [f"-A MINE {rule}" for rule in ("-j A", "-j B", "-g C", "-g D", "-g E")]


def test_rules_that_refer_to_ipsets():
    run(["ipset", "create", "allowed", "hash:ip"])
    rules = (
        "-m set --match-set allowed src -j ACCEPT",
        "-d 10.0.0.1,10.0.0.2/31 -m set --match-set allowed src -j ACCEPT",
        "-p tcp --dport 80 -j DROP",
    )
    assert converge("nft", [ListedChain("filter", "SETS", rules)]) == 1
    assert rules_of("nft", "SETS") == [
        "-A SETS -m set --match-set allowed src -j ACCEPT",
        "-A SETS -d 10.0.0.1/32 -m set --match-set allowed src -j ACCEPT",
        "-A SETS -d 10.0.0.2/31 -m set --match-set allowed src -j ACCEPT",
        "-A SETS -p tcp -m tcp --dport 80 -j DROP",
    ]


@pytest.fixture
def without_namespace(monkeypatch):
    """Let no network namespace be created, as without CAP_SYS_ADMIN."""

    def refuse():
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(canonical_chains, "_unshare", refuse)


@pytest.mark.usefixtures("without_namespace")
def test_canonical_rules_converge_without_a_scratch_namespace():
    rules = ("-d 192.0.2.1 -p tcp --dport 80 -j ACCEPT", "-m conntrack --ctstate ESTABLISHED,RELATED -j RETURN")
    assert converge("nft", [ListedChain("filter", "PLAIN", rules, (Jump("INPUT", "-i lo"),))]) == 2


#: Rules, and what iptables prints of them.
NARROW = (
    ("-p tcp --syn -m set --match-set trusted src -j ACCEPT", "-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN {}ACCEPT"),
    ("-p icmp --icmp-type 8 -m set --match-set trusted src -j ACCEPT", "-p icmp -m icmp --icmp-type 8 {}ACCEPT"),
    ("-f -m set --match-set trusted src -j DROP", "-f {}DROP"),
    ("-m set --match-set trusted src ! -f -p udp -j DROP", "-p udp ! -f {}DROP"),
    ("-s 10.0.0.1 -f -m set --match-set trusted src -j DROP", "-s 10.0.0.1/32 -f {}DROP"),
)


@pytest.mark.parametrize("variant", ["legacy", "nft"])
@pytest.mark.parametrize("namespace", [True, False])
def test_no_condition_of_a_rule_is_lost(variant, namespace, request):
    if not namespace:
        request.getfixturevalue("without_namespace")
    run(["ipset", "create", "trusted", "hash:ip"])
    assert converge(variant, [ListedChain("filter", "NARROW", tuple(rule for rule, _printed in NARROW))]) == 1
    match = "-m set --match-set trusted src -j "
    assert rules_of(variant, "NARROW") == [f"-A NARROW {printed.format(match)}" for _rule, printed in NARROW]


@pytest.mark.usefixtures("without_namespace")
@pytest.mark.parametrize("variant", ["legacy", "nft"])
@pytest.mark.parametrize(
    "rule",
    ["-p tcp --no-such-option -j DROP", "! -s 10.0.0.1,10.0.0.2 -j DROP", "-j LOG -j DROP", "-i lo -j DROP now"],
)
def test_a_rule_that_iptables_refuses_is_not_made_broader(variant, rule):
    resource = ListedChainsResource(detect_variant("IPv4", variant), [ListedChain("filter", "BAD", (rule,))])
    change = difference(*resource.stage())
    with pytest.raises(KernelError):
        resource.apply(change)
    assert "BAD" not in run([f"iptables-{variant}-save"])


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_a_drift_to_fragments_only_is_found_and_undone(variant):
    """The rule of another program has one condition more than the declared one."""
    run(["ipset", "create", "trusted", "hash:ip"])
    chain = ListedChain("filter", "DRIFT", ("-m set --match-set trusted src -j DROP",))
    converge(variant, [chain])
    run([f"iptables-{variant}", "-R", "DRIFT", "1", "-f", "-m", "set", "--match-set", "trusted", "src", "-j", "DROP"])
    before = rules_of(variant, "DRIFT")
    resource = ListedChainsResource(detect_variant("IPv4", variant), [chain])
    change = difference(*resource.stage())
    assert len(change) == 1
    resource.apply(change)
    restore(resource.variant, resource.undo_text(change))
    assert rules_of(variant, "DRIFT") == before


def test_a_bad_rule_changes_nothing():
    before = run(["iptables-nft-save"])
    chain = ListedChain("filter", "BAD", ("-j RETURN", "-p tcp --dport nonsense -j DROP"))
    with pytest.raises(KernelError, match=r"nonsense.*-A BAD -p tcp --dport nonsense"):
        ListedChainsResource(detect_variant("IPv4", "nft"), [chain]).stage()
    assert run(["iptables-nft-save"]) == before


def rules_of(variant: str, chain: str) -> list[str]:
    return run([f"iptables-{variant}", "-S", chain]).splitlines()[1:]


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_positions_of_jumps_are_kept(variant):
    iptables = f"iptables-{variant}"
    run([iptables, "-A", "FORWARD", "-i", "eth9", "-j", "ACCEPT"])
    head = (Jump("FORWARD", "-i lo", FIRST), Jump("FORWARD", "-o lo", FIRST))
    chain = ListedChain("filter", "PLACED", (), (*head, Jump("FORWARD", position=LAST), Jump("INPUT", position=ANY)))
    wanted = [
        "-A FORWARD -i lo -j PLACED",
        "-A FORWARD -o lo -j PLACED",
        "-A FORWARD -i eth9 -j ACCEPT",
        "-A FORWARD -j PLACED",
    ]
    assert converge(variant, [chain]) == 5
    assert rules_of(variant, "FORWARD") == wanted
    # Another program inserts rules before and behind; each jump returns to its position exactly once.
    run([iptables, "-I", "FORWARD", "-i", "eth8", "-j", "ACCEPT"])
    run([iptables, "-A", "FORWARD", "-i", "eth7", "-j", "ACCEPT"])
    run([iptables, "-I", "INPUT", "-i", "eth8", "-j", "ACCEPT"])
    assert converge(variant, [chain]) == 3
    external = ["-A FORWARD -i eth8 -j ACCEPT", wanted[2], "-A FORWARD -i eth7 -j ACCEPT"]
    assert rules_of(variant, "FORWARD") == [*wanted[:2], *external, wanted[3]]
    assert rules_of(variant, "INPUT") == ["-A INPUT -i eth8 -j ACCEPT", "-A INPUT -j PLACED"]
    # In the wrong order among themselves, and duplicated.
    run([iptables, "-I", "FORWARD", "-o", "lo", "-j", "PLACED"])
    assert converge(variant, [chain]) == 2
    assert rules_of(variant, "FORWARD") == [*wanted[:2], *external, wanted[3]]


def random_chains(chance: random.Random) -> list[ListedChain]:
    chains = []
    for name in chance.sample(["ONE", "TWO", "THREE"], chance.randint(1, 3)):
        rules = tuple(chance.sample(RULES[:2] + RULES[4:], chance.randint(0, 3)))
        conditions = chance.sample(["", "-i lo", "-o lo", "-i eth1"], chance.randint(0, 3))
        origins = ("FORWARD", "USER")
        jumps = tuple(Jump(chance.choice(origins), text, chance.choice((ANY, FIRST, LAST))) for text in conditions)
        chains.append(ListedChain("filter", name, rules, jumps if chance.random() < 0.9 else None))
    return chains


@pytest.mark.parametrize("variant", ["legacy", "nft"])
@pytest.mark.parametrize("seed", range(12))
def test_every_change_can_be_undone(variant, seed):
    """The undo text of any change restores every rule at its position, external rules and duplicates included."""
    chance = random.Random(seed)
    iptables = f"iptables-{variant}"
    run([iptables, "-N", "USER"])
    for _number in range(6):
        run([iptables, "-A", chance.choice(["FORWARD", "USER"]), "-p", chance.choice(["tcp", "udp"]), "-j", "RETURN"])
    converge(variant, random_chains(chance))
    for origin in ("FORWARD", "USER"):
        for chain in ("ONE", "TWO", "THREE"):
            if chance.random() < 0.5 and f":{chain} " in run([f"iptables-{variant}-save", "-t", "filter"]):
                run([iptables, "-I", origin, str(chance.randint(1, 2)), "-o", "lo", "-j", chain])
    before = [line for line in run([f"iptables-{variant}-save", "-t", "filter"]).splitlines() if line.startswith("-A")]
    removal = chance.random() < 0.2
    chains = random_chains(chance)
    if removal:
        chains = [chain._replace(jumps=(*(chain.jumps or ()), Jump("USER"))) for chain in chains]
    resource = ListedChainsResource(detect_variant("IPv4", variant), chains, removal=removal)
    change = difference(*resource.stage())
    undo = resource.undo_text(change)
    resource.apply(change)
    restore(resource.variant, undo)
    after = [line for line in run([f"iptables-{variant}-save", "-t", "filter"]).splitlines() if line.startswith("-A")]
    assert after == before, (undo, resource.text(change))
