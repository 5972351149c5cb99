# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all changes have in common that the node reverts unless they are confirmed: those of Services, and of chains.

Such a change is a file below /run, in a directory that no other user can change, and a timer of systemd. A process
decides about it by renaming the file, which succeeds only once, so only one process can.
"""

from __future__ import annotations

import os
import stat
from typing import Mapping

from ..base.errors import HistoryError, os_errors
from ..base.regular_files import others_write
from ..base.whole_files import write_whole


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


def claim(directory: str, waiting: str, decision: str) -> bool:
    """Decide about the change in the file ``waiting`` by renaming that; return False if another process was faster.

    Raises HistoryError.
    """
    with os_errors(HistoryError, directory):
        try:
            os.rename(os.path.join(directory, waiting), os.path.join(directory, decision))
        except FileNotFoundError:
            return False
    return True
