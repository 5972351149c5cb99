# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sockets of one convergence, opened when first needed and closed together.

Opening a socket to IPVS or ipset can make the kernel load a module. A check must not do that, so it first tests whether
the subsystem is loaded. The code for IPVS and ipset is imported late, with the first socket (see docs/architecture.md).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Optional, Sequence, TypeVar

from ..base.closing import Closing
from ..base.errors import PreflightError
from ..base.progress import Progress, unheeded
from ..kernel.facts import PROC_IPVS, kernel_release
from ..kernel.modules.modules import asking_loads
from ..kernel.netlink.protocol import NETLINK_NETFILTER, NETLINK_ROUTE
from ..kernel.netlink.socket import NetlinkSocket, is_supported
from ..kernel.nftables.features import answers as nftables_answers
from ..kernel.nftables.ipvs_table import IpvsTableResource
from ..kernel.nftables.policy_table import PolicyTableResource
from ..kernel.nftables.resource import NftablesResource
from ..resources import Resource
from .live import Flow, LiveConnection, Remembered

if TYPE_CHECKING:
    from ..forwarding.opened import Used
    from ..kernel.ipset.sets import IpsetSocket
    from ..kernel.ipvs.servers import IpvsSocket

# It has a parameter (max_sets), so that the directory exists even if the module is built in.
_IPSET_MODULE = "/sys/module/ip_set"

Table = TypeVar("Table", bound=NftablesResource)

NO_AGENT = "userspace mode needs the agent, which forwards the connections itself"


class ListenerAccess:
    """Access to the listeners of userspace mode; in this base class there is no agent and no listener."""

    def resource(self, family: str) -> Resource[Any, Any]:
        """Return the listeners of a family. Raises PreflightError if there is no agent."""
        raise PreflightError(NO_AGENT)

    def left(self, families: Sequence[str]) -> list[Resource[Any, Any]]:
        """Return the listeners that a running agent still has after it has left userspace mode."""
        return []

    def live_connections(self, flow: Flow) -> list[LiveConnection]:
        """Return the connections and sessions of a flow. Raises KernelError."""
        return []

    def remembered(self, flow: Flow, owner: str, seconds: int) -> list[Remembered]:
        """Return the affinity of a flow's client to an endpoint of a ServicePort. Raises KernelError.

        ``seconds``: for how long a client keeps its endpoint.
        """
        return []

    def used(self) -> list[Used]:
        """Return what ServicePorts have sent to their endpoints. Raises KernelError."""
        return []

    def at_loopback(self, family: str) -> tuple[int, int]:
        """Return how many sockets listen at the loopback address of a family, and how often opening one failed."""
        return 0, 0

    def end_connections(self, owner: str, endpoint: tuple[str, int]) -> int:
        """Reset the connections that listeners of a ServicePort forward to an endpoint; return their number.

        Raises KernelError.
        """
        return 0


class KernelHandles(Closing):
    """Netlink sockets in the network namespace of the calling thread; a context manager.

    ``progress`` is called between the parts of long work with the kernel. ``listeners``: those of userspace mode, which
    are in the agent and not in the kernel. ``commits``: a list to which the generation of nf_tables after each own
    transaction is added; see :class:`.NftablesResource`. ``loads``: whether a socket may be opened that makes the
    kernel load a module.
    """

    def __init__(
        self,
        progress: Progress = unheeded,
        listeners: Optional[ListenerAccess] = None,
        commits: Optional[list[int]] = None,
        loads: bool = True,
    ) -> None:
        self.loads = loads
        self.progress = progress
        self.commits = commits
        self.listeners = listeners or ListenerAccess()
        self._open = contextlib.ExitStack()
        self._ipvs: Optional[IpvsSocket] = None
        self._ipset: Optional[IpsetSocket] = None
        self._route: Optional[NetlinkSocket] = None

    def close(self) -> None:
        """Close all sockets; closing twice is harmless."""
        self._close_ipvs()
        self._open.close()

    def _close_ipvs(self) -> None:
        """Close the socket to IPVS, which may be opened several times."""
        ipvs, self._ipvs = self._ipvs, None
        if ipvs is not None:
            ipvs.close()

    def forget_lost(self) -> bool:
        """Close sockets to a subsystem that was unloaded; return whether there was one. The next use opens another one.

        Only IPVS can be lost: its number in generic netlink is no longer valid. For ipset and nf_tables the kernel
        loads the module again when it is sent a request, and routing netlink cannot be unloaded.
        """
        if self._ipvs is None or not self._ipvs.lost:
            return False
        self._close_ipvs()
        return True

    @staticmethod
    def has_ipvs() -> bool:
        """Return whether IPVS is loaded."""
        return os.path.exists(PROC_IPVS)

    @staticmethod
    def has_ipset() -> bool:
        """Return whether ipset is loaded."""
        return os.path.isdir(_IPSET_MODULE) and is_supported(NETLINK_NETFILTER)

    @staticmethod
    def has_nftables() -> bool:
        """Return whether nf_tables is loaded or built in. Raises KernelError."""
        return not asking_loads("nf_tables", kernel_release()) and nftables_answers()

    def nftables(self, family: str) -> NftablesResource:
        """Return the nftables table of a family, with a socket that is closed with the others."""
        return self._table(NftablesResource(family))

    def ipvs_table(self, family: str) -> IpvsTableResource:
        """Return the nftables table beside IPVS of a family, with a socket that is closed with the others."""
        return self._table(IpvsTableResource(family))

    def network_policy(self) -> PolicyTableResource:
        """Return the nftables table of network policies, with a socket that is closed with the others."""
        return self._table(PolicyTableResource())

    def _table(self, resource: Table) -> Table:
        resource.commits = self.commits
        return self._open.enter_context(contextlib.closing(resource))

    @property
    def ipvs(self) -> IpvsSocket:
        """Return a socket of generic netlink to IPVS. Raises KernelError."""
        if self._ipvs is None:
            from ..kernel.ipvs.servers import IpvsSocket

            self._ipvs = IpvsSocket()
            self._ipvs.netlink.progress = self.progress
        return self._ipvs

    @property
    def ipset(self) -> IpsetSocket:
        """Return a netlink socket to ipset. Raises KernelError."""
        if self._ipset is None:
            from ..kernel.ipset.sets import IpsetSocket

            self._ipset = self._open.enter_context(IpsetSocket())
            self._ipset.netlink.progress = self.progress
        return self._ipset

    @property
    def route(self) -> NetlinkSocket:
        """Return a socket of routing netlink. Raises KernelError."""
        if self._route is None:
            self._route = self._open.enter_context(contextlib.closing(NetlinkSocket(NETLINK_ROUTE)))
            self._route.progress = self.progress
        return self._route
