# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Notifications to systemd about the agent's state (sd_notify(3)): ready, status, watchdog, reloading, stopping."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Mapping, Optional

_MICROSECONDS = 1_000_000
#: Long work calls ``progress`` more often than this; each call extends the time limit of a start by as much.
PROGRESS_SECONDS = 60


class Systemd:
    """Sends notifications to the socket that systemd names; does nothing where there is none."""

    def __init__(self, environment: Optional[Mapping[str, str]] = None) -> None:
        environment = os.environ if environment is None else environment
        path = environment.get("NOTIFY_SOCKET", "")
        # The name of an abstract socket is written with @ instead of its leading zero byte.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._socket: Optional[socket.socket] = None
        if path:
            # Kept, so that the watchdog is fed when the process has no free file descriptor.
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        own = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        period = environment.get("WATCHDOG_USEC", "") if own else ""
        self.watchdog_seconds = int(period) / _MICROSECONDS if period.isdecimal() else 0.0
        self._status = ""
        #: Whether the agent is starting or reloading.
        self.in_transition = True
        self._last_progress = 0.0

    def send(self, *lines: str) -> None:
        """Send assignments such as ``READY=1``. Ignore failures, which do not affect the agent."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)

    def ready(self) -> None:
        """Report that the agent has started or reloaded."""
        self.in_transition = False
        self.send("READY=1")

    def status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows; send it if it differs from the last one."""
        if text != self._status:
            self._status = text
            self.send(f"STATUS={text}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self.send("WATCHDOG=1")

    def progress(self) -> None:
        """Report progress of long work; send at most one message a second.

        It feeds the watchdog and extends the time limit of a start or reload (``EXTEND_TIMEOUT_USEC``). If the work
        hangs and no longer calls this, systemd kills the agent.
        """
        now = time.monotonic()
        if now - self._last_progress < 1.0:
            return
        self._last_progress = now
        extension = [f"EXTEND_TIMEOUT_USEC={PROGRESS_SECONDS * _MICROSECONDS}"] if self.in_transition else []
        self.send("WATCHDOG=1", *extension)

    def reloading(self) -> None:
        """Report that the configuration is being reloaded, until ``ready`` is called."""
        self.in_transition = True
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the agent is stopping."""
        self.send("STOPPING=1")
