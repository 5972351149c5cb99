# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No mode: kube-proxy or another program serves the Services, and only network policies are enforced.

All objects of Services on the node belong to that program, even those with the names of ours.
"""

from __future__ import annotations

from typing import Sequence

from ...base.mode_names import NONE
from ...configuration.model import KubeProxyConfiguration
from ...preflight.check import ModeNeeds
from ...rendering.nothing import RENDERING
from ...resources import Stage
from ..family import FamilyTables
from ..handles import KernelHandles
from .mode import Mode, Subsystems


class NoMode(Mode):
    """See the base class."""

    rendering = RENDERING
    subsystems = Subsystems()
    # The interface that a packet arrived at is known in postrouting since 5.7; sets of concatenated ranges since 5.6.
    needs = ModeNeeds(NONE, kernel=(5, 13, 0), exclusive=False)
    serves = False
    tracks_connections = False

    def stages(
        self, configuration: KubeProxyConfiguration, families: Sequence[FamilyTables], handles: KernelHandles
    ) -> list[Stage]:
        """Return nothing."""
        return []


NO_MODE = NoMode()
