# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the modules share that save the node's state, go back to it, or confirm a change."""

from __future__ import annotations

from typing import Any, Dict, List

from ..convergence.history.directory import DEFAULT_DIRECTORY
from ..convergence.history.store import DEFAULT_KEEP, History
from .arguments import Spec


def history_spec() -> Spec:
    """Options that tell where saved states are, and how many are kept."""
    return {
        "history_directory": {"type": "path", "default": DEFAULT_DIRECTORY},
        "keep_states": {"type": "int", "default": DEFAULT_KEEP},
    }


def states_result(history: History) -> List[Dict[str, Any]]:
    """The saved states, newest first, as a module returns them. Raises HistoryError."""
    return [item._asdict() for item in history.list()]
