# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The schedulers that annotations request, if the kernel has them: those of IPVS, and the hash of nf_tables.

A missing scheduler never keeps the node from being programmed: the Service gets the node's, with a warning.
"""

from __future__ import annotations

from typing import Any, Iterable

from ..kernel.nftables.features import can_hash
from ..rendering.nftables.hashing import JHASH
from ..rendering.rendering import Rendering
from ..rendering.settings import DataplaneSettings
from ..serviceports.info import ServicePortInfo
from .family import FamilyContext


def requested(
    rendering: Rendering[Any], service_ports: Iterable[ServicePortInfo], settings: DataplaneSettings
) -> set[str]:
    """Return the schedulers, other than the node's, that ServicePorts request in a mode."""
    return {name for info in service_ports for name in rendering.serving(info).requested_schedulers(info, settings)}


def with_schedulers(
    context: FamilyContext, rendering: Rendering[Any], service_ports: Iterable[ServicePortInfo], load: bool
) -> FamilyContext:
    """Return the context of a family, with the schedulers added that these ServicePorts may use.

    ``load``: have the kernel load their modules; otherwise those that are installed count.
    """
    settings = context.settings
    missing = requested(rendering, service_ports, settings) - settings.schedulers
    if not missing:
        return context
    # Imported late: few Services request a scheduler.
    from ..kernel.modules.ipvs_schedulers import usable_schedulers

    usable = usable_schedulers(missing - {JHASH}, load)
    if JHASH in missing and can_hash(context.family):
        usable |= {JHASH}
    if not usable:
        return context
    return context._replace(settings=settings._replace(schedulers=settings.schedulers | usable))
