# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Convergences that can be undone: what modules, runners and the node command call."""

from __future__ import annotations

from ..converge import run_convergence
from ..request import Report, Request
from .guard import SavingGuard


def converge(request: Request) -> Report:
    """Make the node what the request says, or with ``request.check`` only report what would change.

    With a history directory in the request the present state is saved before the first change, and with a
    ``confirm_timeout`` the change is reverted unless it is confirmed. Raises as ``run_convergence``, and HistoryError
    while another change waits to be confirmed.
    """
    return run_convergence(request, SavingGuard)


def inspect(request: Request) -> Report:
    """Return what a convergence would change, and how many entries the node is programmed with; changes nothing.

    However much the node differs, that is no error.
    """
    return converge(request._replace(check=True, max_loss_percent=100.0))
