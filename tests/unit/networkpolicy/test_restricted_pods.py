# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which pods of a node policies limit, on whose interfaces link-local traffic is denied, and the rows for these."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import (
    BOUND,
    HERE,
    LINK,
    POD_LINK,
    PORT_BOUND,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import change_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.sets import Options
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import ABSENT

ADDRESS = packed("10.244.1.11")
POD = {
    "kind": "Pod",
    "metadata": {"namespace": "shop", "name": "web"},
    "spec": {"nodeName": "node1"},
    "status": {"podIPs": [{"ip": "10.244.1.11"}]},
}
NAMESPACE = {"kind": "Namespace", "metadata": {"name": "shop"}}


def isolating(name, **spec):
    spec = {"podSelector": {}, **spec}
    return {"kind": "NetworkPolicy", "metadata": {"namespace": "shop", "name": name}, "spec": spec}


def restricted(*policies):
    """Return the directions in which policies limit the pod."""
    state = ClusterState.from_objects([NAMESPACE, POD, *policies])
    policy = NodePolicy("node1", state.policy, cluster_policies=True)
    return {side for side in ("in", "out") if policy.restricted(side) == {ADDRESS}}


def test_a_pod_is_restricted_unless_a_rule_allows_it_everything():
    assert restricted() == set()
    assert restricted(isolating("x", policyTypes=["Egress"])) == {"out"}
    every = [{"to": [{"ipBlock": {"cidr": "::/0"}}]}]
    assert restricted(isolating("x", policyTypes=["Egress"], egress=every)) == {"out"}
    both = isolating("x", policyTypes=["Ingress", "Egress"], egress=[{}])
    assert restricted(both) == {"in"}
    assert restricted(both, isolating("y", ingress=[{"ports": [{"port": 80}]}])) == {"in"}
    assert restricted(both, isolating("y", ingress=[{}])) == set()


def test_a_cluster_network_policy_restricts_a_pod_that_others_allow_everything():
    rules = [{"action": "Deny", "to": [{"networks": ["192.0.2.0/24"]}]}]
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": rules}
    cluster = {"kind": "ClusterNetworkPolicy", "metadata": {"name": "c"}, "spec": spec}
    assert restricted(isolating("x", policyTypes=["Ingress", "Egress"], ingress=[{}], egress=[{}]), cluster) == {"out"}


def test_interfaces_remain_when_policies_are_chosen_again():
    blocks = [{"ipBlock": {"cidr": f"192.0.{2 * number}.0/24"}} for number in range(8)]
    ingress = [{"from": blocks, "ports": [{"port": 80}]}]
    state = ClusterState.from_objects([NAMESPACE, POD, isolating("x", ingress=ingress)])
    policy = NodePolicy("node1", state.policy, most_rows=4)
    assert policy.too_large
    rows = [(LINK, "out", "veth1"), (POD_LINK, "veth1"), (BOUND, "veth1", ADDRESS), (HERE, ADDRESS)]
    policy.set_links(rows)
    policy.table.pop_journal()
    policy.reconsider()
    assert policy.table.rows.keys() >= set(rows) and policy.table.pop_journal() == {}
    # The pod gets another interface: what does not name it remains.
    policy.set_links([(LINK, "out", "veth2"), (POD_LINK, "veth2"), (BOUND, "veth2", ADDRESS), (HERE, ADDRESS)])
    change = change_of(policy.table.pop_journal(), policy.table.rows, Options())
    first, second = (name.encode().ljust(16, b"\0") for name in ("veth1", "veth2"))
    for found, name in ((change.removed, first), (change.added, second)):
        held = {("element", each, name) for each in ("links-out", "pod-links", "forged")}
        assert set(found) == {*held, ("element", "bound4", name + ADDRESS)}


def test_an_address_that_moves_to_another_port_of_a_bridge_stays_one_of_the_node():
    """The element that says so is of both rows: it must be neither removed nor added."""
    before, now = (PORT_BOUND, "veth1", ADDRESS), (PORT_BOUND, "veth2", ADDRESS)
    change = change_of({before: True, now: ABSENT}, {now: True}, Options())
    assert [key.name for key in (*change.added, *change.removed)] == ["bridge/bound4"] * 2
