# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One convergence at a time on a node, whether by a module, the agent or the node command."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from types import TracebackType
from typing import Optional, Type

from ..errors import KernelError

_POLL_SECONDS = 0.05


class ConvergenceLock:
    """An exclusive flock on ``<directory>/lock``, held while the context lasts.

    ``holder``: what to call the process that holds it. Raises KernelError, naming the process that holds it, when it is
    not free within ``timeout`` seconds, or when the directory cannot be made.
    """

    def __init__(self, directory: str, timeout: float, holder: str = "another convergence") -> None:
        self._path = os.path.join(directory, "lock")
        self._directory = directory
        self._timeout = timeout
        self._descriptor = -1
        self._holder = holder

    def __enter__(self) -> ConvergenceLock:
        try:
            os.makedirs(self._directory, mode=0o755, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._share()
        except OSError as error:
            raise KernelError(f"{self._path}: cannot be opened: {error.strerror}") from error
        try:
            self._acquire()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {self._holder}".encode(), 0)
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def _share(self) -> None:
        """Give a lock that root has made to the owner of its directory: the agent's user, if it has one of its own."""
        if os.geteuid() != 0:
            return
        owner = os.stat(self._directory)
        if os.fstat(self._descriptor).st_uid != owner.st_uid:
            os.fchown(self._descriptor, owner.st_uid, owner.st_gid)

    def _acquire(self) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise KernelError(f"{self._path}: cannot be locked: {error.strerror}") from error
            if time.monotonic() >= deadline:
                text = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace")
                process, _blank, holder = text.partition(" ")
                raise KernelError(
                    f"{self._path}: held by process {process or 'unknown'}: {holder or 'another convergence'} of this "
                    f"node is running and has not ended within {self._timeout:g} seconds"
                )
            time.sleep(_POLL_SECONDS)

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        os.close(self._descriptor)
