# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One convergence at a time on a node, whether by a module, the agent or the node command.

The file is removed when the node is left for good. Then somebody may already wait for a file that has no name any
more, so whoever gets the lock looks whether the name still stands for that file, and else begins anew.
"""

from __future__ import annotations

import contextlib
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
        deadline = time.monotonic() + self._timeout
        while not self._descriptor_of_the_name(deadline):
            pass
        return self

    def _descriptor_of_the_name(self, deadline: float) -> bool:
        """Open the file and lock it; False if it was removed meanwhile."""
        try:
            os.makedirs(self._directory, mode=0o755, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if self._is_removed(error) and time.monotonic() < deadline:
                return False
            raise KernelError(f"{self._path}: cannot be opened: {error.strerror}") from error
        try:
            self._share()
            self._acquire(deadline)
            if self._is_named():
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{os.getpid()} {self._holder}".encode(), 0)
                return True
        except OSError as error:
            os.close(self._descriptor)
            raise KernelError(f"{self._path}: cannot be opened: {error.strerror}") from error
        except BaseException:
            os.close(self._descriptor)
            raise
        os.close(self._descriptor)
        return False

    def _is_removed(self, error: OSError) -> bool:
        """Whether the directory was removed while it was being made, or before the file was."""
        if isinstance(error, FileExistsError):
            return os.path.isdir(self._directory) or not os.path.lexists(self._directory)
        return isinstance(error, FileNotFoundError)

    def _is_named(self) -> bool:
        """Whether the name stands for the file that is locked."""
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        held = os.fstat(self._descriptor)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def remove(self) -> None:
        """Remove the file that is held, and its directory if nothing else is in it; nothing may follow but the exit.

        Raises KernelError.
        """
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise KernelError(f"{self._path}: cannot be removed: {error.strerror}") from error
        # Something else is in it, the next one has already come, or its parent is not ours to change.
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)

    def _share(self) -> None:
        """Give a lock that root has made to the owner of its directory: the agent's user, if it has one of its own."""
        if os.geteuid() != 0:
            return
        try:
            owner = os.stat(self._directory)
        except FileNotFoundError:
            return  # removed just now: what is open has no name any more, which is found out later
        if os.fstat(self._descriptor).st_uid != owner.st_uid:
            os.fchown(self._descriptor, owner.st_uid, owner.st_gid)

    def _acquire(self, deadline: float) -> None:
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
