# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The counters of the elements of sets and maps: what they count, and the clients that the packet path adds.

Clients are those with session affinity. Counters tell which packets network policies dropped, and which ones to node
ports at loopback addresses were refused.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, NamedTuple, Optional

from ....base.addresses import FAMILIES, packed
from ....networkpolicy.matching.owners import Address
from ....rendering.networkpolicy import sets
from ....rendering.networkpolicy.bridge_keys import BRIDGE
from ....rendering.nftables.layout import LOCALHOST_COUNTS
from ....rendering.nftables.objects import PROTOCOL_NAMES, TABLE_NAME
from ...netlink.attributes import attribute_text, each_attribute, number_in, parse_attributes, text_attribute
from ...netlink.outcomes import NetlinkRefusal, is_missing
from ...netlink.protocol import NETLINK_NETFILTER
from ...netlink.socket import NetlinkSocket
from .. import attributes as uapi
from .. import messages
from ..decoding import elements_in, parse_data
from ..listing import dumped

_COUNTS = (uapi.NFTA_COUNTER_PACKETS, uapi.NFTA_COUNTER_BYTES)


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
        elements = elements_in(view, start, end)
        for _number, raw in each_attribute(elements, 0, len(elements)):
            found = parse_attributes(raw, 0, len(raw))
            counter = _counter(found)
            if counter is not None and uapi.NFTA_SET_ELEM_KEY in found:
                data = parse_data(found[uapi.NFTA_SET_ELEM_DATA]) if uapi.NFTA_SET_ELEM_DATA in found else None
                packets, size = (number_in(counter, kind) for kind in _COUNTS)
                yield Counted(parse_data(found[uapi.NFTA_SET_ELEM_KEY]), data, packets, size)


def _counter(element: dict[int, memoryview]) -> Optional[dict[int, memoryview]]:
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


def remembered_seconds(sock: NetlinkSocket, family: str, name: str, client: str) -> Optional[float]:
    """Return how many seconds a set of the table still remembers a client; None if it does not, or does not exist.

    Only this element is read, however many there are. Raises KernelError.
    """
    encoder = messages.Encoder(family)
    outcome = sock.transact(list(encoder.get_elements(name, [packed(client) or b""])))
    for error in outcome.errors:
        if not is_missing(error):
            raise NetlinkRefusal(error)
    for reply in outcome.replies:
        view = memoryview(reply.payload)
        elements = elements_in(view, 0, len(view))
        for _kind, raw in each_attribute(elements, 0, len(elements)):
            left = parse_attributes(raw, 0, len(raw)).get(uapi.NFTA_SET_ELEM_EXPIRATION)
            return int.from_bytes(left, "big") / 1000 if left is not None else 0.0
    return None


def denied_packets() -> dict[tuple[str, Address], int]:
    """Return the packets denied since the pod came, by side (``in``, ``out``) and address of a pod of this node.

    It is empty if there is no table. Raises KernelError.
    """
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return {
            (side, element.key): element.packets
            for family in FAMILIES
            for side in sets.SIDES
            for element in counted_elements(sock, "inet", sets.TABLE_NAME, sets.name(sets.DENIED, family, side))
        }


def forged_packets() -> dict[str, int]:
    """Return the packets dropped for their source since an interface of pods came, by its name; frames by their port.

    It is empty if there is no table. Raises KernelError.
    """
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return {
            element.key.rstrip(b"\0").decode(): element.packets
            for family in ("inet", BRIDGE)
            for element in counted_elements(sock, family, sets.TABLE_NAME, sets.FORGED)
        }


def refused_at_loopback(families: Iterable[str]) -> dict[tuple[str, str], int]:
    """Return the packets since the table was made, by family and protocol in upper case. Raises KernelError."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return {
            (family, PROTOCOL_NAMES[element.key[0]].upper()): element.packets
            for family in families
            for element in counted_elements(sock, family, TABLE_NAME, LOCALHOST_COUNTS)
            if element.key[0] in PROTOCOL_NAMES
        }
