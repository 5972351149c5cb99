# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Notifications of nf_tables: in which families another program changed objects of ours, and which program it was.

This reads nothing from the kernel's tables. Source: linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from typing import Callable, Collection, Iterable, Mapping

from ...rendering.nftables.objects import TABLE_DORMANT, TABLE_NAME
from ..netlink.attributes import attribute_text, number_in, parse_attributes
from ..netlink.listener import NetlinkListener, Notification
from ..netlink.protocol import NETLINK_NETFILTER
from . import attributes as uapi
from . import messages

_FAMILIES = {number: family for family, number in messages.FAMILY_NUMBERS.items()}
#: The kernel sends no notifications of clients that the packet path adds to the sets of session affinity.
_CHANGES = frozenset(
    (
        messages.NEW_TABLE,
        messages.DELETE_TABLE,
        messages.NEW_CHAIN,
        messages.DELETE_CHAIN,
        messages.NEW_RULE,
        messages.DELETE_RULE,
        messages.NEW_SET,
        messages.DELETE_SET,
        messages.NEW_ELEMENT,
        messages.DELETE_ELEMENT,
    )
)


def author(generation: Mapping[int, memoryview]) -> str:
    """Return the author of a transaction, ``nft, process 123``, from the attributes of its final message."""
    name = attribute_text(generation[uapi.NFTA_GEN_PROC_NAME]) if uapi.NFTA_GEN_PROC_NAME in generation else ""
    number = number_in(generation, uapi.NFTA_GEN_PROC_PID)
    return ", ".join(filter(None, (name, f"process {number}" if number else "")))


def _attributes(notification: Notification) -> dict[int, memoryview]:
    payload = notification.payload
    return parse_attributes(payload, uapi.GENMSG_BYTES, len(payload))


class NftMonitor(NetlinkListener):
    """Receives the transactions of nf_tables, of both families. Raises KernelError if there is no socket.

    ``author``: the program that made the last of the :meth:`changes`, if the kernel named it; ``lost``: notifications
    were lost, because they were not read in time. Subclasses decide which objects are ours.
    """

    def __init__(self, own_ports: Iterable[int] = ()) -> None:
        # All notifications of one datagram are about the same transaction.
        super().__init__(NETLINK_NETFILTER, (uapi.NFNLGRP_NFTABLES,), "nf_tables", tuple(own_ports))
        self.author = ""
        self._touched: set[str] = set()
        self.lost = False

    def changes(self) -> set[str]:
        """Return the families in which other programs have changed objects of ours since the last call.

        All families if notifications were lost. Does not wait. Raises KernelError.
        """
        found: set[str] = set()
        self.author = ""
        for notification in self.notifications():
            if notification.kind == uapi.NEW_GENERATION:
                # The final message of a transaction follows those about the changed objects.
                generation = _attributes(notification)
                if self._touched and not self._is_own(number_in(generation, uapi.NFTA_GEN_PROC_PID)):
                    found |= self._touched
                    self.author = author(generation)
                self._touched.clear()
            elif notification.kind in _CHANGES:
                family = _FAMILIES.get(notification.payload[0])
                if family is not None and self._concerns_us(family, notification):
                    self._touched.add(family)
        self.lost = self.pop_lost()
        if self.lost:
            found.update(_FAMILIES.values())
        return found

    def _is_own(self, process: int) -> bool:
        """Return whether a transaction of this process is our own."""
        return False

    def _concerns_us(self, family: str, notification: Notification) -> bool:
        """Return whether the notification is about an object of ours."""
        raise NotImplementedError


class TableMonitor(NftMonitor):
    """Detects changes of the table of nftables mode, or of another table named ``table``.

    ``own_ports``: netlink ports (:attr:`.resource.NftablesResource.port`) whose changes are ignored.
    """

    def __init__(self, own_ports: Iterable[int] = (), table: str = TABLE_NAME) -> None:
        super().__init__(own_ports)
        self._table = table

    def _concerns_us(self, family: str, notification: Notification) -> bool:
        table = _attributes(notification).get(uapi.NFTA_TABLE_NAME)
        return table is not None and attribute_text(table) == self._table


class ChainMonitor(NftMonitor):
    """Detects changes of our chains, and of jumps to them, in the tables of iptables-nft.

    ``tables``: the names of these tables. ``mark``: a text that all names of our chains, and so jumps to them, contain.
    ``is_own``: returns whether a process is one of our own restore programs.
    """

    def __init__(
        self, families: Collection[str], tables: Collection[str], mark: bytes, is_own: Callable[[int], bool]
    ) -> None:
        super().__init__()
        self._families = frozenset(families)
        self._tables = frozenset(tables)
        self._mark = mark
        self._of_ours = is_own

    def _is_own(self, process: int) -> bool:
        return self._of_ours(process)

    def _concerns_us(self, family: str, notification: Notification) -> bool:
        if family not in self._families:
            return False
        if notification.kind in (messages.NEW_TABLE, messages.DELETE_TABLE):
            found = _attributes(notification)
            if attribute_text(found[uapi.NFTA_TABLE_NAME]) not in self._tables:
                return False
            # A table that another program creates is of no concern, but one that it makes dormant is.
            flags = number_in(found, uapi.NFTA_TABLE_FLAGS)
            return notification.kind == messages.DELETE_TABLE or bool(flags & TABLE_DORMANT)
        return self._mark in bytes(notification.payload)
