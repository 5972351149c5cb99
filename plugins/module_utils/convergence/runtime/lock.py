# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lock that allows one convergence at a time on a node, by a module, the agent or the node command.

The lock is a file in a directory that only root can write to, so that no other user can replace it. The role agent lets
the agent's group open it (mode 0660), which is all that an unprivileged process needs to hold it.

``state: absent`` removes the file. Another process may be waiting for the deleted file at that time, so a process that
acquires the lock checks that the path still refers to the file that it holds, and otherwise starts again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from typing import Iterator

from ...base.errors import KernelError, os_errors
from ...base.regular_files import open_regular
from ...base.whole_files import remove_file
from ...kernel.facts import read_text
from ...kernel.file_locks import holders
from .state_directory import prepare_state_directory

#: The holder's name that the agent writes to the file; it holds the lock while it runs.
AGENT = "the agent (kubenode-proxy run)"
_POLL_SECONDS = 0.05
#: Limit of the text in the file that is shown: process ID and name of the holder.
_HOLDER_BYTES = 200
#: How long a task of a general module waits for another one.
_TASK_SECONDS = 60.0


class ConvergenceLock:
    """An exclusive flock on ``<directory>/lock``, held while the context lasts.

    ``holder``: the name of this process in messages. ``outlasts_agent``: wait for a running agent as well, because it
    is being stopped. Raises KernelError, naming the process that holds the lock, if it is not free within ``timeout``
    seconds, or immediately if a running agent holds it; if the directory cannot be created, or if as root it is
    writable by others; and if the path is not a regular file.
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
        while not self._open_and_lock(deadline):
            pass
        return self

    def _open_and_lock(self, deadline: float) -> bool:
        """Open the file and lock it; return False if it was removed meanwhile."""
        try:
            prepare_state_directory(self._directory)
            self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if self._is_removed(error) and time.monotonic() < deadline:
                return False
            raise KernelError(f"{self._path}: cannot be opened: {error.strerror}") from error
        with os_errors(KernelError, f"{self._path}: cannot be opened"), contextlib.ExitStack() as opened:
            opened.callback(os.close, self._descriptor)
            self._acquire(deadline)
            named = self._is_named()
            if named:
                # The holder is only for messages, so the lock is valid even if it cannot be written (disk full).
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
                    os.pwrite(self._descriptor, f"{os.getpid()} {self._holder}".encode(), 0)
                opened.pop_all()
        return named

    def _is_removed(self, error: OSError) -> bool:
        """Return whether the directory was removed while it or the file in it was being created."""
        if isinstance(error, FileExistsError):
            return os.path.isdir(self._directory) or not os.path.lexists(self._directory)
        return isinstance(error, FileNotFoundError)

    def _is_named(self) -> bool:
        """Return whether the path refers to the file that is locked."""
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        held = os.fstat(self._descriptor)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def remove(self) -> None:
        """Remove the locked file, and its directory if it is empty; call this last before the lock is released.

        Raises KernelError.
        """
        remove_file(self._path)
        # The directory may contain other files, the next lock, or be in a parent that this user cannot change.
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)

    def refuse_agent(self) -> None:
        """Raise KernelError if a running agent holds the lock, as a convergence would; create nothing."""
        process, _blank, holder = (read_text(self._path) or "").partition(" ")
        if holder == AGENT and process in holders(self._path):
            raise self._held_by_agent(process)

    def _held_by_agent(self, process: str) -> KernelError:
        what = f"{AGENT} of this node is running and programs the node until it is stopped"
        return KernelError(f"{self._path}: held by process {process}: {what}")

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
            others = holders(self._path)
            # Otherwise the file has the name of an earlier holder: the present one is another program.
            if process in others:
                others = {}
            if not others and holder == AGENT and not self._outlasts_agent and is_running(process):
                raise self._held_by_agent(process)
            if time.monotonic() >= deadline:
                known = f"process {process or 'unknown'}: {holder or 'another convergence'} of this node is running"
                raise KernelError(
                    f"{self._path}: held by {', '.join(others.values()) or known}, and did not end within "
                    f"{self._timeout:g} seconds; wait longer, or end it"
                )
            time.sleep(_POLL_SECONDS)

    def __exit__(self, *_error: object) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def task_lock(directory: str) -> Iterator[None]:
    """Hold the lock of tasks that change what others of them change too; nothing without a directory.

    It leaves no file. It is not that of convergences, which a running agent holds. Raises KernelError as
    :class:`ConvergenceLock` does.
    """
    if not directory:
        yield
        return
    with ConvergenceLock(directory, _TASK_SECONDS, "another task") as lock:
        try:
            yield
        finally:
            lock.remove()


def is_running(process: str) -> bool:
    """Return whether a process with that ID exists; the text is from a file, so it may be anything."""
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    return True
