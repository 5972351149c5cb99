# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Disks on which files cannot be written, by means of the kernel.

Directories become read-only or full by mounts; a full one has no room for data, or none for further files. strace makes
calls of fsync(2), rename(2) or read(2) fail with EIO, as on a disk that fails.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Sequence, Union

READ_ONLY, FULL, NO_FILES = "read-only", "full", "no-files"
#: Calls that make what was written durable or visible, by the name of the fault.
CALLS = {"fsync": "fsync,fdatasync", "rename": "rename,renameat,renameat2"}
#: What the kernel says, by the name of the fault.
REASONS = {
    READ_ONLY: "Read-only file system",
    FULL: "No space left on device",
    NO_FILES: "No space left on device",
    **dict.fromkeys(CALLS, "Input/output error"),
}


def mount_script(kind: str, directory: Union[str, Path], kept: Union[str, Path], size: str = "1m") -> str:
    """Return the shell script that makes a directory READ_ONLY, FULL or one in which NO_FILES can be created.

    The last two have copies of the files; ``kept``: where the directory itself is mounted then. ``size``: of one that
    is full.
    """
    where, there = shlex.quote(str(directory)), shlex.quote(str(kept))
    if kind == READ_ONLY:
        return f"mount --bind {where} {where}; mount -o remount,bind,ro {where}"
    fill, limits = f"dd if=/dev/zero of={where}/.filled bs=4096 2>/dev/null || true", f"size={size}"
    if kind == NO_FILES:
        fill, limits = (
            f"number=0; while (: >{where}/.filled$number) 2>/dev/null; do number=$((number+1)); done",
            "nr_inodes=99",
        )
    return (
        f"mkdir -p {there}; mount --bind {where} {there}; mount -t tmpfs -o mode=0755,{limits} none {where};"
        f"cp -a {there}/. {where}; {fill}"
    )


def tracer(calls: str, log: Union[str, Path], options: Sequence[str], injection: str = "") -> list[str]:
    """Return the command line of strace that writes each of these calls to a file: a kind of CALLS, or their names.

    ``injection``: what to do to them, such as ``:error=EIO``.
    """
    names = CALLS.get(calls, calls)
    expressions = ["signal=none", f"trace={names}", *([f"inject={names}{injection}"] if injection else [])]
    chosen = [word for expression in expressions for word in ("-e", expression)]
    return ["strace", "-f", "-qqq", "-o", str(log), *chosen, *options]
