# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A test pod's server: it echoes what it receives on TCP and UDP port 8080. Prints ``ready``."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading


class Stream(socketserver.BaseRequestHandler):
    """One connection, until the client closes it."""

    def handle(self) -> None:
        """Echo every line."""
        # A client that closes early is not an error here.
        with contextlib.suppress(ConnectionError):
            while data := self.request.recv(4096):
                self.request.sendall(data)


class Server(socketserver.ThreadingTCPServer):
    """A TCP server with a thread for each connection."""

    daemon_threads = True
    allow_reuse_address = True


if __name__ == "__main__":
    server = Server(("0.0.0.0", 8080), Stream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("0.0.0.0", 8080))
    print("ready", flush=True)
    while True:
        content, peer = datagrams.recvfrom(4096)
        datagrams.sendto(content, peer)
