# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether network policies let one end reach another, and which rule decides: ``explain --from END --to END``."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Optional, Sequence

from ..base.addresses import packed, unpacked, without_brackets
from ..base.errors import ProxyError
from ..cluster.model import NamespacedName
from ..cluster.policies.policy_model import EGRESS, INGRESS, Pod
from ..cluster.state import ClusterState
from ..networkpolicy.matching.owners import Address, counts
from ..networkpolicy.node_policy import NodePolicy
from ..networkpolicy.rows import ANY, BOUND, CLASS, EGRESS_EXEMPT, GRANT, ISOLATED, PORT_BOUND, PORTS
from ..networkpolicy.verdicts import ITSELF, Flow, SideVerdict, Verdicts
from ..rendering.networkpolicy.elements import Elements
from ..rendering.networkpolicy.sets import Options
from ..rendering.networkpolicy.text import describe
from .explain import Explained
from .target import PROTOCOLS as SERVICE_PROTOCOLS
from .target import Destination, End, ServiceTarget, Target

_EGRESS_EXEMPT = "not judged: the destination is in networkPolicy.egressExemptCIDRs"
_FORGED = "denied: dropped where it arrives, because its source is an address of this node or of a pod of this node"
_UNKNOWN = "denied: an address in the node's pod ranges that belongs to no known pod (networkPolicy.unknownPods)"


class Resolved(NamedTuple):
    """An address that an end resolves to. ``via``: the Service through which it is reached, or empty."""

    address: str
    port: int
    protocol: str
    via: str = ""


def resolved(endpoint: str, protocol: str, service: str) -> Resolved:
    """Return what an endpoint of a Service, ADDRESS:PORT, is to network policies."""
    address, _colon, port = endpoint.rpartition(":")
    return Resolved(without_brackets(address), int(port), protocol, service)


def service_target(end: End) -> Target:
    """Return the target of a destination that is a Service."""
    protocol = "" if end.protocol not in SERVICE_PROTOCOLS else end.protocol
    if not end.name:
        return Destination(end.address, end.port, protocol)
    return ServiceTarget(end.namespace, end.name, str(end.port) if end.port else "", protocol)


def service_endpoints(explained: Explained) -> list[Resolved]:
    """Return the endpoints to which connections to a Service are sent."""
    chosen = ((verdict.endpoint, item) for item in explained.found for verdict in item.endpoints if verdict.chosen)
    return list(dict.fromkeys(resolved(endpoint, item.protocol, item.service) for endpoint, item in chosen))


def _key(end: End) -> NamespacedName:
    return NamespacedName(end.namespace, end.name)


class PolicyExplainer:
    """Explains connections by the policies of a node.

    ``node_addresses``: of this node. ``endpoints``: of the Service that a destination names, if it names one.
    """

    def __init__(
        self,
        cluster: ClusterState,
        policy: NodePolicy,
        *,
        node_name: str,
        node_addresses: Sequence[str],
        options: Options,
        endpoints: Sequence[Resolved] = (),
    ) -> None:
        self._cluster = cluster
        self._policy = policy
        self._node_name = node_name
        self._own: set[str] = set(node_addresses)
        self._options = options
        self._endpoints = endpoints
        self._verdicts = Verdicts(cluster.policy, policy.owners, options.tiers, policy.too_large)

    def document(self, source: End, destination: End) -> dict[str, Any]:
        """Return the explanation as plain JSON values. Raises ProxyError if an end does not exist."""
        notes: list[str] = []
        targets = list(self._targets(destination, notes))
        sources = list(dict.fromkeys(self._addresses(source, notes)))
        sender = self._cluster.policy.pods.get(_key(source)) if source.name else None
        connections = [
            self._connection(address, target, sender)
            for target in targets
            for address in sources
            if (":" in address) == (":" in target.address)
        ]
        if not connections:
            raise ProxyError(f"{source} and {destination} have no addresses of the same family")
        return {
            "from": str(source),
            "to": str(destination),
            "node": self._node_name,
            "allowed": all(item["allowed"] for item in connections),
            "notes": notes,
            "connections": connections,
        }

    # ---- ends

    def _targets(self, end: End, notes: list[str]) -> Iterator[Resolved]:
        if self._endpoints and (not end.name or _key(end) not in self._cluster.policy.pods):
            notes.append(f"{end} is a Service: policies judge its endpoints, at their own addresses and ports")
            yield from self._endpoints
            yield from self._held_by_node(end, notes)
            return
        for address in self._addresses(end, notes):
            yield Resolved(address, end.port, end.protocol)

    def _held_by_node(self, end: End, notes: list[str]) -> Iterator[Resolved]:
        """Yield the addresses of a Service that this node has itself, as NodeLocal DNSCache adds them.

        What a program of the node answers there is not sent to an endpoint (network policy contract, section 3.2).
        """
        service = self._cluster.services.get(_key(end)) if end.name else None
        given = [end.address] if service is None else [service.cluster_ip_v4, service.cluster_ip_v6]
        for address in given:
            if address in self._own:
                notes.append(
                    f"{address} is also an address of this node: where a program here answers, ipBlock matches it"
                )
                yield Resolved(address, end.port, end.protocol, str(end))

    def _addresses(self, end: End, notes: list[str]) -> Iterator[str]:
        if not end.name:
            owner = self._policy.owners.owners.get(packed(end.address) or b"")
            if owner is None:
                kind = "an address of this node" if end.address in self._own else "not the address of a pod"
                notes.append(f"{end.address} is {kind}: only ipBlock can match it")
            else:
                notes.append(f"{end.address} is the address of pod {owner.key}")
            yield end.address
            return
        pod = self._cluster.policy.pods.get(_key(end))
        if pod is None:
            raise ProxyError(f"there is no pod {_key(end)}")
        if not pod.addresses:
            raise ProxyError(f"pod {_key(end)} has no address yet")
        notes += self._notes(pod)
        yield from pod.addresses

    def _notes(self, pod: Pod) -> Iterator[str]:
        if pod.ended:
            yield f"pod {pod.key} has ended: it is not a pod for policies, although it keeps its address"
        elif pod.host_network:
            yield f"pod {pod.key} is on the host's network: it is the node for policies, and only ipBlock can match it"
        elif any(self._policy.owners.owners.get(packed(address) or b"") is not pod for address in pod.addresses):
            yield f"pod {pod.key} shares an address with another pod or the node, which owns it"
        if pod.namespace not in self._cluster.policy.namespaces:
            yield f"the Namespace {pod.namespace} is not known: no namespaceSelector matches its pods"

    # ---- one connection

    def _connection(self, source: str, target: Resolved, sender: Optional[Pod]) -> dict[str, Any]:
        raw_source, raw_target = packed(source) or b"", packed(target.address) or b""
        forged = sender is not None and counts(sender) and self._policy.is_forged(sender, raw_source)
        from_node = source in self._own and not forged
        sides = [
            self._side(EGRESS, raw_source, Flow(raw_target, target.protocol, target.port), target.via, from_node=False),
            self._side(
                INGRESS, raw_target, Flow(raw_source, target.protocol, target.port), target.via, from_node=from_node
            ),
        ]
        if forged:
            sides[0].update(allowed=False, reason=_FORGED)
        return {
            "source": source,
            "destination": target.address,
            "port": target.port,
            "protocol": target.protocol,
            "service": target.via,
            "allowed": all(side["allowed"] for side in sides),
            "sides": sides,
            "programmed": [line for pair in self._programmed(raw_source, raw_target, forged) for line in pair],
        }

    def _side(self, direction: str, own: Address, flow: Flow, via: str, *, from_node: bool) -> dict[str, Any]:
        pods = self._policy.owners.judged(own)
        pod = pods[0] if pods else None
        if pod is None:
            # Traffic with its own node is never denied to an unknown pod.
            unknown = self._policy.is_unknown(own) and not {unpacked(own), unpacked(flow.peer)} & self._own
            verdict = SideVerdict(not unknown, _UNKNOWN if unknown else "not judged: not a pod")
        elif from_node and pod.node_name == self._node_name:
            verdict = SideVerdict(True, "always allowed: from the pod's own node")
        elif direction == EGRESS and self._policy.is_egress_exempt(flow.peer):
            verdict = SideVerdict(True, _EGRESS_EXEMPT)
        elif own == flow.peer and not via:
            verdict = SideVerdict(True, ITSELF)
        else:
            verdict = self._verdicts.side(direction, own, flow)
        here = pod is not None and pod.node_name == self._node_name
        return {
            "direction": direction.lower(),
            "pod": str(pod.key) if pod is not None else "",
            "node": pod.node_name if pod is not None else "",
            "judgedHere": here,
            "allowed": verdict.allowed,
            "reason": verdict.reason,
            "allowedBy": verdict.by if verdict.allowed else "",
            "deniedBy": "" if verdict.allowed else verdict.by,
            "isolatedBy": list(verdict.isolated_by),
            "misses": list(verdict.misses),
        }

    def _programmed(self, source: Address, target: Address, forged: bool) -> Iterator[list[str]]:
        """Yield the elements that the tables have for the two ends, in the syntax of the nft program.

        ``forged``: the source is not the sender's, so those that bind it to an interface or a port decide.
        """
        rows = self._policy.table.rows
        judge = self._policy.judge()
        wanted = [row for row in rows if row[0] in (BOUND, PORT_BOUND) and row[2] == source] if forged else []
        for side, own, peer in (("out", source, target), ("in", target, source)):
            if (ISOLATED, side, own) in rows:
                number = judge.class_of(peer)
                wanted += [(ISOLATED, side, own), (CLASS, peer), (ANY, side, own), (GRANT, side, number, own)]
        if self._policy.is_egress_exempt(target):
            ranges = (row for row in rows if row[0] == EGRESS_EXEMPT and len(row[1]) == len(target))
            wanted += [row for row in ranges if row[1] <= target <= row[2]]
        sets = {rows[row] for row in wanted if row in rows and row[0] in (ANY, GRANT)}
        wanted += sorted(row for row in rows if row[0] == PORTS and row[1] in sets) if sets else []
        entries = Elements(self._options).entries
        for row in dict.fromkeys(wanted):
            if row in rows:
                yield [line for key, value in entries(row, rows[row]) for line in describe(key, value)]
