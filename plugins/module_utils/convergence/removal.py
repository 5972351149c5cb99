# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stages that remove what modes made: what other modes than the one in effect left, or everything."""

from __future__ import annotations

from typing import List, Sequence

from ..resources import Stage
from .family import FamilyContext
from .handles import KernelHandles
from .modes.mode import Mode
from .node import removal_contexts
from .stages import chain_removal_stages, ipvs_removal_stages, nftables_removal_stages


def leftover_contexts(mode: Mode, families: Sequence[str]) -> List[FamilyContext]:
    """Return the iptables of each family in which a mode that uses none looks for chains of other modes."""
    return [] if mode.subsystems.chains else removal_contexts(families)


def leftover_stages(mode: Mode, handles: KernelHandles, contexts: Sequence[FamilyContext]) -> List[Stage]:
    """Return the stages that remove what other modes left in subsystems that ``mode`` does not use.

    ``contexts``: those of :func:`leftover_contexts`. Two modes that use iptables share one table of chains, so what one
    of them left there is removed with the changes of the other. Raises KernelError.
    """
    used = mode.subsystems
    stages: List[Stage] = []
    if not used.ipvs:
        stages += ipvs_removal_stages(handles, draining=True)
    stages += chain_removal_stages(contexts)
    if not used.nftables:
        stages += nftables_removal_stages(handles)
    return stages


def removal_stages(contexts: Sequence[FamilyContext], handles: KernelHandles) -> List[Stage]:
    """Return the stages that remove all that any mode made, in an order in which nothing is still referred to."""
    return [*ipvs_removal_stages(handles), *chain_removal_stages(contexts), *nftables_removal_stages(handles)]
