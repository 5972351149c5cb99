# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random small clusters with every feature of policies, invalid objects included, and random changes of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

from .oracle import Packet

Raw = dict[str, Any]
NAMESPACES = ("shop", "bank", "lab", "void")
LABELS = {"app": ("web", "db", "tool"), "tier": ("front", "back", ""), "k": ("1",)}
TEAMS = {"team": ("red", "blue"), "env": ("prod", "dev")}
PORT_NAMES = ("http", "dns", "sig")
PORTS = (53, 80, 8080, 8443)
NODE_ADDRESSES = ("172.18.0.2", "fd00:172:18::2", "10.244.1.1", "fd00:10:244:1::1")
OUTSIDE = ("203.0.113.10", "203.0.113.200", "2001:db8:113::10", "2001:db8:113::200", "172.18.0.3", "fd00:172:18::3")
PODS = [(1, number) for number in range(11, 17)] + [(2, 11), (2, 12), (3, 11)]
_RANGES_4 = ("0.0.0.0/0", "10.244.0.0/16", "10.244.1.0/24", "10.244.1.12/30", "10.244.2.0/24", "203.0.113.0/24",
             "203.0.113.128/25", "203.0.113.10/32", "172.18.0.0/24", "203.000.113.200/32", "::ffff:203.0.113.0/120",
             "203.0.113.77/24", "10.244.1.11/32")  # fmt: skip
_RANGES_6 = ("::/0", "fd00:10:244::/48", "fd00:10:244:1::/64", "fd00:10:244:1::12/127", "2001:db8:113::/64",
             "2001:db8:113::200/120", "2001:db8:113::10/128", "fd00:172:18::/64")  # fmt: skip
_BAD_RANGES = ("not-a-range", "10.0.0.0", "10.0.0.0/33", "", 5, None)


class Generator:
    """Generate random objects. ``odd``: the probability that a part is invalid."""

    def __init__(self, seed: int, cluster_policies: bool = True, odd: float = 0.06) -> None:
        self._random = random.Random(seed)
        self._odd = odd
        self._cluster_policies = cluster_policies
        self._serial = 0

    # ---- clusters

    def cluster(self) -> dict[tuple[str, str, str], Raw]:
        """Return a cluster, by kind, namespace and name."""
        items = [self.namespace(name) for name in NAMESPACES[:3]]
        items += [self.pod(place) for place in PODS if self._chance(0.9)]
        items += [self.pod(self._random.choice(PODS)) for _ in range(self._random.choice((0, 0, 1, 2)))]
        items += [self.policy() for _ in range(self._random.randint(1, 7))]
        if self._cluster_policies and self._chance(0.5):
            items += [self.node(number) for number in (2, 3)]
            items += [self.cluster_policy() for _ in range(self._random.randint(1, 4))]
        return {self._key(item): item for item in items}

    def change(self, objects: dict[tuple[str, str, str], Raw]) -> None:
        """Change a cluster in place: add, replace or delete an object."""
        kinds = ["pod", "relabel", "policy", "policy", "namespace", "delete"]
        if self._cluster_policies:
            kinds += ["cluster", "node"]
        kind = self._random.choice(kinds)
        if kind == "delete" and objects:
            del objects[self._random.choice(sorted(objects))]
            return
        pods = [item for item in objects.values() if item["kind"] == "Pod"]
        policies = sorted(key for key in objects if key[0].endswith("NetworkPolicy"))
        if kind == "relabel" and pods:
            item = copy.deepcopy(self._random.choice(pods))
            item["metadata"]["labels"] = self._labels(LABELS)
        elif kind == "namespace":
            item = self.namespace(self._random.choice(NAMESPACES))
        elif kind == "node":
            item = self.node(self._random.choice((2, 3)))
        elif kind == "cluster":
            item = self.cluster_policy()
        elif kind == "policy" or not pods:
            item = self.policy()
        else:
            item = self.pod(self._random.choice(PODS))
        if policies and item["kind"].endswith("NetworkPolicy") and self._chance(0.6):
            same = [key for key in policies if key[0] == item["kind"]]
            if same:
                _kind, namespace, name = self._random.choice(same)
                item["metadata"] = {"name": name, **({"namespace": namespace} if namespace else {})}
        objects[self._key(item)] = item

    @staticmethod
    def _key(item: Raw) -> tuple[str, str, str]:
        return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]

    def _chance(self, likelihood: float) -> bool:
        return self._random.random() < likelihood

    def _name(self, prefix: str) -> str:
        self._serial += 1
        return f"{prefix}{self._serial}"

    def _labels(self, known: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        return {key: self._random.choice(values) for key, values in known.items() if self._chance(0.7)}

    # ---- objects

    def namespace(self, name: str) -> Raw:
        labels = self._labels(TEAMS)
        if self._chance(0.9):
            labels["kubernetes.io/metadata.name"] = name
        return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}}

    def node(self, number: int) -> Raw:
        """Return a Node whose name is not that of the node under test; it may have its address, or a client's."""
        listed = self._random.sample((*NODE_ADDRESSES, "203.0.113.7", "198.51.100.1"), 2)
        status = {"addresses": [{"type": "InternalIP", "address": each} for each in listed]}
        metadata = {"name": f"node{number}", "labels": self._labels(TEAMS)}
        return {"kind": "Node", "apiVersion": "v1", "metadata": metadata, "status": status}

    def pod(self, place: tuple[int, int]) -> Raw:
        subnet, number = place
        addresses = [f"10.244.{subnet}.{number}", f"fd00:10:244:{subnet}::{number}"]
        if self._chance(0.12):
            addresses = [self._random.choice(addresses)]
        metadata: Raw = {
            "name": self._name("pod"),
            "namespace": self._random.choice(NAMESPACES),
            "labels": self._labels(LABELS),
            "creationTimestamp": f"2026-01-01T00:00:{self._random.randint(10, 13)}Z",
            "uid": f"{self._random.getrandbits(40):010x}",
        }
        if self._chance(0.08):
            metadata["deletionTimestamp"] = "2026-01-02T00:00:00Z"
        # Of another node, it claims an address that it does not have.
        node = 2 if subnet == 1 and self._chance(0.1) else subnet
        spec: Raw = {"nodeName": f"node{node}", "containers": [self._container() for _ in range(2)]}
        if self._chance(0.15):
            spec["initContainers"] = [self._container()]
            if self._chance(0.5):
                spec["initContainers"][0]["restartPolicy"] = "Always"
        status: Raw = {"phase": "Running", "podIP": addresses[0], "podIPs": [{"ip": each} for each in addresses]}
        if self._chance(0.08):
            status["phase"] = self._random.choice(("Succeeded", "Failed"))
        elif self._chance(0.06):
            status = {"phase": "Pending"}
        elif self._chance(0.06):
            del status["podIPs"]
        elif self._chance(0.06):
            spec["hostNetwork"] = True
            own = [f"172.18.0.{subnet + 1}", f"fd00:172:18::{subnet + 1}"]
            status.update(podIP=own[0], podIPs=[{"ip": each} for each in own])
        return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec, "status": status}

    def _container(self) -> Raw:
        ports = []
        for name in PORT_NAMES:
            if self._chance(0.4):
                port: Raw = {"name": name, "containerPort": self._random.choice(PORTS)}
                if self._chance(0.4):
                    port["protocol"] = self._random.choice(("TCP", "UDP", "SCTP"))
                ports.append(port)
        return {"name": "c", "image": "x", "ports": ports}

    def _selector(self, known: Mapping[str, tuple[str, ...]], odd: bool = True) -> Any:
        if odd and self._chance(self._odd):
            return self._random.choice(
                (
                    {"matchExpressions": [{"key": "app", "operator": "Gt", "values": ["1"]}]},
                    {"matchExpressions": [{"key": "app", "operator": "In", "values": []}]},
                    {"matchLabels": {"app": 3}},
                    {"matchExpressions": [{"key": "app", "operator": "Exists", "values": ["web"]}]},
                    "everything",
                    {"matchLabel": {"app": "web"}},
                )
            )
        selector: Raw = {}
        if self._chance(0.45):
            key = self._random.choice(list(known))
            selector["matchLabels"] = {key: self._random.choice(known[key])}
        if self._chance(0.3):
            selector["matchExpressions"] = [self._expression(known) for _ in range(self._random.randint(1, 2))]
        return selector

    def _expression(self, known: Mapping[str, tuple[str, ...]]) -> Raw:
        key = self._random.choice([*known, "absent"])
        operator = self._random.choice(("In", "NotIn", "Exists", "DoesNotExist"))
        found: Raw = {"key": key, "operator": operator}
        if operator in ("In", "NotIn"):
            values = known.get(key, ("x",))
            found["values"] = self._random.sample(values, self._random.randint(1, len(values)))
        return found

    def policy(self) -> Raw:
        spec: Raw = {}
        if self._chance(0.92):
            spec["podSelector"] = self._selector(LABELS) if self._chance(0.6) else {}
        types = [each for each in ("Ingress", "Egress") if self._chance(0.6)]
        if types or self._chance(0.5):
            spec["policyTypes"] = types
        for field, peers in (("ingress", "from"), ("egress", "to")):
            if self._chance(0.75):
                spec[field] = [self._rule(peers) for _ in range(self._random.choice((0, 1, 1, 2, 3)))]
        if self._chance(self._odd / 2):
            spec["ingress"] = [None]
        metadata = {"name": self._name("policy"), "namespace": self._random.choice(NAMESPACES)}
        return {"kind": "NetworkPolicy", "apiVersion": "networking.k8s.io/v1", "metadata": metadata, "spec": spec}

    def _rule(self, peers: str) -> Any:
        rule: Raw = {}
        if self._chance(0.8):
            rule[peers] = [self._peer() for _ in range(self._random.choice((0, 1, 1, 2, 3)))]
        if self._chance(0.6):
            rule["ports"] = [self._port() for _ in range(self._random.choice((0, 1, 1, 2)))]
        return rule

    def _peer(self) -> Any:
        if self._chance(self._odd):
            return self._random.choice(
                ({}, None, {"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}, "x", {"a": 1})
            )
        kind = self._random.choice(("pods", "namespaces", "both", "block", "block"))
        peer: Raw = {}
        if kind in ("pods", "both"):
            peer["podSelector"] = self._selector(LABELS)
        if kind in ("namespaces", "both"):
            peer["namespaceSelector"] = self._selector({**TEAMS, "kubernetes.io/metadata.name": NAMESPACES})
        return peer or {"ipBlock": self._block()}

    def _block(self) -> Any:
        ranges = self._random.choice((_RANGES_4, _RANGES_4, _RANGES_6))
        cidr: Any = self._random.choice(ranges)
        if self._chance(self._odd):
            cidr = self._random.choice(_BAD_RANGES)
        block: Raw = {"cidr": cidr}
        if self._chance(0.4):
            block["except"] = [self._random.choice(ranges) for _ in range(self._random.randint(1, 2))]
        return block

    def _port(self) -> Any:
        if self._chance(self._odd):
            return self._random.choice(
                (
                    {"port": 0},
                    {"port": 80, "endPort": 1},
                    {"endPort": 9000},
                    {"protocol": "ICMP", "port": 8},
                    {"port": "http", "endPort": 81},
                    {"port": 65536},
                    {"port": "80"},
                    None,
                )
            )
        port: Raw = {}
        if self._chance(0.5):
            port["protocol"] = self._random.choice(("TCP", "UDP", "SCTP"))
        kind = self._random.choice(("all", "number", "number", "range", "name"))
        if kind == "name":
            port["port"] = self._random.choice(PORT_NAMES)
        elif kind != "all":
            port["port"] = self._random.choice(PORTS)
        if kind == "range":
            port["endPort"] = self._random.choice([each for each in (*PORTS, 65535) if each >= port["port"]])
        return port

    def cluster_policy(self) -> Raw:
        spec: Raw = {
            "tier": self._random.choice(("Admin", "Baseline")),
            "priority": self._random.randint(0, 3),
            "subject": self._pods_or_namespaces(odd=False),
        }
        for field, peers in (("ingress", "from"), ("egress", "to")):
            if self._chance(0.8):
                spec[field] = [self._cluster_rule(peers) for _ in range(self._random.randint(0, 3))]
        metadata = {"name": self._name("cluster")}
        version = "policy.networking.k8s.io/v1alpha2"
        return {"kind": "ClusterNetworkPolicy", "apiVersion": version, "metadata": metadata, "spec": spec}

    def _pods_or_namespaces(self, odd: bool = True) -> Raw:
        namespaces = {**TEAMS, "kubernetes.io/metadata.name": NAMESPACES}
        if self._chance(0.5):
            return {"namespaces": self._selector(namespaces, odd)}
        found: Raw = {"podSelector": self._selector(LABELS, odd)}
        if self._chance(0.5):
            found["namespaceSelector"] = self._selector(namespaces, odd)
        return {"pods": found}

    def _cluster_rule(self, peers: str) -> Raw:
        rule: Raw = {"action": self._random.choice(("Accept", "Deny", "Pass")), "name": "r"}
        networks = False
        rule[peers] = []
        for _ in range(self._random.randint(1, 2)):
            if self._chance(self._odd):
                rule[peers].append(self._random.choice(({"domainNames": ["x.example"]}, {})))
            elif peers == "to" and self._chance(0.15):
                networks = True
                rule[peers].append({"nodes": self._selector(TEAMS, odd=True)})
            elif peers == "to" and self._chance(0.4):
                networks = True
                ranges = self._random.choice((_RANGES_4, _RANGES_6))
                rule[peers].append({"networks": [self._random.choice(ranges) for _ in range(2)]})
            else:
                rule[peers].append(self._pods_or_namespaces())
        if self._chance(0.6):
            rule["protocols"] = [self._cluster_port(networks) for _ in range(self._random.randint(1, 2))]
        return rule

    def _cluster_port(self, networks: bool) -> Raw:
        if self._chance(self._odd):
            return self._random.choice(({"dccp": {}}, {"tcp": {"destinationPort": {"number": 0}}}))
        if not networks and self._chance(0.25):
            return {"destinationNamedPort": self._random.choice(PORT_NAMES)}
        kind = self._random.choice(("tcp", "tcp", "udp", "sctp"))
        form = self._random.choice(("all", "number", "range"))
        if form == "all":
            return {kind: {}}
        number = self._random.choice(PORTS)
        if form == "number":
            return {kind: {"destinationPort": {"number": number}}}
        return {kind: {"destinationPort": {"range": {"start": number, "end": self._random.choice((8443, 9000))}}}}

    # ---- packets

    def packets(self, count: int) -> list[Packet]:
        """Return packets between pods, nodes and external hosts, through the node under test."""
        found: list[Packet] = []
        while len(found) < count:
            packet = self._packet()
            if packet is not None:
                found.append(packet)
        return found

    def _packet(self) -> Packet | None:
        six = self._chance(0.4)
        template = "fd00:10:244:{}::{}" if six else "10.244.{}.{}"
        pods = [template.format(*place) for place in PODS]
        others = [each for each in OUTSIDE if (":" in each) == six]
        nodes = [each for each in NODE_ADDRESSES if (":" in each) == six]
        protocol = self._random.choice(("tcp", "tcp", "tcp", "udp", "sctp", "icmp"))
        allowed_ports = {"tcp": (80, 8080, 8443), "udp": (53, 8080), "sctp": (8080,), "icmp": (0,)}[protocol]
        port = self._random.choice(allowed_ports)
        own = self._random.choice(pods[:6])
        kind = self._random.choice(("out", "out", "in", "in", "node", "to node", "self"))
        if kind == "node":
            return Packet(nodes[0], own, protocol, port, from_node=True)
        if kind == "to node":
            return Packet(own, self._random.choice(nodes), protocol, port, to_node=True)
        if kind == "self":
            return Packet(own, own, protocol, port) if protocol != "icmp" else None
        peer = self._random.choice([*pods, *others])
        if peer == own:
            return None
        return Packet(own, peer, protocol, port) if kind == "out" else Packet(peer, own, protocol, port)
