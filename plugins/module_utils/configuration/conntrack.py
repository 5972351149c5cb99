# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The size of the connection tracking table, computed from the number of cores as kube-proxy 1.36 does."""

from __future__ import annotations

from typing import Optional

# Scaling with cores stops here (since kube-proxy 1.36); a larger minimum still counts where scaling stays below it.
SCALED_LIMIT = 1048576


def conntrack_maximum(max_per_core: Optional[int], minimum: Optional[int], cores: int) -> Optional[int]:
    """Entries for nf_conntrack_max, or None to leave the kernel's value alone.

    ``max_per_core`` entries per core, but not less than ``minimum``. Without ``max_per_core`` (None or 0) the minimum
    is ignored too. Scaling beyond SCALED_LIMIT gives SCALED_LIMIT, even if the minimum is larger.
    """
    if not max_per_core or max_per_core < 0:
        return None
    scaled = max_per_core * cores
    if scaled > SCALED_LIMIT:
        return SCALED_LIMIT
    return max(scaled, minimum or 0)
