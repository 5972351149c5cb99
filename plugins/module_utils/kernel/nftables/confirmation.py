# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Confirm that a large set has the expected elements, without dumping it.

For each part of a dump, of some hundred elements, the kernel walks over the set from its beginning. So the time of a
dump grows with the square of the number of elements: a list of 680,000 takes a minute. Looking each element up takes
time in proportion. It finds none that is not expected, so the number of elements must be right as well.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, cast

from ...rendering.nftables.objects import ElementKey, Key, ListValue, Value, index_bytes, list_items
from ..netlink.attributes import parse_attributes
from ..netlink.outcomes import is_missing
from ..netlink.socket import NetlinkSocket
from . import messages
from .attributes import GENMSG_BYTES, NFTA_SET_ELEM_LIST_ELEMENTS
from .decoding import parse_elements
from .messages import Encoder

#: Smaller sets are dumped, which takes less time up to here.
FEWEST_ELEMENTS = 100_000
#: The elements of one request; the kernel sends an answer for each.
_ELEMENTS_OF_REQUEST = 2_000


class Confirmation:
    """Compares sets of a table with the ``expected`` table over a socket."""

    def __init__(self, sock: NetlinkSocket, encoder: Encoder, expected: Mapping[Key, Value]) -> None:
        self._sock = sock
        self._encoder = encoder
        self._expected = expected

    def entries(self, name: str, count: int) -> Optional[Dict[Key, Value]]:
        """Return the expected entries of a set of ``count`` elements; None if it has others, or that is not certain.

        Raises KernelError.
        """
        found: Dict[Key, Value] = {
            key: value for key, value in self._expected.items() if isinstance(key, ElementKey) and key.name == name
        }
        elements = _elements(found)
        if sum(1 for _element in _elements(found)) != count or self._has_catch_all(name):
            return None
        part = dict(islice(elements, _ELEMENTS_OF_REQUEST))
        while part:
            if self._read(name, list(part)) != part:
                return None
            part = dict(islice(elements, _ELEMENTS_OF_REQUEST))
        return found

    def _has_catch_all(self, name: str) -> bool:
        """Return whether the set has the element that the kernel does not count."""
        outcome = self._sock.transact(list(self._encoder.get_elements(name, [messages.CATCH_ALL])))
        return not outcome.errors or not all(map(is_missing, outcome.errors))

    def _read(self, name: str, keys: List[bytes]) -> Dict[bytes, Any]:
        """Return those of the elements with these keys that the kernel finds before it finds one missing."""
        replies = self._sock.transact(list(self._encoder.get_elements(name, keys))).replies
        if not replies:
            return {}
        first = replies[0].payload
        nest = parse_attributes(memoryview(first), GENMSG_BYTES, len(first))[NFTA_SET_ELEM_LIST_ELEMENTS]
        # Each answer has one element behind the same names.
        begin = len(first) - len(nest)
        return parse_elements([b"".join([reply.payload[begin:] for reply in replies])])


def _elements(entries: Mapping[Key, Value]) -> Iterator[Tuple[bytes, Any]]:
    """Yield the elements of the entries of a set: those of a list one by one."""
    for key, value in entries.items():
        element = cast(ElementKey, key)
        if element.kind == "list":
            for index, data in list_items(cast(ListValue, value)):
                yield element.key + index_bytes(index), data
        else:
            yield element.key, value
