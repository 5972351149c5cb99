# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision whether a run may return the result of the last complete one."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Sequence, Union

from ...base.errors import KernelError
from ..runtime.lock import ConvergenceLock
from .inputs import Unusable, engine_digest, options_digest, read_files
from .record import Record, State, read_record
from .surroundings import NotComparable, boot_seconds, surroundings

#: How long a record is valid, in seconds. Meanwhile the generation of nf_tables, a number of 32 bits, can assume no
#: value twice: that would take 50,000 transactions a second.
LONGEST_SECONDS = 86_400.0


class Question(NamedTuple):
    """A run that is about to start: its options, and the files whose paths the options name.

    ``directory``: the state directory. ``lock_timeout``: seconds to wait for another convergence.
    """

    options: dict[str, Any]
    paths: Sequence[str]
    directory: str
    lock_timeout: float


class Unchanged(NamedTuple):
    """The result of the last complete run, and its warnings."""

    result: dict[str, Any]
    warnings: list[str]


class Changed(NamedTuple):
    """Why a run must be complete, for tests and debugging."""

    reason: str


Decision = Union[Unchanged, Changed]


def given(question: Question, directory: str) -> State:
    """Return the compared part of the input; ``directory``: of the static Services. Raises Unusable, OSError."""
    files = read_files(question.paths, directory)
    return {"options": options_digest(question.options), "engine": engine_digest(), "files": files.digests}


def decide(question: Question) -> Decision:
    """Return the result of the last complete run if this one would have the same, otherwise the reason.

    Holds the lock while the kernel is read, as a complete run does. Raises KernelError if the lock is not free, which
    is the error of a complete run as well.
    """
    if os.geteuid():
        return Changed("only root keeps records")
    record = read_record(question.directory)
    if record is None:
        return Changed("there is no record")
    try:
        different = _difference(record.given, given(question, record.directory))
    except (Unusable, OSError) as error:
        return Changed(f"the input cannot be compared: {error}")
    if different:
        return Changed(different)
    with ConvergenceLock(question.directory, question.lock_timeout):
        if read_record(question.directory) != record:
            return Changed("another run has ended meanwhile")
        return _decide_by_state(question, record)


def _decide_by_state(question: Question, record: Record) -> Decision:
    age = boot_seconds() - record.taken
    if not 0 <= age < LONGEST_SECONDS:
        return Changed("the record is too old")
    try:
        different = _difference(record.state, surroundings(question.directory, record.state["sysctls"]))
    except (NotComparable, KernelError, OSError, ValueError, KeyError, TypeError) as error:
        return Changed(f"the state cannot be compared: {error}")
    return Changed(different) if different else Unchanged(record.result, record.warnings)


def _difference(before: State, now: State) -> str:
    """Return the difference, in words; empty if there is none."""
    return ", ".join(name for name in sorted({*before, *now}) if before.get(name, ...) != now.get(name, ...))
