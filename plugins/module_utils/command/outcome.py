# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a command gives back, and its exit codes."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

OK, FAILED, USAGE, DIFFERENT, NOT_RUNNING = 0, 1, 2, 3, 4


class Outcome(NamedTuple):
    """What a command has to say: lines for people, a document for programs, warnings, and its exit code."""

    code: int
    lines: List[str]
    document: Dict[str, Any]
    warnings: Tuple[str, ...] = ()
