# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of iptables that the node rolls back automatically unless it is confirmed in time.

Below /run, which like the tables is empty after a reboot, each such change has a directory with the input of
iptables-restore that reverts it, and a shell script that does so. systemd runs the script after the timeout; on nodes
without systemd a waiting process does. The process that decides renames the file ``pending``, so only one can. The name
of the file is the outcome of the change.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
from typing import Collection, NamedTuple, Optional, Sequence

from ..base.errors import HistoryError, os_errors
from ..kernel.xtables.variant import XtablesVariant
from ..rollback.decisions import claim, make_own_directory, write_files
from ..rollback.units import start_timer, stop_timer, why_not_systemd

DIRECTORY = "/run/kubenode-iptables-chains"
PENDING, CONFIRMED, REVERTED, FAILED, WITHDRAWN = "pending", "confirmed", "reverted", "failed", "withdrawn"
_REVERTING = "reverting"
_UNDO, _SCRIPT, _PROCESS = "undo.", "revert", "process"
#: How long iptables-restore waits for the xtables lock, and how often it is run while another program holds the lock.
_LOCK_SECONDS, _ATTEMPTS = 5, 60


class Undo(NamedTuple):
    """The revert of the change of one family: input of ``iptables-restore --noflush`` of the variant."""

    variant: XtablesVariant
    text: str


def _changes(directory: str) -> list[str]:
    with os_errors(HistoryError, f"{directory}: cannot be read"):
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []


def _tables_of(place: str) -> set[tuple[str, str]]:
    """Return family and table of everything that the revert of a change replaces."""
    tables: set[tuple[str, str]] = set()
    for name in _changes(place):
        if name.startswith(_UNDO):
            with open(os.path.join(place, name), encoding="utf-8") as stream:
                tables.update((name[len(_UNDO) :], line[1:].strip()) for line in stream if line.startswith("*"))
    return tables


def _process_of(place: str) -> str:
    """Return the number of the process that reverts a change; empty if it has just begun. Raises OSError."""
    try:
        with open(os.path.join(place, _PROCESS), encoding="ascii") as stream:
            return stream.read().strip()
    except FileNotFoundError:
        return ""


def _is_reverting(place: str) -> bool:
    """Return whether the script that reverts a change runs. Raises OSError.

    If something has ended it, its directory still looks as if it ran. That must not refuse every later change.
    """
    if not os.path.exists(os.path.join(place, _REVERTING)):
        return False
    process = _process_of(place)
    if not process:
        return True
    try:
        with open(f"/proc/{process}/cmdline", "rb") as stream:
            return os.path.join(place, _SCRIPT).encode() in stream.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _unfinished(place: str) -> str:
    """Return in words why a change is not to be touched yet; empty if it is over. Raises OSError."""
    # In this order: the script may turn the first state into the second at any time.
    if os.path.exists(os.path.join(place, PENDING)):
        return "still waits to be confirmed (state: confirmed)"
    return "is being rolled back: try again when that has ended" if _is_reverting(place) else ""


def refuse_while_pending(tables: Optional[Collection[tuple[str, str]]], directory: str = DIRECTORY) -> None:
    """Raise HistoryError if a change waits, or is being reverted, in one of the tables (family and name); None: in any.

    To revert it replaces whole chains, and relies on rule numbers and on chains that no other rule leads to. A later
    change in the same table would be lost, or would make the kernel refuse the revert.
    """
    for name in _changes(directory):
        place = os.path.join(directory, name)
        with os_errors(HistoryError, f"{place}: cannot be read"):
            unfinished = _unfinished(place)
            concerned = unfinished and (tables is None or not _tables_of(place).isdisjoint(tables))
        if concerned:
            raise HistoryError(f"change {name} {unfinished}")


def _script(place: str, undos: Sequence[tuple[str, Undo]]) -> str:
    """Return the script that reverts a change; it writes errors of iptables-restore to the file ``errors``."""
    lines = ["#!/bin/sh", f"cd {shlex.quote(place)} || exit 0", f"mv {PENDING} {_REVERTING} 2>/dev/null || exit 0"]
    lines += [f"echo $$ >{_PROCESS}", f"end={REVERTED}", ": >errors"]
    for name, undo in undos:
        wait = f" -w {_LOCK_SECONDS}" if undo.variant.restore_waits else ""
        lines += [
            "attempt=1",
            f"until {shlex.quote(undo.variant.restore)} --noflush{wait} <{name} 2>output; do",
            # Without the lock, nothing was changed. The kernel would refuse other changes again.
            f'  if [ $attempt -lt {_ATTEMPTS} ] && grep -q "xtables lock" output; then',
            "    attempt=$((attempt + 1)); sleep 1; continue",
            "  fi",
            f"  cat output >>errors; end={FAILED}; break",
            "done",
        ]
    return "\n".join([*lines, "cat errors >&2", f"mv {_REVERTING} $end", ""])


def arm(undos: Sequence[Undo], seconds: int, directory: str = DIRECTORY) -> str:
    """Have a change rolled back after ``seconds`` unless it is confirmed; return its name. Raises HistoryError.

    Only one change can wait at a time, and none while one is rolled back: that would rely on rule numbers that the
    other has changed.
    """
    make_own_directory(directory)
    refuse_while_pending(None, directory)
    for name in _changes(directory):
        shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
    change = secrets.token_hex(8)
    place = os.path.join(directory, change)
    script = os.path.join(place, _SCRIPT)
    texts = [(f"{_UNDO}{undo.variant.family}", undo) for undo in undos if undo.text]
    with contextlib.ExitStack() as failed:
        # A change that nothing would revert must not be found pending.
        failed.callback(shutil.rmtree, place, ignore_errors=True)
        contents = {**{name: undo.text for name, undo in texts}, _SCRIPT: _script(place, texts), PENDING: ""}
        write_files(place, {name: content.encode() for name, content in contents.items()})
        _start(change, seconds, script)
        failed.pop_all()
    return change


def _unit(change: str) -> str:
    return f"kubenode-iptables-chains-{change}"


def _start(change: str, seconds: int, script: str) -> None:
    command = ["/bin/sh", script]
    if not why_not_systemd():
        start_timer(_unit(change), seconds, "Roll back an unconfirmed change of iptables", command)
        return
    loop = (
        f'passed=0; while [ -e "$0" ] && [ $passed -lt {seconds} ]; do sleep 1; passed=$((passed + 1)); done; exec "$@"'
    )
    waiting = ["/bin/sh", "-c", loop, os.path.join(os.path.dirname(script), PENDING), *command]
    with os_errors(HistoryError, "/bin/sh: cannot be started"):
        # Its own session and no descriptors of the caller: it outlives the connection that the change may cut.
        subprocess.Popen(
            waiting,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )


def _errors(path: str) -> str:
    """Return in one line what iptables-restore has printed."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return " ".join(stream.read(4096).split()) or "no reason is known"
    except OSError as error:
        return f"{path}: {error.strerror}"


def withdraw(change: str, directory: str = DIRECTORY) -> bool:
    """Keep the node from reverting a change; return False if it has already begun. Raises HistoryError."""
    return _decide(change, WITHDRAWN, directory)


def _decide(change: str, outcome: str, directory: str) -> bool:
    decided = claim(os.path.join(directory, change), PENDING, outcome)
    if decided:
        # If that fails, its script finds nothing to do. The process that waits where systemd does not sees that too.
        stop_timer(_unit(change))
    return decided


def confirm(change: str, check: bool = False, directory: str = DIRECTORY) -> bool:
    """Keep a change; with an empty name, the pending one, if any. Return whether it was pending.

    Raises HistoryError if the named change failed, was or is being rolled back, or is not known because the node was
    rebooted.
    """
    for name in _changes(directory) if not change else [change]:
        pending = os.path.exists(os.path.join(directory, name, PENDING))
        if pending if check else _decide(name, CONFIRMED, directory):
            return True
    if not change or os.path.exists(os.path.join(directory, change, CONFIRMED)):
        return False
    raise HistoryError(f"change {change} {_why_not_kept(os.path.join(directory, change))}")


def _why_not_kept(place: str) -> str:
    """Return in words why a change that is not pending cannot be confirmed. Raises HistoryError."""
    late = "was not confirmed in time"
    with os_errors(HistoryError, f"{place}: cannot be read"):
        # First: the script may end at any time, and the others are final.
        if _is_reverting(place):
            return f"{late}: it is being rolled back"
    if os.path.exists(os.path.join(place, WITHDRAWN)):
        return "has failed: there is nothing to confirm"
    if os.path.exists(os.path.join(place, FAILED)):
        return f"{late}, and could not be rolled back: {_errors(os.path.join(place, 'errors'))}"
    if os.path.exists(os.path.join(place, _REVERTING)):
        return f"{late}, and its rollback was interrupted"
    if os.path.isdir(place):
        return f"{late}: the node has rolled it back"
    return "is not known: the node was rebooted, or a later change has replaced it"
