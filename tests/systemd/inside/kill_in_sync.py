# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``kill_in_sync.py PID``: wait until that process runs a program that restores rules, and kill the process then."""

from __future__ import annotations

import os
import signal
import sys
import time

PATIENCE_SECONDS = 120.0


def is_restoring(agent: str) -> bool:
    """Return whether iptables-restore is a child of the process."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                parent = file.read().rsplit(")", 1)[1].split()[1]
            with open(f"/proc/{name}/cmdline", encoding="ascii", errors="replace") as file:
                command = file.read()
        except OSError:
            continue
        if parent == agent and "restore" in command:
            return True
    return False


if __name__ == "__main__":
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_restoring(sys.argv[1]):
        if time.monotonic() > end:
            sys.exit(f"process {sys.argv[1]} has restored nothing for {PATIENCE_SECONDS:g} s")
    os.kill(int(sys.argv[1]), signal.SIGKILL)
