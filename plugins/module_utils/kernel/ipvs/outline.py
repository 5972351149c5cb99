# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Digests of the IPVS tables, for detecting changes at less cost than observing them. Source: linux/ip_vs.h."""

from __future__ import annotations

import hashlib
import re
import socket
import sys
from typing import Callable

from ..facts import PROC_IPVS
from ..raw_sockets import kernel_copy, raw_socket

#: IP_VS_SO_GET_INFO of linux/ip_vs.h; struct ip_vs_getinfo: version, size of the table, number of virtual servers.
_GET_INFO = 64 + 1024 + 64 + 1
_INFO_BYTES = 12
#: IP_VS_SO_GET_SERVICES: struct ip_vs_get_services, a number followed by an entry for each virtual server of IPv4.
_GET_SERVICES = _GET_INFO + 1
_SERVICES_HEAD = 8
#: struct ip_vs_service_entry in words of 8 bytes: the configuration, followed by the traffic counters.
_ENTRY_WORDS, _CONFIGURED_WORDS = 13, 6
#: The connection counts of a real server, at the end of its line in /proc.
_COUNTS = re.compile(rb" +\d+ +\d+ *$", re.MULTILINE)


def virtual_servers_text(path: str = PROC_IPVS) -> bytes:
    """Return the content of /proc about all virtual and real servers; empty if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


class ServersContent:
    """A digest of all virtual and real servers without their connection counts."""

    def __init__(self, read: Callable[[], bytes] = virtual_servers_text) -> None:
        self._read = read
        self._raw = b""
        self._digest = b""

    def __call__(self) -> bytes:
        """Return the current digest."""
        text = self._read()
        raw = hashlib.blake2b(text, digest_size=16).digest()
        # Removing the counts costs more than reading them, so it is skipped while they do not change.
        if raw != self._raw:
            self._raw = raw
            self._digest = hashlib.blake2b(_COUNTS.sub(b"", text), digest_size=16).digest()
        return self._digest


class ServersOutline:
    """A digest of all virtual servers of IPv4 with the number of their real servers, and the number of all others.

    It costs a hundredth of reading all real servers. Empty if the kernel does not answer. Raises KernelError if the
    system gives no socket.
    """

    def __init__(self) -> None:
        self._socket = raw_socket(socket.AF_INET)

    def __call__(self) -> bytes:
        """Return the current digest."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_IP, _GET_INFO, _INFO_BYTES)
        except OSError:
            return b""
        number = info[8:12]
        count = int.from_bytes(number, sys.byteorder)
        size = _SERVICES_HEAD + 8 * _ENTRY_WORDS * count
        entries = kernel_copy(self._socket, socket.IPPROTO_IP, _GET_SERVICES, number, size)
        found = hashlib.blake2b(number, digest_size=16)
        # No entries: their number has changed since it was requested, or this kernel has another struct layout.
        if entries is not None and count:
            words = memoryview(entries)[_SERVICES_HEAD:].cast("Q")
            for word in range(_CONFIGURED_WORDS):
                found.update(words[word::_ENTRY_WORDS].tobytes())
        return found.digest()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
