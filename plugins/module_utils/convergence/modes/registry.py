# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Mode objects by name; a mode, with its rendering and its part of the kernel, is imported when it is first used.

Ansible ships modules as source, which each run on each node compiles, and a run needs one mode.
"""

from __future__ import annotations

from typing import Callable

from ...base.addresses import FAMILIES
from ...base.mode_names import IPTABLES, IPVS, NFTABLES, NONE, USERSPACE
from ...cluster.state import ClusterState
from ...configuration.model import KubeProxyConfiguration
from ...rendering.build_settings import localhost_listeners
from ...serviceports.policy import is_forwarded
from .mode import Mode


def _iptables() -> Mode:
    from .iptables import IPTABLES_MODE

    return IPTABLES_MODE


def _ipvs_with_iptables() -> Mode:
    from .ipvs_iptables import IPVS_MODE

    return IPVS_MODE


def _ipvs_with_nftables() -> Mode:
    from .ipvs_nftables import IPVS_WITH_NFTABLES

    return IPVS_WITH_NFTABLES


def _nftables() -> Mode:
    from .nftables import NFTABLES_MODE

    return NFTABLES_MODE


def _userspace() -> Mode:
    from .userspace import USERSPACE_MODE

    return USERSPACE_MODE


def _none() -> Mode:
    from .none import NO_MODE

    return NO_MODE


_MODES: dict[str, Callable[[], Mode]] = {
    IPTABLES: _iptables,
    IPVS: _ipvs_with_iptables,
    NFTABLES: _nftables,
    USERSPACE: _userspace,
    NONE: _none,
}
_FILTER_BACKENDS: dict[str, Callable[[], Mode]] = {"nftables": _ipvs_with_nftables, "iptables": _ipvs_with_iptables}

#: The filter backends of ipvs mode, in the order in which ``auto`` tries them.
FILTER_BACKENDS: tuple[str, ...] = tuple(_FILTER_BACKENDS)


def mode_object(name: str) -> Mode:
    """Return the mode of that name, one of MODES_IN_EFFECT; for ipvs mode, the one with the filter backend iptables."""
    return _MODES[name]()


def ipvs_with(filter_backend: str) -> Mode:
    """Return ipvs mode with a filter backend, one of FILTER_BACKENDS."""
    return _FILTER_BACKENDS[filter_backend]()


def localhost_needs_agent(mode: Mode, configuration: KubeProxyConfiguration) -> bool:
    """Return whether node ports answer at loopback addresses in a mode only if an agent runs."""
    own = configuration._replace(mode=mode.name)
    return any(localhost_listeners(own, family) for family in FAMILIES)


def with_listeners(mode: Mode, configuration: KubeProxyConfiguration, cluster: ClusterState) -> Mode:
    """Return the mode with listeners beside it if the agent serves something itself, else without.

    It does so for a static Service of the cluster state that needs it, and for node ports at loopback addresses. Modes
    that need none, because the agent or another program serves all Services, are returned as they are.
    """
    static = any(is_forwarded(service) for service in cluster.static_services.values())
    needed = static or localhost_needs_agent(mode, configuration)
    if not needed and not mode.subsystems.listeners:
        return mode
    from . import beside

    return beside.with_listeners(mode) if needed else beside.without_listeners(mode)
