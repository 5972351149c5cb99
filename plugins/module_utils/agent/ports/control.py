# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's control socket: the node command sends a request in one line of JSON and receives one answer.

The agent's loop answers between syncs, so an answer never shows a partial change.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import time
from typing import Callable

from ...base.closing import closed_on_error
from ...base.errors import KernelError, os_errors
from ...base.regular_files import parse_json
from ...convergence.runtime.agent_client import ANSWER_SECONDS, BUSY, CLIENT_SECONDS, Answer, Question
from ..threads.supervision import Task

_MOST_BYTES = 1 << 16


class ControlRequest:
    """A question of the node command, whose sender waits for the answer of the agent's loop."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def reply(self, answer: Answer) -> None:
        """Send the answer."""
        self._answers.put(answer)

    def wait(self) -> Answer:
        """Wait for the answer and return it; return an error if the agent is too busy to answer in time."""
        try:
            return self._answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            return BUSY


def _listening(path: str) -> socket.socket:
    """Return a socket that listens at a path, and replace any file that exists there. Raises KernelError."""
    with os_errors(KernelError, f"{path}: cannot listen"):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with closed_on_error(made):
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            before = os.umask(0o177)
            try:
                made.bind(path)
            finally:
                os.umask(before)
            made.listen(128)
    return made


class ControlServer:
    """Listens at ``path`` (mode 0600) and passes each request to ``deliver``. Raises KernelError if it cannot listen.

    :meth:`run` is the body of a supervised thread.
    """

    def __init__(self, path: str, deliver: Callable[[ControlRequest], None]) -> None:
        self._path = path
        self._deliver = deliver
        self._closed = False
        self._socket = _listening(path)

    def renew(self) -> bool:
        """Listen again if another program has removed the path, such as a cleaner of /run; return whether it had.

        May be called from any thread. Raises KernelError if the agent cannot listen.
        """
        if os.path.lexists(self._path):
            return False
        before, self._socket = self._socket, _listening(self._path)
        # Wakes the thread that waits for clients of the path that was removed.
        with contextlib.suppress(OSError):
            before.shutdown(socket.SHUT_RDWR)
        before.close()
        return True

    def run(self, task: Task) -> None:
        """Answer one client at a time until :meth:`close`."""
        while True:
            task.idle()
            listening = self._socket
            try:
                client, _address = listening.accept()
            except OSError:
                if self._closed:
                    return
                if listening is not self._socket:
                    continue
                raise
            task.busy(ANSWER_SECONDS + 2 * CLIENT_SECONDS)
            with client:
                client.settimeout(CLIENT_SECONDS)
                with contextlib.suppress(OSError):
                    self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        data = b""
        end = time.monotonic() + CLIENT_SECONDS
        while not data.endswith(b"\n") and len(data) < _MOST_BYTES and time.monotonic() < end:
            part = client.recv(4096)
            if not part:
                break
            data += part
        try:
            question = parse_json(data)
        except ValueError:
            question = None
        if not isinstance(question, dict):
            answer: Answer = {"error": "a question must be one line with a JSON object"}
        else:
            request = ControlRequest(question)
            self._deliver(request)
            answer = request.wait()
        client.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
