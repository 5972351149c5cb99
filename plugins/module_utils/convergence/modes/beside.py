# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel modes with listeners of the agent beside them, for static Services that require userspace mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Sequence

from ...configuration.model import KubeProxyConfiguration
from ...rendering.desired import Changes
from ...rendering.userspace.beside import RenderingWithListeners
from ...rendering.userspace.model import ADDRESSES, DEVICE, LISTENERS
from ...resources import Stage
from ...serviceports.info import Endpoint, ServicePortInfo
from ..family import FamilyContext, FamilyTables
from ..handles import KernelHandles
from ..live import Flow, LiveConnection, Remembered
from .iptables import IPTABLES_MODE, IptablesMode
from .ipvs_iptables import IPVS_MODE, IpvsWithIptables
from .ipvs_nftables import IPVS_WITH_NFTABLES, IpvsWithNftables
from .mode import Adjustments, Mode
from .nftables import NFTABLES_MODE, NftablesMode
from .stages.userspace import address_device_stage, userspace_addresses
from .userspace import USERSPACE_MODE, ForwardedConnections

if TYPE_CHECKING:
    from ...serviceports.frontends import Frontends
    from ..traffic.account import Sample


class WithListeners(Mode):
    """A mode with listeners. Subclasses derive from the class of that mode as well, whose object is ``main``."""

    main: Mode

    def __init__(self) -> None:
        self._tables = RenderingWithListeners(self.main.rendering)
        self.rendering = self._tables
        device = self.main.subsystems.device or DEVICE
        self.subsystems = self.main.subsystems._replace(listeners=True, device=device)

    def stages(
        self,
        configuration: KubeProxyConfiguration,
        families: Sequence[FamilyTables],
        handles: KernelHandles,
        loaded: bool = True,
    ) -> List[Stage]:
        """Return the stages of the mode, and listeners after the addresses that their sockets are bound to."""
        stages = super().stages(configuration, families, handles, loaded)
        listeners = [
            Stage(handles.listeners.resource(context.family), tables[LISTENERS]) for context, tables in families
        ]
        if self._tables.has_device:
            return [*stages, *listeners]
        addresses = [
            Stage(userspace_addresses(handles, context.family), tables[ADDRESSES]) for context, tables in families
        ]
        return [address_device_stage(handles), *addresses, *listeners, *stages]

    def live_connections(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> List[LiveConnection]:
        """See the base class."""
        if port.policy.userspace:
            return USERSPACE_MODE.live_connections(flow, port, handles)
        return super().live_connections(flow, port, handles)

    def remembered(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> List[Remembered]:
        """See the base class."""
        if port.policy.userspace:
            return USERSPACE_MODE.remembered(flow, port, handles)
        return super().remembered(flow, port, handles)

    def traffic(self, context: FamilyContext, frontends: Frontends, handles: KernelHandles) -> List[Sample]:
        """See the base class."""
        main = super().traffic(context, frontends, handles)
        return [*main, *USERSPACE_MODE.traffic(context, frontends, handles)]

    def adjustments(self, context: FamilyContext, stages: Sequence[Stage], handles: KernelHandles) -> Adjustments:
        """See the base class."""
        return _WithForwardedConnections(super().adjustments(context, stages, handles), handles)


class _Nftables(WithListeners, NftablesMode):
    main = NFTABLES_MODE


class _Iptables(WithListeners, IptablesMode):
    main = IPTABLES_MODE


class _IpvsWithIptables(WithListeners, IpvsWithIptables):
    main = IPVS_MODE


class _IpvsWithNftables(WithListeners, IpvsWithNftables):
    main = IPVS_WITH_NFTABLES


class _WithForwardedConnections(Adjustments):
    """The adjustments of another mode, and for ServicePorts in userspace mode those of userspace mode."""

    def __init__(self, main: Adjustments, handles: KernelHandles) -> None:
        self._main = main
        self._forwarded = ForwardedConnections(handles)

    @property
    def draining(self) -> int:
        """See the base class."""
        return self._main.draining

    def adjust(self, changes: Changes) -> None:
        """See the base class."""
        self._main.adjust(changes)

    def observed(self, desired: Mapping[str, Mapping[Any, Any]]) -> None:
        """See the base class."""
        self._main.observed(desired)

    def drain(self) -> int:
        """See the base class."""
        return self._main.drain()

    def drop(self, port: ServicePortInfo, endpoint: Endpoint) -> int:
        """See the base class."""
        chosen = self._forwarded if port.policy.userspace else self._main
        return chosen.drop(port, endpoint)


_BESIDE: Dict[Mode, Mode] = {
    mode.main: mode for mode in (_Nftables(), _Iptables(), _IpvsWithIptables(), _IpvsWithNftables())
}


def with_listeners(mode: Mode) -> Mode:
    """Return the mode with listeners beside it, or the mode itself if it needs none."""
    main = without_listeners(mode)
    return _BESIDE.get(main, main)


def without_listeners(mode: Mode) -> Mode:
    """Return the mode that a mode with listeners consists of; other modes are returned as they are."""
    return mode.main if isinstance(mode, WithListeners) else mode
