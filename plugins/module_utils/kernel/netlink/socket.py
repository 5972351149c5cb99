# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Netlink sockets that send many messages per system call and attribute each error to its message.

A *message* is a tuple ``(type, flags, payload)``; the socket writes the header (``struct nlmsghdr``), numbers the
messages and pads them. ``payload`` is everything after that header: a family header (``struct genlmsghdr``,
``nfgenmsg``, ``ifaddrmsg``) followed by attributes made with :func:`attribute` and :func:`nested`. Example::

    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        outcome = sock.transact([(NEW, NLM_F_CREATE, payload), ...])      # many messages, few sends
        for error in outcome.errors:                                      # error.position: its index in the list
            ...
        for buffer, kind, start, end in sock.dump(GET, payload):          # whole dump, repeated if interrupted
            attributes = parse_attributes(buffer, start + family_header_size, end)

The kernel handles the messages of one send in order and before ``send`` returns, and always reports errors; so only the
last message of a send requests an acknowledgement. Subsystems whose messages form one transaction (nf_tables, between
NFNL_MSG_BATCH_BEGIN and _END) need ``single_send=True``: everything is then sent at once or not at all.

Sources: netlink(7), linux/netlink.h, linux/genetlink.h.
"""

from __future__ import annotations

import errno
import socket
import struct
from itertools import islice
from typing import Iterable, Iterator, Sequence, Union

from ...base.closing import Closing, closed_on_error
from ...base.errors import KernelError, os_errors
from ...base.progress import Progress, unheeded
from . import protocol as nl
from .encoding import encode_ready, encode_sends
from .outcomes import MessageError, NetlinkRefusal, Outcome, Reply, extended_text

_SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33

_ERRNO = struct.Struct("=i")

_RECEIVE_BUFFER_BYTES = 8 << 20
_SEND_BUFFER_BYTES = 2 << 20
# Large enough for hundreds of messages in a send, small enough that the allocator reuses memory.
_READY_BYTES = 96 << 10
_DATAGRAM_BYTES = 256 << 10
# The receive buffer that one error with an extended text may occupy by the kernel's accounting.
_ERROR_TRUESIZE = 2048
_RECEIVE_TIMEOUT_SECONDS = 120
_DUMP_ATTEMPTS = 10
_UNLIMITED = 1 << 62


class DumpInterrupted(Exception):
    """The dumped table changed during the read (NLM_F_DUMP_INTR): the dump may lack or repeat entries."""


def is_supported(protocol: int) -> bool:
    """Return whether the kernel has a netlink protocol: one built without netfilter has no NETLINK_NETFILTER."""
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol).close()
    except OSError as error:
        return error.errno != errno.EPROTONOSUPPORT
    return True


def set_buffer(sock: socket.socket, forced: int, plain: int, size: int) -> None:
    """Set the size of a buffer, by the option beyond the system's limit, or without that privilege by the plain one."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, forced, size)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, plain, size)


class NetlinkSocket(Closing):
    """A netlink socket in the network namespace of the calling thread; a context manager.

    ``protocol``: NETLINK_ROUTE, NETLINK_NETFILTER or NETLINK_GENERIC. ``send_bytes`` limits one send; a value above the
    system's limit is reduced unless the process has the right to exceed it. Raises KernelError if there is no socket.

    ``progress`` is called for each send and for each datagram received, so that a supervisor sees that a change or a
    dump of many objects is still running.
    """

    def __init__(self, protocol: int, send_bytes: int = _SEND_BUFFER_BYTES) -> None:
        with os_errors(KernelError, f"netlink socket (protocol {protocol})"):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        with os_errors(KernelError, f"netlink socket (protocol {protocol})"), closed_on_error(self._socket):
            self._socket.bind((0, 0))
            self._socket.settimeout(_RECEIVE_TIMEOUT_SECONDS)
            # Half of the value that getsockopt returns is the kernel's own overhead; sends larger than the rest are
            # refused whole.
            set_buffer(self._socket, SO_RCVBUFFORCE, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            self._grow_send_buffer(send_bytes)
            received = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            self._messages_per_send = max(32, received // _ERROR_TRUESIZE)
            for option in (nl.NETLINK_CAP_ACK, nl.NETLINK_EXT_ACK):
                self._set_option(option)
        self.progress: Progress = unheeded
        self._sequence = 0
        # The first message of each send contains it, so that netlink monitors can distinguish our requests from others.
        self._origin = self.port
        self._buffer = bytearray(_DATAGRAM_BYTES)
        self._view = memoryview(self._buffer)

    def check_strictly(self) -> None:
        """Have the kernel refuse what it does not know in requests, and heed attributes of dumps (Linux 4.20)."""
        self._set_option(nl.NETLINK_GET_STRICT_CHK)

    def _set_option(self, option: int) -> None:
        try:
            self._socket.setsockopt(nl.SOL_NETLINK, option, 1)
        except OSError as error:
            # Kernels before 4.12 lack the options; answers are then only longer and have no texts.
            if error.errno != errno.ENOPROTOOPT:
                raise

    def _grow_send_buffer(self, size: int) -> None:
        set_buffer(self._socket, _SO_SNDBUFFORCE, socket.SO_SNDBUF, size)
        self._bytes_per_send = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2 - 64

    @property
    def port(self) -> int:
        """Return the kernel's number of this socket; notifications name it as the origin of a change."""
        return int(self._socket.getsockname()[0])

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self._socket.close()

    def _next_sequence(self, count: int) -> int:
        """Return the first of ``count`` new sequence numbers; none is zero, the number of notifications."""
        first = self._sequence + 1
        if first + count > 0x7FFFFFFF:
            first = 1
        self._sequence = first + count - 1
        return first

    def encode(
        self, messages: Sequence[nl.Message], first: int, acknowledge: bool = True, single_send: bool = False
    ) -> list[tuple[bytes, int, int]]:
        """Encode messages as triples (bytes, first sequence number, last sequence number), one per send.

        ``first`` is the sequence number of the first message; the others count up from it.
        """
        return encode_sends(
            messages,
            first,
            origin=self._origin,
            most_bytes=_UNLIMITED if single_send else self._bytes_per_send,
            most_messages=_UNLIMITED if single_send else self._messages_per_send,
            acknowledge=acknowledge,
        )

    def transact(self, messages: Sequence[nl.Message], single_send: bool = False, acknowledge: bool = True) -> Outcome:
        """Send messages in as few sends as the buffers allow and collect errors and answers.

        A refused message does not stop the others. With ``single_send`` all are sent at once. With
        ``acknowledge=False`` no message requests an acknowledgement (needed where the last message never gets one:
        NFNL_MSG_BATCH_END). Raises KernelError if the kernel does not accept the bytes or answers were lost.
        """
        outcome = Outcome([], [])
        if not messages:
            return outcome
        first = self._next_sequence(len(messages))
        for data, _started, last in self.encode(messages, first, acknowledge, single_send):
            self.exchange(data, first, last, outcome, acknowledge)
        return outcome

    def chunks(self, messages: Iterable[bytes]) -> Iterator[list[bytes]]:
        """Yield lists of whole messages that make one send each, small enough that memory is reused."""
        iterator = iter(messages)
        chunk = list(islice(iterator, 1))
        while chunk:
            count = min(self._messages_per_send, _READY_BYTES // len(chunk[-1]) + 1)
            chunk += islice(iterator, count - len(chunk))
            yield chunk
            chunk = list(islice(iterator, 1))

    def transact_ready(self, messages: Iterable[bytes]) -> Outcome:
        """Send whole messages (see :func:`encode_ready`), which may be generated during the sends.

        Use it for tens of thousands of messages of similar lengths. Raises KernelError.
        """
        outcome = Outcome([], [])
        done = 0
        for chunk in self.chunks(messages):
            first = self._next_sequence(len(chunk))
            answer = Outcome([], [])
            self.exchange(encode_ready(chunk, first, self._origin), first, first + len(chunk) - 1, answer)
            outcome.errors.extend(error._replace(position=error.position + done) for error in answer.errors)
            outcome.replies.extend(reply._replace(position=reply.position + done) for reply in answer.replies)
            done += len(chunk)
        return outcome

    def exchange(
        self, data: Union[bytes, bytearray], first: int, last: int, outcome: Outcome, acknowledge: bool = True
    ) -> None:
        """Send encoded messages and add the answers to ``outcome``; ``first`` is the sequence number of position 0.

        Raises KernelError as :meth:`transact` does.
        """
        self.progress()
        if len(data) > self._bytes_per_send:
            self._grow_send_buffer(len(data) + 4096)
        self._send(data)
        done = False
        while not done:
            size = self._receive(True) if acknowledge else self._receive_at_once()
            if size == 0:
                return
            done = self._collect(size, first, last, outcome)

    def _send(self, data: Union[bytes, bytearray]) -> None:
        try:
            self._socket.send(data)
        except OSError as error:
            hint = f" ({len(data)} bytes in one send; see net.core.wmem_max)" if error.errno == errno.EMSGSIZE else ""
            raise KernelError(f"netlink: send: {error.strerror}{hint}") from error

    def _receive_at_once(self) -> int:
        """Receive without waiting; a socket with a timeout would wait even for MSG_DONTWAIT."""
        self._socket.settimeout(0)
        try:
            return self._receive(False)
        finally:
            self._socket.settimeout(_RECEIVE_TIMEOUT_SECONDS)

    def _receive(self, wait: bool) -> int:
        """Receive the next datagram into the buffer and return its size; 0 if there is none and ``wait`` is not set."""
        while True:
            try:
                size = self._socket.recv_into(self._buffer, 0, 0 if wait else socket.MSG_DONTWAIT)
                self.progress()
                return size
            except InterruptedError:
                continue
            except BlockingIOError:
                if not wait:
                    return 0
                raise
            except socket.timeout as error:
                if not wait:
                    return 0
                raise KernelError(f"netlink: no answer within {_RECEIVE_TIMEOUT_SECONDS} seconds") from error
            except OSError as error:
                raise KernelError(f"netlink: receive: {error.strerror}") from error

    def _collect(self, size: int, first: int, last: int, outcome: Outcome) -> bool:
        """Sort the messages of one datagram; return True once the last message sent has been answered."""
        view, offset, done = self._view, 0, False
        while offset + 16 <= size:
            length, kind, flags, sequence, _port = nl.HEADER.unpack_from(view, offset)
            if length < 16 or offset + length > size:
                raise KernelError("netlink: the kernel's answer is truncated")
            if first <= sequence <= last:
                payload = bytes(view[offset + 16 : offset + length])
                if kind == nl.NLMSG_ERROR:
                    number = -_ERRNO.unpack_from(payload)[0]
                    if number:
                        outcome.errors.append(
                            MessageError(sequence - first, number, extended_text(payload, flags), payload[4:])
                        )
                    done = done or sequence == last
                elif kind > nl.NLMSG_DONE:
                    outcome.replies.append(Reply(sequence - first, kind, payload))
            offset += (length + 3) & ~3
        return done

    def request(self, kind: int, payload: bytes, flags: int = 0) -> list[Reply]:
        """Send one message and return its answers. Raises NetlinkRefusal if the kernel refuses it."""
        outcome = self.transact([(kind, flags, payload)])
        if outcome.errors:
            raise NetlinkRefusal(outcome.errors[0])
        return outcome.replies

    def dump_stream(self, kind: int, payload: bytes) -> Iterator[nl.Slice]:
        """Yield the messages of a dump as they arrive: (buffer, message type, start and end of the payload in it).

        The buffer is reused: copy what you need before the next iteration. A dump that is abandoned (``close``) is read
        to its end and discarded. Raises DumpInterrupted at the end if the table changed meanwhile, NetlinkRefusal if
        the kernel refuses, KernelError.
        """
        sequence = self._next_sequence(1)
        message = nl.HEADER.pack(len(payload) + 16, kind, nl.NLM_F_REQUEST | nl.NLM_F_DUMP, sequence, 0) + payload
        self._send(message)
        view, unpack, interrupted = self._view, nl.HEADER.unpack_from, 0
        while True:
            size = self._receive(True)
            offset = 0
            while offset + 16 <= size:
                length, answer, answer_flags, number, _port = unpack(view, offset)
                end = offset + length
                if length < 16 or end > size:
                    raise KernelError("netlink: the kernel's answer is truncated")
                if number == sequence:
                    interrupted |= answer_flags & nl.NLM_F_DUMP_INTR
                    if answer > nl.NLMSG_DONE:
                        try:
                            yield view, answer, offset + 16, end
                        except GeneratorExit:
                            self._finish_dump(sequence)
                            raise
                    elif answer in (nl.NLMSG_ERROR, nl.NLMSG_DONE):
                        said = bytes(view[offset + 16 : end])
                        refused = -_ERRNO.unpack_from(said)[0] if len(said) >= 4 else 0
                        if refused:
                            raise NetlinkRefusal(MessageError(0, refused, extended_text(said, answer_flags), said[4:]))
                        if interrupted:
                            raise DumpInterrupted
                        return
                offset = (end + 3) & ~3

    def _finish_dump(self, sequence: int) -> None:
        """Read and discard the rest of a dump; otherwise the kernel refuses the next one."""
        while True:
            size, offset = self._receive(True), 0
            while offset + 16 <= size:
                length, answer, _flags, number, _port = nl.HEADER.unpack_from(self._view, offset)
                if number == sequence and answer in (nl.NLMSG_ERROR, nl.NLMSG_DONE):
                    return
                offset += max(16, (length + 3) & ~3)

    def dump(self, kind: int, payload: bytes) -> list[nl.Slice]:
        """Return a whole, consistent dump: like :meth:`dump_stream`, but each message can be kept.

        A dump that was interrupted by a change is repeated, several times. Raises NetlinkRefusal, KernelError.
        """
        for _attempt in range(_DUMP_ATTEMPTS):
            found: list[nl.Slice] = []
            try:
                for view, answer, start, end in self.dump_stream(kind, payload):
                    found.append((memoryview(bytes(view[start:end])), answer, 0, end - start))
                return found
            except DumpInterrupted:
                continue
            except NetlinkRefusal as refusal:
                if refusal.error.errno != errno.EINTR:
                    raise
        raise KernelError("netlink: the table kept changing during the read")
