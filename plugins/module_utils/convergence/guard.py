# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollback hooks of a convergence without rollback: nothing is saved, and nothing needs to be confirmed."""

from __future__ import annotations

import contextlib
from typing import Iterator, Optional

from ..configuration.model import KubeProxyConfiguration
from .handles import KernelHandles
from .request import Interfaces, Request


class Guard:
    """Hooks that a convergence calls around its changes. The subclass in ``history.guard`` saves the state of the node.

    ``saved_state``: the number of the saved state, None if none was saved. ``confirm_until``: when the node rolls back
    to it unless the change is confirmed; empty if it needs no confirmation.
    """

    def __init__(self, request: Request, handles: KernelHandles) -> None:
        self.saved_state: Optional[int] = None
        self.confirm_until = ""

    def begin(self) -> list[str]:
        """Check for obstacles before anything is changed; return warnings."""
        return []

    def target(self, configuration: KubeProxyConfiguration) -> None:
        """Record the configuration to which the node is about to be converged."""

    def before_change(self) -> list[str]:
        """Save the current state; return warnings."""
        return []

    def after_change(self, mode: str, filter_backend: str, node_name: str, addresses: Interfaces) -> list[str]:
        """Keep what the next boot needs of a convergence that is complete; return warnings.

        ``mode``: the one in effect, empty after a removal. ``filter_backend``: the one beside IPVS, empty in other
        modes. ``addresses``: pairs of interface and address.
        """
        return []

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add instructions for the rollback to the error of a change that fails halfway."""
        yield
