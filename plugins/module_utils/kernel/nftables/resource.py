# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of nftables mode as one atomic resource, over netlink; no program is needed on the node."""

from __future__ import annotations

import time
from typing import Iterator, Mapping, Optional

from ...base.closing import Closing
from ...base.errors import KernelError
from ...rendering.nftables import objects as nft
from ...rendering.nftables.layout import SERVICES_TABLE
from ...resources import NO_CHANGE, Change, Kind, Part, Resource
from ..netlink.outcomes import MessageError, is_busy, is_transient
from ..netlink.protocol import NETLINK_NETFILTER, NLM_F_ECHO
from ..netlink.socket import NetlinkSocket
from . import messages
from .generation import generation_in
from .listing import owner_hint
from .messages import BATCH_BEGIN, BATCH_END, Encoder
from .observation import Reader
from .parts import TableParts
from .transactions import ELEMENTS_PER_TRANSACTION, Labelled, Planner, Transaction, uses_sets

_ATTEMPTS = 5
#: Kernels before 6.2 count a chain as referred to for a moment after the last element that names it was removed.
_BUSY_ATTEMPTS = 15
_BUSY_SECONDS = 0.2


class TransactionRefused(KernelError):
    """The kernel refused a transaction as a whole.

    ``transient``: it may succeed after the table has been read again; ``busy_chains``: the only refusals are of the
    removal of chains that are still referred to.
    """

    def __init__(self, text: str, transient: bool, busy_chains: bool) -> None:
        super().__init__(text)
        self.transient = transient
        self.busy_chains = busy_chains


class NftablesResource(Resource[nft.Key, nft.Value], Closing):
    """Table ``kube-proxy`` of one family (IPv4: ``ip``, IPv6: ``ip6``) in the network namespace of the calling thread.

    Close it with :meth:`close` or use it in a ``with`` statement. ``longest_call``: seconds that the longest single
    transaction has taken. ``commits``: a list to which the generation after each own transaction is added, 0 if the
    kernel did not report it; None not to request it.
    """

    kind = Kind.TABLE_OBJECTS
    atomic = True

    #: The table, and its family in nf_tables if that is not the family of the resource.
    table: nft.TableIdentity = SERVICES_TABLE
    table_family: str = ""

    def __init__(self, family: str, most_elements: int = ELEMENTS_PER_TRANSACTION) -> None:
        self.family = family
        self.longest_call = 0.0
        self.commits: Optional[list[int]] = None
        self._table_family = self.table_family or family
        self._encoder = Encoder(self._table_family, self.table)
        self._planner = Planner(self._encoder, most_elements)
        self._sock: Optional[NetlinkSocket] = None

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    @property
    def socket(self) -> NetlinkSocket:
        """Return the socket, opened on first use. Raises KernelError."""
        if self._sock is None:
            self._sock = NetlinkSocket(NETLINK_NETFILTER)
            self._sock.progress = self._note_progress
        return self._sock

    def _note_progress(self) -> None:
        """Call what reports progress; ``report_to`` may replace it later."""
        self.progress()

    def observe(self) -> dict[nft.Key, nft.Value]:
        """Return the whole table, whichever programs created its objects. Raises KernelError."""
        return {key: value for part in self.parts({}) for key, value in part.observed.items()}

    def parts(
        self, expected: Mapping[nft.Key, nft.Value], urgent: Change[nft.Key, nft.Value] = NO_CHANGE
    ) -> Iterator[Part[nft.Key, nft.Value]]:
        """See the base class. Raises KernelError."""
        return self._parts(expected).read(urgent)

    def _parts(self, expected: Mapping[nft.Key, nft.Value]) -> TableParts:
        return TableParts(self.socket, self._encoder, expected)

    def exists(self) -> bool:
        """Return whether there is a table of this name. Raises KernelError."""
        return self._reader().table() is not None

    def is_empty(self) -> bool:
        """Return whether there is no table of this name: the table itself is one of its objects. Raises KernelError."""
        return not self.exists()

    def _reader(self) -> Reader:
        return Reader(self.socket, self._table_family, self.table)

    @property
    def port(self) -> int:
        """Return the netlink port from which this resource makes its changes."""
        return self.socket.port

    def apply(self, change: Change[nft.Key, nft.Value]) -> None:
        """Make the change: in one transaction, or in several without a wrong intermediate state if it is large.

        If another program changed the table meanwhile, it is read again and the remaining changes are made. Raises
        KernelError.
        """
        asked = change
        for attempt in range(_ATTEMPTS):
            try:
                for transaction in self._transactions(change):
                    self._send_patiently(transaction)
                return
            except TransactionRefused as refused:
                if not refused.transient or attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(0.01 * attempt)
            if self.table.key not in {**asked.added, **asked.removed} and not self.exists():
                raise KernelError(f"table {self.table.name} ({self._table_family}): another program deleted it")
            change = self._touched(asked).difference(asked.new_values())

    def _transactions(self, change: Change[nft.Key, nft.Value]) -> Iterator[Transaction]:
        """Yield the transactions that make a change, in order. Raises KernelError."""
        return self._planner.transactions(self._with_elements_of_replaced_sets(change))

    def _touched(self, change: Change[nft.Key, nft.Value]) -> Part[nft.Key, nft.Value]:
        """Return the entries that a change names, as they are now. Raises KernelError."""
        return self._parts({}).touched(change)

    def _with_elements_of_replaced_sets(self, change: Change[nft.Key, nft.Value]) -> Change[nft.Key, nft.Value]:
        """Extend a change that recreates a set: its elements and the rules that use it must be added again."""
        renewed = frozenset(key.name for key in change.replaced if key.kind == "set")
        if not renewed:
            return change
        reader = self._reader()
        observed = reader.chains(reader.hooks())
        for name in renewed:
            observed.update(reader.contents(name))
        wider: Change[nft.Key, nft.Value] = Change(dict(change.added), dict(change.replaced), dict(change.removed))
        for key, value in observed.items():
            if isinstance(key, nft.ElementKey) and key.name in renewed:
                if key in wider.replaced:
                    wider.added[key] = wider.replaced.pop(key)[1]
                elif key in wider.removed:
                    del wider.removed[key]
                elif key.key != messages.CATCH_ALL:
                    wider.added[key] = value
            elif key not in wider.replaced and key not in wider.removed and uses_sets(value, renewed):
                wider.replaced[key] = (value, value)
        return wider

    def _send_patiently(self, transaction: Transaction) -> None:
        """Send a transaction; if chains to be removed are still busy, send the rest first and remove them later."""
        try:
            self._send(transaction.messages)
            return
        except TransactionRefused as refused:
            removing = [each for each in transaction.messages if each.message[0] == messages.DELETE_CHAIN]
            if not refused.busy_chains:
                raise
            error = refused
        others = [each for each in transaction.messages if each.message[0] != messages.DELETE_CHAIN]
        remade = {each.chain for each in others if each.chain}
        if any(each.chain in remade for each in removing):
            raise error
        if others:
            self._send(others)
        for _attempt in range(_BUSY_ATTEMPTS):
            time.sleep(_BUSY_SECONDS)
            try:
                self._send(removing)
                return
            except TransactionRefused as refused:
                if not refused.busy_chains:
                    raise
                error = refused
        raise error

    def _send(self, labelled: list[Labelled]) -> None:
        batch = [BATCH_BEGIN]
        batch.extend(each.message for each in labelled)
        batch.append(BATCH_END)
        if self.commits is not None:
            # The kernel reports the generation after a transaction whose first message requests an echo.
            kind, flags, payload = batch[1]
            batch[1] = (kind, flags | NLM_F_ECHO, payload)
        started = time.monotonic()
        outcome = self.socket.transact(batch, single_send=True, acknowledge=False)
        self.longest_call = max(self.longest_call, time.monotonic() - started)
        if outcome.errors:
            raise self._refusal(labelled, outcome.errors)
        if self.commits is not None:
            self.commits.append(generation_in(outcome.replies))

    def _refusal(self, labelled: list[Labelled], errors: list[MessageError]) -> TransactionRefused:
        first = errors[0]
        # Position 0 is the message that begins the batch; an error there is about the whole of it.
        where = labelled[first.position - 1].label if 0 < first.position <= len(labelled) else "transaction"
        busy_chains = all(
            is_busy(error)
            and 0 < error.position <= len(labelled)
            and labelled[error.position - 1].message[0] == messages.DELETE_CHAIN
            for error in errors
        )
        more = f" (and {len(errors) - 1} more refusals)" if len(errors) > 1 else ""
        text = f"table {self.table.name} ({self._table_family}): {where}: {first}{more}"
        text += owner_hint(self.socket, self._table_family, self.table.name, first)
        return TransactionRefused(text, any(map(is_transient, errors)), busy_chains)

    def describe(self, key: nft.Key, value: nft.Value) -> list[str]:
        """Return one entry in the syntax of the nft program."""
        # Imported late: only changes are described.
        from ...rendering.nftables.text import describe

        return describe(self.family, key, value, self.table.name)
