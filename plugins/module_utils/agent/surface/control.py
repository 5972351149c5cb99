# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's unix socket: the node command asks a question in one line of JSON and gets one answer.

The answers are made by the agent's own loop, between syncs, so that they never see half a change.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import socket
import time
from typing import Any, Callable, Dict

from ...errors import KernelError, ProxyError
from ...regular_files import parse_json
from ..supervision import Task

_MOST_BYTES = 1 << 16
#: Most bytes of an answer: an explanation of a Service with a hundred thousand endpoints takes some 20 MB.
_MOST_ANSWER_BYTES = 64 << 20
_CLIENT_SECONDS = 5.0
ANSWER_SECONDS = 30.0

Question = Dict[str, Any]
Answer = Dict[str, Any]


class Ask:
    """A question that waits for its answer."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def reply(self, answer: Answer) -> None:
        """Give the answer."""
        self._answers.put(answer)

    def wait(self) -> Answer:
        """The answer, or an error that says that the agent is busy."""
        try:
            return self._answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            return {"error": f"the agent is busy and has not answered within {ANSWER_SECONDS:g} seconds"}


class ControlServer:
    """Listens at ``path`` (mode 0600) and hands each question to ``deliver``. Raises KernelError if it cannot.

    :meth:`run` is the body of a supervised thread.
    """

    def __init__(self, path: str, deliver: Callable[[Ask], None]) -> None:
        self._path = path
        self._deliver = deliver
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            before = os.umask(0o177)
            try:
                self._socket.bind(path)
            finally:
                os.umask(before)
            self._socket.listen(8)
        except OSError as error:
            self._socket.close()
            raise KernelError(f"{path}: cannot listen: {error.strerror or error}") from error

    def run(self, task: Task) -> None:
        """Answer one client after the other until :meth:`close`; the body of a supervised thread."""
        while True:
            task.idle()
            try:
                client, _address = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                raise
            task.busy(ANSWER_SECONDS + 2 * _CLIENT_SECONDS)
            with client:
                client.settimeout(_CLIENT_SECONDS)
                with contextlib.suppress(OSError):
                    self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        data = b""
        end = time.monotonic() + _CLIENT_SECONDS
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
            answer: Answer = {"error": "a question is one line with a JSON object"}
        else:
            ask = Ask(question)
            self._deliver(ask)
            answer = ask.wait()
        client.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def ask_agent(path: str, question: Question) -> Answer:
    """Ask the agent that listens at ``path``, and return its answer without control characters in any text.

    The one who asks may be root, and whoever has taken the agent over decides what it answers: its length, its nesting
    and the time that it may take are bounded. Raises NoAgent if none runs, ProxyError.
    """
    try:
        data = _ask(path, json.dumps(question).encode() + b"\n")
    except OSError as error:
        raise NoAgent(f"{path}: no agent answers: {error.strerror or error}") from error
    try:
        answer = _printable(parse_json(data))
    except (ValueError, RecursionError) as error:
        raise ProxyError(f"{path}: the agent's answer is not valid") from error
    if not isinstance(answer, dict):
        raise ProxyError(f"{path}: the agent's answer is not an object")
    if "error" in answer:
        raise ProxyError(str(answer["error"]))
    return answer


def _ask(path: str, question: bytes) -> bytes:
    """Return the line that the agent answers. Raises OSError, also when it does not end in time or at all."""
    deadline = time.monotonic() + ANSWER_SECONDS + _CLIENT_SECONDS
    data = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(ANSWER_SECONDS + _CLIENT_SECONDS)
        sock.connect(path)
        sock.sendall(question)
        while not data.endswith(b"\n"):
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            part = sock.recv(65536)
            if not part:
                break
            data += part
            if len(data) > _MOST_ANSWER_BYTES:
                raise OSError(errno.EFBIG, f"the answer is larger than {_MOST_ANSWER_BYTES} bytes")
    return bytes(data)


def _printable(value: Any) -> Any:
    """Return a JSON value with a question mark for each character of its texts that cannot be printed."""
    if isinstance(value, str):
        return "".join(character if character.isprintable() else "?" for character in value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return value


class NoAgent(ProxyError):
    """No agent runs on this node, or it does not listen."""
