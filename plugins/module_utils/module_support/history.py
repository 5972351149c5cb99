# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options and results of the modules that save the node's state, restore it, or confirm a change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional

from ..convergence.defaults import DEFAULT_KEEP
from ..rollback.places import DEFAULT_DIRECTORY
from .arguments import Spec

if TYPE_CHECKING:
    from ..rollback.store import History


def history_spec(keep: Optional[int] = DEFAULT_KEEP) -> Spec:
    """Return the options for the directory of saved states and the number of states to keep, by default ``keep``."""
    return {
        "history_directory": {"type": "path", "default": DEFAULT_DIRECTORY},
        "keep_states": {"type": "int"} if keep is None else {"type": "int", "default": keep},
    }


def states_result(history: History) -> List[Dict[str, Any]]:
    """Return the saved states in the form of a module's result, newest first. Raises HistoryError."""
    return [item._asdict() for item in history.list()]
