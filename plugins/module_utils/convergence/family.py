# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One IP family on one node: the data that rendering and the kernel resources need."""

from __future__ import annotations

import os
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from ..base.addresses import FAMILIES, IPV6
from ..base.errors import NotInstalledError
from ..kernel.netlink.protocol import NETLINK_NETFILTER
from ..kernel.netlink.socket import is_supported
from ..kernel.xtables.variant import NFT, VARIANTS, Survey, XtablesVariant, detect_variant
from ..rendering.rendering import ServicePorts
from ..rendering.settings import DataplaneSettings
from ..serviceports.table import NodeContext


class FamilyContext(NamedTuple):
    """The node's data for one family.

    ``settings``: for rendering. ``node``: for computing ServicePorts. ``variant``: the iptables in use, None if the
    mode needs none.
    """

    settings: DataplaneSettings
    node: NodeContext
    variant: Optional[XtablesVariant]

    @property
    def family(self) -> str:
        """IPv4 or IPv6."""
        return self.settings.family


class FamilyServices(NamedTuple):
    """A family and the ServicePorts that the node must serve in it."""

    context: FamilyContext
    service_ports: ServicePorts


class FamilyTables(NamedTuple):
    """A family and the tables that a mode's resources should hold in it, by name (see ``rendering.rendering``)."""

    context: FamilyContext
    tables: Mapping[str, Mapping[Any, Any]]


def removal_contexts(families: Sequence[str] = FAMILIES) -> list[FamilyContext]:
    """Return each family with every iptables variant that is installed, for removing chains. Raises KernelError."""
    contexts = []
    survey = Survey()
    # A kernel without netfilter has no chains of iptables-nft, although the programs may be installed.
    usable = [name for name in VARIANTS if name != NFT or is_supported(NETLINK_NETFILTER)]
    for family in families:
        for name in usable:
            try:
                variant = detect_variant(family, name, survey)
            except NotInstalledError:
                continue
            if family == IPV6 and not os.path.exists("/proc/net/if_inet6"):
                continue
            contexts.append(FamilyContext(DataplaneSettings(family), NodeContext(family, ""), variant))
    return contexts
