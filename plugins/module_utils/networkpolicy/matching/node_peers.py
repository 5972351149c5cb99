# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes as peers of rules: they match by their addresses, like ranges, and not as pods."""

from __future__ import annotations

from ...base.addresses import networks_of
from ...cluster.model import Node
from ...cluster.parsing.policy_objects import PolicyObjects
from ...cluster.policies.policy_model import BlockPeer, NodePeer, PolicyRule, closed


def known_rule(rule: PolicyRule, objects: PolicyObjects) -> PolicyRule:
    """Return a rule; what replaces it while Nodes that it may select are not known."""
    return closed(rule.action) if rule.node_peers and not objects.nodes_known else rule


def resolved_rule(rule: PolicyRule, objects: PolicyObjects) -> PolicyRule:
    """Return a rule with the addresses of Nodes instead of selectors for them."""
    rule = known_rule(rule, objects)
    if not rule.node_peers:
        return rule
    chosen = [node for node in objects.nodes.values() if any(selects(peer, node) for peer in rule.node_peers)]
    ranges = networks_of(f"{address}/{128 if ':' in address else 32}" for node in chosen for address in node.addresses)
    others = [peer for peer in rule.peers if not isinstance(peer, NodePeer)]
    # No peers would mean every peer.
    return rule._replace(peers=(*others, *map(BlockPeer, ranges), None))


def selects(peer: NodePeer, node: Node) -> bool:
    """Return whether a peer selects a Node."""
    return peer.nodes.matches(node.labels)
