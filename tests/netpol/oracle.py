# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decide which packets network policies allow, strictly by the specification.

The oracle reads raw objects and shares no code with the project; it is slow and simple on purpose. Sources:
networking.k8s.io/v1 NetworkPolicy and policy.networking.k8s.io/v1alpha2 ClusterNetworkPolicy, their validation and
documentation; where these are silent, docs/network-policy.md.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, Union

Raw = dict[str, Any]
PROTOCOLS = {"tcp": "TCP", "udp": "UDP", "sctp": "SCTP"}
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


class Packet(NamedTuple):
    """The first packet of a connection after Service translation. ``protocol`` is tcp, udp, sctp or icmp.

    ``from_node``: sent by a process of the node under test. ``to_node``: to one.
    """

    source: str
    destination: str
    protocol: str
    port: int = 0
    from_node: bool = False
    to_node: bool = False
    by_service: bool = False


class Bad(Exception):
    """A part of a policy is invalid."""


def _check(condition: object) -> None:
    if not condition:
        raise Bad


def selector_matches(selector: Any, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches. Raises Bad if it is invalid."""
    _check(isinstance(selector, dict) and set(selector) <= {"matchLabels", "matchExpressions"})
    result = True
    wanted = selector.get("matchLabels")
    _check(wanted is None or isinstance(wanted, dict))
    for key, value in (wanted or {}).items():
        _check(isinstance(value, str))
        result &= labels.get(key) == value
    expressions = selector.get("matchExpressions")
    _check(expressions is None or isinstance(expressions, list))
    for item in expressions or []:
        _check(isinstance(item, dict) and isinstance(item.get("key"), str) and item["key"])
        values, operator, key = item.get("values") or [], item.get("operator"), item["key"]
        _check(isinstance(values, list) and all(isinstance(value, str) for value in values))
        if operator == "In":
            _check(values)
            result &= key in labels and labels[key] in values
        elif operator == "NotIn":
            _check(values)
            result &= key not in labels or labels[key] not in values
        elif operator == "Exists":
            _check(not values)
            result &= key in labels
        elif operator == "DoesNotExist":
            _check(not values)
            result &= key not in labels
        else:
            raise Bad
    return result


Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]


def network(text: Any) -> Network:
    """Parse an address range. Leading zeros are decimal, and IPv4-mapped ranges are IPv4. Raises Bad."""
    _check(isinstance(text, str) and text.count("/") == 1)
    base, length = text.split("/")
    _check(length.isascii() and length.isdecimal())
    if ":" not in base:
        base = ".".join(str(int(part)) if part.isascii() and part.isdecimal() else part for part in base.split("."))
    try:
        address = ipaddress.ip_address(base)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            _check(int(length) >= 96)
            return ipaddress.ip_network(f"{address.ipv4_mapped}/{int(length) - 96}", strict=False)
        return ipaddress.ip_network(f"{base}/{int(length)}", strict=False)
    except ValueError as error:
        raise Bad from error


class Oracle:
    """Decide about packets for the pods of one node, in a cluster of raw objects.

    ``pod_ranges``: where addresses of no known pod exchange packets with their own node only. ``egress_exempt``: ranges
    of destinations to which no egress rule is applied.
    """

    def __init__(
        self,
        objects: Iterable[Raw],
        node: str = "node1",
        node_addresses: Iterable[str] = (),
        pod_ranges: Iterable[str] = (),
        egress_exempt: Iterable[str] = (),
    ) -> None:
        by_key = {(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]): item for item in objects}
        items = list(by_key.values())
        self._node = node
        self._own = set(map(ipaddress.ip_address, node_addresses))
        self._ranges = list(map(ipaddress.ip_network, pod_ranges))
        self._egress_exempt = list(map(ipaddress.ip_network, egress_exempt))
        self.pods = [item for item in items if item["kind"] == "Pod" and self._counts(item)]
        self.namespaces = {
            item["metadata"]["name"]: item["metadata"].get("labels") or {}
            for item in items
            if item["kind"] == "Namespace"
        }
        self.policies = [item for item in items if item["kind"] == "NetworkPolicy"]
        self.cluster_policies = [item for item in items if item["kind"] == "ClusterNetworkPolicy"]
        self.nodes = [item for item in items if item["kind"] == "Node"]

    @staticmethod
    def _counts(pod: Raw) -> bool:
        ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        return not ended and not (pod.get("spec") or {}).get("hostNetwork")

    @staticmethod
    def _addresses(pod: Raw) -> set[Any]:
        status = pod.get("status") or {}
        listed = [item["ip"] for item in status.get("podIPs") or []]
        if not listed and status.get("podIP"):
            listed = [status["podIP"]]
        return set(map(ipaddress.ip_address, listed))

    def is_unknown(self, packet: Packet) -> bool:
        """Return whether an end of a packet between pods is in the ranges, and no pod has its address."""
        if packet.from_node or packet.to_node:
            return False
        return any(
            ipaddress.ip_address(end) in each and self.pod_at(end) is None
            for end in (packet.source, packet.destination)
            for each in self._ranges
        )

    def pod_at(self, address: str) -> Optional[Raw]:
        """Return the pod that owns an address."""
        value = ipaddress.ip_address(address)
        if value in self._own:
            return None
        found = [pod for pod in self.pods if value in self._addresses(pod)]

        def strength(pod: Raw) -> tuple[bool, bool, str, str]:
            metadata = pod["metadata"]
            created, uid = metadata.get("creationTimestamp") or "", metadata.get("uid") or ""
            return not metadata.get("deletionTimestamp"), self._is_own(pod), created, uid

        return max(found, key=strength) if found else None

    def own_at(self, address: str) -> list[Raw]:
        """Return the pods of the node that claim an address, whose policies add up."""
        value = ipaddress.ip_address(address)
        claims = [pod for pod in self.pods if value in self._addresses(pod) and self._is_own(pod)]
        return [] if value in self._own else claims

    def _is_own(self, pod: Raw) -> bool:
        return bool((pod.get("spec") or {}).get("nodeName") == self._node)

    def allowed(self, packet: Packet) -> bool:
        """Return whether the node lets the packet pass."""
        source, destination = self.pod_at(packet.source), self.pod_at(packet.destination)
        if packet.from_node:
            return True
        judged = not any(ipaddress.ip_address(packet.destination) in each for each in self._egress_exempt)
        senders, receivers = self.own_at(packet.source), self.own_at(packet.destination)
        if judged and senders and not self._side(packet, "Egress", senders, destination):
            return False
        if packet.to_node:
            return True
        return not receivers or self._side(packet, "Ingress", receivers, source)

    def _side(self, packet: Packet, direction: str, own: list[Raw], peer: Optional[Raw]) -> bool:
        itself = packet.source == packet.destination
        verdict = self._tier("Admin", packet, direction, own, peer)
        if verdict:
            return verdict == "Accept"
        isolating = [policy for policy in self.policies if any(self._isolates(policy, direction, pod) for pod in own)]
        if isolating:
            return itself or any(self._policy_allows(policy, packet, direction, own, peer) for policy in isolating)
        return self._tier("Baseline", packet, direction, own, peer) != "Deny"

    # ---- NetworkPolicy

    def _isolates(self, policy: Raw, direction: str, pod: Raw) -> bool:
        spec = policy.get("spec") or {}
        if policy["metadata"]["namespace"] != pod["metadata"]["namespace"]:
            return False
        types = spec.get("policyTypes") or (["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])
        if direction not in types:
            return False
        try:
            return selector_matches(spec.get("podSelector") or {}, pod["metadata"].get("labels") or {})
        except Bad:
            return False

    def _policy_allows(self, policy: Raw, packet: Packet, direction: str, own: list[Raw], peer: Optional[Raw]) -> bool:
        field, peers_field = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
        other = packet.source if direction == "Ingress" else packet.destination
        targets = own if direction == "Ingress" else [peer]
        for rule in (policy.get("spec") or {}).get(field) or []:
            if not isinstance(rule, dict):
                continue
            peers, ports = rule.get(peers_field), rule.get("ports")
            namespace = policy["metadata"]["namespace"]
            if peers and not (isinstance(peers, list) and any(self._peer(p, other, peer, namespace) for p in peers)):
                continue
            if ports and not (
                isinstance(ports, list) and any(self._port(p, packet, pod) for p in ports for pod in targets)
            ):
                continue
            return True
        return False

    def _peer(self, item: Any, address: str, pod: Optional[Raw], namespace: str) -> bool:
        try:
            _check(isinstance(item, dict))
            given = {
                name: item[name]
                for name in ("podSelector", "namespaceSelector", "ipBlock")
                if item.get(name) is not None
            }
            _check(given)
            if "ipBlock" in given:
                _check(len(given) == 1)
                return self._block(given["ipBlock"], address)
            labels = pod["metadata"].get("labels") or {} if pod is not None else {}
            matches = selector_matches(given.get("podSelector", {}), labels)
            if "namespaceSelector" in given:
                name = pod["metadata"]["namespace"] if pod is not None else ""
                matches &= selector_matches(given["namespaceSelector"], self.namespaces.get(name, {}))
                matches &= name in self.namespaces
            else:
                matches &= pod is not None and pod["metadata"]["namespace"] == namespace
            return matches and pod is not None
        except Bad:
            return False

    @staticmethod
    def _block(block: Any, address: str) -> bool:
        _check(isinstance(block, dict))
        whole = network(block.get("cidr"))
        excepted = block.get("except") or []
        _check(isinstance(excepted, list))
        parts = [network(item) for item in excepted]
        for part in parts:
            _check(part.version == whole.version and part != whole and part.subnet_of(whole))  # type: ignore[arg-type]
        value = ipaddress.ip_address(address)
        return value in whole and not any(value in part for part in parts)

    @staticmethod
    def _named(pod: Optional[Raw], name: str, protocol: Optional[str], packet: Packet) -> bool:
        if pod is None:
            return False
        spec = pod.get("spec") or {}
        containers = list(spec.get("containers") or [])
        containers += [item for item in spec.get("initContainers") or [] if item.get("restartPolicy") == "Always"]
        return any(
            port.get("name") == name
            and (port.get("protocol") or "TCP") == PROTOCOLS.get(packet.protocol)
            and protocol in (None, PROTOCOLS.get(packet.protocol))
            and port["containerPort"] == packet.port
            for container in containers
            for port in container.get("ports") or []
        )

    def _is_port(self, ports: list[Any], packet: Packet, targets: Iterable[Optional[Raw]]) -> bool:
        return any(self._port(item, packet, pod) for item in ports for pod in targets)

    def _port(self, item: Any, packet: Packet, target: Optional[Raw]) -> bool:
        if not isinstance(item, dict):
            return False
        protocol, port, last = item.get("protocol") or "TCP", item.get("port"), item.get("endPort")
        if protocol not in ("TCP", "UDP", "SCTP"):
            return False
        if isinstance(port, str):
            valid = len(port) <= 15 and _NAME.fullmatch(port) and "--" not in port and re.search("[a-z]", port)
            return last is None and bool(valid) and self._named(target, port, protocol, packet)
        if port is None:
            return last is None and protocol == PROTOCOLS.get(packet.protocol)
        if type(port) is not int or not 1 <= port <= 65535:
            return False
        if last is None:
            last = port
        if type(last) is not int or not port <= last <= 65535:
            return False
        return protocol == PROTOCOLS.get(packet.protocol) and port <= packet.port <= last

    # ---- ClusterNetworkPolicy

    def _tier(self, tier: str, packet: Packet, direction: str, own: list[Raw], peer: Optional[Raw]) -> str:
        """Return the verdict of a tier: Accept, Deny, or empty to continue with the next one."""
        ordered = sorted(
            (policy for policy in self.cluster_policies if policy["spec"]["tier"] == tier),
            key=lambda policy: (policy["spec"]["priority"], policy["metadata"]["name"]),
        )
        for policy in ordered:
            try:
                if not any(self._pods_or_namespaces(policy["spec"]["subject"], pod) for pod in own):
                    continue
            except Bad:
                continue
            for rule in policy["spec"].get(direction.lower()) or []:
                action = rule["action"]
                try:
                    matches = self._cluster_rule(rule, packet, direction, own, peer)
                except Bad:
                    if action == "Accept":
                        continue
                    return "Deny"
                if matches:
                    return "" if action == "Pass" else action
        return ""

    def _pods_or_namespaces(self, item: Any, pod: Optional[Raw]) -> bool:
        _check(isinstance(item, dict))
        given = [name for name in item if item[name] is not None]
        _check(given in (["namespaces"], ["pods"]))
        namespaces = item["namespaces"] if given == ["namespaces"] else item["pods"].get("namespaceSelector") or {}
        pods = {} if given == ["namespaces"] else item["pods"].get("podSelector") or {}
        name = pod["metadata"]["namespace"] if pod is not None else ""
        first = selector_matches(namespaces, self.namespaces.get(name, {}))
        second = selector_matches(pods, pod["metadata"].get("labels") or {} if pod is not None else {})
        return first and second and pod is not None and name in self.namespaces

    def _cluster_rule(self, rule: Raw, packet: Packet, direction: str, own: list[Raw], peer: Optional[Raw]) -> bool:
        peers = rule.get("from" if direction == "Ingress" else "to")
        _check(peers)
        targets = own if direction == "Ingress" else [peer]
        # Every peer is checked, since an invalid one counts even if another one matches.
        by_peer = []
        for item in peers:  # type: ignore[union-attr]
            if direction == "Egress" and list(item) == ["networks"]:
                _check(item["networks"])
                ranges = [network(text) for text in item["networks"]]
                by_peer.append(any(ipaddress.ip_address(packet.destination) in part for part in ranges))
            elif direction == "Egress" and list(item) == ["nodes"]:
                by_peer.append(
                    any(
                        packet.destination in [each["address"] for each in node["status"]["addresses"]]
                        for node in self.nodes
                        if selector_matches(item["nodes"], node["metadata"].get("labels") or {})
                    )
                )
            else:
                by_peer.append(self._pods_or_namespaces(item, peer))
        protocols = rule.get("protocols")
        _check(protocols is None or protocols)
        if any("nodes" in item for item in peers):  # type: ignore[union-attr]
            _check(not any("destinationNamedPort" in item for item in protocols or []))
        by_port = [self._cluster_port(item, packet, pod) for item in protocols or [] for pod in targets]
        return any(by_peer) and (protocols is None or any(by_port))

    def _cluster_port(self, item: Raw, packet: Packet, target: Optional[Raw]) -> bool:
        _check(len(item) == 1)
        ((kind, value),) = item.items()
        if kind == "destinationNamedPort":
            return self._named(target, value, None, packet)
        _check(kind in PROTOCOLS)
        port = value.get("destinationPort")
        if port is None:
            _check(not value)
            return packet.protocol == kind
        if list(port) == ["number"]:
            _check(1 <= port["number"] <= 65535)
            return packet.protocol == kind and packet.port == port["number"]
        _check(list(port) == ["range"])
        start, end = port["range"].get("start"), port["range"].get("end")
        _check(start and end and 1 <= start < end <= 65535)
        return packet.protocol == kind and start <= packet.port <= end
