# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rows of one family: classes of peers, pieces of the address space, and grants of subjects to classes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import AbstractSet, Any, Optional

from ..base.addresses import address_bits
from .matching.address_space import AddressSpace, changed_ranges
from .matching.compiled import Block, Content
from .matching.owners import Address
from .numbers import IdAllocator, content_digest
from .rows import ANY, BLOCK, CLASS, GRANT, NO_CLASS, TIER_GRANT, PolicyRows, Row
from .subjects import NETWORK_POLICY, Part, Subject
from .values import GrantValues

_NO_ADDRESSES: frozenset[Address] = frozenset()


class FamilyTables:
    """Classes and grants of one family; :meth:`flush` brings the rows up to date after any number of changes."""

    def __init__(self, family: str, rows: PolicyRows, values: GrantValues, most_pieces: Optional[int] = None) -> None:
        self.family = family
        self.space = AddressSpace(most_pieces)
        self.class_of: dict[Address, int] = {}
        # The same addresses in order.
        self._classified: list[Address] = []
        self._bytes = address_bits(family) // 8
        self._rows = rows
        self._values = values
        self._classes: IdAllocator[Content] = IdAllocator(content_digest, high=False)
        #: The classes that the grants of the last :meth:`flush` are for, by number.
        self._flushed: dict[int, Content] = {}
        #: Which of these classes a peer, block or port name is part of.
        self._classes_of_part: dict[Part, set[int]] = {}
        self._pieces: dict[Row, int] = {}
        self._block_uses: dict[Block, int] = {}
        self._blocks_changed = False
        self._subjects: dict[Subject, set[Address]] = {}
        #: The subjects with rules for a peer, block or port name, and those with grants to classes without any.
        self._users: dict[Part, set[Subject]] = {}
        self._wide: set[Subject] = set()
        self._order: dict[Subject, int] = {}
        self._subjects_added = 0
        self._leaving: list[tuple[Subject, Address]] = []
        self._joining: list[tuple[Subject, Address]] = []

    # ---- blocks

    def use_blocks(self, blocks: list[Block], count: int) -> None:
        """Change the use count of blocks; blocks of the other family are skipped."""
        for block in blocks:
            if block.family == self.family:
                before = self._block_uses.get(block, 0)
                self._block_uses[block] = before + count
                self._blocks_changed |= not before or not before + count
                if not before + count:
                    del self._block_uses[block]

    def divide(self) -> list[Address]:
        """Divide the address space again if the blocks in use changed.

        Return the classified addresses that other blocks contain now. Raises TooManyRows.
        """
        if not self._blocks_changed:
            return []
        self._blocks_changed = False
        before = self.space.pieces
        self.space.divide(self._block_uses.keys())
        pieces: dict[Row, int] = {}
        for first, last, blocks in self.space.pieces:
            row = (BLOCK, first.to_bytes(self._bytes, "big"), last.to_bytes(self._bytes, "big"))
            pieces[row] = self._classes.acquire(Content(blocks=blocks))
        for row, number in self._pieces.items():
            if row not in pieces:
                self._rows.remove(row)
            self._classes.release(number)
        for row, number in pieces.items():
            self._rows.put(row, number)
        self._pieces = pieces
        return [
            address
            for first, last in changed_ranges(before, self.space.pieces)
            for address in self._classified_in(first, last)
        ]

    def _classified_in(self, first: int, last: int) -> list[Address]:
        begin = bisect_left(self._classified, first.to_bytes(self._bytes, "big"))
        end = bisect_right(self._classified, last.to_bytes(self._bytes, "big"), begin)
        return self._classified[begin:end]

    # ---- peers

    def classify(self, address: Address, content: Content) -> None:
        """Set the class of a pod's address; ``content`` lacks the blocks.

        A pod that only blocks match needs no entry: its address is in a piece of that class.
        """
        before = self.class_of.pop(address, None)
        if content.peers or content.ports:
            whole = content._replace(blocks=self.space.blocks_at(int.from_bytes(address, "big")))
            number = self.class_of[address] = self._classes.acquire(whole)
            self._rows.put((CLASS, address), number)
            if before is None:
                insort(self._classified, address)
        elif before is not None:
            self._rows.remove((CLASS, address))
            del self._classified[bisect_left(self._classified, address)]
        if before is not None:
            self._classes.release(before)

    # ---- subjects

    def join(self, subject: Subject, address: Address) -> None:
        """Add an address of this node to a subject."""
        self._joining.append((subject, address))

    def leave(self, subject: Subject, address: Address) -> None:
        """Remove an address of this node from a subject."""
        self._leaving.append((subject, address))

    def flush(self) -> None:
        """Bring grants up to date. Raises TooManyRows."""
        self._remove_leaving()
        live = self._classes.values
        flushed = self._flushed
        touched = sorted(number for number in self._classes.touched if live.get(number) is not flushed.get(number))
        self._classes.touched.clear()
        for number in touched:
            if number in flushed:
                content = flushed.pop(number)
                for part in _parts(content):
                    self._classes_of_part[part].remove(number)
                    if not self._classes_of_part[part]:
                        del self._classes_of_part[part]
                for subject in self._concerned(content):
                    self._withdraw(subject, number, self._subjects[subject])
        for subject, address in self._joining:
            self._admit(subject, address)
        self._joining.clear()
        for number in touched:
            if number in live:
                content = flushed[number] = live[number]
                for part in _parts(content):
                    self._classes_of_part.setdefault(part, set()).add(number)
                for subject in self._concerned(content):
                    self._grant(subject, number, content, self._subjects[subject])

    def _concerned(self, content: Content) -> list[Subject]:
        """Return the subjects that may grant something to a class, in order of their creation."""
        found = set(self._wide)
        for part in _parts(content):
            users = self._users.get(part)
            if users:
                found |= users
        return sorted(found, key=self._order.__getitem__)

    def _candidate_classes(self, subject: Subject) -> set[int]:
        """Return the classes to which a subject may grant something."""
        if subject.is_wide:
            return set(self._flushed)
        found: set[int] = set()
        for part in subject.parts:
            found.update(self._classes_of_part.get(part, ()))
        return found

    def _remove_leaving(self) -> None:
        for subject, address in self._leaving:
            granted = subject.granted[self.family]
            for number in granted:
                self._rows.remove(_grant_row(subject, number, address))
            addresses = self._subjects[subject]
            addresses.remove(address)
            if not addresses:
                self._remove_subject(subject)
                for value in granted.values():
                    self._values.release(value)
                granted.clear()
        self._leaving.clear()

    def _add_subject(self, subject: Subject) -> set[Address]:
        for part in subject.parts:
            self._users.setdefault(part, set()).add(subject)
        if subject.is_wide:
            self._wide.add(subject)
        self._subjects_added += 1
        self._order[subject] = self._subjects_added
        self._subjects[subject] = set()
        return self._subjects[subject]

    def _remove_subject(self, subject: Subject) -> None:
        for part in subject.parts:
            self._users[part].remove(subject)
            if not self._users[part]:
                del self._users[part]
        self._wide.discard(subject)
        del self._order[subject], self._subjects[subject]

    def _admit(self, subject: Subject, address: Address) -> None:
        granted = subject.granted[self.family]
        addresses = self._subjects.get(subject)
        if addresses is None:
            addresses = self._add_subject(subject)
            for number in sorted(self._candidate_classes(subject)):
                self._grant(subject, number, self._flushed[number], _NO_ADDRESSES)
            self._grant_value(subject, NO_CLASS, subject.default(), _NO_ADDRESSES)
            self._grant_value(subject, _ANY_CLASS, subject.any, _NO_ADDRESSES)
        addresses.add(address)
        for number, value in granted.items():
            self._rows.put(_grant_row(subject, number, address), value)

    def _grant(self, subject: Subject, number: int, content: Content, addresses: AbstractSet[Address]) -> None:
        before = subject.steps
        value = subject.grant(content)
        self._rows.spend(subject.steps - before)
        self._grant_value(subject, number, value, addresses)

    def _grant_value(self, subject: Subject, number: int, value: Any, addresses: AbstractSet[Address]) -> None:
        if not value:
            return
        granted = self._values.acquire(value)
        subject.granted[self.family][number] = granted
        for address in addresses:
            self._rows.put(_grant_row(subject, number, address), granted)

    def _withdraw(self, subject: Subject, number: int, addresses: set[Address]) -> None:
        value = subject.granted[self.family].pop(number, None)
        if value is not None:
            for address in addresses:
                self._rows.remove(_grant_row(subject, number, address))
            self._values.release(value)


def _parts(content: Content) -> list[Part]:
    return [*content.peers, *content.blocks, *{port.name for port in content.ports}]


#: Key in ``Subject.granted`` of a grant to peers of every class.
_ANY_CLASS = -1


def _grant_row(subject: Subject, number: int, address: Address) -> Row:
    if number == _ANY_CLASS:
        return (ANY, subject.side, address)
    if subject.tier == NETWORK_POLICY:
        return (GRANT, subject.side, number, address)
    return (TIER_GRANT, subject.tier, subject.side, number, address)
