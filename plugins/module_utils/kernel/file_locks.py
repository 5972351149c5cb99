# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which processes hold the flock(2) of a file, as the kernel knows it."""

from __future__ import annotations

import os

from .facts import read_text

_ELSEWHERE = "a process of another container"


def holders(path: str) -> dict[str, str]:
    """Return the holders by process ID, each as ``process 123 (iptables)``; empty if there is none or it is not known.

    A process of another container has the ID 0 here.
    """
    try:
        status = os.stat(path)
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    wanted = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    for line in lines:
        words = line.split()
        if len(words) < 6 or words[1] == "->" or words[1] != "FLOCK":
            continue
        major, minor, inode = words[5].split(":")
        if (int(major, 16), int(minor, 16), int(inode)) == wanted:
            pid = words[4]
            program = (read_text(f"/proc/{pid}/comm") or "unknown program").strip()
            found[pid] = f"process {pid} ({program})" if pid.isdecimal() and pid != "0" else _ELSEWHERE
    return found
