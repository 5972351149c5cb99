# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connection to connection tracking, over which its table is read and entries are deleted."""

from __future__ import annotations

import time
from typing import Callable, Generator, Iterable, Iterator, Optional, Sequence, TypeVar

from ...base.addresses import IPV6
from ...base.closing import Closing
from ...base.errors import KernelError
from ...base.progress import Progress, unheeded
from ..netlink.attributes import attribute, nested
from ..netlink.outcomes import MessageError, NetlinkRefusal, is_interrupted, is_missing, is_not_understood
from ..netlink.protocol import NETLINK_NETFILTER, Message, Slice
from ..netlink.socket import DumpInterrupted, NetlinkSocket
from . import messages as ct

_ATTEMPTS = 5

Found = TypeVar("Found")


#: Work that pauses wherever it yields, and returns a result.
Steps = Generator[None, None, Found]


def finished(steps: Generator[Optional[float], None, Found]) -> Found:
    """Take all steps at once, waiting for the seconds that they yield, and return the result."""
    while True:
        try:
            pause = next(steps)
            if pause:
                time.sleep(pause)
        except StopIteration as end:
            result: Found = end.value
            return result


def collecting(read: Callable[[], Iterable[Optional[Found]]]) -> Steps[list[Found]]:
    """Return the items that ``read`` yields for a whole dump; call ``read`` again if the table changed meanwhile.

    A dump that is interrupted in each of several attempts is used nevertheless: its entries were in the table. On a
    busy node, waiting for a consistent dump could take forever. Wherever ``read`` yields None, there is a pause. Raises
    KernelError.
    """
    found: list[Found] = []
    for _attempt in range(_ATTEMPTS):
        found = []
        try:
            for item in read():
                if item is None:
                    yield
                else:
                    found.append(item)  # The entries read before the interruption are valid.
        except DumpInterrupted:
            continue
        break
    return found


def collected(read: Callable[[], Iterable[Found]]) -> list[Found]:
    """Return what :func:`collecting` does, without a pause."""
    return finished(collecting(read))


class ConntrackSocket(Closing):
    """A connection to connection tracking in the calling thread's network namespace; a context manager.

    ``progress`` is called while a large table is read. Raises KernelError if no socket can be opened.
    """

    def __init__(self, progress: Progress = unheeded) -> None:
        self._netlink = NetlinkSocket(NETLINK_NETFILTER)
        self._netlink.progress = progress

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self._netlink.close()

    def dump(self, family: str, only: bytes = b"") -> Iterator[Slice]:
        """Yield the entries of a family as they arrive: buffer, message type, start of ``struct nfgenmsg``, and end.

        The buffer is reused: copy what you need before the next iteration. ``only``: the :func:`~.messages.selection`
        of entries; kernels before 5.8 refuse it, and then all entries are read. Raises DumpInterrupted at the end if
        the table changed meanwhile (see :func:`collected`), and KernelError.
        """
        for attributes in (only, b"") if only else (b"",):
            try:
                yield from self._netlink.dump_stream(ct.IPCTNL_MSG_CT_GET, ct.header(family) + attributes)
                return
            except NetlinkRefusal as refusal:
                if not attributes or not is_not_understood(refusal.error):
                    raise KernelError(f"connection tracking table cannot be read: {refusal.error}") from refusal

    def entries(self, family: str, protocol: str, only: bytes = b"") -> Iterator[ct.RawEntry]:
        """Yield the entries of a family and protocol (TCP, UDP, SCTP) as :meth:`dump` reads them.

        ``only``: attributes for a further selection, which old kernels do not know.
        """
        ipv6 = family == IPV6
        number = nested(ct.CTA_TUPLE_PROTO, attribute(ct.CTA_PROTO_NUM, bytes((ct.PROTOCOLS[protocol],))))
        only += ct.selection(family, ct.CTA_TUPLE_ORIG, number, ct.CTA_FILTER_ORIG_FLAGS, ct.FILTER_PROTO_NUM)
        for view, _kind, start, end in self.dump(family, only):
            entry = ct.read_entry(view, start, end, ipv6, protocol)
            if entry is not None:
                yield entry

    def delete(self, family: str, identities: Sequence[bytes]) -> int:
        """Delete entries in batches and return how many of them existed. Raises KernelError."""
        head = ct.header(family)
        messages: list[Message] = [(ct.IPCTNL_MSG_CT_DELETE, 0, head + wanted) for wanted in identities]
        deleted = 0
        for attempt in range(_ATTEMPTS):
            errors = self._netlink.transact(messages).errors
            deleted += len(messages) - len(errors)
            again = self._to_repeat(errors, last=attempt == _ATTEMPTS - 1)
            if not again:
                break
            messages = [messages[position] for position in again]
        return deleted

    @staticmethod
    def _to_repeat(errors: Sequence[MessageError], last: bool) -> list[int]:
        """Return positions of interrupted deletions; entries that ended meanwhile are ignored."""
        again = []
        for error in errors:
            if is_interrupted(error) and not last:
                again.append(error.position)
            elif not is_missing(error):
                raise KernelError(f"a connection tracking entry cannot be deleted: {error}")
        return again
