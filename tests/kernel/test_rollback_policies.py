# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies in saved states, on a real kernel: a rollback restores their table, or removes it."""

from __future__ import annotations

from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.store import History
from tests.kernel.policy_node import PORTS, bridge_port
from tests.kernel.rollback_node import POLICIES_OFF, POLICIES_ON, POLICY_TABLE, Node, differences, dump, names, policies
from tests.lab.system import run

#: A table that no version of this project creates: any content is saved and restored.
EXTERNAL_POLICIES = (
    POLICY_TABLE
    + """ {
    comment "of another program"
    counter seen { comment "all" packets 0 bytes 0 }
    quota monthly { over 500 mbytes }
    limit slowly { rate 10/second burst 20 packets }
    set blocks4 { type ipv4_addr; flags interval; \
        elements = { 10.0.0.0/24, 10.0.1.0-10.0.1.9 comment "few", 240.0.0.0/4 } }
    set ports { type inet_proto . inet_service; counter; elements = { tcp . 80, udp . 53 comment "dns" } }
    set port-ranges { type ipv4_addr . inet_service; flags interval; \
        elements = { 10.0.0.1 . 80-90, 10.0.0.0/24 . 70-99 comment "around it", \
                     10.0.0.0/8 . 1-1000, 10.9.0.0/16 . 2000 } }
    set seen4 { type ipv4_addr; size 100; flags dynamic,timeout; timeout 1m; }
    map targets { type ipv6_addr : verdict; flags interval; \
        elements = { fd00::/64 : goto denied, fd00:0:0:1::/64 : accept, * : jump denied } }
    map counted { type inet_service : counter; elements = { 80 : "seen", 443 : "seen" } }
    chain denied { counter name "seen" drop comment "end"; }
    chain input {
        type filter hook input priority 101; policy accept;
        ip saddr { 192.0.2.0/24, 198.51.100.7 } tcp dport { 1-9, 11 } counter packets 0 bytes 0 goto denied
        ip saddr @blocks4 limit name "slowly" quota name "monthly" add @seen4 { ip saddr } accept
        ip saddr . tcp dport @port-ranges counter name tcp dport map @counted
        ip6 saddr vmap @targets
    }
}
"""
)


@pytest.fixture
def node(tmp_path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def bridge() -> Iterator[None]:
    """A pod of the node on a bridge, whose ports have a table of their own."""
    with bridge_port("10.244.1.11/24", "10.244.1.1/24"):
        yield


@pytest.mark.usefixtures("bridge")
def test_network_policies_are_restored_as_they_were(node) -> None:
    states = [dump()]
    for settings, *cases in (
        (POLICIES_ON, "ip-block"),
        (POLICIES_ON, "cnp-tiers", "ip-block"),
        (POLICIES_OFF, "ip-block"),
    ):
        node.converge("nftables", **policies(settings, *cases))
        states.append(dump())
    for table in (POLICY_TABLE, f"table {PORTS}"):
        assert [table in state for state in states] == [False, True, True, False]
    assert '"port0" . 10.244.1.11' in str(states[1][f"table {PORTS}"])
    assert "10.1.0.1" in str(states[1]) and "tier-ports-accept" in str(states[1])
    for number in (3, 2, 1, 3, 1, 2):
        preview = node.roll_back(number, keep=20, check=True, describe=True)
        assert "network policy objects" in names(preview.changes)
        node.roll_back(number, keep=20)
        assert differences(states[number - 1], dump()) == ""
        assert node.roll_back(number, keep=20).changed is False
    # The restored table is the one that a convergence would program, so a convergence changes nothing.
    assert node.converge("nftables", **policies(POLICIES_ON, "ip-block")).changed is False


def test_a_table_of_network_policies_that_another_program_made_is_restored(node) -> None:
    run(["nft", "-f", "-"], stdin=EXTERNAL_POLICIES)
    before = dump()
    node.converge("nftables", **policies(POLICIES_OFF, "ip-block"))
    assert POLICY_TABLE not in dump()
    preview = node.roll_back(check=True, describe=True)
    shown = [line for change in preview.changes for line in change.after]
    assert "\t10.0.1.0-10.0.1.9" in shown
    node.roll_back()
    assert differences(before, dump()) == ""
    assert node.roll_back().changed is False


def test_a_state_that_an_older_version_saved_leaves_network_policies_as_they_are(node) -> None:
    node.converge("nftables", **policies(POLICIES_OFF, "ip-block"))
    history = History(node.history)
    number = history.save(history.load(1).state._replace(network_policy=None)).number
    node.converge("nftables", **policies(POLICIES_ON, "ip-block"))
    before = dump()
    node.roll_back(number)
    assert dump()[POLICY_TABLE] == before[POLICY_TABLE]
    assert "table ip kube-proxy" not in dump()
