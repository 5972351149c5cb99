# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect requests that other programs send to IPVS and ipset, through a netlink monitoring device.

Neither subsystem sends notifications of changes, but a device of the kind ``nlmon`` copies every netlink message of its
network namespace to a packet socket. A filter in the kernel passes only requests that change IPVS or ipsets and are not
from our own sockets (those contain their port number, see ``netlink``). Sources: drivers/net/nlmon.c, packet(7),
linux/filter.h, linux/ip_vs.h, linux/netfilter/ipset/ip_set.h.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Sequence

from ...base.closing import closed_on_error
from ...base.errors import KernelError, os_errors
from ...base.socket_filter import JUMP_BITS, JUMP_EQUAL, LOAD_BYTE, LOAD_HALF, LOAD_WORD, RETURN, Instruction, attach
from .protocol import NETLINK_GENERIC, NETLINK_NETFILTER, NLM_F_REQUEST

# Every IPVS command is a change except these queries: get service, destination, daemon, config, info.
_IPVS_QUESTIONS = (4, 8, 11, 13, 15)
# Create, destroy, flush, rename, swap, add, delete.
_IPSET_CHANGES = tuple(6 << 8 | command for command in (2, 3, 4, 5, 6, 9, 10))

_TYPE_AT, _FLAGS_AT, _PORT_AT, _COMMAND_AT = 4, 6, 12, 16
# Not an offset but the extension SKF_AD_PROTOCOL.
_PROTOCOL_OF_PACKET = 0xFFFFF000
_KEPT_BYTES = 64
#: More than its buffer has room for. Requests that come faster than they are read must not keep the caller.
_MOST_AT_ONCE = 1024
_ETH_P_ALL = 3


def _as_loaded(value: int, size: int) -> int:
    """Return the value that the filter, which loads in network byte order, sees for one in this machine's order."""
    return int.from_bytes(struct.pack("=H" if size == 2 else "=I", value), "big")


def changes_filter(ipvs_family: int, own_ports: Sequence[int]) -> list[Instruction]:
    """Return a classic BPF program that passes requests to IPVS or ipset, except those from ``own_ports``.

    Only requests that change something pass. ``ipvs_family``: number of the generic netlink family IPVS. Each
    instruction: code, jumps if true and false, value.
    """
    # Jumps are written as labels here and resolved below.
    lines: list[tuple[int, str, str, int]] = [
        (LOAD_HALF, "", "", _FLAGS_AT),
        (JUMP_BITS, "", "drop", _as_loaded(NLM_F_REQUEST, 2)),
        (LOAD_WORD, "", "", _PORT_AT),
    ]
    lines += [(JUMP_EQUAL, "drop", "", _as_loaded(port, 4)) for port in own_ports]
    lines += [
        (LOAD_HALF, "", "", _PROTOCOL_OF_PACKET),
        (JUMP_EQUAL, "ipset", "", NETLINK_NETFILTER),
        (JUMP_EQUAL, "", "drop", NETLINK_GENERIC),
        (LOAD_HALF, "", "", _TYPE_AT),
        (JUMP_EQUAL, "", "drop", _as_loaded(ipvs_family, 2)),
        (LOAD_BYTE, "", "", _COMMAND_AT),
    ]
    lines += [(JUMP_EQUAL, "drop", "", command) for command in _IPVS_QUESTIONS[:-1]]
    lines.append((JUMP_EQUAL, "drop", "keep", _IPVS_QUESTIONS[-1]))
    labels = {"ipset": len(lines)}
    lines.append((LOAD_HALF, "", "", _TYPE_AT))
    lines += [(JUMP_EQUAL, "keep", "", _as_loaded(kind, 2)) for kind in _IPSET_CHANGES]
    labels["drop"], labels["keep"] = len(lines), len(lines) + 1
    lines += [(RETURN, "", "", 0), (RETURN, "", "", _KEPT_BYTES)]

    def jump(label: str, position: int) -> int:
        return labels[label] - position - 1 if label else 0

    return [
        (code, jump(true, position), jump(false, position), value)
        for position, (code, true, false, value) in enumerate(lines)
    ]


class RequestTap:
    """A packet socket on a monitoring device that is up; a filter passes requests that change IPVS or ipsets.

    ``ipvs_family``: number of the generic netlink family IPVS; ``own_ports``: netlink ports whose requests are ignored.
    Raises KernelError if this process may not use packet sockets, or the device cannot be monitored.
    """

    def __init__(self, device: str, ipvs_family: int, own_ports: Sequence[int]) -> None:
        with os_errors(KernelError, "packet socket"):
            self._socket = socket.socket(
                socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0
            )
        with os_errors(KernelError, f"device {device} cannot be monitored"), closed_on_error(self._socket):
            attach(self._socket, changes_filter(ipvs_family, own_ports))
            self._socket.bind((device, _ETH_P_ALL))

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def pop_seen(self) -> bool:
        """Return whether a request came since the last call, without waiting. Raises OSError if the device is gone."""
        seen = False
        with contextlib.suppress(BlockingIOError, InterruptedError):
            for _count in range(_MOST_AT_ONCE):
                seen = bool(self._socket.recv(_KEPT_BYTES)) or seen
        return seen
