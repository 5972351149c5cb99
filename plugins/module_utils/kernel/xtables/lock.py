# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lock that all legacy iptables programs share, a flock(2) on one file."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from typing import Optional

from ...base.errors import KernelError, os_errors
from ..file_locks import holders

DEFAULT_LOCK_FILE = "/run/xtables.lock"


def lock_file() -> str:
    """Return the path of the lock file, which the variable XTABLES_LOCKFILE may set as it does for iptables."""
    return os.environ.get("XTABLES_LOCKFILE") or DEFAULT_LOCK_FILE


def held_message(seconds: float, path: Optional[str] = None) -> str:
    """Return one line that names the current holder of the lock after a wait of ``seconds``."""
    who = ", ".join(holders(path or lock_file()).values()) or "another process"
    waited = f"{seconds:g} second{'' if seconds == 1 else 's'}"
    return f"the xtables lock {path or lock_file()} is held by {who}; gave up after {waited}; end it, or try again"


class XtablesLock:
    """Takes the file lock and the abstract socket @xtables, for restore programs older than 1.6.2 that do not.

    Raises KernelError on entering if they are not free within ``seconds``.
    """

    def __init__(self, seconds: float, path: Optional[str] = None) -> None:
        self._seconds = seconds
        self._path = path or lock_file()
        self._file = -1
        self._socket: Optional[socket.socket] = None

    def __enter__(self) -> XtablesLock:
        deadline = time.monotonic() + self._seconds
        with os_errors(KernelError, f"xtables lock {self._path}"):
            self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            while not self._try():
                if time.monotonic() >= deadline:
                    raise KernelError(held_message(self._seconds, self._path))
                time.sleep(min(0.2, max(0.01, deadline - time.monotonic())))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._release()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise KernelError(f"xtables lock {self._path}: {error.strerror}") from None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0xtables")
        except OSError:
            listener.close()
            fcntl.flock(self._file, fcntl.LOCK_UN)
            return False
        self._socket = listener
        return True

    def _release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
