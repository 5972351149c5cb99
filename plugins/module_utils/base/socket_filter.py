# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters of sockets: classic BPF programs, with which the kernel decides what a socket receives (linux/filter.h)."""

from __future__ import annotations

import ctypes
import socket
import struct
from typing import Sequence

LOAD_BYTE, LOAD_HALF, LOAD_WORD, JUMP_EQUAL, JUMP_BITS, RETURN = 0x30, 0x28, 0x20, 0x15, 0x45, 0x06
#: Load relative to the index register, and set that: to a value, or to the length of the header of IPv4 at an offset.
LOAD_HALF_AT_INDEX, LOAD_INDEX, LOAD_INDEX_IHL = 0x48, 0x01, 0xB1
#: Returned by a program: the whole packet.
ALL_BYTES = 0xFFFFFFFF

#: Code, jumps if true and false, value.
Instruction = tuple[int, int, int, int]

_INSTRUCTION = struct.Struct("=HBBI")
_SO_ATTACH_FILTER = 26


def attach(sock: socket.socket, program: Sequence[Instruction]) -> None:
    """Have the kernel run a program on each packet for a socket. Raises OSError."""
    code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*line) for line in program))
    # struct sock_fprog: the number of instructions and their address.
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))
