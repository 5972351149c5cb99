# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""State left by another proxy mode, and which parts must be kept until existing connections drain."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional

from ....rendering.ipvs import model as ipvs
from ....rendering.ipvs.own_servers import recorded_server, server_record
from ....rendering.nftables.objects import ObjectKey
from ....resources import Change, Resource


class StillConnected:
    """The parts of ipvs mode that still have active connections, of one family: the desired tables of its leftovers.

    New connections no longer reach IPVS once another mode serves. Open connections pass through IPVS until they end;
    they would be reset without their virtual server, and lost without its address. The elements that record the server
    as ours are kept. ``record`` has the elements of such sets. ``listed`` counts the active
    connections in the kernel's list; ``counted`` returns the real servers with connections by IPVS's own counters, as
    of the last observation. Both are needed: the list has gaps while connections come and go, and the counters do not
    include connections that are being established. With ``draining`` False nothing is kept.
    """

    def __init__(
        self,
        real_servers: Resource[Any, Any],
        record: Resource[Any, Any],
        listed: Callable[[], Mapping[ipvs.RealServerKey, int]],
        counted: Callable[[], Mapping[ipvs.RealServerKey, int]],
        draining: bool,
    ) -> None:
        self._resource = real_servers
        self._record = record
        self._listed = listed
        self._counted = counted
        self._draining = draining
        self._kept: Optional[dict[ipvs.RealServerKey, Any]] = None

    def _real_servers(self) -> dict[ipvs.RealServerKey, Any]:
        if self._kept is None:
            # Read the list first: connections that it lacks are established when the real servers are observed.
            listed = self._listed() if self._draining else {}
            observed = self._resource.observe() if self._draining else {}
            used = {*listed, *self._counted()}
            self._kept = {key: value for key, value in observed.items() if key in used}
        return self._kept

    def has_connections(self) -> bool:
        """Return whether anything must be kept. Raises KernelError, like all methods of this class."""
        return bool(self._real_servers())

    def real_servers(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the real servers with connections."""
        kept = self._real_servers()
        return {key: value for key, value in observed.items() if key in kept}

    def servers(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the virtual servers of the real servers with connections."""
        kept = {key.server for key in self._real_servers()}
        return {key: value for key, value in observed.items() if key in kept}

    def addresses(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the addresses of these virtual servers on the dummy device."""
        kept = {key.server.address for key in self._real_servers()}
        return {key: value for key, value in observed.items() if key in kept}

    def elements(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the set elements that record these virtual servers."""
        servers = {key.server for key in self._real_servers()}
        kept = servers | {server._replace(address="") for server in servers}
        return {key: value for key, value in observed.items() if kept and recorded_server(key) in kept}

    def table(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the table beside IPVS with only such elements; empty if there are none."""
        elements = self.elements(observed) if self.has_connections() else {}
        if not elements:
            return {}
        record = server_record(observed)
        return {key: value for key, value in record.items() if key in elements or isinstance(key, ObjectKey)}

    def sets(self, observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the sets that contain such elements."""
        found = self.elements(self._record.observe()) if self.has_connections() else {}
        kept = {key.set for key in found if isinstance(key, ipvs.SetElementKey)}
        return {key: value for key, value in observed.items() if key in kept}


def replaces_iptables_mode(change: Change[Any, Any]) -> bool:
    """Return whether a change removes chains that lead to endpoints, which only iptables mode has."""
    return any(key.chain.startswith("KUBE-SEP-") for key in change.removed)
