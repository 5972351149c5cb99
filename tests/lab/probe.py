# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask a virtual address which backend answers.

``python -m tests.lab.probe PROTOCOL ADDRESS PORT [--count N] [--source ADDRESS] [--namespace PATH]`` prints one
JSON list. PROTOCOL is TCP, UDP, DNS-UDP or DNS-TCP.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import sys
from typing import NamedTuple, Optional, Sequence

from tests.lab import wire
from tests.lab.system import socket_inside

PROTOCOLS = ("TCP", "UDP", "DNS-UDP", "DNS-TCP")


class Answer(NamedTuple):
    """A request's outcome: ``answer``, ``refused`` or ``timeout``, the backend that answered, and the peer it saw."""

    outcome: str
    backend: str = ""
    peer: str = ""


def ask(
    protocol: str,
    address: str,
    port: int,
    *,
    source: Optional[str] = None,
    namespace: Optional[str] = None,
    timeout: float = 2.0,
) -> Answer:
    """Send one request from the network namespace at the path ``namespace``, from the address ``source``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_STREAM if protocol in ("TCP", "DNS-TCP") else socket.SOCK_DGRAM
    with socket_inside(namespace, family, kind) as client:
        client.settimeout(timeout)
        if source:
            client.bind((source, 0))
        try:
            client.connect((address, port))
            text = _exchange(client, protocol)
        except socket.timeout:
            return Answer("timeout")
        except (ConnectionError, OSError) as error:
            return Answer("refused" if isinstance(error, ConnectionError) else f"error: {error.strerror}")
    backend, peer = text.split()
    return Answer("answer", backend, peer)


def _exchange(client: socket.socket, protocol: str) -> str:
    query = wire.dns_query(random.randrange(1 << 16))
    if protocol == "TCP":
        return _read_all(client).decode("ascii")
    if protocol == "DNS-TCP":
        client.sendall(struct.pack("!H", len(query)) + query)
        return wire.dns_text(_read_all(client)[2:])
    client.send(query if protocol == "DNS-UDP" else b"who\n")
    data = client.recv(4096)
    return wire.dns_text(data) if protocol == "DNS-UDP" else data.decode("ascii")


def _read_all(client: socket.socket) -> bytes:
    data = b""
    while True:
        part = client.recv(4096)
        if not part:
            if not data:
                raise ConnectionResetError(0, "closed without an answer")
            return data
        data += part


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Ask from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.probe", description="ask an address who answers")
    parser.add_argument("protocol", choices=PROTOCOLS)
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--source")
    parser.add_argument("--namespace", help="path of a network namespace")
    parser.add_argument("--timeout", type=float, default=2.0)
    options = parser.parse_args(arguments)
    answers: list[Answer] = [
        ask(
            options.protocol,
            options.address,
            options.port,
            source=options.source,
            namespace=options.namespace,
            timeout=options.timeout,
        )
        for _ in range(options.count)
    ]
    sys.stdout.write(json.dumps([answer._asdict() for answer in answers]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
