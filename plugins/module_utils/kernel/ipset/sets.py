# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipsets and their elements as resources, over nfnetlink.

Needs the module ip_set and CAP_NET_ADMIN in the network namespace; the kernel itself loads the modules of set types.
Adding what exists already and removing what does not exist are not errors.
"""

from __future__ import annotations

import hashlib
from typing import Collection, Iterable, Mapping

from ...base.addresses import IPV4
from ...base.closing import Closing, closed_on_error
from ...base.errors import KernelError
from ...rendering.ipvs.model import SetDefinition, SetElementKey
from ...rendering.ipvs.sets import BITMAP_PORT, exempted
from ...rendering.ipvs.text import set_line
from ...resources import Change, Kind, Passes, Resource
from ..netlink.outcomes import MessageError, NetlinkRefusal, is_existing, is_forbidden, is_missing, refusals_as
from ..netlink.protocol import NETLINK_NETFILTER, Slice
from ..netlink.socket import NetlinkSocket
from . import messages

_TEMPORARY = "KUBENODE-SWAP"


class IpsetSocket(Closing):
    """A connection to the ipsets of the calling thread's network namespace; a context manager.

    Raises KernelError if the kernel has no ipsets (module ip_set) or no socket can be opened.
    """

    def __init__(self) -> None:
        self.netlink = NetlinkSocket(NETLINK_NETFILTER)
        with closed_on_error(self.netlink):
            self.protocol = self._negotiate()

    def _negotiate(self) -> int:
        try:
            replies = self.netlink.request(messages.PROTOCOL, messages.base(messages.NEWEST_PROTOCOL))
        except NetlinkRefusal as refusal:
            hint = "CAP_NET_ADMIN is needed" if is_forbidden(refusal.error) else "is the module ip_set loaded?"
            raise KernelError(f"ipsets cannot be used: {refusal.error}; {hint}") from refusal
        return min(messages.NEWEST_PROTOCOL, messages.decode_protocol(replies[0].payload)) if replies else 6

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self.netlink.close()

    def _list(self, name: str = "", header_only: bool = False) -> list[Slice]:
        with refusals_as(f"set {name or 'list'} cannot be read", is_missing):
            return self.netlink.dump(messages.LIST, messages.list_request(self.protocol, name, header_only))
        return []

    def headers(self) -> dict[str, SetDefinition]:
        """Return the definitions of all sets of the namespace by name. Raises KernelError."""
        found = {}
        for view, _kind, start, end in self._list(header_only=True):
            entry = messages.decode_header(view, start, end)
            if entry is not None:
                found[entry[0]] = entry[1]
        return found

    def elements(self, name: str) -> list[str]:
        """Return the elements of a set in ipset's text; none if there is no such set. Raises KernelError."""
        return [
            element
            for view, _kind, start, end in self._list(name)
            for element in messages.decode_elements(view, start, end)
        ]

    def content_digest(self, names: Collection[str], header_only: bool = False) -> bytes:
        """Return a digest of the definitions and elements of the named sets, as the kernel lists them, in one dump.

        It is constant while nothing changes, and cheaper than reading the elements. With ``header_only`` it covers only
        the number of elements and the memory they occupy, at almost no cost. Raises KernelError.
        """
        found = hashlib.blake2b(digest_size=16)
        for view, _kind, start, end in self._list(header_only=header_only):
            if messages.listed_name(view, start, end) in names:
                found.update(view[start:end])
        return found.digest()

    def create(self, sets: Mapping[str, SetDefinition]) -> None:
        """Create sets; equal ones that exist are accepted. Raises KernelError naming the first that was refused."""
        revisions = {definition: self._revision(definition) for definition in dict.fromkeys(sets.values())}
        names = list(sets)
        batch = [messages.create(self.protocol, name, sets[name], revisions[sets[name]]) for name in names]
        for error in self.netlink.transact(batch).errors:
            name = names[error.position]
            exists = "a set of that name but another kind exists" if is_existing(error) else ""
            raise KernelError(f"set {name} cannot be created: {exists or messages.refusal_text(error)}")

    def _revision(self, definition: SetDefinition) -> int:
        try:
            replies = self.netlink.request(messages.TYPE, messages.type_query(self.protocol, definition))
        except NetlinkRefusal as refusal:
            reason = messages.refusal_text(refusal.error)
            raise KernelError(f"set type {definition.type} {definition.family}: {reason}") from refusal
        return messages.decode_revision(replies[0].payload) if replies else 0

    def destroy(self, names: Iterable[str]) -> None:
        """Remove sets; missing ones are ignored. Raises KernelError naming the first that was refused."""
        wanted = list(names)
        for error in self.netlink.transact([messages.destroy(self.protocol, name) for name in wanted]).errors:
            if not is_missing(error):
                raise KernelError(f"set {wanted[error.position]} cannot be removed: {messages.refusal_text(error)}")

    def replace(self, name: str, definition: SetDefinition) -> None:
        """Resize a set without an interval in which rules miss it: fill a second set and swap the two.

        Type and family must be the same. Raises KernelError.
        """
        self.destroy([_TEMPORARY])
        self.create({_TEMPORARY: definition})
        try:
            kept = {SetElementKey(_TEMPORARY, element): True for element in self.elements(name)}
            self.change_elements(messages.ADD, kept, {_TEMPORARY: definition})
            for error in self.netlink.transact([messages.swap(self.protocol, name, _TEMPORARY)]).errors:
                raise KernelError(f"set {name} cannot be replaced: {messages.refusal_text(error)}")
        finally:
            self.destroy([_TEMPORARY])

    def change_elements(self, command: int, keys: Iterable[SetElementKey], sets: Mapping[str, SetDefinition]) -> None:
        """Add or remove (``command``: ADD or DELETE) elements of sets that ``sets`` describes.

        Every set is attempted; then the first refusal is raised as KernelError naming set and element. Frontends with a
        refused element are not added to the sets that follow, which would drop clients whose source range is lacking.
        """
        by_set: dict[str, list[str]] = {}
        for key in keys:
            by_set.setdefault(key.set, []).append(key.element)
        first = ""
        withheld: set[str] = set()
        # The names of sets for allowed sources follow that of the set of firewalled frontends: they are filled first.
        for name, elements in sorted(by_set.items(), reverse=command == messages.ADD):
            if name not in sets:
                raise KernelError(f"set {name}: elements cannot be changed, its type is not known")
            sent = [each for each in elements if _frontend(each) not in withheld] if withheld else elements
            batches = list(messages.element_batches(self.protocol, command, name, sets[name].type, sent))
            for error in self.netlink.transact([batch.message for batch in batches]).errors:
                if command == messages.DELETE and is_missing(error):
                    continue
                first = first or _element_refusal(command, error, batches[error.position], sets)
                withheld.update(map(_frontend, batches[error.position].elements))
        if first:
            raise KernelError(first)


def _frontend(element: str) -> str:
    """Return the address and port that an element begins with."""
    return ",".join(element.split(",", 2)[:2])


def _element_refusal(
    command: int, error: MessageError, batch: messages.ElementBatch, sets: Mapping[str, SetDefinition]
) -> str:
    element = messages.refused_element(error, batch)
    definition = sets[batch.set]
    if is_missing(error):
        reason = "the set does not exist"
    else:
        reason = messages.refusal_text(error, definition.limit, definition.type == BITMAP_PORT)
    verb = "added" if command == messages.ADD else "removed"
    what = f"element {element}" if element is not None else "elements"
    return f"set {batch.set}: {what} cannot be {verb}: {reason}"


class _OfKnownSets:
    """The base of the resources of the ipsets with the given names. Other sets are never touched.

    ``known`` are all sets of the family that the mode may own (``sets.definitions``).
    """

    def __init__(self, sock: IpsetSocket, known: Mapping[str, SetDefinition], family: str) -> None:
        self.family = family
        self._socket = sock
        self._known = dict(known)


class SetsResource(_OfKnownSets, Resource[str, SetDefinition]):
    """The sets themselves: name -> SetDefinition."""

    kind = Kind.SETS

    def observe(self) -> dict[str, SetDefinition]:
        """See the class. Raises KernelError.

        The set that a killed run has left while it resized another is among those of IPv4, and is never desired.
        """
        known = {*self._known, _TEMPORARY} if self.family == IPV4 else self._known
        return {name: definition for name, definition in self._socket.headers().items() if name in known}

    def apply(self, change: Change[str, SetDefinition]) -> None:
        """Create, resize and remove sets. Raises KernelError.

        A set whose type or family differs is not ours to convert: the error says how to remove it.
        """
        for name, (old, new) in change.replaced.items():
            if (old.type, old.family) != (new.type, new.family):
                found, wanted = (f"{it.type} {it.family}".strip() for it in (old, new))
                raise KernelError(f"set {name}: it exists as {found}, expected {wanted}; run: ipset destroy {name}")
        self._socket.create(change.added)
        for name, (_old, new) in change.replaced.items():
            self._socket.replace(name, new)
        self._socket.destroy(change.removed)

    @staticmethod
    def describe(key: str, value: SetDefinition) -> list[str]:
        """Return one line as ``ipset save`` prints it."""
        return [set_line(key, value)]


class SetElementsResource(_OfKnownSets, Resource[SetElementKey, bool]):
    """The elements of the sets: SetElementKey -> True.

    Those of sets for policy Local exempt their frontends from masquerading.
    """

    kind = Kind.SET_ELEMENTS

    def observe(self) -> dict[SetElementKey, bool]:
        """See the class. Raises KernelError."""
        found: dict[SetElementKey, bool] = {}
        for name in self._socket.headers():
            if name in self._known:
                for element in self._socket.elements(name):
                    found[SetElementKey(name, element)] = True
        return found

    def apply(self, change: Change[SetElementKey, bool]) -> None:
        """Remove and add elements in a few messages per set. Raises KernelError naming set and element."""
        self._socket.change_elements(messages.DELETE, change.removed, self._known)
        self._socket.change_elements(messages.ADD, change.added, self._known)

    def passes(self, change: Change[SetElementKey, bool]) -> Passes[SetElementKey, bool]:
        """See the base class."""
        return change.passes(exempted)

    @staticmethod
    def describe(key: SetElementKey, value: bool) -> list[str]:
        """Return one line as ``ipset save`` prints it."""
        return [f"add {key.set} {key.element}"]
