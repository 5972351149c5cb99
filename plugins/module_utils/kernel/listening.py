# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who listens at a TCP port of this network namespace, as a program without rights sees it: by user, not by process."""

from __future__ import annotations

import socket
from typing import Optional

from .facts import read_text

_LISTENING = "0A"


def _as_in_proc(address: str) -> str:
    """Return an address as /proc/net/tcp has it: words of four bytes in the order of the processor."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    return "".join(packed[i : i + 4][::-1].hex() for i in range(0, len(packed), 4)).upper()


def listening_user(address: str, port: int) -> Optional[int]:
    """Return the user id of what listens where this address and port cannot be listened on; None if nothing does.

    A program may hold a port without listening there.
    """
    wanted = _as_in_proc(address)
    for name in ("tcp", "tcp6"):
        for line in (read_text(f"/proc/self/net/{name}") or "").splitlines()[1:]:
            fields = line.split()
            found, _colon, number = fields[1].partition(":")
            # An IPv4 address is the end of the IPv6 address that is mapped to it.
            meets = not int(found, 16) or not int(wanted, 16) or found.endswith(wanted)
            if fields[3] == _LISTENING and int(number, 16) == port and meets:
                return int(fields[7])
    return None
