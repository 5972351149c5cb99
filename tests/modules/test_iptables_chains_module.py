# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module iptables_chains, through Ansible, in both iptables variants; verified with iptables-save."""

from __future__ import annotations

import fcntl
import time

import pytest

from tests.modules.examples import faults_of_examples
from tests.modules.harness import UNPRIVILEGED

MODULE = "kubenode.proxy.iptables_chains"


def look(variant):
    clean = "grep -v '^#' | sed 's/\\[[0-9:]*\\]//'"
    return ["sh", "-c", f"iptables-{variant}-save | {clean}; ip6tables-{variant}-save | {clean}"]


# Spelled differently from iptables-save's output on purpose.
CHAINS = [
    {
        "name": "MANAGEMENT",
        "family": "both",
        "rules": [
            "-m conntrack --ctstate ESTABLISHED,RELATED --jump ACCEPT",
            "--protocol tcp --destination-port ssh -m comment --comment 'shell access' -j ACCEPT",
            "-p tcp -m multiport --dports 80,443 -m limit --limit 5/second -j RETURN",
            "-j EXTERNAL",
        ],
        "jumps": [{"from": "INPUT", "match": "! -i lo"}, {"from": "USER", "position": "last"}],
    },
    {"name": "PUBLISH-WEB", "table": "nat", "rules": ["-p tcp -j DNAT --to-destination 10.0.0.20:8443"]},
    {
        "name": "PUBLISH",
        "table": "nat",
        "rules": ["-d 192.0.2.10 -p tcp --dport 443 -j PUBLISH-WEB", "-s 10.0.0.0/255.0.0.0 -j MARK --set-mark 1"],
        "jumps": [{"from": "PREROUTING", "position": "first"}],
    },
    {"name": "EMPTY", "table": "mangle"},
]


def prepare(node, variant):
    for program in (f"iptables-{variant}", f"ip6tables-{variant}"):
        node.run(program, "-N", "EXTERNAL")
        node.run(program, "-A", "EXTERNAL", "-m", "comment", "--comment", "of others", "-j", "RETURN")
        node.run(program, "-N", "USER")
        node.run(program, "-A", "USER", "-j", "RETURN")
        node.run(program, "-A", "INPUT", "-j", "USER")


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_check_apply_repeat_and_remove(node, variant):
    prepare(node, variant)
    runs = node.four_runs("iptables_chains", {"chains": CHAINS, "variant": variant}, verify=look(variant))
    lines = runs.after.splitlines()
    for line in (
        "-A INPUT ! -i lo -j MANAGEMENT",
        "-A MANAGEMENT -j EXTERNAL",
        "-A PUBLISH -d 192.0.2.10/32 -p tcp -m tcp --dport 443 -j PUBLISH-WEB",
        "-A PUBLISH-WEB -p tcp -j DNAT --to-destination 10.0.0.20:8443",
        "-A PREROUTING -j PUBLISH",
    ):
        assert line in lines
    assert lines.index("-A INPUT ! -i lo -j MANAGEMENT") < lines.index("-A INPUT -j USER")
    assert lines.index("-A USER -j RETURN") < lines.index("-A USER -j MANAGEMENT")
    assert lines.count("-A INPUT ! -i lo -j MANAGEMENT") == 2  # both families
    assert [change["table"] for change in runs.first["changes"]] == ["IPv4 chains", "IPv6 chains"]
    assert runs.first["changes"][0]["added"] == 7
    assert runs.first["variants"]["IPv4"].endswith(f"({variant}: requested)")
    headers = [entry["after_header"] for entry in runs.first["diff"]]
    assert "IPv4 chains: filter MANAGEMENT" in headers

    changed = [dict(CHAINS[0], rules=["-j RETURN"], jumps=[{"from": "INPUT", "match": "-i eth9"}]), *CHAINS[1:]]
    absent = {"chains": CHAINS, "variant": variant, "state": "absent"}
    replaced, again, check, gone, gone_again = node.play(
        {MODULE: {"chains": changed, "variant": variant}},
        {MODULE: {"chains": changed, "variant": variant}},
        {MODULE: absent, "check_mode": True},
        {MODULE: absent},
        {MODULE: absent},
    )
    assert replaced["changed"] and not again["changed"], (replaced, again)
    assert replaced["changes"][0]["replaced"] == 1 and replaced["changes"][0]["added"] == 1
    assert check["changed"] and gone["changed"] and not gone_again["changed"]
    left = node.run(*look(variant)).stdout.splitlines()
    # Jumps from USER stayed when USER was no longer named; absent names it, so they are removed; external rules stay.
    assert [line for line in left if "MANAGEMENT" in line or "PUBLISH" in line or "EMPTY" in line] == []
    assert set(runs.before.splitlines()) <= set(left)


def test_jumps_that_are_not_declared_are_left_alone(node):
    chain = {"name": "MINE", "rules": ["-j RETURN"]}
    node.play({MODULE: {"chains": [chain]}})
    node.run("iptables", "-A", "FORWARD", "-i", "eth7", "-j", "MINE")
    node.run("iptables", "-N", "OTHER")
    node.run("iptables", "-A", "OTHER", "-j", "MINE")
    same, exact, used = node.play(
        {MODULE: {"chains": [chain]}},
        {MODULE: {"chains": [dict(chain, jumps=[])]}},
        {MODULE: {"chains": [chain], "state": "absent"}},
    )
    assert not same["changed"]
    assert exact["changed"] and exact["changes"][0]["entries"] == ["filter FORWARD -i eth7 -j MINE"]
    assert used["failed"]
    assert used["msg"] == "chain filter MINE: cannot be removed, chain OTHER leads into it: -A OTHER -j MINE"
    assert "-A OTHER -j MINE" in node.run("iptables-save").stdout


def one(**more):
    return {MODULE: {"chains": [{"name": "MINE", "rules": ["-j RETURN"], **more}]}}


def test_errors_are_one_clear_line_and_change_nothing(node):
    before = node.run(*look("nft")).stdout
    found = node.play(
        one(rules=["-j RETURN", "-p tcp --dport 99999 -j ACCEPT"]),
        {**one(rules=["--no-such-option -j ACCEPT"]), "check_mode": True},
        one(rules=["-j NO-SUCH-CHAIN"]),
        one(rules=["-j RETURN\n-A INPUT -j DROP"]),
        one(rules=["-A INPUT -j DROP"]),
        one(rules=["-j RETURN", " "]),
        one(name="INPUT"),
        one(name="MINE; reboot"),
        one(name="A" * 29),
        one(jumps=[{"from": "NOWHERE"}]),
        one(jumps=[{"from": "INPUT", "match": "-j DROP"}]),
        one(table="nats"),
        one(rules=["-m comment --comment 'open -j RETURN"]),
        {MODULE: {"chains": [{"name": "MINE"}, {"name": "MINE", "family": "both"}]}},
        {MODULE: {"chains": [{"name": "MINE"}, {"name": "B", "jumps": [{"from": "MINE"}]}]}},
        {**one(), **UNPRIVILEGED},
        {MODULE: {}},
        {MODULE: {**one()[MODULE], "state": "confirmed"}},
        {MODULE: {**one()[MODULE], "confirm_timeout": -1}},
        {MODULE: {"state": "confirmed", "change": "../../etc"}},
        {MODULE: {"state": "confirmed", "change": "abc"}},
    )
    messages = [result["msg"] for result in found]
    assert all(result["failed"] for result in found), found
    expected = [
        "99999",
        "no-such-option",
        "NO-SUCH-CHAIN",
        "chain filter MINE: rules[0]: holds a line break",
        "chain filter MINE: rules[0]: -A: give the rule only",
        "chain filter MINE: rules[1]: is empty",
        "is the name of a built-in chain or target",
        "not a chain name",
        "not a chain name",
        "NOWHERE",
        "jumps[0].match: holds a target",
        "nats",
        "no closing quotation",
        "chain filter MINE: given twice",
        "jumps[0].from: MINE is listed too",
        "needs root",
        "chains: required unless state confirmed",
        "chains: not allowed with state confirmed",
        "confirm_timeout: -1 is not between 0 and 86400",
        "change: '../../etc' is not the name of a change",
        "change abc is not known: the node was rebooted",
    ]
    for message, words in zip(messages, expected):
        assert words in message and "\n" not in message, (words, message)
    assert node.run(*look("nft")).stdout == before


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_chains_are_listed(node, variant):
    prepare(node, variant)
    info = {f"{MODULE}_info": {"chains": ["INPUT", "EXTERNAL"], "family": "both", "variant": variant}}
    shown, none, bad = node.play(
        info,
        {f"{MODULE}_info": {"table": "raw", "variant": variant}},
        {f"{MODULE}_info": {}, **UNPRIVILEGED},
    )
    assert not shown["changed"] and set(shown["variants"]) == {"IPv4", "IPv6"}
    names = [(item["family"], item["name"], item["builtin"]) for item in shown["chains"]]
    assert sorted(names) == [
        ("ipv4", "EXTERNAL", False),
        ("ipv4", "INPUT", True),
        ("ipv6", "EXTERNAL", False),
        ("ipv6", "INPUT", True),
    ]
    assert shown["chains"][0]["table"] == "filter"
    of_input = next(item["rules"] for item in shown["chains"] if item["name"] == "INPUT")
    assert of_input == ["-j USER"]
    assert none["chains"] == [] and "needs root" in bad["msg"]


def test_tables_that_iptables_cannot_show_are_named(node):
    jumps = [{"from": "INPUT"}]
    made = one(jumps=jumps)
    node.play(made)
    node.run("nft", "add", "chain", "ip", "filter", "EXT")
    node.run("nft", "add", "rule", "ip", "filter", "EXT", "meta", "length", "100-200", "counter", "accept")
    node.run("iptables-nft", "-t", "mangle", "-N", "OTHER")
    before = node.run("nft", "list", "ruleset").stdout
    info = f"{MODULE}_info"
    again, check, gone, shown, of_mangle, of_ipv6 = node.play(
        made,
        {**made, "check_mode": True},
        {MODULE: {**one(jumps=jumps)[MODULE], "state": "absent"}},
        {info: {}},
        {info: {"table": "mangle"}},
        {info: {"family": "ipv6"}},
    )
    reason = "-save cannot show it, since it holds rules that only nft understands"
    for refused in (again, check, gone):
        assert refused["failed"] and refused["msg"].startswith("table filter of IPv4: "), refused
        assert reason in refused["msg"] and "\n" not in refused["msg"]
    assert node.run("nft", "list", "ruleset").stdout == before
    assert {item["table"] for item in shown["chains"]} == {"mangle"}
    assert shown["unreadable"] == [{"table": "filter", "family": "ipv4"}]
    assert len(shown["warnings"]) == 1 and reason in shown["warnings"][0]
    for complete in (of_mangle, of_ipv6):
        assert complete["unreadable"] == [] and not complete.get("warnings")


def test_a_held_lock_is_named(node):
    node.run("touch", "/run/xtables.lock")
    with open(f"/proc/{node.holder.pid}/root/run/xtables.lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        task = one()
        task[MODULE].update(variant="legacy", lock_timeout=1)
        (held,) = node.play(task)
    assert held["failed"]
    assert "xtables lock" in held["msg"] and "\n" not in held["msg"]


def test_a_change_is_reverted_unless_it_is_confirmed(node):
    """Without systemd a process waits for the timeout; tests/systemd covers the timer."""
    node.run("iptables", "-A", "INPUT", "-i", "eth9", "-j", "ACCEPT")
    node.run("ip6tables", "-A", "INPUT", "-i", "eth9", "-j", "ACCEPT")
    before = node.run(*look("nft")).stdout
    jumps = [{"from": "INPUT", "position": "first"}]
    task = {MODULE: {"chains": [{"name": "MINE", "family": "both", "rules": ["-j DROP"], "jumps": jumps}]}}
    provisional = {MODULE: {**task[MODULE], "confirm_timeout": 1}}
    confirm = {MODULE: {"state": "confirmed"}}
    check, made = node.play({**provisional, "check_mode": True}, provisional)
    assert check["changed"] and check["change"] == ""
    assert made["changed"] and len(made["change"]) == 16
    deadline = time.monotonic() + 60
    while node.run(*look("nft")).stdout != before:
        assert time.monotonic() < deadline, node.run(*look("nft")).stdout
        time.sleep(0.1)
    other = {MODULE: {"chains": [{**task[MODULE]["chains"][0], "rules": ["-j ACCEPT"]}]}}
    late, again, second, final, checked, kept, would, confirmed, twice, none = node.play(
        {MODULE: {"state": "confirmed", "change": made["change"]}},
        {MODULE: {**task[MODULE], "confirm_timeout": 300}},
        {MODULE: {**one(name="OTHER")[MODULE], "confirm_timeout": 300}},
        other,
        {**other, "check_mode": True},
        {MODULE: {**task[MODULE], "confirm_timeout": 300}},
        {**confirm, "check_mode": True},
        confirm,
        confirm,
        {MODULE: {"state": "confirmed", "change": ""}},
    )
    assert late["msg"] == f"change {made['change']} was not confirmed in time: the node has rolled it back"
    assert again["changed"] and not kept["changed"] and kept["change"] == ""
    for refused in (second, final, checked):
        assert refused["msg"] == f"change {again['change']} still waits to be confirmed (state: confirmed)"
    assert would["changed"] and confirmed["changed"] and not twice["changed"] and not none["changed"]
    assert "-A INPUT -j MINE" in node.run(*look("nft")).stdout
    assert (
        f"{again['change']}/confirmed"
        in node.run("sh", "-c", "cd /run/kubenode-iptables-chains && ls */confirmed").stdout
    )


def test_the_examples_do_what_a_check_predicts_and_then_nothing(node):
    """Those of the other general modules run in guest/check_guest.py."""
    assert faults_of_examples(node, "iptables_chains") == []
