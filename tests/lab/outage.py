# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A client that sends requests to a Service continuously, and reports how long it got no answer."""

from __future__ import annotations

import socket
import threading
import time

from . import system

# The client gives up a connection that the node does not deliver after this time, and tries again.
CONNECT_SECONDS = 0.2
# A connection that was made while rules were missing may get no answer.
ANSWER_SECONDS = 2.0


class Client(threading.Thread):
    """A thread that connects to an address and port from a network namespace every few milliseconds, until closed.

    ``says``: what it sends first, if anything. It then waits for the first byte or the end of the connection.
    """

    def __init__(self, namespace: str, address: str, port: int = 80, says: bytes = b"") -> None:
        super().__init__(daemon=True)
        self._namespace, self._address, self._says = namespace, (address, port), says
        self._end = threading.Event()
        #: For each connection: its beginning and end (time.monotonic), and the problem, if any.
        self.results: list[tuple[float, float, str]] = []
        self.start()

    def run(self) -> None:
        """Connect until closed."""
        system.enter(self._namespace, system.CLONE_NEWNET)
        while not self._end.wait(0.01):
            started = time.monotonic()
            problem = ""
            try:
                with socket.create_connection(self._address, CONNECT_SECONDS) as sock:
                    sock.settimeout(ANSWER_SECONDS)
                    sock.sendall(self._says)
                    sock.recv(1)
            except OSError as error:
                problem = str(error) or type(error).__name__
            self.results.append((started, time.monotonic(), problem))

    def answered_since(self, moment: float) -> bool:
        """Report whether three connections in a row, begun after the moment, have been answered."""
        last = self.results[-3:]
        return len(last) == 3 and all(started > moment and not problem for started, _ended, problem in last)

    def outage(self, moment: float) -> float:
        """Return the seconds from the moment until the end of the last failure after it; 0 if there was none."""
        return max([ended - moment for _started, ended, problem in self.results if problem and ended > moment] + [0.0])

    def close(self, seconds: float = 60.0) -> None:
        """End the thread within a limited time."""
        self._end.set()
        self.join(seconds)
