# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stages that remove objects that kube-proxy does not use from the tables of nftables mode that it has taken over."""

from __future__ import annotations

import functools
from typing import List

from ...addresses import FAMILIES
from ...kernel.nftables.unused import UnusedResource
from ...resources import Stage
from ..handles import KernelHandles


def release_stages(handles: KernelHandles) -> List[Stage]:
    """Return stages that remove objects that kube-proxy, now in charge in nftables mode, does not use."""
    if not handles.has_nftables():
        return []
    return [Stage(UnusedResource(family, functools.partial(handles.nftables, family)), {}) for family in FAMILIES]
