# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hooks that record what a convergence's result depends on; see :mod:`.unchanged.recorder`."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional

from ..kernel.facts import NodeFacts


class Observed(NamedTuple):
    """What a convergence has found on the node and used.

    ``counted``: all that it programs is in tables of nf_tables, whose changes the kernel counts, and depends on no
    other node state than the rest of this value and :mod:`.unchanged.surroundings`. ``complete``: the next run has
    nothing to repeat, and the same warnings. ``commits``: the generation of nf_tables after each of its transactions, 0
    where the kernel did not report it. ``sysctls``: values of the kernel parameters that it compared, None for one
    that it could not change. ``addresses``: as pairs (interface, address).
    """

    counted: bool
    complete: bool
    commits: tuple[int, ...]
    facts: NodeFacts
    addresses: tuple[tuple[str, str], ...]
    sysctls: Mapping[str, Optional[str]]


class Witness:
    """Hooks that a convergence calls under its lock, at both of its ends; these do nothing. A check calls none."""

    def begin(self) -> None:
        """Note the state of the node before anything is observed or changed."""

    def end(self, observed: Observed) -> None:
        """Note what the run has found, after its last change."""
