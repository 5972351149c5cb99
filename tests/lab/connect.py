# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An ssh ProxyCommand into a network namespace: ``python -m tests.lab.connect NAMESPACE HOST PORT``."""

from __future__ import annotations

import os
import selectors
import socket
import sys
from typing import Sequence

from tests.lab.system import socket_inside


def main(arguments: Sequence[str]) -> int:
    """Relay standard input and output to a TCP connection made inside the namespace, until either of them ends.

    The end of standard input is that of ssh. A guest that was killed does not end its side, so it is not awaited.
    """
    namespace, host, port = arguments
    connection = socket_inside(f"/run/netns/{namespace}", socket.AF_INET, socket.SOCK_STREAM)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    connection.settimeout(None)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                data = os.read(0, 65536)
                if not data:
                    return 0
                connection.sendall(data)
            else:
                data = connection.recv(65536)
                if not data:
                    return 0
                while data:
                    data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
