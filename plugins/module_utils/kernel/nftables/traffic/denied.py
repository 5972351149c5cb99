# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many packets of which pod network policies have denied: the counters of the table's elements."""

from __future__ import annotations

from typing import Dict, Iterator, Tuple

from ....addresses import FAMILIES
from ....networkpolicy.matching.owners import Address
from ....rendering.networkpolicy import sets
from ...netlink.attributes import attribute_text, each_attribute, parse_attributes, text_attribute
from ...netlink.outcomes import NetlinkRefusal, is_missing, is_unsupported
from ...netlink.protocol import NETLINK_NETFILTER
from ...netlink.socket import NetlinkSocket
from .. import messages
from ..attributes import (
    NFTA_COUNTER_PACKETS,
    NFTA_EXPR_DATA,
    NFTA_EXPR_NAME,
    NFTA_SET_ELEM_EXPR,
    NFTA_SET_ELEM_EXPRESSIONS,
    NFTA_SET_ELEM_KEY,
    NFTA_SET_ELEM_LIST_ELEMENTS,
    NFTA_SET_ELEM_LIST_SET,
    NFTA_TABLE_NAME,
)
from ..decoding import parse_data

_HEAD = 4


def denied_packets() -> Dict[Tuple[str, Address], int]:
    """Return the packets denied since the pod came, by side (``in``, ``out``) and address of a pod of this node.

    It is empty if there is no table. Raises KernelError.
    """
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return {
            (side, address): packets
            for family in FAMILIES
            for side in sets.SIDES
            for address, packets in _counted(sock, sets.name(sets.DENIED, family, side))
        }


def _counted(sock: NetlinkSocket, name: str) -> Iterator[Tuple[Address, int]]:
    head = messages.family_header("inet") + text_attribute(NFTA_TABLE_NAME, sets.TABLE_NAME)
    try:
        slices = sock.dump(messages.GET_ELEMENT, head + text_attribute(NFTA_SET_ELEM_LIST_SET, name))
    except NetlinkRefusal as refusal:
        if is_missing(refusal.error) or is_unsupported(refusal.error):
            return
        raise
    for view, _kind, start, end in slices:
        elements = parse_attributes(view, start + _HEAD, end).get(NFTA_SET_ELEM_LIST_ELEMENTS, memoryview(b""))
        for _number, raw in each_attribute(elements, 0, len(elements)):
            found = parse_attributes(raw, 0, len(raw))
            if NFTA_SET_ELEM_KEY in found:
                yield parse_data(found[NFTA_SET_ELEM_KEY]), _packets(found)


def _packets(element: Dict[int, memoryview]) -> int:
    expressions = [element[NFTA_SET_ELEM_EXPR]] if NFTA_SET_ELEM_EXPR in element else []
    several = element.get(NFTA_SET_ELEM_EXPRESSIONS, memoryview(b""))
    expressions += [raw for _number, raw in each_attribute(several, 0, len(several))]
    for raw in expressions:
        outer = parse_attributes(raw, 0, len(raw))
        if NFTA_EXPR_DATA in outer and attribute_text(outer[NFTA_EXPR_NAME]) == "counter":
            data = outer[NFTA_EXPR_DATA]
            return int.from_bytes(parse_attributes(data, 0, len(data)).get(NFTA_COUNTER_PACKETS, b""), "big")
    return 0
