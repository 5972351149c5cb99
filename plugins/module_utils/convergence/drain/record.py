# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file that keeps the drain of a node over restarts of the agent and reboots.

Only root writes it, in a directory of root's; the agent, which may be another user, only reads it. A file that does not
belong to root, that others can write, or that is not a regular file without other names, is not a drain.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple, Optional

from ...base.errors import ProxyError, os_errors
from ...base.regular_files import parse_json, read_trusted
from ...base.whole_files import unlink_durably, write_whole
from ..runtime.state_directory import prepare_state_directory

DEFAULT_FILE = "/var/lib/kubenode-proxy/drain.json"
#: How long a drain lasts, in seconds, unless it is ended before: by default, and at most.
DEFAULT_SECONDS, MOST_SECONDS = 2 * 3600.0, 7 * 86400.0
#: No time is that late, and a larger integer may not fit into a float.
_LATEST = 1 << 53

_MOST_BYTES = 4096


class DrainError(ProxyError):
    """The file of a drain cannot be read, written or trusted."""


class DrainRecord(NamedTuple):
    """A drain: when it began and when it ends, in seconds since the epoch.

    ``boot``: identity of the boot in which it was written, and ``ends``: its end in seconds since that boot.
    """

    since: float
    until: float
    boot: str = ""
    ends: float = 0.0

    def remaining(self, now: float) -> float:
        """Return the seconds that are left; 0 if the drain has ended.

        Until the next boot, setting the clock neither ends nor prolongs a drain. Later, setting it back prolongs none
        beyond its whole length.
        """
        same_boot = bool(self.boot) and self.boot == _this_boot()
        left = self.ends - seconds_since_boot() if same_boot else self.until - now
        return max(0.0, min(left, self.until - self.since))


def drain_until(since: float, now: float, seconds: float) -> DrainRecord:
    """Return a drain that ends in some seconds. ``now``: the time in seconds since the epoch."""
    return DrainRecord(since, now + seconds, _this_boot(), seconds_since_boot() + seconds)


def _this_boot() -> str:
    # Imported late: a query of the agent does without the kernel.
    from ...kernel.facts import boot_identity

    return boot_identity()


def seconds_since_boot() -> float:
    """Return the seconds since the boot, those while the machine was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_record(path: str, owner: int = 0) -> Optional[DrainRecord]:
    """Return the drain that the file holds, ended or not; None without a file. Raises DrainError.

    ``owner``: the user to whom the file must belong.
    """
    try:
        return _parse(parse_json(read_trusted(path, _MOST_BYTES, owner)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DrainError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DrainError(f"{path}: is damaged: {error}") from error


def _parse(document: Any) -> DrainRecord:
    """Return a drain from the file's JSON value. Raises ValueError."""
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    # A drain that an older version wrote has no boot.
    boot = document.get("boot", "")
    ends = _seconds(document, "ends") if boot else 0.0
    record = DrainRecord(_seconds(document, "since"), _seconds(document, "until"), str(boot), ends)
    if not 0 < record.until - record.since <= MOST_SECONDS:
        raise ValueError(f"a drain lasts at most {MOST_SECONDS:g} seconds")
    return record


def _seconds(document: Any, name: str) -> float:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LATEST:
        raise ValueError(f"{name} is not a time")
    return float(value)


def write_record(path: str, record: DrainRecord) -> None:
    """Write the file, readable by all users, in a directory that only root can write. Raises DrainError."""
    content = json.dumps(record._asdict()).encode() + b"\n"
    with os_errors(DrainError, f"{path}: cannot be written"):
        prepare_state_directory(os.path.dirname(path) or ".")
        write_whole(path, content, 0o644)


def remove_record(path: str) -> bool:
    """Remove the file, whatever it is; return whether there was one. Raises DrainError."""
    with os_errors(DrainError, f"{path}: cannot be removed"):
        return unlink_durably(path)
