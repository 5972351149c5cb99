# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The counters of the elements of sets and maps."""

from __future__ import annotations

from typing import Any, Dict, Iterator, NamedTuple, Optional

from ...netlink.attributes import attribute_text, each_attribute, parse_attributes, text_attribute
from ...netlink.socket import NetlinkSocket
from .. import attributes as uapi
from .. import messages
from ..decoding import parse_data
from ..listing import dumped


class Counted(NamedTuple):
    """An element with a counter: its key, its data (None in a set), and the packets and bytes that matched it."""

    key: Any
    data: Any
    packets: int
    bytes: int


def counted_elements(sock: NetlinkSocket, family: str, table: str, name: str) -> Iterator[Counted]:
    """Yield the elements of a set that have a counter; none if the set does not exist. Raises KernelError."""
    head = messages.family_header(family) + text_attribute(uapi.NFTA_TABLE_NAME, table)
    request = head + text_attribute(uapi.NFTA_SET_ELEM_LIST_SET, name)
    for view, _kind, start, end in dumped(sock, messages.GET_ELEMENT, request):
        elements = parse_attributes(view, start + uapi.GENMSG_BYTES, end).get(
            uapi.NFTA_SET_ELEM_LIST_ELEMENTS, memoryview(b"")
        )
        for _number, raw in each_attribute(elements, 0, len(elements)):
            found = parse_attributes(raw, 0, len(raw))
            counter = _counter(found)
            if counter is not None and uapi.NFTA_SET_ELEM_KEY in found:
                data = parse_data(found[uapi.NFTA_SET_ELEM_DATA]) if uapi.NFTA_SET_ELEM_DATA in found else None
                numbers = (
                    int.from_bytes(counter.get(kind, b""), "big")
                    for kind in (uapi.NFTA_COUNTER_PACKETS, uapi.NFTA_COUNTER_BYTES)
                )
                yield Counted(parse_data(found[uapi.NFTA_SET_ELEM_KEY]), data, *numbers)


def _counter(element: Dict[int, memoryview]) -> Optional[Dict[int, memoryview]]:
    """Return the attributes of an element's counter, None without one."""
    expressions = [element[uapi.NFTA_SET_ELEM_EXPR]] if uapi.NFTA_SET_ELEM_EXPR in element else []
    several = element.get(uapi.NFTA_SET_ELEM_EXPRESSIONS, memoryview(b""))
    expressions += [raw for _number, raw in each_attribute(several, 0, len(several))]
    for raw in expressions:
        outer = parse_attributes(raw, 0, len(raw))
        if uapi.NFTA_EXPR_DATA in outer and attribute_text(outer[uapi.NFTA_EXPR_NAME]) == "counter":
            data = outer[uapi.NFTA_EXPR_DATA]
            return parse_attributes(data, 0, len(data))
    return None
