# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Taking the record of a complete run.

Input and node are read before the run reads them, and again at its end. Its result belongs to them only if both are the
same, and the state that the run itself has found is, too: otherwise there may be a change that the run has not seen.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Iterator, Optional

from ...base.errors import KernelError
from ..witness import Observed, Witness
from .decision import Question
from .inputs import Files, Unusable, engine_digest, options_digest, read_files
from .record import Record, State, write_record
from .surroundings import DEVICES, NotComparable, boot_seconds, surroundings


class Recorder(Witness):
    """Watches one run and writes its record. ``reason``: why there is none, for tests and debugging."""

    def __init__(self, question: Question) -> None:
        """Read the input that the options name; call this before the run reads it."""
        self.reason = "the run has not ended"
        self._question = question
        self._directory = ""
        self._given: State = {}
        self._files: list[Files] = []
        self._before: Optional[State] = None
        self._after: Optional[State] = None
        self._taken = 0.0
        self._usable = False
        with self._excused():
            if os.geteuid():
                raise Unusable("only root keeps records")
            self._given = {"options": options_digest(question.options), "engine": engine_digest()}
            self._files = [self._settled(read_files(question.paths, ""))]
            self._usable = True

    @contextlib.contextmanager
    def _excused(self) -> Iterator[None]:
        """Discard the record and keep the reason if the states cannot be compared. The run itself is not affected."""
        try:
            yield
        except (Unusable, NotComparable, KernelError, OSError, ValueError) as error:
            self.reason = str(error)
            self._usable = False

    @staticmethod
    def _settled(files: Files) -> Files:
        if not files.settled:
            raise Unusable("a file has changed just now")
        return files

    def configured(self, directory: str) -> None:
        """Read the static Services in a directory; call this before the run reads them."""
        self._directory = directory
        if self._usable:
            with self._excused():
                self._files.append(self._settled(read_files((), directory)))

    def begin(self) -> None:
        """See the base class."""
        if self._usable:
            with self._excused():
                self._before = surroundings(self._question.directory, ())

    def end(self, observed: Observed) -> None:
        """See the base class."""
        if not self._usable or self._before is None:
            return
        with self._excused():
            self._taken = boot_seconds()
            self._after = surroundings(self._question.directory, observed.sysctls)
            self._compare(self._before, self._after, observed)
            again = [read_files(self._question.paths, ""), read_files((), self._directory)]
            if again != self._files:
                raise Unusable("a file has changed during the run")
            self.reason = ""

    def _compare(self, before: State, after: State, observed: Observed) -> None:
        """Raise Unusable unless the node was the same at both ends and the run has found the same."""
        if not observed.counted:
            raise Unusable("not everything that the result depends on is counted or compared")
        if not observed.complete:
            raise Unusable("the run has not completed, or has warnings of its own")
        # Without a gap, no other program has made a transaction since before the run observed anything.
        first, commits = before["generation"], observed.commits
        if commits != tuple(range(first + 1, first + 1 + len(commits))) or after["generation"] != first + len(commits):
            raise Unusable("another program has made a transaction")
        # Under the lock, only the run itself writes the ledger.
        own = {"sysctls", "ledger", "generation", *(("tables",) if commits else ())}
        for name, value in after.items():
            if name not in own and value != before[name]:
                raise Unusable(f"another program has changed: {name}")
        used = sorted([*pair] for pair in observed.addresses)
        if used != sorted(row[:2] for row in after["addresses"] if row[0] not in DEVICES):
            raise Unusable("addresses have changed during the run")
        if json.loads(json.dumps(observed.facts)) != after["facts"]:
            raise Unusable("facts have changed during the run")
        for key, value in observed.sysctls.items():
            if value is not None and after["sysctls"][key][:1] != [value]:
                raise Unusable(f"the kernel parameter {key} has changed during the run")

    def write(self, result: dict[str, Any], warnings: list[str]) -> bool:
        """Write the record of the run with its result; return whether there is one now."""
        if self.reason or self._after is None:
            return False
        digests = {path: digest for files in self._files for path, digest in files.digests.items()}
        given = {**self._given, "files": digests}
        record = Record(
            given=given,
            directory=self._directory,
            state=self._after,
            taken=self._taken,
            result=result,
            warnings=warnings,
        )
        return write_record(self._question.directory, record)
