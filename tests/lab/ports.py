# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ports for servers that a test starts later, or on which nothing may listen."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from pathlib import Path

FIRST = 10240
#: The first node port of Kubernetes. Tests program Services there, whose rules would catch connections to a server.
NODE_PORTS = 30000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_count = itertools.count()


def free_port() -> int:
    """Return a port that is free for TCP and UDP on all IPv4 addresses, a different one each time.

    It is below the range from which the kernel gives ports to clients, so that no connection takes it meanwhile, and
    no node port. Processes begin at different places.
    """
    number = min(int(_RANGE.read_text(encoding="ascii").split()[0]), NODE_PORTS) - FIRST
    for _attempt in range(number):
        port = FIRST + (os.getpid() * 97 + next(_count)) % number
        with contextlib.suppress(OSError), socket.socket() as tcp:
            tcp.bind(("", port))
            with socket.socket(type=socket.SOCK_DGRAM) as udp:
                udp.bind(("", port))
                return port
    raise RuntimeError("no port is free")
