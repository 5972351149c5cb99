# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The directory of saved states, and in it the outcomes of the changes that had to be confirmed.

It is apart from the saved states themselves so that a confirmation loads nothing that reads the kernel.
"""

from __future__ import annotations

import json
import os
import re
import stat
from typing import Any, Dict, Optional

from ...errors import HistoryError
from ...regular_files import SMALL, parse_json, read_regular
from ...timestamps import timestamp
from ...whole_files import write_whole

DEFAULT_DIRECTORY = "/var/lib/kubenode-proxy-history"
CONFIRMED, REVERTED, WITHDRAWN = "confirmed", "reverted", "rolled back"

_NUMBER = re.compile(r"[0-9]{1,6}\Z")
_OUTCOMES = "outcomes.json"


class HistoryDirectory:
    """A directory that only root can read and change.

    Raises HistoryError from every method if the directory is not root's alone, or cannot be used.
    """

    def __init__(self, directory: str = DEFAULT_DIRECTORY) -> None:
        self.directory = directory

    def check(self) -> bool:
        """Whether the directory is there. Raises HistoryError if others could have put something into it."""
        try:
            found = os.lstat(self.directory)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise HistoryError(f"{self.directory}: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode):
            raise HistoryError(f"{self.directory}: is not a directory")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            owner = f"belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}"
            raise HistoryError(f"{self.directory}: {owner}; saved states are trusted only where nobody else may write")
        return True

    @staticmethod
    def write(path: str, content: bytes) -> None:
        """Write a file whole or not at all."""
        try:
            write_whole(path, content)
        except OSError as error:
            raise HistoryError(f"{path}: cannot be written: {error.strerror}") from error

    def outcomes(self) -> Dict[int, Dict[str, str]]:
        """What became of changes that had to be confirmed, by the number of the state saved before them."""
        if not self.check():
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
        """What became of the change after the state of that number; None if nothing is known."""
        return self.outcomes().get(number, {}).get("outcome")

    def note(self, number: int, outcome: str) -> None:
        """Remember what became of a change; the last hundred are kept."""
        known = self.outcomes()
        known[number] = {"outcome": outcome, "time": timestamp()}
        last = {str(key): known[key] for key in sorted(known)[-100:]}
        self.write(os.path.join(self.directory, _OUTCOMES), json.dumps(last, indent=1).encode())
