# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all changes have in common that the node reverts unless they are confirmed: those of Services, and of chains.

Such a change is a file below /run, in a directory that no other user can change, and a timer of systemd. A process
decides about it by renaming the file, which succeeds only once, so only one process can.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from typing import Mapping

from ..base.errors import HistoryError, os_errors
from ..base.regular_files import others_write
from ..base.whole_files import rename_durably, write_whole

# Temporary files of ``write_whole`` for saved states, their outcomes, and the files of the next boot.
_UNFINISHED = re.compile(r"\.((state(-\d{6})?|unconfirmed)\.json\.gz(\.boot)?|outcomes\.json|boot\.pyz|writable)\..+\Z")
# Of this age, one has no writer any more.
_UNFINISHED_SECONDS = 60.0


def own_directory(directory: str) -> bool:
    """Return whether a directory exists. Raises HistoryError if another user could have written in it."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise HistoryError(f"{directory}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise HistoryError(f"{directory}: is not a directory")
    if os.geteuid() and not found.st_uid:
        raise HistoryError(f"{directory}: belongs to root: run the command as root")
    distrusted = others_write(found, os.geteuid())
    if distrusted:
        raise HistoryError(f"{directory}: {distrusted}; it is trusted only if no other user can write there")
    return True


def make_own_directory(directory: str) -> None:
    """Create a directory that only this user can access, unless it exists. Raises as :func:`own_directory` does."""
    with os_errors(HistoryError, f"{directory}: cannot be created"):
        os.makedirs(directory, 0o700, exist_ok=True)
    own_directory(directory)


def write_files(directory: str, contents: Mapping[str, bytes]) -> None:
    """Write files, by name and in this order, in a directory that is created if necessary. Raises HistoryError."""
    make_own_directory(directory)
    with os_errors(HistoryError, f"{directory}: cannot be written"):
        for name, content in contents.items():
            write_whole(os.path.join(directory, name), content)


def remove_unfinished(directory: str) -> None:
    """Remove temporary files of writers that were killed. Ignore failures, which are harmless."""
    with contextlib.suppress(OSError):
        for name in filter(_UNFINISHED.match, os.listdir(directory)):
            path = os.path.join(directory, name)
            if os.lstat(path).st_mtime < time.time() - _UNFINISHED_SECONDS:
                os.unlink(path)


def claim(directory: str, waiting: str, decision: str) -> bool:
    """Decide about the change in the file ``waiting`` by renaming that; return False if another process was faster.

    Raises HistoryError.
    """
    with os_errors(HistoryError, directory):
        try:
            rename_durably(os.path.join(directory, waiting), os.path.join(directory, decision))
        except FileNotFoundError:
            return False
    return True
