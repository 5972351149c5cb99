# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stages that remove the tables of nftables mode."""

from __future__ import annotations

from typing import List

from ....base.addresses import FAMILIES
from ....resources import Stage
from ...handles import KernelHandles


def nftables_removal_stages(handles: KernelHandles) -> List[Stage]:
    """Return stages that remove the tables of nftables mode; none if nf_tables is not loaded."""
    if not handles.has_nftables():
        return []
    return [Stage(handles.nftables(family), {}) for family in FAMILIES]
