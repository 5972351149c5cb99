# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``flows.py ADDRESS PORT``: use one TCP connection and one UDP flow to a Service continuously.

For each line on standard input the program prints, as JSON, the number of exchanges so far, their source ports, and the
errors. It exits at the end of its input. It does not reopen a lost connection.
"""

from __future__ import annotations

import json
import select
import socket
import sys

PATIENCE_SECONDS = 60.0


def main(address: str, port: int) -> None:
    """Exchange data and report."""
    stream = socket.create_connection((address, port), PATIENCE_SECONDS)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.settimeout(PATIENCE_SECONDS)
    datagrams.connect((address, port))
    exchanges, error = 0, ""
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            if not sys.stdin.readline():
                return
            ports = [sock.getsockname()[1] for sock in (stream, datagrams)]
            print(json.dumps({"exchanges": exchanges, "ports": ports, "error": error}), flush=True)
        if error:
            continue
        message = b"%012d" % exchanges
        for sock in (stream, datagrams):
            try:
                sock.sendall(message)
                answer = sock.recv(4096)
            except OSError as problem:
                error = f"{sock.type.name}: {problem}"
                continue
            if answer != message:
                error = f"{sock.type.name}: {answer!r} for {message!r}"
        exchanges += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
