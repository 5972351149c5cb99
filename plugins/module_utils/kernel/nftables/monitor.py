# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hearing of changes that others make to the table: the notifications of nf_tables."""

from __future__ import annotations

import errno
import socket
from typing import Dict, Iterable, Mapping, Set, Tuple, Type, TypeVar

from ...errors import KernelError
from ...rendering.nftables.objects import TABLE_NAME
from ..netlink import HEADER, NETLINK_NETFILTER, SOL_NETLINK, attribute_text, parse_attributes
from . import messages

Self = TypeVar("Self", bound="TableMonitor")

_GROUP_NFTABLES = 7
_ADD_MEMBERSHIP = 1
_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER_BYTES = 16 << 20
_DATAGRAM_BYTES = 1 << 20
#: NFTA_GEN_PROC_PID, NFTA_GEN_PROC_NAME.
_GENERATION_PROCESS, _GENERATION_NAME = 2, 3

#: An object of the table: ("table", ""), ("set", name) or ("chain", name).
TableObject = Tuple[str, str]
EVERYTHING: TableObject = ("table", "")

_FAMILIES = {number: family for family, number in messages.FAMILY_NUMBERS.items()}
#: Of which kind the object is that a message is about, and which attribute has its name.
_OBJECTS = {
    messages.NEW_TABLE: ("table", 0),
    messages.DELETE_TABLE: ("table", 0),
    messages.NEW_CHAIN: ("chain", 3),
    messages.DELETE_CHAIN: ("chain", 3),
    messages.NEW_RULE: ("chain", 2),
    messages.DELETE_RULE: ("chain", 2),
    messages.NEW_SET: ("set", 2),
    messages.DELETE_SET: ("set", 2),
    messages.NEW_ELEMENT: ("set", 2),
    messages.DELETE_ELEMENT: ("set", 2),
}


def author(generation: Mapping[int, memoryview]) -> str:
    """``nft, process 123``: who made a transaction, from the attributes of the message that ends it."""
    name = attribute_text(generation[_GENERATION_NAME]) if _GENERATION_NAME in generation else ""
    number = int.from_bytes(generation.get(_GENERATION_PROCESS, b""), "big")
    return ", ".join(filter(None, (name, f"process {number}" if number else "")))


class TableMonitor:
    """Listens to nf_tables in the network namespace of the calling thread, for both families.

    ``own_ports``: netlink ports (:attr:`.resource.NftablesResource.port`) whose changes do not count. Wait for
    ``fileno()`` to become readable, then call :meth:`changes`. Clients that the packet path adds to the sets of session
    affinity are not changes. ``author``: the program that made the last foreign change, if the kernel told it. Raises
    KernelError if there is no socket.
    """

    def __init__(self, own_ports: Iterable[int] = ()) -> None:
        self.own_ports: Set[int] = set(own_ports)
        self.author = ""
        self._foreign = False
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, NETLINK_NETFILTER
            )
        except OSError as error:
            raise KernelError(f"nf_tables notifications: {error.strerror}") from error
        try:
            self._socket.bind((0, 0))
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
            except PermissionError:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            self._socket.setsockopt(SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP_NFTABLES)
        except OSError as error:
            self._socket.close()
            raise KernelError(f"nf_tables notifications: {error.strerror}") from error
        self._buffer = bytearray(_DATAGRAM_BYTES)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: Type[BaseException], value: BaseException, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self._socket.close()

    def fileno(self) -> int:
        """The file descriptor to wait for."""
        return self._socket.fileno()

    def changes(self) -> Dict[str, Set[TableObject]]:
        """What others changed since the last call, by family; does not wait.

        :data:`EVERYTHING` stands for the table as a whole: it was made or deleted, or notifications were lost.
        Raises KernelError.
        """
        found: Dict[str, Set[TableObject]] = {}
        while True:
            try:
                size = self._socket.recv_into(self._buffer)
            except (BlockingIOError, InterruptedError):
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise KernelError(f"nf_tables notifications: {error.strerror}") from error
                for family in _FAMILIES.values():
                    found.setdefault(family, set()).add(EVERYTHING)
                continue
            self._sort(memoryview(self._buffer)[:size], found)

    def _sort(self, view: memoryview, found: Dict[str, Set[TableObject]]) -> None:
        offset = 0
        while offset + 20 <= len(view):
            length, kind, _flags, _sequence, port = HEADER.unpack_from(view, offset)
            if length < 16:
                return
            family = _FAMILIES.get(view[offset + 16])
            if kind == messages.NEW_GENERATION:
                if self._foreign:
                    self.author = author(parse_attributes(view, offset + 20, offset + length))
                self._foreign = False
            elif kind in _OBJECTS and family is not None and port not in self.own_ports:
                attributes = parse_attributes(view, offset + 20, offset + length)
                word, number = _OBJECTS[kind]
                if 1 in attributes and attribute_text(attributes[1]) == TABLE_NAME:
                    name = attribute_text(attributes[number]) if number in attributes else ""
                    found.setdefault(family, set()).add((word, name))
                    self._foreign = True
            offset += (length + 3) & ~3
