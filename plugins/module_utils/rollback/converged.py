# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Convergences with rollback: the functions that modules, runners and the node command call."""

from __future__ import annotations

import functools
from typing import Optional

from ..convergence.converge import run_convergence
from ..convergence.request import Report, Request
from ..convergence.witness import Witness
from .boot_state import NextBoot
from .guard import SavingGuard


def converge(request: Request, witness: Optional[Witness] = None, next_boot: Optional[NextBoot] = None) -> Report:
    """Converge the node to the request, or with ``request.check`` only report what would change.

    ``next_boot``: what a boot needs to restore the result, beside the request.

    If the request has a history directory, the current state is saved before the first change; if it has a
    ``confirm_timeout``, the change is reverted unless it is confirmed. ``witness``: see ``run_convergence``. Raises as
    ``run_convergence`` does, and HistoryError while another change waits to be confirmed.
    """
    return run_convergence(request, functools.partial(SavingGuard, next_boot=next_boot), witness)


def inspect(request: Request) -> Report:
    """Return what a convergence would change, and the number of programmed entries, without changing anything.

    A difference of any size is not an error, nor is another service proxy on the node.
    """
    return converge(request._replace(check=True, compare=True, max_unserved_percent=100.0))
