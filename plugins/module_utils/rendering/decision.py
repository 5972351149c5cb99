# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inputs of a mode's decisions about one flow: its sender, and its destination address and port."""

from __future__ import annotations

from typing import NamedTuple, Tuple


class Client(NamedTuple):
    """The sender of a flow: a canonical address, and a port or 0 if any.

    ``of_node``: the address is one of this node's. ``is_pod``: the detector of local traffic classifies it as a pod.
    """

    address: str
    port: int = 0
    of_node: bool = False
    is_pod: bool = False

    @property
    def is_inside(self) -> bool:
        """Return whether traffic policies treat the client as this node or one of its pods."""
        return self.of_node or self.is_pod


class Arrival(NamedTuple):
    """Where packets arrive: protocol (tcp, udp, sctp), address and port. ``node_port``: the port is a node port."""

    protocol: str
    address: str
    port: int
    node_port: bool = False


class Masquerade(NamedTuple):
    """Whether the node's address replaces the source address, and why or why not."""

    applies: bool
    reason: str


_KEPT, _REPLACED = Masquerade(False, "policy Local"), Masquerade(True, "external traffic, policy Cluster")
_POD = Masquerade(False, "a pod, as detectLocalMode defines it")


def masquerade_external(local: bool, client: Client, for_node: bool) -> Masquerade:
    """Return how external traffic is masqueraded. ``local``: the policy; ``for_node``: then the node is masqueraded."""
    if not local:
        return _REPLACED
    if client.is_pod:
        return _POD
    if client.of_node and for_node:
        return Masquerade(True, "from this node itself")
    return _KEPT


def masquerade_internal(everything: bool, detector: bool, client: Client, for_node: bool) -> Masquerade:
    """Return how traffic to a cluster IP is masqueraded.

    ``everything``: masqueradeAll. ``detector``: there is one. ``for_node``: without one, the node is masqueraded.
    """
    if everything:
        return Masquerade(True, "masqueradeAll")
    if not detector:
        replaced = client.of_node and for_node
        return Masquerade(replaced, "from this node itself" if replaced else "no detectLocalMode")
    return _POD if client.is_pod else Masquerade(True, "not a pod, as detectLocalMode defines it")


Shares = Tuple[int, ...]
