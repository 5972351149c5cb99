# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random clusters and changes: the rendered table, executed by an interpreter, compared with the oracle."""

from __future__ import annotations

from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed, parse_network
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.policies.policy_model import EGRESS, INGRESS
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import BOUND, HERE, POD_LINK
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.verdicts import Flow, Verdicts
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import (
    change_of,
    desired_table,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.sets import Options
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
#: Pods of the node and of others, and an address of the node; two ranges overlap.
_EGRESS_EXEMPT = ("10.244.1.12/30", "10.244.2.0/24", "10.244.2.0/28", "172.18.0.2/32", "fd00:10:244:1::/64")


def _policy(cluster: ClusterState, options: Options, portion: int = 1) -> NodePolicy:
    ranges = [parse_network(text) for text in _POD_RANGES] if options.unknown else []
    egress_exempt = [parse_network(text) for text in _EGRESS_EXEMPT] if options.egress_exempt else []
    return NodePolicy(
        "node1", cluster.policy, _OWN, options.tiers, pod_ranges=ranges, egress_exempt=egress_exempt, portion=portion
    )


def _link(policy: NodePolicy) -> None:
    """Let all pods of the node be behind one interface."""
    own = [address for local in policy.local.values() for address in local.at]
    policy.set_links([(POD_LINK, "pods"), *((BOUND, "pods", each) for each in own), *((HERE, each) for each in own)])


def _apply(change: Any, table: dict[Any, Any]) -> None:
    table.update(change.added)
    table.update({key: new for key, (_old, new) in change.replaced.items()})
    for key in change.removed:
        del table[key]


def differences(seed: int) -> list[str]:
    """Return one line for each packet of a random, changing cluster on which the interpreter and the oracle disagree.

    Raises AssertionError if incrementally updated rows or tables differ from those computed from scratch.
    """
    generator = Generator(seed)
    tiers = seed % 3 != 0
    options = Options(
        tiers=tiers,
        cut=seed % 5 == 0,
        log_group=9 if seed % 7 == 0 else -1,
        unknown=seed % 4 == 1,
        egress_exempt=seed % 11 < 3,
    )
    objects = generator.cluster()
    if not tiers:
        objects = {key: item for key, item in objects.items() if key[0] != "ClusterNetworkPolicy"}
        generator = Generator(seed + 1_000_000_000, cluster_policies=False)
    cluster = ClusterState.from_objects(objects.values())
    policy = _policy(cluster, options)
    _link(policy)
    cluster.policy.pop_changes()
    policy.table.pop_journal()
    table = desired_table(policy.table.rows, options)
    wrong: list[str] = []
    for step in range(STEPS):
        ranges, egress_exempt = _POD_RANGES if options.unknown else (), _EGRESS_EXEMPT if options.egress_exempt else ()
        judge = Oracle(objects.values(), "node1", NODE_ADDRESSES, ranges, egress_exempt)
        interpreter = Interpreter(table)
        user_space = policy.judge()
        for packet in generator.packets(PACKETS):
            unknown = judge.is_unknown(packet)
            expected = judge.allowed(packet) and not unknown
            own, other = ("pods", "eth0") if judge.own_at(packet.source) else ("eth0", "pods")
            if interpreter.allowed(packet, frozenset(NODE_ADDRESSES), _PRIORITIES[seed % 4], own) != expected:
                wrong.append(
                    f"seed {seed} step {step}: {packet}: the oracle says {'allowed' if expected else 'denied'}"
                )
            if not packet.from_node and interpreter.allowed(packet, interface=other, routed_back=False):
                wrong.append(f"seed {seed} step {step}: {packet}: allowed with a forged source")
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
        _link(again)
        assert not difference(policy.table.rows, again.table.rows), f"seed {seed} step {step}"
        before = dict(objects)
        generator.change(objects)
        follow(cluster, before, objects)
        if cluster.refusals:
            # The last valid version of a policy stays in force, which the stateless oracle cannot know.
            break
        policy.update(cluster.policy.pop_changes())
        while policy.pending:
            policy.proceed()
        _link(policy)
        change = change_of(policy.table.pop_journal(), policy.table.rows, options)
        assert change == difference(table, desired_table(policy.table.rows, options)), f"seed {seed} step {step}"
        _apply(change, table)
    return wrong


def gradual_differences(seed: int) -> tuple[int, list[str]]:
    """Start the pods of the node of a random cluster, and end them, while grants follow pod by pod.

    Between the transactions no packet may pass that the oracle denies, and a packet that the oracle allows may be
    denied only if one of its ends is a new pod, or an address that now belongs to another pod than before. After each
    pod something else changes as well. Return how often grants followed later, and one line for each packet for which
    this is wrong.
    """
    generator = Generator(seed, cluster_policies=seed % 2 == 0)
    options = Options(tiers=seed % 2 == 0, unknown=seed % 3 == 0)
    objects = generator.cluster()
    own = [key for key, item in objects.items() if item["kind"] == "Pod" and item["spec"]["nodeName"] == "node1"]
    pods = {key: objects.pop(key) for key in own}
    cluster = ClusterState.from_objects(objects.values())
    policy = _policy(cluster, options)
    table = desired_table(policy.table.rows, options)
    cluster.policy.pop_changes()
    policy.table.pop_journal()
    later = 0
    wrong: list[str] = []
    for key in (*own, *own):
        before = dict(objects)
        if objects.pop(key, None) is None:
            objects[key] = pods[key]
        between = dict(objects)
        generator.change(objects)
        for earlier, now in ((before, between), (between, objects)):
            follow(cluster, earlier, now)
            if cluster.refusals:
                return later, wrong
            policy.update(cluster.policy.pop_changes())
            ranges = _POD_RANGES if options.unknown else ()
            former, judge = (Oracle(each.values(), "node1", NODE_ADDRESSES, ranges) for each in (earlier, now))
            packets = generator.packets(PACKETS)
            while True:
                _apply(change_of(policy.table.pop_journal(), policy.table.rows, options), table)
                interpreter = Interpreter(table)
                for packet in packets:
                    expected = judge.allowed(packet) and not judge.is_unknown(packet)
                    found = interpreter.allowed(packet, frozenset(NODE_ADDRESSES))
                    ends = packet.source, packet.destination
                    may_wait = policy.pending and any(_is_new(end, former, judge) for end in ends)
                    if found != expected and not (may_wait and expected):
                        verdict = "allowed" if expected else "denied"
                        wrong.append(f"seed {seed} {key}: {packet}: the oracle says {verdict}")
                if not policy.pending:
                    break
                later += 1
                policy.proceed()
            again = _policy(ClusterState.from_objects(now.values()), options)
            assert not difference(policy.table.rows, again.table.rows), f"seed {seed} {key}"
    return later, wrong


def _is_new(address: str, former: Oracle, judge: Oracle) -> bool:
    """Return whether an address belongs to other pods than before, as where one of several pods with it has ended."""
    before, now = ([each.pod_at(address), *each.own_at(address)] for each in (former, judge))
    uids = [{pod["metadata"]["uid"] for pod in pods if pod is not None} for pods in (before, now)]
    return bool(uids[1]) and uids[0] != uids[1]


def _explained(policy: NodePolicy, cluster: ClusterState, packet: Packet, tiers: bool) -> bool:
    """Return whether the explanation says that this node lets a packet pass."""
    verdicts = Verdicts(cluster.policy, policy.owners, tiers, policy.too_large)
    ends = [(EGRESS, packet.source, packet.destination), (INGRESS, packet.destination, packet.source)]
    for direction, own, peer in ends:
        raw, other = packed(own), packed(peer)
        assert raw is not None and other is not None
        egress_exempt = direction == EGRESS and policy.is_egress_exempt(other)
        if raw in policy.owners.local and not egress_exempt:
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
