# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's HTTP server with a responder, and clients of it."""

from __future__ import annotations

import contextlib
import io
import socket
import time
from typing import NamedTuple

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.connections import Limits
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.message import Response
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.server import HttpServer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Backoff, Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.clients import ClientRule
from tests.waiting import PATIENCE

GET = b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n"
HERE = "127.0.0.1"
OTHER = "127.0.0.2"


def respond(request):
    """Answer with the method and path; fail for ``/broken``, and answer 4 MiB for ``/large``."""
    if request.path == "/broken":
        raise RuntimeError("a fault of the responder")
    if request.path == "/large":
        return Response(200, (), b"x" * (1 << 22))
    return Response(200, (("Content-Type", "text/plain"),), f"{request.method} {request.path}".encode())


class Running(NamedTuple):
    """A server with a port on all addresses, and its log."""

    server: HttpServer
    port: int
    log: io.StringIO


class ShortPauses(Backoff):
    """Short pauses for tests."""

    def pause(self) -> float:
        return min(super().pause(), 0.01)


def supervisor(stream: io.StringIO) -> Supervisor:
    """Return a supervisor that logs to a stream."""
    return Supervisor(Log(stream), backoff=ShortPauses)


@contextlib.contextmanager
def running(limits=None, clock=time.monotonic):
    """Run a server."""
    stream = io.StringIO()
    server = HttpServer(supervisor(stream), LimitedLog(Log(stream)), ClientRule(), limits or Limits(), clock)
    try:
        yield Running(server, server.open("0.0.0.0", 0, respond).port, stream)
    finally:
        server.stop()


def connect(port, source=HERE):
    """Return a connection to a port, from an address."""
    sock = socket.create_connection((HERE, port), timeout=PATIENCE, source_address=(source, 0))
    sock.settimeout(PATIENCE)
    return sock


def read_all(sock):
    """Return everything that a socket receives until its end, which may be a reset."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while True:
            part = sock.recv(65536)
            if not part:
                break
            found += part
    return found


def ask(port, data=GET, source=HERE):
    """Return the answer to a request."""
    with connect(port, source) as sock:
        sock.sendall(data)
        return read_all(sock)


def answers(port):
    """Return whether a request is answered; while the thread is down its connection may be lost."""
    with contextlib.suppress(OSError):
        return ask(port).endswith(b"GET /healthz")
    return False
