# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The directory of saved states, and the file in it that records the outcomes of changes with a confirm_timeout.

This module is separate from the saved states themselves, so that a confirmation imports no code that reads the kernel.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Optional

from ..base.errors import HistoryError, os_errors
from ..base.installed import HISTORY_DIRECTORY
from ..base.regular_files import SMALL, parse_json, read_regular
from ..base.timestamps import timestamp
from ..base.whole_files import check_room, write_whole
from .decisions import make_own_directory, own_directory

CONFIRMED, REVERTED, WITHDRAWN = "confirmed", "reverted", "rolled back"

_NUMBER = re.compile(r"[0-9]{1,6}\Z")
_OUTCOMES = "outcomes.json"


class HistoryDirectory:
    """A directory that only root can read and change.

    Every method except ``note`` raises HistoryError if other users can write to the directory, or if it cannot be used.
    """

    def __init__(self, directory: str = HISTORY_DIRECTORY) -> None:
        self.directory = directory

    def check_writable(self) -> None:
        """Raise HistoryError if there is no room for a small state."""
        make_own_directory(self.directory)
        with os_errors(HistoryError, f"{self.directory}: cannot be written"):
            check_room(os.path.join(self.directory, _OUTCOMES), SMALL)

    @staticmethod
    def write(path: str, content: bytes) -> None:
        """Write a file atomically. Raises HistoryError."""
        with os_errors(HistoryError, f"{path}: cannot be written"):
            write_whole(path, content)

    def outcomes(self) -> dict[int, dict[str, str]]:
        """Return the outcomes of changes with a confirm_timeout, by the number of the state saved before each."""
        if not own_directory(self.directory):
            return {}
        try:
            document: Any = parse_json(read_regular(os.path.join(self.directory, _OUTCOMES), SMALL))
        except (OSError, ValueError):
            return {}
        if not isinstance(document, dict):
            return {}
        return {
            int(key): value
            for key, value in document.items()
            if _NUMBER.match(key) and isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        }

    def outcome(self, number: int) -> Optional[str]:
        """Return the outcome of the change after a saved state; None if it is unknown."""
        return self.outcomes().get(number, {}).get("outcome")

    def note(self, number: int, outcome: str) -> tuple[str, ...]:
        """Record the outcome of a change, of which the last hundred are kept; return a warning on failure.

        The outcome is in effect without its record, so a full disk must not leave the decision half done.
        """
        try:
            known = self.outcomes()
            known[number] = {"outcome": outcome, "time": timestamp()}
            last = {str(key): known[key] for key in sorted(known)[-100:]}
            self.write(os.path.join(self.directory, _OUTCOMES), json.dumps(last, indent=1).encode())
        except HistoryError as error:
            return (f"the change after state {number} was {outcome}, which is not recorded: {error}",)
        return ()
