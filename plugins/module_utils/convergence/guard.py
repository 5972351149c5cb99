# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way back of a convergence, as far as it is none: nothing is saved, and nothing has to be confirmed."""

from __future__ import annotations

import contextlib
from typing import Iterator, List, Optional

from ..configuration.model import KubeProxyConfiguration
from .handles import KernelHandles
from .request import Request


class Guard:
    """What a convergence calls around its changes; ``history.guard`` saves the state of the node.

    ``saved_state``: the number of the state that was saved, None if none was. ``confirm_until``: when the node goes
    back to it unless the change is confirmed; empty if it does not.
    """

    def __init__(self, request: Request, handles: KernelHandles) -> None:
        self.saved_state: Optional[int] = None
        self.confirm_until = ""

    def begin(self) -> List[str]:
        """Check before anything is touched; return warnings."""
        return []

    def target(self, configuration: KubeProxyConfiguration) -> None:
        """Take the configuration that the node is about to be converged to."""

    def before_change(self) -> List[str]:
        """Save the present state; return warnings."""
        return []

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say, when a change fails half way, how the node gets back."""
        yield
