# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What runs in a pod of the tests: it gives back what comes on TCP and UDP port 8080. Prints ``ready``."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading


class Stream(socketserver.BaseRequestHandler):
    """One connection, for as long as it lasts."""

    def handle(self) -> None:
        """Give back every line."""
        # A client that goes away in the middle is ordinary here.
        with contextlib.suppress(ConnectionError):
            while data := self.request.recv(4096):
                self.request.sendall(data)


class Server(socketserver.ThreadingTCPServer):
    """A thread for each connection."""

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
