# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What another mode has left, and what of it has to stay for a while so that no connection is lost."""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, Mapping, Optional, Tuple

from ..rendering.ipvs import model as ipvs
from ..rendering.ipvs.sets import PROTOCOL_OF_NODE_PORTS
from ..resources import Change, Resource


def node_ports(elements: Mapping[Any, bool]) -> FrozenSet[Tuple[str, int]]:
    """Return (protocol, port) of the node ports among set elements."""
    return frozenset(
        (PROTOCOL_OF_NODE_PORTS[name], int(element.rsplit(":", 1)[-1]))
        for name, element in elements
        if name in PROTOCOL_OF_NODE_PORTS
    )


class StillConnected:
    """What of ipvs mode still has connections in use, of one family: the desired tables of its leftovers.

    New connections no longer get there once another mode serves. Those that are open go through IPVS to their end, and
    would be reset without their virtual server, and lost without its address. Its node port stays in its set, by which
    the server is known as ours. ``listed`` counts the listed ones in use; ``counted`` tells which real servers IPVS
    itself counts some for, as of the last observation of real servers: the list has gaps while connections come and go,
    and the counts leave out those that are being made. ``draining`` False: nothing stays.
    """

    def __init__(
        self,
        real_servers: Resource[Any, Any],
        elements: Resource[Any, Any],
        listed: Callable[[], Mapping[ipvs.RealServerKey, int]],
        counted: Callable[[], Mapping[ipvs.RealServerKey, int]],
        draining: bool,
    ) -> None:
        self._resource = real_servers
        self._elements = elements
        self._listed = listed
        self._counted = counted
        self._draining = draining
        self._kept: Optional[Dict[ipvs.RealServerKey, Any]] = None

    def _real_servers(self) -> Dict[ipvs.RealServerKey, Any]:
        if self._kept is None:
            # The list first: what is being made then is established when the real servers are observed.
            listed = self._listed() if self._draining else {}
            observed = self._resource.observe() if self._draining else {}
            used = {*listed, *self._counted()}
            self._kept = {key: value for key, value in observed.items() if key in used}
        return self._kept

    def any(self) -> bool:
        """Whether anything stays. Raises KernelError, as all of these do."""
        return bool(self._real_servers())

    def real_servers(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Real servers with connections."""
        kept = self._real_servers()
        return {key: value for key, value in observed.items() if key in kept}

    def servers(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The virtual servers of these."""
        kept = {key.server for key in self._real_servers()}
        return {key: value for key, value in observed.items() if key in kept}

    def addresses(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The addresses of these on the dummy device."""
        kept = {key.server.address for key in self._real_servers()}
        return {key: value for key, value in observed.items() if key in kept}

    def elements(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The elements of sets by which node ports of these are known."""
        kept = {(key.server.protocol, key.server.port) for key in self._real_servers()}
        return {key: value for key, value in observed.items() if kept and kept & node_ports({key: value})}

    def sets(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The sets that hold such elements."""
        kept = {name for name, _element in self.elements(self._elements.observe())} if self.any() else set()
        return {key: value for key, value in observed.items() if key in kept}


def replaces_iptables_mode(change: Change[Any, Any]) -> bool:
    """Whether a change of chains takes away those that lead to endpoints, which only iptables mode has."""
    return any(key.chain.startswith("KUBE-SEP-") for key in change.removed)
