# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel modes with listeners of the agent beside them, for static Services that require userspace mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from ...configuration.model import KubeProxyConfiguration
from ...rendering.userspace.beside import RenderingWithListeners
from ...rendering.userspace.model import ADDRESSES, DEVICE, LISTENERS
from ...resources import Stage
from ...serviceports.info import ServicePortInfo
from ..family import FamilyContext, FamilyTables
from ..handles import KernelHandles
from .iptables import IPTABLES_MODE, IptablesMode
from .ipvs_iptables import IPVS_MODE, IpvsWithIptables
from .ipvs_nftables import IPVS_WITH_NFTABLES, IpvsWithNftables
from .mode import Mode
from .nftables import NFTABLES_MODE, NftablesMode
from .stages.userspace import address_device_stage, userspace_addresses
from .userspace import USERSPACE_MODE

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
        self, configuration: KubeProxyConfiguration, families: Sequence[FamilyTables], handles: KernelHandles
    ) -> list[Stage]:
        """Return the stages of the mode, and listeners after the addresses that their sockets are bound to."""
        stages = super().stages(configuration, families, handles)
        listeners = [
            Stage(handles.listeners.resource(context.family), tables[LISTENERS]) for context, tables in families
        ]
        if self._tables.has_device:
            return [*stages, *listeners]
        addresses = [
            Stage(userspace_addresses(handles, context.family), tables[ADDRESSES]) for context, tables in families
        ]
        return [address_device_stage(handles), *addresses, *listeners, *stages]

    def serving(self, port: ServicePortInfo) -> Mode:
        """See the base class."""
        return USERSPACE_MODE if port.policy.userspace else self

    def traffic(self, context: FamilyContext, frontends: Frontends, handles: KernelHandles) -> list[Sample]:
        """See the base class."""
        main = super().traffic(context, frontends, handles)
        return [*main, *USERSPACE_MODE.traffic(context, frontends, handles)]


class _Nftables(WithListeners, NftablesMode):
    main = NFTABLES_MODE


class _Iptables(WithListeners, IptablesMode):
    main = IPTABLES_MODE


class _IpvsWithIptables(WithListeners, IpvsWithIptables):
    main = IPVS_MODE


class _IpvsWithNftables(WithListeners, IpvsWithNftables):
    main = IPVS_WITH_NFTABLES


_BESIDE: dict[Mode, Mode] = {
    mode.main: mode for mode in (_Nftables(), _Iptables(), _IpvsWithIptables(), _IpvsWithNftables())
}


def with_listeners(mode: Mode) -> Mode:
    """Return the mode with listeners beside it, or the mode itself if it needs none."""
    main = without_listeners(mode)
    return _BESIDE.get(main, main)


def without_listeners(mode: Mode) -> Mode:
    """Return the mode that a mode with listeners consists of; other modes are returned as they are."""
    return mode.main if isinstance(mode, WithListeners) else mode
