# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which entries a report names first: those whose difference is the most harmful."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.report import entry_names
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, PlannedChange, Resource


def names(change):
    return entry_names(PlannedChange(Resource(), change))


def test_a_flushed_chain_comes_before_a_changed_rule_and_extra_entries_come_last():
    rules = tuple(f"-d 10.96.0.{number}/32 -j KUBE-SVC-{number}" for number in range(26))
    change = Change(
        added={ChainKey("nat", "KUBE-SVC-A"): ("-j X",)},
        replaced={
            ChainKey("nat", "KUBE-MARK-MASQ"): (("-j MARK", "-j ACCEPT"), ("-j MARK",)),
            ChainKey("nat", "KUBE-SERVICES"): (rules[:2], rules),
        },
        removed={ChainKey("nat", "KUBE-SVC-OLD"): ()},
    )
    assert names(change) == (
        "nat KUBE-SERVICES (24 of 26 missing)",
        "nat KUBE-MARK-MASQ",
        "nat KUBE-SVC-A",
        "nat KUBE-SVC-OLD",
    )


def test_a_few_entries_are_described_whatever_the_key():
    change = Change(added={("element", "services", bytes([number])): True for number in range(100)})
    found = names(change)
    assert len(found) == 10 and all(name.isprintable() and len(name) <= 120 for name in found)
    assert names(Change(added={"net.ipv4.ip_forward": "1"})) == ("net.ipv4.ip_forward",)
