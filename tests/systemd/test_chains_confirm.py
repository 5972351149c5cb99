# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of iptables_chains that is not confirmed is reverted by a systemd timer."""

from __future__ import annotations

import pytest

from tests.waiting import wait_for

from .node import Node, play

MODULE = "kubenode.proxy.iptables_chains"
CHAIN = {
    "name": "MINE",
    "rules": ["-j DROP"],
    "jumps": [{"from": "OUTPUT", "match": "-d 192.0.2.1", "position": "first"}],
}


@pytest.fixture(scope="module")
def node(start):
    return start("chains")


def rules(node: Node) -> str:
    return node.output("iptables", "-S")


def converge(node: Node, *tasks):
    return play([node], list(tasks), {})[node.name]


def timers(node: Node) -> str:
    return node.output("systemctl", "list-timers", "--all", "--no-legend", "kubenode-iptables-chains-*")


def ended(node: Node) -> list[str]:
    """Return the outcome of the last change."""
    names = node.output("sh", "-c", "ls /run/kubenode-iptables-chains/*").split()
    return [name for name in names if name in ("pending", "reverting", "reverted", "confirmed", "failed")]


def test_the_timer_reverts_an_unconfirmed_change(node):
    node.run("iptables", "-A", "OUTPUT", "-d", "192.0.2.9", "-j", "ACCEPT")
    before = rules(node)
    assert converge(node, {MODULE: {"chains": [CHAIN], "confirm_timeout": 5}}).changed == 1
    wait_for(lambda: ended(node) == ["reverted"], what="the change is reverted")
    assert rules(node) == before
    wait_for(lambda: timers(node) == "", what="the timer is gone")


def test_a_confirmed_change_is_kept_and_its_timer_stopped(node):
    before = rules(node)
    made = {MODULE: {"chains": [CHAIN], "confirm_timeout": 600}, "register": "made"}
    again = {"ansible.builtin.meta": "reset_connection"}
    confirm = {MODULE: {"state": "confirmed", "change": "{{ made.change }}"}}
    assert converge(node, made, again, confirm).changed == 2
    assert "-A OUTPUT -d 192.0.2.1/32 -j MINE" in rules(node)
    assert ended(node) == ["confirmed"]
    assert timers(node) == ""
    assert converge(node, {MODULE: {"chains": [CHAIN], "state": "absent"}}).changed == 1
    assert rules(node) == before
