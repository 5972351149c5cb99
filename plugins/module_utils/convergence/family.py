# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One IP family on one node: the data that rendering and the kernel resources need."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional

from ..kernel.xtables.variant import XtablesVariant
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
