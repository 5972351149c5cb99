# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes that had drifted serve again, and state of other programs is unchanged."""

from __future__ import annotations

from tests.molecule_support.checks import within

FIRST = {"pod-1-2", "pod-2-2", "pod-3-2"}


def test_services_are_served_again(node):
    within(60, "the Service answers", lambda: node.ask("10.96.0.10", 80, timeout=1).outcome == "answer")
    assert {answer.backend for answer in node.ask_often("10.96.0.10", 80)} == FIRST


def test_the_node_itself_is_served_again(node):
    assert [answer.outcome for answer in node.ask_inside("10.96.0.10", 80, count=5)] == ["answer"] * 5


def test_rules_of_other_programs_are_untouched(node):
    rules = node.rules()
    assert "-A OTHER-PROGRAM -d 192.0.2.1/32 -j RETURN" in rules
    assert "-A PREROUTING -j OTHER-PROGRAM" in rules


def test_killed_agent_was_restarted(nodes):
    for name in ("node1", "node2"):
        restarts = nodes[name].host.check_output("systemctl show --property=NRestarts --value kubenode-proxy.service")
        assert int(restarts) == 1
        assert nodes[name].host.run("curl -sf http://127.0.0.1:10256/healthz").rc == 0
