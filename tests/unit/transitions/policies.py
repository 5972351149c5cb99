# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""States of pods and policies on one node, and changes of the tables of network policies, step by step.

The rows are those of the agent, with its way to find the interfaces of pods; only what the kernel says of these is
simulated. Packets are judged by ``tests.netpol.interpreter``, which knows nothing of policies.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence
from unittest import mock

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import NetworkPolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import policy as convergence
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import FAMILY_NUMBERS
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.policy_table import (
    PolicyTableResource,
    _PortsTable,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Labelled
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.pod_links import PodLink, PodLinks
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy import bridge_keys
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import (
    change_of,
    desired_table,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import Key, Value
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference
from tests.netpol.campaign import follow
from tests.netpol.interpreter import Interpreter
from tests.netpol.oracle import Packet

from .nftables import Crashed, Simulated, Steps, Table
from .states import Changes

Objects = dict[tuple[str, str, str], dict[str, Any]]
#: Tables of policies and of the ports of bridges.
Tables = tuple[Table, Table]

NODE, BRIDGE = "172.18.0.2", "cni0"
#: Addresses of pods on the node, of pods on another node, and outside the cluster.
OWN = ("10.244.1.11", "10.244.1.12")
PEERS = ("10.244.2.11", "10.244.2.12")
OUTSIDE = ("203.0.113.10", "203.0.113.200")


class PodAt(NamedTuple):
    """A pod: its name, address, label ``app``, and the number of its port ``http``."""

    name: str
    address: str
    app: str = "web"
    http: int = 8080


_PEER = PodAt("peer", PEERS[0], "peer")
_THIRD = PodAt("third", "10.244.3.11", "peer")
#: Pods, of which those with an address in OWN are on the node.
PODS: dict[str, tuple[PodAt, ...]] = {
    "none": (_PEER, _THIRD),
    "one": (PodAt("a", OWN[0]), _PEER, _THIRD),
    "moved": (PodAt("a", OWN[1]), _PEER, _THIRD),
    "two": (PodAt("a", OWN[0]), PodAt("b", OWN[1], "peer"), _PEER),
    "exchanged": (PodAt("a", OWN[1]), PodAt("b", OWN[0], "peer"), _PEER),
    "another at its address": (PodAt("b", OWN[0], "peer"), _PEER),
    "other label": (PodAt("a", OWN[0], "other"), _PEER),
    "other port": (PodAt("a", OWN[0], http=9090), _PEER._replace(http=9090)),
    "peer moved": (PodAt("a", OWN[0]), _PEER._replace(address=PEERS[1])),
    "peer not selected": (PodAt("a", OWN[0]), _PEER._replace(app="other")),
    "no peer": (PodAt("a", OWN[0]),),
}

_BLOCK = {"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.128/25"]}}
_PODS_LIKE = {"podSelector": {"matchLabels": {"app": "peer"}}}
_TEAM = {"namespaceSelector": {"matchLabels": {"team": "red"}}}


def _both(*rules: dict[str, Any]) -> dict[str, Any]:
    """Return a spec that allows rules in both directions."""
    spec: dict[str, Any] = {"policyTypes": ["Ingress", "Egress"]}
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        spec[direction] = [{peers if key == "peers" else key: value for key, value in rule.items()} for rule in rules]
    return spec


def _cluster(tier: str, action: str) -> dict[str, Any]:
    subject = {"pods": {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}}
    peers = {"pods": {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "peer"}}}}
    ports = [{"tcp": {"destinationPort": {"number": 8080}}}]
    ingress = [{"action": action, "from": [peers], "protocols": ports}]
    return {"tier": tier, "priority": 1, "subject": subject, "ingress": ingress}


_ALONE = {"ports": [{"port": 8080}]}
#: The policies by their names; those with a tier are ClusterNetworkPolicies.
POLICIES: dict[str, tuple[dict[str, Any], ...]] = {
    "none": (),
    "isolated in": ({"policyTypes": ["Ingress"]},),
    "isolated out": ({"policyTypes": ["Egress"]},),
    "isolated": (_both(),),
    "everything": (_both({}),),
    "peers": (_both({"peers": [_PODS_LIKE]}),),
    "peers by name of port": (_both({"peers": [_PODS_LIKE], "ports": [{"port": "http"}]}),),
    "port": (_both(_ALONE),),
    "range": (_both({"peers": [_BLOCK], "ports": [{"port": 8000, "endPort": 9000}, {"protocol": "UDP"}]}),),
    "block": (_both({"peers": [_BLOCK, _PODS_LIKE]}),),
    "namespace": (_both({"peers": [_TEAM]}),),
    "two policies": ({"policyTypes": ["Ingress"]}, {"podSelector": {"matchLabels": {"app": "web"}}, **_both(_ALONE)}),
    "admin denies": (_cluster("Admin", "Deny"), _both({})),
    "admin accepts": (_cluster("Admin", "Accept"), _both()),
    "baseline denies": (_cluster("Baseline", "Deny"),),
}
NAMESPACES = ("plain", "labelled", "terminating")


class State(NamedTuple):
    """Keys of PODS and POLICIES, and the namespace; a terminating one has lost its policies to the API server."""

    pods: str
    policies: str
    namespace: str = "plain"

    def objects(self) -> Objects:
        labels = {} if self.namespace == "plain" else {"team": "red"}
        metadata: dict[str, Any] = {"name": "ns", "labels": labels}
        if self.namespace == "terminating":
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        found = [{"kind": "Namespace", "metadata": metadata}, *map(_pod, PODS[self.pods])]
        found += [] if self.namespace == "terminating" else _policies(POLICIES[self.policies])
        return {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each for each in found}


def _pod(pod: PodAt) -> dict[str, Any]:
    node = "node1" if pod.address in OWN else "node2"
    ports = [{"name": "http", "containerPort": pod.http}]
    return {
        "kind": "Pod",
        "metadata": {"namespace": "ns", "name": pod.name, "labels": {"app": pod.app}, "uid": pod.name},
        "spec": {"nodeName": node, "containers": [{"name": "c", "ports": ports}]},
        "status": {"phase": "Running", "podIPs": [{"ip": pod.address}]},
    }


def _policies(specs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, spec in enumerate(specs):
        kind = "ClusterNetworkPolicy" if "tier" in spec else "NetworkPolicy"
        metadata = {"name": f"p{number}", **({} if "tier" in spec else {"namespace": "ns"})}
        whole = spec if "tier" in spec else {"podSelector": {}, **spec}
        yield {"kind": kind, "metadata": metadata, "spec": whole}


Changed = tuple[State, State]


def states() -> list[State]:
    return [State(*each) for each in itertools.product(PODS, POLICIES, NAMESPACES)]


def neighbours() -> list[Changed]:
    """Return every change of pods alone, of policies alone, and of the namespace alone."""
    found = states()
    return [
        (old, new)
        for old, new in itertools.permutations(found, 2)
        if sum(one != other for one, other in zip(old, new)) == 1
    ]


def any_changes(seed: int, count: int) -> list[Changed]:
    """Return random changes of everything at once."""
    chosen, found = random.Random(seed), states()
    return [(chosen.choice(found), chosen.choice(found)) for _each in range(count)]


class Sent(NamedTuple):
    """A packet with the port of the bridge from which it comes, empty if from none, and whether its source is near."""

    packet: Packet
    port: str
    interface: str
    routed_back: bool


def sent() -> list[Sent]:
    """Return packets of pods with every address of the node's pods, of others, of clients and the node."""
    found: list[Sent] = []
    goals = [("tcp", 8080), ("tcp", 9090), ("tcp", 80), ("udp", 53), ("icmp", 0)]
    for protocol, port in goals:
        for source in (*OWN, *PEERS, *OUTSIDE):
            for goal in (*OWN, PEERS[0], OUTSIDE[0]):
                packet = Packet(source, goal, protocol, port)
                if goal != source and source in OWN:
                    found += [Sent(packet, name, BRIDGE, True) for name in ("port-a", "port-b")]
                elif goal in OWN:
                    found.append(Sent(packet, "", "eth0", True))
        found.append(Sent(Packet(NODE, OWN[0], protocol, port, from_node=True), "", "", True))
        found.append(Sent(Packet(OWN[0], NODE, protocol, port, to_node=True), "port-a", BRIDGE, True))
    found += [Sent(Packet(PEERS[0], OWN[1], "tcp", 8080), "port-a", BRIDGE, False)]
    return [*found, Sent(Packet(OWN[0], OWN[1], "tcp", 8080), "", "eth0", False)]


SENT = sent()
#: For each packet, whether it is passed on.
Verdicts = list[bool]


def verdicts(tables: Tables) -> Verdicts:
    policies, ports = (Interpreter(table.observed()) for table in tables)
    here = frozenset([NODE])
    return [
        (not port or ports.frame_allowed(packet, port))
        and policies.allowed(packet, here, interface=interface, routed_back=back)
        for packet, port, interface, back in SENT
    ]


class _Links(PodLinks):
    """What the kernel says of the interfaces of pods, all on one bridge; ``of``: the names of pods by address."""

    def __init__(self, of: Callable[[], Mapping[str, str]]) -> None:
        super().__init__()
        self._of = of

    def find(self, addresses: Iterable[str]) -> dict[str, PodLink]:
        of = self._of()
        self.ports = {(number, f"port-{name}"): False for number, name in enumerate("ab", 11)}
        return {each: PodLink(BRIDGE, 2, True, ("_ab".index(of[each]) + 10, f"port-{of[each]}")) for each in addresses}


class Agent:
    """The policies of a node as the agent follows them; the rows are its own."""

    def __init__(self, objects: Objects, settings: NetworkPolicySettings, portion: int = 0) -> None:
        self.objects = objects
        self.settings = settings
        self._cluster = ClusterState.from_objects(list(objects.values()))
        self.policy = convergence.node_policy(self._cluster, settings, "node1", [("eth0", NODE)])
        if portion:
            self.policy._state._portion = portion
        self._links = _Links(self._names)
        self._cluster.policy.pop_changes()
        self._find_links()
        self.policy.table.pop_journal()

    def _names(self) -> Mapping[str, str]:
        pods = (item for key, item in self.objects.items() if key[0] == "Pod")
        return {pod["status"]["podIPs"][0]["ip"]: pod["metadata"]["name"] for pod in pods}

    def _find_links(self) -> None:
        with mock.patch.object(convergence, "_judges_frames", lambda: True):
            convergence.find_links(self.policy, self.settings, self._links)

    @property
    def desired(self) -> dict[Key, Value]:
        return desired_table(self.policy.table.rows, convergence.policy_options(self.settings))

    def changes(self, objects: Objects) -> Iterator[Change[Key, Value]]:
        """Follow the objects; yield the changes of the tables, of which the first is complete but for late grants."""
        follow(self._cluster, self.objects, objects)
        self.objects = objects
        assert not self._cluster.refusals
        self.policy.update(self._cluster.policy.pop_changes())
        while True:
            self._find_links()
            options = convergence.policy_options(self.settings)
            yield change_of(self.policy.table.pop_journal(), self.policy.table.rows, options)
            if not self.policy.pending:
                return
            self.policy.proceed()


class _Ports(Simulated, _PortsTable):
    """The table of ports; the resource of both tables sends its changes."""


class Kernel(Simulated, PolicyTableResource):
    """The tables of policies with simulated ones. ``seen``: called with both after each transaction."""

    def __init__(self, tables: Tables, seen: Callable[[Tables], None], crash: int = -1) -> None:
        super().__init__()
        self._ports: _Ports = _Ports("", 1 << 62)
        self.held, self._ports.held = tables
        self.steps = Steps(crash)
        self._both_seen = seen

    @property
    def tables(self) -> Tables:
        return self.held, self._ports.held

    def observe(self) -> dict[Key, Value]:
        return joined(self.tables)

    def _send(self, labelled: list[Labelled]) -> None:
        self.steps.begin()
        numbers = (FAMILY_NUMBERS[family] for family in ("inet", "bridge"))
        # The first byte of a message is the family of its table.
        parts = [[each for each in labelled if each.message[2][0] == number] for number in numbers]
        self.held, self._ports.held = [table.after(part) for table, part in zip(self.tables, parts)]
        self._both_seen(self.tables)


def joined(tables: Tables) -> dict[Key, Value]:
    """Return both tables as one."""
    policies, ports = (table.observed() for table in tables)
    return {**policies, **{bridge_keys.prefixed(key): value for key, value in ports.items()}}


def loaded(desired: Mapping[Key, Value]) -> Tables:
    parts: list[dict[Key, Value]] = [{}, {}]
    for key, value in desired.items():
        bridged = bridge_keys.is_bridged(key)
        parts[bridged][bridge_keys.plain(key) if bridged else key] = value
    return Table(parts[0]), Table(parts[1])


SETTINGS = NetworkPolicySettings(enabled=True, cluster_policies=True)


class Check(Changes[State]):
    """Changes from state to state. ``faults``: what went wrong; ``states``: how many transactions; ``late``: steps in
    which grants were still to follow.

    ``prepare``: may alter the kernel before a change, as seeded faults do.
    """

    def __init__(
        self, settings: NetworkPolicySettings = SETTINGS, portion: int = 0,
        prepare: Callable[[Kernel], None] = lambda _kernel: None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.settings = settings
        self.portion = portion
        self.prepare = prepare
        self.packets = self.late = 0
        self._known: dict[Any, Verdicts] = {}

    def change(self, old: State, new: State, crash: int = -1, to: Optional[NetworkPolicySettings] = None) -> bool:
        """Make a change; return whether the process has ended after ``crash`` transactions and another continued.

        ``to``: where settings change as well; then, and after a crash, the tables are compared with the kernel's.
        """
        where, agent = f"{old} to {new}", Agent(old.objects(), self.settings, self.portion)
        held, crashed = loaded(agent.desired), False
        found = [self._steady(agent)]
        if to is None:
            changes: Iterable[Optional[Change[Key, Value]]] = agent.changes(new.objects())
        else:
            changes, agent = [None], Agent(new.objects(), to)
        for change in changes:
            found.append(self._steady(agent))
            if not crashed:
                held, crashed = self._made(where, held, change, agent.desired, found[-2:], crash)
                ends = found[-2:]
        if crashed:
            # The next run computes everything.
            held, _again = self._made(f"{where}, after a crash", held, None, agent.desired, [*ends, found[-1]])
        self.late += len(found) - 2
        for between in found[1:-1]:
            several = zip(SENT, between, found[0], found[-1])
            opened = [one for one, now, old_one, new_one in several if now and not old_one and not new_one]
            self.faults += [f"{where}: {one}: allowed while grants were to follow" for one in opened]
        if difference(joined(held), agent.desired):
            self.faults.append(f"{where}: not the desired table")
        return crashed

    def _steady(self, agent: Agent) -> Verdicts:
        rows = agent.policy.table.rows
        key = (frozenset(rows.items()), convergence.policy_options(agent.settings))
        if key not in self._known:
            self._known[key] = verdicts(loaded(agent.desired))
        return self._known[key]

    def _made(
        self, where: str, held: Tables, change: Optional[Change[Key, Value]], desired: Mapping[Key, Value],
        ends: Sequence[Verdicts], crash: int = -1,
    ) -> tuple[Tables, bool]:  # fmt: skip
        """Make a change, None for the difference to ``desired``; return the tables, and whether the process ended."""

        def seen(tables: Tables) -> None:
            self.states += 1
            self.packets += len(SENT)
            # The last transaction leads to what is desired.
            whole = joined(tables) == desired
            now = ends[-1] if whole else verdicts(tables)
            for one, verdict, *of_ends in zip(SENT, now, *ends):
                if verdict not in of_ends:
                    self.faults.append(f"{where}: {one}: {verdict}, before and after: {of_ends}")

        kernel = Kernel(held, seen, crash)
        self.prepare(kernel)
        try:
            kernel.apply(difference(kernel.observe(), desired) if change is None else change)
        except Crashed:
            return kernel.tables, True
        except (KernelError, KeyError) as error:
            self.faults.append(f"{where}: {error!r}")
        return kernel.tables, False
