# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The directory of the state that a node boots with: which file counts, and copies of it for rollbacks.

This module is separate from the files' format, so that a confirmation and a run that ends early import little.
"""

from __future__ import annotations

import contextlib
import os

from ..base.errors import HistoryError, os_errors
from ..base.installed import BOOT_DIRECTORY, BOOT_STATE
from ..base.regular_files import read_regular
from ..base.whole_files import remove_file, rename_durably, unlink_durably, write_whole
from .decisions import own_directory

DIRECTORY = BOOT_DIRECTORY
#: The program that the unit starts.
PROGRAM = "boot.pyz"
#: The timer that looks whether kube-proxy has returned: a pod starts later than the node.
AGAIN = "kubenode-proxy-boot-again"
#: How long to wait for a convergence.
LOCK_SECONDS = 60.0
#: The state that counts, and that of a change that waits to be confirmed: a reboot ends such a change.
STATE, UNCONFIRMED = os.path.basename(BOOT_STATE), "unconfirmed.json.gz"


def path_of(name: str) -> str:
    """Return the path of a file in the directory."""
    return os.path.join(DIRECTORY, name)


def exists() -> bool:
    """Return whether states are kept here. Raises HistoryError if another user could have written them."""
    return own_directory(DIRECTORY) and os.path.lexists(path_of(PROGRAM))


def confirm() -> tuple[str, ...]:
    """Let the state of a change that was just confirmed replace the one before it; return a warning on failure."""
    try:
        rename_durably(path_of(UNCONFIRMED), path_of(STATE))
    except FileNotFoundError:
        return ()
    except OSError as error:
        return (f"the next boot restores the state before the change: {DIRECTORY}: {error.strerror}",)
    return ()


def discard_unconfirmed() -> None:
    """Remove the state of a change that was not confirmed. Raises KernelError."""
    remove_file(path_of(UNCONFIRMED))


def forget() -> None:
    """Keep nothing for the next boot, and end what the last one has begun. Raises KernelError."""
    if os.path.lexists(path_of(PROGRAM)):
        # Imported late: few runs have anything to forget.
        from . import units

        units.stop_timer(AGAIN)
    for name in (STATE, UNCONFIRMED, PROGRAM):
        remove_file(path_of(name))
    with contextlib.suppress(OSError):
        os.rmdir(DIRECTORY)


def copy_to(path: str) -> None:
    """Copy the state that counts, with its age, to a file, or remove that if there is none. Raises HistoryError."""
    _copy(path_of(STATE), path)


def restore_from(path: str) -> bool:
    """Let the copy of a state count again, and return whether there is one: else none counts.

    On a node that keeps no states nothing is done. Raises HistoryError and KernelError.
    """
    if not exists():
        return True
    _copy(path, path_of(STATE))
    discard_unconfirmed()
    return os.path.lexists(path_of(STATE))


def _copy(source: str, target: str) -> None:
    # Imported late: a confirmation copies nothing.
    from ..cluster.files.cache import MOST_BYTES

    with os_errors(HistoryError, f"{source}: cannot be read"):
        try:
            renewed, content = os.lstat(source).st_mtime_ns, read_regular(source, MOST_BYTES)
        except FileNotFoundError:
            unlink_durably(target)
            return
    with os_errors(HistoryError, f"{target}: cannot be written"):
        write_whole(target, content)
        os.utime(target, ns=(renewed, renewed))
