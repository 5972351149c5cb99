# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Only the rules of different Services may be in any order."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import KUBE_FIREWALL, SERVICES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.observed_order import in_observed_order

WEB = '-d 10.96.1.1/32 -p tcp -m comment --comment "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-A'
DNS = '-d 10.96.1.1/32 -p udp -m comment --comment "default/web:dns cluster IP" -m udp --dport 53 -j KUBE-SVC-B'
RIVAL = '-d 10.96.1.1/32 -p tcp -m comment --comment "default/rival:x external IP" -m tcp --dport 80 -j KUBE-EXT-C'
TAIL = '-m comment --comment "nodeports; must be last" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS'


def kept(found, wanted, chain=SERVICES):
    desired = {chain: tuple(wanted), "other": 1}
    result = in_observed_order(desired, {chain: tuple(found)})
    assert result["other"] == 1 and desired[chain] == tuple(wanted)
    return result[chain] == tuple(found)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ((DNS, WEB, TAIL), (WEB, DNS, TAIL), True),
        ((TAIL, DNS, WEB), (WEB, DNS, TAIL), False),
        ((DNS, TAIL, WEB), (DNS, WEB, TAIL), False),
        ((DNS, TAIL), (WEB, DNS, TAIL), False),
        ((DNS, DNS, TAIL), (WEB, DNS, TAIL), False),
        ((RIVAL, WEB, DNS), (WEB, RIVAL, DNS), False),
        ((WEB, RIVAL), (WEB, RIVAL), True),
    ],
)
def test_only_rules_that_match_different_packets_may_be_reordered(found, wanted, same):
    assert kept(found, wanted) is same


def test_chains_of_one_service_and_external_chains_keep_their_order():
    assert not kept((DNS, WEB), (WEB, DNS), chain=KUBE_FIREWALL)


def test_without_observed_chains_the_desired_table_is_the_same_object():
    desired = {SERVICES: (WEB, TAIL)}
    assert in_observed_order(desired, {}) is desired
