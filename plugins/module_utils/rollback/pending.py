# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The change that waits to be confirmed: a file below /run, which like the rules and the timer is lost in a reboot.

Only root can write to its directory, because systemd runs the program in it as root.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from typing import Any, NamedTuple, Optional

from ..base.errors import HistoryError, os_errors
from ..base.regular_files import SMALL, parse_json, read_regular
from ..base.timestamps import timestamp, wall_time
from ..convergence.runtime.state_directory import PENDING
from . import decisions

DIRECTORY = PENDING
ENGINE = "revert.pyz"
UNIT = "kubenode-proxy-revert"
_FILE = "pending.json"
#: A process claims the decision by renaming the file to one of these names; the rename succeeds only once.
REVERTING, DECIDED = "reverting.json", "decided.json"


class Pending(NamedTuple):
    """A change that is reverted unless it is confirmed in time.

    ``saved_state``: the number of the state saved before it. ``armed``: when its timer started, in seconds of the
    monotonic clock; ``timeout``: its length in seconds; ``deadline``: its end as the wall clock was set then,
    RFC 3339 in UTC, which earlier versions read.
    ``reverting``: the timeout has expired, or a probe has failed, and the change is being reverted.
    """

    saved_state: int
    armed: float
    timeout: float
    deadline: str
    history_directory: str
    state_directory: str
    reverting: bool = False

    @property
    def remaining(self) -> float:
        """Seconds that are left; negative after the timeout."""
        return self.armed + self.timeout - time.monotonic()

    def __str__(self) -> str:
        until = f"waits to be confirmed until {timestamp(wall_time(self.armed + self.timeout))}"
        return f"the change after state {self.saved_state} {'is being reverted' if self.reverting else until}"


def read(directory: str = DIRECTORY) -> Optional[Pending]:
    """Return the pending change, None if there is none. Raises HistoryError."""
    if not decisions.own_directory(directory):
        return None
    for name in (_FILE, REVERTING):
        path = os.path.join(directory, name)
        try:
            return _parsed(parse_json(read_regular(path, SMALL)), name == REVERTING)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise HistoryError(f"{path}: cannot be read: {reason}; check the node, then remove the file") from error
    return None


def _parsed(document: Any, reverting: bool) -> Pending:
    """Return the change that a document describes. Raises ValueError, TypeError, KeyError or OverflowError."""
    armed, timeout = float(document["armed"]), float(document["timeout"])
    if not math.isfinite(armed + timeout):
        raise ValueError("a time is not finite")
    texts = {name: document[name] for name in ("deadline", "history_directory", "state_directory")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("a field is not text")
    return Pending(int(document["saved_state"]), armed, timeout, **texts, reverting=reverting)


def claim(name: str, directory: str = DIRECTORY) -> bool:
    """Claim the decision on the pending change, REVERTING or DECIDED; return False if another process was faster.

    Raises HistoryError.
    """
    return decisions.claim(directory, _FILE, name)


def write(pending: Pending, engine: bytes, directory: str = DIRECTORY) -> str:
    """Write the pending change and the program that reverts it; return the program's path. Raises HistoryError."""
    decisions.write_files(directory, {ENGINE: engine, _FILE: json.dumps(pending._asdict()).encode()})
    return os.path.join(directory, ENGINE)


def clear(directory: str = DIRECTORY) -> None:
    """Remove the pending change after it was confirmed, reverted or rolled back. Raises HistoryError."""
    if not decisions.own_directory(directory):
        return
    with os_errors(HistoryError, f"{directory}: cannot be removed"), contextlib.suppress(FileNotFoundError):
        # Remove the file of the change first: without it the program does nothing. Several processes may do this at
        # once.
        unfinished = [name for name in os.listdir(directory) if name.startswith((f".{_FILE}.", f".{ENGINE}."))]
        for name in (_FILE, REVERTING, DECIDED, ENGINE, *unfinished):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
