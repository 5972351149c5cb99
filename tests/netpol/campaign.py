# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random clusters and changes: the rendered table, executed by an interpreter, compared with the oracle."""

from __future__ import annotations

from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.addresses import packed, parse_network
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.policy_model import EGRESS, INGRESS
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.verdicts import Flow, Verdicts
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import (
    change_of,
    desired_table,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.layout import Options
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference

from .interpreter import Interpreter
from .oracle import Oracle, Packet
from .random_clusters import NODE_ADDRESSES, Generator

STEPS = 4
PACKETS = 30
_OWN = [packed(address) for address in NODE_ADDRESSES]
#: Priorities that packets with a DSCP value arrive with.
_PRIORITIES = (0, 2, 4, 6)
_NUMBERS = {"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1}


_POD_RANGES = ("10.244.1.0/24", "fd00:10:244:1::/64")


def _policy(cluster: ClusterState, options: Options) -> NodePolicy:
    ranges = [parse_network(text) for text in _POD_RANGES] if options.unknown else []
    return NodePolicy("node1", cluster.policy, _OWN, options.tiers, pod_ranges=ranges)


def differences(seed: int) -> list[str]:
    """Return one line for each packet of a random, changing cluster on which the interpreter and the oracle disagree.

    Raises AssertionError if incrementally updated rows or tables differ from those computed from scratch.
    """
    generator = Generator(seed)
    tiers = seed % 3 != 0
    options = Options(tiers=tiers, cut=seed % 5 == 0, log_group=9 if seed % 7 == 0 else -1, unknown=seed % 4 == 1)
    objects = generator.cluster()
    if not tiers:
        objects = {key: item for key, item in objects.items() if key[0] != "ClusterNetworkPolicy"}
        generator = Generator(seed + 1_000_000_000, cluster_policies=False)
    cluster = ClusterState.from_objects(objects.values())
    policy = _policy(cluster, options)
    cluster.policy.pop_changes()
    policy.table.pop_journal()
    table = desired_table(policy.table.rows, options)
    wrong: list[str] = []
    for step in range(STEPS):
        judge = Oracle(objects.values(), "node1", NODE_ADDRESSES, _POD_RANGES if options.unknown else ())
        interpreter = Interpreter(table)
        user_space = policy.judge()
        for packet in generator.packets(PACKETS):
            unknown = judge.is_unknown(packet)
            expected = judge.allowed(packet) and not unknown
            if interpreter.allowed(packet, frozenset(NODE_ADDRESSES), _PRIORITIES[seed % 4]) != expected:
                wrong.append(
                    f"seed {seed} step {step}: {packet}: the oracle says {'allowed' if expected else 'denied'}"
                )
            if unknown:
                assert any(policy.is_unknown(packed(end)) for end in (packet.source, packet.destination))
                continue
            ends = packed(packet.source), packed(packet.destination)
            by_rows = packet.from_node or user_space.allows(*ends, _NUMBERS[packet.protocol], packet.port)
            if by_rows != expected:
                wrong.append(f"seed {seed} step {step}: {packet}: judged otherwise in user space")
            if not packet.from_node and _explained(policy, cluster, packet, tiers) != expected:
                wrong.append(f"seed {seed} step {step}: {packet}: explained otherwise")
        again = _policy(ClusterState.from_objects(objects.values()), options)
        assert not difference(policy.table.rows, again.table.rows), f"seed {seed} step {step}"
        before = dict(objects)
        generator.change(objects)
        follow(cluster, before, objects)
        if cluster.refusals:
            # The last valid version of a policy stays in force, which the stateless oracle cannot know.
            break
        policy.update(cluster.policy.pop_changes())
        change = change_of(policy.table.pop_journal(), policy.table.rows, options)
        assert change == difference(table, desired_table(policy.table.rows, options)), f"seed {seed} step {step}"
        table.update(change.added)
        table.update({key: new for key, (_old, new) in change.replaced.items()})
        for key in change.removed:
            del table[key]
    return wrong


def _explained(policy: NodePolicy, cluster: ClusterState, packet: Packet, tiers: bool) -> bool:
    """Return whether the explanation says that this node lets a packet pass."""
    verdicts = Verdicts(cluster.policy, policy.owners, tiers, policy.too_large)
    ends = [(EGRESS, packet.source, packet.destination), (INGRESS, packet.destination, packet.source)]
    for direction, own, peer in ends:
        raw, other = packed(own), packed(peer)
        assert raw is not None and other is not None
        owner = policy.owners.owners.get(raw)
        if owner is not None and owner.node_name == "node1":
            flow = Flow(other, packet.protocol, packet.port)
            if not verdicts.side(direction, raw, flow).allowed:
                return False
    return True


def follow(cluster: ClusterState, before: dict[Any, Any], now: dict[Any, Any]) -> None:
    """Apply the objects that differ to a cluster state."""
    for key in before.keys() - now.keys():
        cluster.delete(before[key])
    for key, item in now.items():
        if before.get(key) != item:
            cluster.upsert(item)
