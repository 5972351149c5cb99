# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A process that passes TCP connections at one address and port on to a server elsewhere.

Several of them in front of one test API server are several API servers of one cluster: each can be killed, stopped by
SIGSTOP, or cut off by a rule. ``python -m tests.lab.front ADDRESS PORT SERVER SERVER_PORT`` prints ``ready``.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _serve(connection: socket.socket, server: tuple[str, int]) -> None:
    with connection:
        try:
            behind = socket.create_connection(server, 10)
        except OSError:
            return
        with behind:
            back = threading.Thread(target=_pass_on, args=(behind, connection), daemon=True)
            back.start()
            _pass_on(connection, behind)
            back.join()


def main() -> None:
    """Listen until killed."""
    address, port, server, server_port = sys.argv[1:]
    with socket.create_server((address, int(port)), backlog=64) as listener:
        print("ready", flush=True)
        while True:
            connection, _peer = listener.accept()
            threading.Thread(target=_serve, args=(connection, (server, int(server_port))), daemon=True).start()


if __name__ == "__main__":
    main()
