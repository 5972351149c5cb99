# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The size of the connection tracking table, computed from the number of cores as kube-proxy 1.36 does."""

from __future__ import annotations

from typing import Optional

# Scaling with cores stops here (since kube-proxy 1.36). Below this limit a larger minimum still applies.
SCALED_LIMIT = 1048576


def conntrack_maximum(max_per_core: Optional[int], minimum: Optional[int], cores: int) -> Optional[int]:
    """Return the value for nf_conntrack_max, or None to keep the kernel's value.

    It is ``max_per_core`` entries per core, but not less than ``minimum``. Without ``max_per_core`` (None or 0) the
    minimum is ignored too. If scaling exceeds SCALED_LIMIT, the value is SCALED_LIMIT, even if the minimum is larger.
    """
    if not max_per_core or max_per_core < 0:
        return None
    scaled = max_per_core * cores
    if scaled > SCALED_LIMIT:
        return SCALED_LIMIT
    return max(scaled, minimum or 0)
