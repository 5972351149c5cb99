# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The last saved states of a node, in a directory that only root can read and change.

It is not below the agent's state directory: systemd gives that one, with all that is in it, to the agent's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

from ...errors import HistoryError
from ...packaging.identity import engine_hash
from ...regular_files import SMALL, parse_json, read_regular
from ...timestamps import timestamp
from ...whole_files import write_whole
from .form import MOST_BYTES, StateRecord, pack_record, unpack_record
from .state import NodeState

DEFAULT_DIRECTORY = "/var/lib/kubenode-proxy-history"
DEFAULT_KEEP = 5

#: What a state was saved before: these are what ``rollback`` goes back to when no number is given.
BEFORE_CONVERGENCE = "before a convergence"
BEFORE_ROLLBACK = "before a rollback"

CONFIRMED, REVERTED, WITHDRAWN = "confirmed", "reverted", "rolled back"

_NUMBER = re.compile(r"[0-9]{1,6}\Z")
_NAME = re.compile(r"state-(\d{6})\.json\.gz\Z")
_OUTCOMES = "outcomes.json"
#: What a writer that was killed leaves behind: whole_files.write_whole makes such names.
_UNFINISHED = re.compile(r"\.(state-\d{6}\.json\.gz|outcomes\.json|writable)\..+\Z")
#: A file of that age has no writer any more.
_UNFINISHED_SECONDS = 60.0
_MOST = 999_999


class SavedState(NamedTuple):
    """One line of the list of saved states.

    ``counts``: entries by kind; ``mode``: what the state looks like; ``outcome``: what became of the change that it
    was saved before, if that had to be confirmed. ``problem``: why the file cannot be used, empty if it can.
    """

    number: int
    created: str
    reason: str
    mode: str
    counts: Dict[str, int]
    size_bytes: int
    outcome: str = ""
    problem: str = ""


def boot_identity() -> str:
    """The kernel's identity of the boot; empty where it tells none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class History:
    """Saved states by number, the newest with the highest; ``keep``: how many, at least one.

    Raises HistoryError from every method if the directory is not root's alone, or cannot be used.
    """

    def __init__(self, directory: str = DEFAULT_DIRECTORY, keep: int = DEFAULT_KEEP) -> None:
        if keep < 1:
            raise HistoryError(f"keep: {keep} states cannot be kept, at least 1 is needed")
        self.directory = directory
        self.keep = keep

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, f"state-{number:06d}.json.gz")

    def _check(self) -> bool:
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

    def numbers(self) -> List[int]:
        """The numbers of the saved states, oldest first."""
        if not self._check():
            return []
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            raise HistoryError(f"{self.directory}: {error.strerror}") from error
        return sorted(int(found.group(1)) for found in map(_NAME.match, names) if found)

    def save(self, state: NodeState, reason: str = BEFORE_CONVERGENCE, kept: Iterable[int] = ()) -> StateRecord:
        """Save a state, and forget the oldest beyond ``keep``, except those with the numbers ``kept``."""
        self._make()
        numbers = self.numbers()
        number = max([*numbers, *self.outcomes()], default=0) + 1
        if number > _MOST:
            raise HistoryError(f"{self.directory}: there is no number after {_MOST}; remove the directory")
        record = StateRecord(number, timestamp(), reason, os.uname().release, engine_hash(), boot_identity(), state)
        self._write(self._path(number), pack_record(record))
        self._remove_unfinished()
        spared = {number, *kept}
        for old in [each for each in numbers if each not in spared][: max(0, len(numbers) + 1 - self.keep)]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(old))
        return record

    def _make(self) -> None:
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise HistoryError(f"{self.directory}: cannot be made: {error.strerror}") from error

    def check_writable(self) -> None:
        """Write a file as large as a small state and remove it. Raises HistoryError if that is not possible."""
        self._make()
        self._check()
        try:
            with tempfile.NamedTemporaryFile(prefix=".writable.", dir=self.directory) as file:
                file.write(bytes(SMALL))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HistoryError(f"{self.directory}: cannot be written: {error.strerror}") from error

    def _remove_unfinished(self) -> None:
        """Remove what writers that were killed have left. A file that is gone already, or stays, does no harm."""
        with contextlib.suppress(OSError):
            for name in filter(_UNFINISHED.match, os.listdir(self.directory)):
                path = os.path.join(self.directory, name)
                if os.lstat(path).st_mtime < time.time() - _UNFINISHED_SECONDS:
                    os.unlink(path)

    @staticmethod
    def _write(path: str, content: bytes) -> None:
        try:
            write_whole(path, content)
        except OSError as error:
            raise HistoryError(f"{path}: cannot be written: {error.strerror}") from error

    def load(self, number: int) -> StateRecord:
        """The saved state of that number. Raises HistoryError if there is none or its file cannot be used."""
        numbers = self.numbers()
        if number not in numbers:
            known = ", ".join(map(str, numbers)) or "none"
            raise HistoryError(f"state {number}: there is no such saved state in {self.directory} (there are: {known})")
        path = self._path(number)
        try:
            record = unpack_record(read_regular(path, MOST_BYTES))
        except OSError as error:
            raise HistoryError(f"{path}: cannot be read: {error.strerror}") from error
        except HistoryError as error:
            raise HistoryError(f"{path}: {error}") from error
        if record.number != number:
            raise HistoryError(f"{path}: is the state {record.number}, not {number}")
        return record

    def newest(self) -> int:
        """The number of the newest state that was saved before a convergence. Raises HistoryError if there is none."""
        for number in reversed(self.numbers()):
            if self.load(number).reason == BEFORE_CONVERGENCE:
                return number
        raise HistoryError(f"{self.directory}: there is no state saved before a convergence")

    def list(self) -> List[SavedState]:
        """All saved states, newest first; files that cannot be used are listed with the reason."""
        outcomes = self.outcomes()
        found = []
        for number in reversed(self.numbers()):
            try:
                size = os.lstat(self._path(number)).st_size
            except FileNotFoundError:
                continue
            try:
                record = self.load(number)
            except HistoryError as error:
                found.append(SavedState(number, "", "", "", {}, size, problem=str(error)))
                continue
            outcome = outcomes.get(number, {}).get("outcome", "")
            state = record.state
            found.append(SavedState(number, record.created, record.reason, state.mode(), state.counts(), size, outcome))
        return found

    def outcomes(self) -> Dict[int, Dict[str, str]]:
        """What became of changes that had to be confirmed, by the number of the state saved before them."""
        if not self._check():
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
        self._write(os.path.join(self.directory, _OUTCOMES), json.dumps(last, indent=1).encode())
