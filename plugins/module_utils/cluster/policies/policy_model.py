# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects that network policies depend on, as immutable values.

Parts of a policy that are not understood are kept as None in their place: they match nothing, which differs from being
absent (absent peers are all peers), and the indices of the other parts, by which users find them, do not change.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional, Union

from ...base.addresses import Network
from ..model import NamespacedName
from .selectors import EVERYTHING, LabelSelector

INGRESS, EGRESS = "Ingress", "Egress"
DIRECTIONS = (INGRESS, EGRESS)
ADMIN, BASELINE = "Admin", "Baseline"
ACCEPT, DENY, PASS = "Accept", "Deny", "Pass"
LAST_PORT = 65535


class ContainerPort(NamedTuple):
    """A port of a container that has a name."""

    name: str
    protocol: str
    port: int


class Pod(NamedTuple):
    """The fields of a Pod that policies depend on.

    ``addresses``: canonical, of both families. ``created``: as in the object (RFC 3339), empty where absent. ``ended``:
    its phase is Succeeded or Failed. ``ports``: those with a name, of containers and of sidecars.
    """

    namespace: str
    name: str
    uid: str = ""
    labels: Mapping[str, str] = {}
    created: str = ""
    deleting: bool = False
    node_name: str = ""
    host_network: bool = False
    ended: bool = False
    addresses: tuple[str, ...] = ()
    ports: tuple[ContainerPort, ...] = ()

    @property
    def key(self) -> NamespacedName:
        """Namespace and name."""
        return NamespacedName(self.namespace, self.name)


class Namespace(NamedTuple):
    """A Namespace and its labels. ``deleting``: it is terminating."""

    name: str
    labels: Mapping[str, str] = {}
    deleting: bool = False


class PodPeer(NamedTuple):
    """Pods as a peer or subject.

    Either ``namespace`` names the only namespace, or ``namespaces`` selects them.
    """

    namespace: str
    namespaces: Optional[LabelSelector]
    pods: LabelSelector = EVERYTHING

    def __str__(self) -> str:
        if self.namespaces is None:
            return f"pods ({self.pods}) of namespace {self.namespace}"
        return f"pods ({self.pods}) of namespaces ({self.namespaces})"


class BlockPeer(NamedTuple):
    """A range of addresses without its excepted parts."""

    network: Network
    excepted: tuple[Network, ...] = ()

    def __str__(self) -> str:
        less = f" except {', '.join(map(str, self.excepted))}" if self.excepted else ""
        return f"ipBlock {self.network}{less}"


class NodePeer(NamedTuple):
    """Nodes as a peer, by their labels."""

    nodes: LabelSelector

    def __str__(self) -> str:
        return f"nodes ({self.nodes})"


Peer = Union[PodPeer, BlockPeer, NodePeer]


class PolicyPort(NamedTuple):
    """Ports of a protocol: by ``name``, or from ``first`` to ``last``, both included.

    ``protocol`` is empty for a name of any protocol.
    """

    protocol: str
    first: int = 0
    last: int = LAST_PORT
    name: str = ""

    def __str__(self) -> str:
        if self.name:
            return f"{self.name}/{self.protocol or 'any'}"
        if (self.first, self.last) == (0, LAST_PORT):
            return f"all of {self.protocol}"
        return f"{self.first}{f'-{self.last}' if self.last != self.first else ''}/{self.protocol}"


class PolicyRule(NamedTuple):
    """One rule. No ``peers``: every peer; no ``ports``: every port of every protocol.

    ``action`` and ``name`` are those of a ClusterNetworkPolicy; rules of a NetworkPolicy have the action Accept.
    """

    peers: tuple[Optional[Peer], ...] = ()
    ports: tuple[Optional[PolicyPort], ...] = ()
    action: str = ACCEPT
    name: str = ""

    @property
    def node_peers(self) -> tuple[NodePeer, ...]:
        """The peers that are Nodes."""
        return tuple(peer for peer in self.peers if isinstance(peer, NodePeer))


#: What replaces a rule that is not understood, so that nothing is opened: an Accept rule, or another one.
_NOTHING, _DENY_ALL = PolicyRule(peers=(None,)), PolicyRule(action=DENY)


def closed(action: object) -> PolicyRule:
    """Return what a rule with this action is replaced by if it is not understood."""
    return _NOTHING if action == ACCEPT else _DENY_ALL


class NetworkPolicy(NamedTuple):
    """A NetworkPolicy: the pods of its namespace that it selects, and the rules by direction.

    A rule is None if it was not understood. Rules of directions that are not among the policy's types are ignored.
    """

    namespace: str
    name: str
    pods: LabelSelector
    directions: tuple[str, ...]
    ingress: tuple[Optional[PolicyRule], ...] = ()
    egress: tuple[Optional[PolicyRule], ...] = ()

    @property
    def key(self) -> NamespacedName:
        """Namespace and name."""
        return NamespacedName(self.namespace, self.name)

    def rules(self, direction: str) -> tuple[Optional[PolicyRule], ...]:
        """Return the rules of a direction; empty if it is not among the policy's types."""
        if direction not in self.directions:
            return ()
        return self.ingress if direction == INGRESS else self.egress


class ClusterNetworkPolicy(NamedTuple):
    """A ClusterNetworkPolicy (policy.networking.k8s.io)."""

    name: str
    tier: str
    priority: int
    subject: PodPeer
    ingress: tuple[PolicyRule, ...] = ()
    egress: tuple[PolicyRule, ...] = ()

    @property
    def has_node_peers(self) -> bool:
        """Whether any rule has Nodes as peers."""
        return any(rule.node_peers for rule in (*self.ingress, *self.egress))

    def rules(self, direction: str) -> tuple[PolicyRule, ...]:
        """Return the rules of a direction, in their order."""
        return self.ingress if direction == INGRESS else self.egress
