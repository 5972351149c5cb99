# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The results of commands and their exit codes, and the lines that several commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Sequence, TypeVar

from ..base.errors import ProxyError
from ..base.timestamps import timestamp
from ..convergence.runtime.agent_client import Answer, ask_agent, reading_answer

if TYPE_CHECKING:
    from ..convergence.request import TableChange

Result = TypeVar("Result")
OK, FAILED, USAGE, DIFFERENT, NOT_RUNNING, LEFT = 0, 1, 2, 3, 4, 5


class UsageError(Exception):
    """The command line is invalid; the message is for the user."""

    code = USAGE


class Refused(ProxyError):
    """A command refuses to do anything, and the exit code is the reason for programs."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def valid(use: Callable[[], Result]) -> Result:
    """Return what a function makes of an agent's answer. Raises ProxyError if the answer is not valid."""
    with reading_answer():
        return use()


def ask_newer(control: str, purpose: str, question: dict[str, Any]) -> Answer:
    """Ask the agent what older ones do not know; ``purpose``: for what such an agent is too old. Raises ProxyError."""
    try:
        return ask_agent(control, question)
    except ProxyError as error:
        if "unknown command" not in str(error):
            raise
        raise ProxyError(f"the running agent is too old to {purpose}: restart it") from error


class CommandResult(NamedTuple):
    """The result of a command: lines for people, a document for programs, warnings, and the exit code."""

    code: int
    lines: list[str]
    document: dict[str, Any]
    warnings: tuple[str, ...] = ()


def drain_line(answer: Mapping[str, Any]) -> str:
    """Return an agent's drain in one line. Raises LookupError, TypeError or ValueError if the answer is not valid."""
    if not answer["drained"]:
        return f"not drained; ignored: {answer['problem']}" if answer["problem"] else "not drained"
    since, until = (timestamp(float(answer[name])) for name in ("since", "until"))
    return f"drained since {since} until {until} ({float(answer['remainingSeconds']):.0f} s left)"


def change_lines(changes: Sequence[TableChange], checking: bool, with_entries: bool) -> list[str]:
    """Return the lines that list changes: the diff of each table, or with ``with_entries`` False the counts."""
    if with_entries:
        from ..differences import unified

        return [line for change in changes for line in unified(change.table, change.before, change.after)]
    words = ("to add", "to replace", "to remove") if checking else ("added", "replaced", "removed")
    lines = []
    for change in changes:
        parts = (f"{number} {word}" for number, word in zip((change.added, change.replaced, change.removed), words))
        lines.append(f"{change.table}: {', '.join(parts)}")
    return lines
