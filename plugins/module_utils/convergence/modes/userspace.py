# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""userspace mode: the agent itself listens at the addresses of Services and forwards connections to endpoints.

It does not use netfilter. Without CAP_NET_ADMIN the agent serves at the addresses that exist; the user who starts it
must provide those of Services, for instance on the loopback interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from ...configuration.model import KubeProxyConfiguration
from ...kernel.facts import may_change_network
from ...preflight.check import ModeNeeds
from ...rendering.userspace.mode import RENDERING, owner_of
from ...rendering.userspace.model import ADDRESSES, DEVICE, LISTENERS
from ...resources import Stage
from ...serviceports.info import Endpoint, ServicePortInfo
from ..family import FamilyContext, FamilyTables
from ..handles import KernelHandles
from ..live import Flow, LiveConnection, Remembered
from .mode import Adjustments, Mode, Subsystems
from .stages.userspace import address_device_stage, userspace_addresses

if TYPE_CHECKING:
    from ...serviceports.frontends import Frontends
    from ..traffic.account import Sample


class UserspaceMode(Mode):
    """See the base class."""

    rendering = RENDERING
    subsystems = Subsystems(listeners=True, device=DEVICE)
    needs = ModeNeeds("userspace", capabilities=())
    needs_agent = True
    tracks_connections = False
    uncounted = "the agent counts the connections that it forwards; their bytes only for the whole node"
    caution = (
        "mode userspace: endpoints see the address of this node instead of the client's, and a restart of the agent "
        "ends all connections"
    )
    policy_caution = (
        "networkPolicy.enabled: in userspace mode the node itself connects to endpoints, so policies of pods do not "
        "judge who uses their Service"
    )

    def stages(
        self, configuration: KubeProxyConfiguration, families: Sequence[FamilyTables], handles: KernelHandles
    ) -> list[Stage]:
        """Return the device, and the addresses and listeners of each family.

        A listener comes after its address, because its socket can be bound only then. Without the capability to change
        the network, the device and its addresses are not managed.
        """
        manages = may_change_network()
        stages = [address_device_stage(handles)] if manages else []
        for context, tables in families:
            if manages:
                stages.append(Stage(userspace_addresses(handles, context.family), tables[ADDRESSES]))
            stages.append(Stage(handles.listeners.resource(context.family), tables[LISTENERS]))
        return stages

    def live_connections(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> list[LiveConnection]:
        """See the base class; the agent itself knows them."""
        return handles.listeners.live_connections(flow)

    def remembered(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> list[Remembered]:
        """See the base class."""
        return handles.listeners.remembered(flow, owner_of(port), port.affinity_seconds)

    def traffic(self, context: FamilyContext, frontends: Frontends, handles: KernelHandles) -> list[Sample]:
        """See the base class; the agent itself counts."""
        from ..traffic.samples import of_listeners

        return of_listeners(frontends, handles)

    def adjustments(self, context: FamilyContext, stages: Sequence[Stage], handles: KernelHandles) -> Adjustments:
        """See the base class."""
        return ForwardedConnections(handles)


class ForwardedConnections(Adjustments):
    """Ends connections in the agent itself, since connection tracking does not know which Service they belong to."""

    def __init__(self, handles: KernelHandles) -> None:
        self._handles = handles

    def drop(self, port: ServicePortInfo, endpoint: Endpoint) -> int:
        """See the base class."""
        return self._handles.listeners.end_connections(owner_of(port), (endpoint.ip, endpoint.port))


USERSPACE_MODE = UserspaceMode()
