# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel parameters that a configuration requires on this node."""

from __future__ import annotations

from typing import Mapping

from ....configuration.model import ConntrackConfiguration, KubeProxyConfiguration
from ....kernel.facts import NodeFacts
from ....kernel.parameters.sysctl_profile import (
    CONNTRACK_TIMEOUTS,
    ConntrackProfile,
    ProfileSettings,
    profile,
    wanted_values,
)
from ....kernel.parameters.sysctls import (
    TCP_BE_LIBERAL,
    SysctlsResource,
    Wanted,
    resolve,
    stated_difference,
    unchangeable,
)
from ....resources import Stage


def conntrack_profile(settings: ConntrackConfiguration, cores: int) -> ConntrackProfile:
    """Return what to set of connection tracking; a timeout below a second, as 0, keeps the kernel's value."""
    timeouts = {name: int(getattr(settings, name)) for name in CONNTRACK_TIMEOUTS}
    return ConntrackProfile(
        maximum=settings.maximum(cores),
        timeouts={name: seconds for name, seconds in timeouts.items() if seconds},
        be_liberal=settings.tcp_be_liberal,
    )


def profile_settings(
    configuration: KubeProxyConfiguration, kernel_version: tuple[int, int, int], cores: int, localhost: bool
) -> ProfileSettings:
    """Return the settings that determine a node's parameters, as kube-proxy 1.36 derives them from its configuration.

    ``localhost``: node ports answer on 127.0.0.1; see :func:`.rendering.build_settings.localhost_node_ports`.
    """
    return ProfileSettings(
        mode=configuration.mode,
        kernel_version=kernel_version,
        strict_arp=configuration.effective_strict_arp,
        route_localnet=localhost,
        conntrack=conntrack_profile(configuration.conntrack, cores),
    )


def wanted_sysctls(configuration: KubeProxyConfiguration, facts: NodeFacts, localhost: bool) -> dict[str, Wanted]:
    """Return the parameters by key, as kube-proxy 1.36 sets them at its start; ``localhost`` as above."""
    return wanted_values(profile(profile_settings(configuration, facts.kernel_version, facts.cores, localhost)))


def tracks_liberally(configuration: KubeProxyConfiguration, facts: NodeFacts) -> bool:
    """Return whether nf_conntrack_tcp_be_liberal is set once the parameters of the configuration are.

    kube-proxy sets its parameters before it decides about rules. Here, rules are rendered first, in a check without
    setting anything, so the value that the parameter will have counts: a wanted one unless it cannot be changed here.
    """
    return facts.conntrack_liberal or (configuration.conntrack.tcp_be_liberal and not unchangeable([TCP_BE_LIBERAL]))


def sysctl_stage(wanted: Mapping[str, Wanted]) -> tuple[Stage, list[str]]:
    """Return the stage that sets the parameters, and warnings about those that cannot be changed on this node.

    A parameter that differs and is read-only here (in a container, or a network namespace other than the host's) is
    skipped with a warning: it must be set on the host. Raises KernelError if a parameter cannot be read.
    """
    resource = SysctlsResource(wanted)
    observed = resource.observe()
    desired = resolve(wanted, observed)
    blocked = unchangeable(key for key, value in desired.items() if observed.get(key, value) != value)
    warnings = [
        f"sysctl {key}: {stated_difference(observed[key], desired[key])}: {why}" for key, why in blocked.items()
    ]
    kept = {key: value for key, value in desired.items() if key not in blocked}
    return Stage(SysctlsResource(kept), kept), warnings
