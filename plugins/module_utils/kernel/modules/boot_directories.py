# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The directories of configuration files that programs read at boot, and which of the files in them count.

Of files with one name, only that in the first directory counts (sysctl.d(5), modules-load.d(5), modprobe.d(5)).
Functions take ``root``, the directory under which these directories are found.
"""

from __future__ import annotations

import os
from typing import Collection, Sequence

SUFFIX = ".conf"


def _places(name: str) -> tuple[str, ...]:
    return tuple(f"{parent}/{name}" for parent in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib"))


SYSCTL = _places("sysctl.d")
MODULES_LOAD = _places("modules-load.d")
MODPROBE = _places("modprobe.d")


def unread_name(path: str) -> str:
    """Return why no program reads a file of this name in any directory, in one clause; empty if they do."""
    name = os.path.basename(path)
    if not name.endswith(SUFFIX):
        return f"its name does not end in {SUFFIX}"
    return "its name begins with a dot" if name.startswith(".") else ""


def files_read(directories: Sequence[str], root: str = "", assumed: Collection[str] = ()) -> dict[str, str]:
    """Return the path of each file that is read, by its name.

    ``assumed``: files (path without ``root``) to be treated as existing.
    """
    chosen: dict[str, str] = {}
    for directory in directories:
        try:
            found = os.listdir(f"{root}{directory}")
        except OSError:
            found = []
        found += [os.path.basename(path) for path in assumed if os.path.dirname(path) == directory]
        for name in found:
            if not unread_name(name):
                chosen.setdefault(name, f"{directory}/{name}")
    return chosen


def unread(path: str, directories: Sequence[str], root: str = "") -> str:
    """Return why a file is not read at boot, in one clause; empty if it is read."""
    reason = unread_name(path)
    if reason:
        return reason
    directory, name = os.path.split(os.path.normpath(path))
    own = os.path.realpath(f"{root}{directory}")
    real = [os.path.realpath(f"{root}{candidate}") for candidate in directories]
    if own not in real:
        return f"only files in {', '.join(directories)} are"
    for candidate in directories[: real.index(own)]:
        if os.path.lexists(f"{root}{candidate}/{name}"):
            return f"{candidate}/{name} takes its place"
    return ""
