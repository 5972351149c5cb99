# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Call an object's methods from outside its machine, by one line of JSON each.

``python -m tests.lab.calls PORT MODULE CLASS [JSON ARGUMENTS]`` makes the object and answers at the virtio port of
that name; :class:`Remote` is the object for those outside.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO, Sequence

from tests.lab.system import LabError


class RemoteError(Exception):
    """A call has failed; the text is the traceback of the other side."""


class Remote:
    """An object at the other end of a connected socket; arguments and results are JSON values."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        """Wait at most ``timeout`` seconds, the limit of every call as well, until the other side answers."""
        self._socket = connection
        self._socket.settimeout(timeout)
        self._stream = connection.makefile("rb")
        self._receive()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result. Raises RemoteError."""
        self._socket.sendall(json.dumps([method, *arguments]).encode() + b"\n")
        return self._receive()

    def _receive(self) -> Any:
        line = self._stream.readline()
        if not line:
            raise RemoteError("the other side has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()
        self._socket.close()


def serve(reader: BinaryIO, writer: BinaryIO, target: Any) -> None:
    """Answer calls of the target's methods until the other side closes the connection."""
    answer: Any = {"result": "ready"}
    while True:
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.flush()
        line = reader.readline()
        if not line:
            return
        method, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(target, method)(*arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}


def _port(name: str) -> str:
    """Return the device of a virtio port."""
    for path in Path("/sys/class/virtio-ports").glob("*/name"):
        if path.read_text(encoding="ascii").strip() == name:
            return f"/dev/{path.parent.name}"
    raise LabError(f"this machine has no virtio port {name}")


def main(arguments: Sequence[str]) -> int:
    """Serve until killed."""
    port, module, name = arguments[:3]
    target = getattr(importlib.import_module(module), name)(*(json.loads(text) for text in arguments[3:]))
    # The port can be opened only once.
    descriptor = os.open(_port(port), os.O_RDWR | os.O_CLOEXEC)
    with open(descriptor, "rb", closefd=False) as reader, open(descriptor, "wb") as writer:
        serve(reader, writer, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
