# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write files atomically, so that a reader sees the old or the new content whatever happens, and remove them."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from typing import Optional

from .errors import KernelError, os_errors

#: The first line of configuration files that the collection writes whole.
MANAGED_LINE = "# Managed by the Ansible collection kubenode.proxy; changes are overwritten."
#: Raised for a directory that the caller may only create names in, by file systems that cannot sync directories, and
#: where another process has removed the directory by now.
_NOT_SYNCABLE = frozenset((errno.EACCES, errno.EINVAL, errno.ENOENT))


def is_managed(text: str) -> bool:
    """Return whether the collection has written a configuration file with this text, by its first line."""
    return text.startswith(MANAGED_LINE)


def write_whole(path: str, content: bytes, mode: int = 0o600, owner: Optional[tuple[int, int]] = None) -> None:
    """Replace a file so that at any moment, power loss included, either the old or the new content is complete.

    The new file has the permission bits ``mode`` and the ``owner`` (user, group), None for the caller. A symbolic link
    is itself replaced, not its target. The temporary file that a killed writer leaves behind is named ``.NAME.*``.
    Raises OSError.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(descriptor, mode)
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fsync(descriptor)
        rename_durably(temporary, path)
    except BaseException:
        # A file system that became read-only keeps it, and the first error is the reason.
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def check_room(path: str, room: int = 1) -> None:
    """Raise OSError if a file of ``room`` bytes, with the directories that are missing, could not be written.

    Without ``room``, the file is only to be removed, which a full disk allows. Nothing is left behind, and existing
    directories are not changed where the file system has files without names.
    """
    place = os.path.dirname(os.path.realpath(path))
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    with tempfile.TemporaryFile(dir=place) as file:
        if room:
            os.posix_fallocate(file.fileno(), 0, room)


def unlink_durably(path: str) -> bool:
    """Remove a file so that no power loss brings it back; return whether there was one. Raises OSError."""
    # On a disk that is read-only, unlink(2) fails for a file that does not exist, too.
    if not os.path.lexists(path):
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    _sync_directory(os.path.dirname(path) or ".")
    return True


def rename_durably(source: str, target: str) -> None:
    """Rename a file within its directory so that no power loss undoes it. Raises OSError."""
    os.replace(source, target)
    _sync_directory(os.path.dirname(target) or ".")


def remove_file(path: str) -> None:
    """Remove a file, also over a power loss; one that does not exist is not an error. Raises KernelError."""
    with os_errors(KernelError, f"{path}: cannot be removed"):
        unlink_durably(path)


def _sync_directory(directory: str) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SYNCABLE:
            raise
