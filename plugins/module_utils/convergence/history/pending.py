# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The change that waits to be confirmed: a file below /run, which is gone after a reboot, as rules and timer are.

Its directory is root's alone, unlike /run/kubenode-proxy, which belongs to the agent's user: systemd runs as root what
lies in it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time
from typing import Any, NamedTuple, Optional

from ...errors import HistoryError
from ...regular_files import SMALL, parse_json, read_regular
from ...whole_files import write_whole

DIRECTORY = "/run/kubenode-proxy-confirm"
ENGINE = "revert.pyz"
UNIT = "kubenode-proxy-revert"
_FILE = "pending.json"
#: What the file is renamed to by whoever decides: the rename succeeds only once.
REVERTING, DECIDED = "reverting.json", "decided.json"


class Pending(NamedTuple):
    """A change that is reverted unless it is confirmed in time.

    ``state``: the number of the state saved before it. ``armed``: when its timer began, in seconds of the monotonic
    clock; ``timeout``: its length in seconds; ``deadline``: its end by the wall clock, UTC in the form of RFC 3339.
    ``reverting``: the time is up, or a probe has failed, and it is being reverted.
    """

    state: int
    armed: float
    timeout: float
    deadline: str
    history_directory: str
    state_directory: str
    reverting: bool = False

    @property
    def remaining(self) -> float:
        """Seconds that are left; negative when the time is up."""
        return self.armed + self.timeout - time.monotonic()

    def __str__(self) -> str:
        until = f"waits to be confirmed until {self.deadline}"
        return f"the change after state {self.state} {'is being reverted' if self.reverting else until}"


def _trusted(directory: str) -> bool:
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise HistoryError(f"{directory}: {error.strerror}") from error
    if os.geteuid() and not found.st_uid:
        raise HistoryError(f"a change that root has made waits to be confirmed ({directory} exists)")
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise HistoryError(f"{directory}: is not a directory of user {os.geteuid()} alone")
    return True


def read(directory: str = DIRECTORY) -> Optional[Pending]:
    """Return the pending change, None if there is none. Raises HistoryError."""
    if not _trusted(directory):
        return None
    for name in (_FILE, REVERTING):
        path = os.path.join(directory, name)
        try:
            return _parsed(parse_json(read_regular(path, SMALL)), name == REVERTING)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise HistoryError(f"{path}: cannot be read: {reason}; remove it once the node is in order") from error
    return None


def _parsed(document: Any, reverting: bool) -> Pending:
    """Return what a document says. Raises ValueError, TypeError, KeyError or OverflowError."""
    armed, timeout = float(document["armed"]), float(document["timeout"])
    if not math.isfinite(armed + timeout):
        raise ValueError("a time is not finite")
    deadline, *directories = (document[name] for name in ("deadline", "history_directory", "state_directory"))
    if not all(isinstance(text, str) for text in (deadline, *directories)):
        raise TypeError("a field is not text")
    return Pending(int(document["state"]), armed, timeout, deadline, directories[0], directories[1], reverting)


def claim(name: str, directory: str = DIRECTORY) -> bool:
    """Claim the decision on the pending change, REVERTING or DECIDED; return False if another process was faster.

    Raises HistoryError.
    """
    try:
        os.rename(os.path.join(directory, _FILE), os.path.join(directory, name))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise HistoryError(f"{directory}: {error.strerror}") from error
    return True


def write(pending: Pending, engine: bytes, directory: str = DIRECTORY) -> str:
    """Write the pending change, and the program that reverts it; return its path. Raises HistoryError."""
    path = os.path.join(directory, ENGINE)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        _trusted(directory)
        for name, content in ((path, engine), (os.path.join(directory, _FILE), _text(pending))):
            write_whole(name, content)
    except OSError as error:
        raise HistoryError(f"{directory}: cannot be written: {error.strerror}") from error
    return path


def _text(pending: Pending) -> bytes:
    return json.dumps(pending._asdict()).encode()


def clear(directory: str = DIRECTORY) -> None:
    """Forget the change: it is confirmed, reverted or rolled back. Raises HistoryError."""
    if not _trusted(directory):
        return
    try:
        # Remove the file of the change first: without it the program does nothing.
        unfinished = [name for name in os.listdir(directory) if name.startswith((f".{_FILE}.", f".{ENGINE}."))]
        for name in (_FILE, REVERTING, DECIDED, ENGINE, *unfinished):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except OSError as error:
        raise HistoryError(f"{directory}: cannot be removed: {error.strerror}") from error
