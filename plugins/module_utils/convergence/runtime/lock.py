# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One convergence at a time on a node, whether by a module, the agent or the node command.

The lock is a file in a directory that only root can write, so that nobody else can put another file in its place. The
role agent lets the agent's group open it (mode 0660), which is all that an unprivileged process needs to hold it.

The file is removed when the node is left for good. Another process may wait by then for a file that has no name any
more, so whoever gets the lock compares the name with the file that it holds, and starts again if they differ.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from types import TracebackType
from typing import Optional, Type

from ...errors import KernelError
from ...regular_files import open_regular
from .state_directory import prepare_state_directory

#: What the agent calls itself: it holds the lock for as long as it runs.
AGENT = "the agent (kubenode-proxy run)"
_POLL_SECONDS = 0.05
#: Most bytes of the text in the file that are shown: the process and what it calls itself.
_HOLDER_BYTES = 200


class ConvergenceLock:
    """An exclusive flock on ``<directory>/lock``, held while the context lasts.

    ``holder``: what to call the process that holds it. ``outlasts_agent``: wait for a running agent as well, since it
    is about to end. Raises KernelError, naming the process that holds the lock, when it is not free within ``timeout``
    seconds, or at once when a running agent holds it; when the directory cannot be made, or for root when others can
    write it; and when the name does not stand for a regular file.
    """

    def __init__(
        self, directory: str, timeout: float, holder: str = "another convergence", *, outlasts_agent: bool = False
    ) -> None:
        self._path = os.path.join(directory, "lock")
        self._directory = directory
        self._timeout = timeout
        self._descriptor = -1
        self._holder = holder
        self._outlasts_agent = outlasts_agent

    def __enter__(self) -> ConvergenceLock:
        deadline = time.monotonic() + self._timeout
        while not self._descriptor_of_the_name(deadline):
            pass
        return self

    def _descriptor_of_the_name(self, deadline: float) -> bool:
        """Open the file and lock it; False if it was removed meanwhile."""
        try:
            prepare_state_directory(self._directory)
            self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if self._is_removed(error) and time.monotonic() < deadline:
                return False
            raise KernelError(f"{self._path}: cannot be opened: {error.strerror}") from error
        try:
            self._acquire(deadline)
            if self._is_named():
                # Who holds it is for messages only; a full file system is no reason to go without a lock.
                with contextlib.suppress(OSError):
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

    def _acquire(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise KernelError(f"{self._path}: cannot be locked: {error.strerror}") from error
            text = os.pread(self._descriptor, _HOLDER_BYTES, 0).decode("utf-8", "replace")
            process, _blank, holder = text.partition(" ")
            if holder == AGENT and not self._outlasts_agent and _is_running(process):
                raise KernelError(
                    f"{self._path}: held by process {process}: {holder} of this node is running and programs the node "
                    "until it is stopped"
                )
            if time.monotonic() >= deadline:
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


def _is_running(process: str) -> bool:
    """Whether there is a process of that number; the text is what the last holder of the lock wrote."""
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    return True
