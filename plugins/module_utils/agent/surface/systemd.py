# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Telling systemd how the agent is (sd_notify(3)): ready, status, watchdog, reloading, stopping."""

from __future__ import annotations

import os
import socket
import time
from typing import Mapping, Optional

_MICROSECONDS = 1_000_000
#: Long work calls ``progress`` more often than this; so much longer may a start take after each call.
PROGRESS_SECONDS = 60


class Systemd:
    """Sends notifications to the socket that systemd names; does nothing where there is none."""

    def __init__(self, environment: Optional[Mapping[str, str]] = None) -> None:
        environment = os.environ if environment is None else environment
        path = environment.get("NOTIFY_SOCKET", "")
        # An abstract socket is written with @ for the zero byte that begins its name.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        own = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        period = environment.get("WATCHDOG_USEC", "") if own else ""
        self.watchdog_seconds = int(period) / _MICROSECONDS if period.isdecimal() else 0.0
        self._status = ""
        self._in_transition = True
        self._last_progress = 0.0

    def send(self, *lines: str) -> None:
        """Send assignments such as ``READY=1``. A manager that does not listen is not the agent's concern."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            try:
                sock.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return

    def ready(self) -> None:
        """Started, or reloaded."""
        self._in_transition = False
        self.send("READY=1")

    def status(self, text: str) -> None:
        """The line that ``systemctl status`` shows; sent when it differs from the last one."""
        if text != self._status:
            self._status = text
            self.send(f"STATUS={text}")

    def alive(self) -> None:
        """Keep the watchdog quiet."""
        self.send("WATCHDOG=1")

    def progress(self) -> None:
        """Report that long work goes on; at most one message a second.

        The watchdog counts from here, and a start or reload gets that much more time (``EXTEND_TIMEOUT_USEC``). Work
        that stops calling this is ended by systemd like any other.
        """
        now = time.monotonic()
        if now - self._last_progress < 1.0:
            return
        self._last_progress = now
        extension = [f"EXTEND_TIMEOUT_USEC={PROGRESS_SECONDS * _MICROSECONDS}"] if self._in_transition else []
        self.send("WATCHDOG=1", *extension)

    def reloading(self) -> None:
        """The configuration is being read again; ``ready`` ends it."""
        self._in_transition = True
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The agent ends."""
        self.send("STOPPING=1")
