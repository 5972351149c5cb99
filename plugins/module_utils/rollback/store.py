# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The most recent saved states of a node, in a directory that only root can read and change.

It is not below the agent's state directory: systemd changes the owner of that directory recursively to the agent's
user.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
from typing import Iterable, NamedTuple, Optional

from ..base.errors import HistoryError, errors_as, os_errors
from ..base.installed import HISTORY_DIRECTORY
from ..base.regular_files import read_regular
from ..base.timestamps import timestamp
from ..convergence.defaults import DEFAULT_KEEP
from ..kernel.facts import boot_identity
from ..packaging.identity import identity
from . import boot_directory
from .decisions import make_own_directory, own_directory, remove_unfinished
from .directory import HistoryDirectory
from .form import MOST_BYTES, StateRecord, pack_record, unpack_record
from .state import NodeState

#: The reasons for saving a state. Without a number, ``rollback`` restores the newest one before a convergence.
BEFORE_CONVERGENCE = "before a convergence"
BEFORE_ROLLBACK = "before a rollback"

#: What a file has beside it: the state that a boot restored at its time.
_OF_BOOT = ".boot"
_NAME = re.compile(r"state-(\d{6})\.json\.gz\Z")
_MOST = 999_999


class SavedState(NamedTuple):
    """One line of the list of saved states.

    ``counts``: entries by kind; ``mode``: the mode to which the entries belong; ``outcome``: of the change before which
    it was saved, if that had a confirm_timeout. ``problem``: why the file cannot be used, empty if it can.
    """

    number: int
    created: str = ""
    reason: str = ""
    mode: str = ""
    counts: dict[str, int] = {}
    size_bytes: int = 0
    outcome: str = ""
    problem: str = ""


class History(HistoryDirectory):
    """Saved states by number, the newest with the highest.

    ``keep``: the number of states to keep, at least one; None to keep all.

    Every method raises HistoryError if other users can write to the directory, or if it cannot be used.
    """

    def __init__(self, directory: str = HISTORY_DIRECTORY, keep: Optional[int] = DEFAULT_KEEP) -> None:
        if keep is not None and keep < 1:
            raise HistoryError(f"keep: {keep} states cannot be kept, at least 1 is needed")
        super().__init__(directory)
        self.keep = keep

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, f"state-{number:06d}.json.gz")

    def numbers(self) -> builtins.list[int]:
        """Return the numbers of the saved states, oldest first."""
        if not own_directory(self.directory):
            return []
        with os_errors(HistoryError, self.directory):
            names = os.listdir(self.directory)
        return sorted(int(found.group(1)) for found in map(_NAME.match, names) if found)

    def save(self, state: NodeState, reason: str = BEFORE_CONVERGENCE, kept: Iterable[int] = ()) -> StateRecord:
        """Save a state, and remove the oldest ones beyond ``keep``, except those with the numbers ``kept``."""
        make_own_directory(self.directory)
        numbers = self.numbers()
        number = max([*numbers, *self.outcomes()], default=0) + 1
        if number > _MOST:
            raise HistoryError(f"{self.directory}: state numbers are exhausted ({_MOST}); remove the directory")
        record = StateRecord(
            number=number,
            created=timestamp(),
            reason=reason,
            kernel=os.uname().release,
            engine=identity().engine,
            boot=boot_identity(),
            state=state,
        )
        path = self._path(number)
        boot_directory.copy_to(path + _OF_BOOT)
        self.write(path, pack_record(record))
        remove_unfinished(self.directory)
        if self.keep is None:
            return record
        spared = {number, *kept}
        for old in [each for each in numbers if each not in spared][: max(0, len(numbers) + 1 - self.keep)]:
            for name in (self._path(old), self._path(old) + _OF_BOOT):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
        return record

    def boot_with(self, number: int) -> bool:
        """Have the next boot restore what it would have when a state was saved; return False if that was nothing.

        Raises HistoryError, KernelError.
        """
        return boot_directory.restore_from(self._path(number) + _OF_BOOT)

    def load(self, number: int) -> StateRecord:
        """Return the saved state of that number. Raises HistoryError if it does not exist or cannot be used."""
        numbers = self.numbers()
        if number not in numbers:
            known = ", ".join(map(str, numbers)) or "none"
            raise HistoryError(f"state {number}: there is no such saved state in {self.directory} (there are: {known})")
        path = self._path(number)
        with os_errors(HistoryError, f"{path}: cannot be read"):
            content = read_regular(path, MOST_BYTES)
        with errors_as(HistoryError, path, HistoryError):
            record = unpack_record(content)
        if record.number != number:
            raise HistoryError(f"{path}: is the state {record.number}, not {number}")
        return record

    def newest(self) -> int:
        """Return the number of the newest state saved before a convergence. Raises HistoryError if there is none."""
        for number in reversed(self.numbers()):
            if self.load(number).reason == BEFORE_CONVERGENCE:
                return number
        raise HistoryError(f"{self.directory}: there is no state saved before a convergence")

    def list(self) -> builtins.list[SavedState]:
        """Return all saved states, newest first; files that cannot be used are listed with the reason."""
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
                found.append(SavedState(number, size_bytes=size, problem=str(error)))
                continue
            outcome = outcomes.get(number, {}).get("outcome", "")
            state = record.state
            saved = SavedState(
                number, record.created, record.reason, state.mode(), state.counts(), size_bytes=size, outcome=outcome
            )
            found.append(saved)
        return found
