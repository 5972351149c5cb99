# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries of connection tracking that belong to one flow, for explanations. Nothing is changed."""

from __future__ import annotations

from typing import Iterator, Mapping, NamedTuple, Optional

from ...base.addresses import packed_place, unpacked_place
from ..netlink.attributes import number_in, parse_attributes
from . import messages as ct
from .socket import ConntrackSocket, collected

Place = tuple[str, int]

_CTA_TIMEOUT = 7
# The names of the states of a protocol, by number.
_STATES: Mapping[str, tuple[str, ...]] = {
    "TCP": (
        "none",
        "syn-sent",
        "syn-recv",
        "established",
        "fin-wait",
        "close-wait",
        "last-ack",
        "time-wait",
        "close",
        "syn-sent2",
    ),
    "SCTP": (
        "none",
        "closed",
        "cookie-wait",
        "cookie-echoed",
        "established",
        "shutdown-sent",
        "shutdown-recd",
        "shutdown-ack-sent",
        "heartbeat-sent",
    ),
}
#: The most entries of one query: a client may have tens of thousands of connections to one address.
MOST_FLOWS = 1000


class TrackedFlow(NamedTuple):
    """An entry: the client and its destination, and the two ends of the reply, each as address and port.

    ``state``: of the protocol, or ``replied`` or ``unreplied``; with ``, assured`` if the entry survives pressure.
    ``seconds``: until it expires if no packet comes.
    """

    source: Place
    destination: Place
    reply_source: Place
    reply_destination: Place
    state: str
    seconds: int


def parse_flow(view: memoryview, start: int, end: int, protocol: str) -> Optional[TrackedFlow]:
    """Parse a message of ctnetlink, from ``struct nfgenmsg`` on; None for an entry of another protocol."""
    found = parse_attributes(view, start + ct.NFGENMSG.size, end)
    tuples = ct.parse_tuples(found)
    if tuples is None or tuples[0][0] != ct.PROTOCOLS[protocol]:
        return None
    original, reply = tuples
    source, destination, replier, client = map(unpacked_place, (*original[1:], *reply[1:]))
    return TrackedFlow(
        source=source,
        destination=destination,
        reply_source=replier,
        reply_destination=client,
        state=_state(found, protocol),
        seconds=number_in(found, _CTA_TIMEOUT),
    )


def _state(found: Mapping[int, memoryview], protocol: str) -> str:
    status = number_in(found, ct.CTA_STATUS)
    state = "replied" if status & ct.SEEN_REPLY else "unreplied"
    number, names = ct.state_number(found, protocol), _STATES.get(protocol, ())
    if number is not None and number < len(names):
        state = names[number]
    return f"{state}, assured" if status & ct.ASSURED else state


def tracked_flows(family: str, protocol: str, source: Place, destination: Place) -> list[TrackedFlow]:
    """Return the entries of the flows from a source, of any port if that is 0, to a destination, at most MOST_FLOWS.

    ``protocol``: TCP, UDP or SCTP. Raises KernelError.
    """
    with ConntrackSocket() as sock:
        return collected(lambda: _flows(sock, family, protocol, source, destination))


def _flows(
    sock: ConntrackSocket, family: str, protocol: str, source: Place, destination: Place
) -> Iterator[TrackedFlow]:
    count = 0
    # Kernels that do not know these attributes return all entries.
    selection = ct.flow_selection(family, ct.PROTOCOLS[protocol], packed_place(*destination), packed_place(*source))
    for view, _kind, start, end in sock.dump(family, selection):
        flow = parse_flow(view, start, end, protocol)
        if flow is None or flow.destination != destination or flow.source[0] != source[0]:
            continue
        if source[1] in (0, flow.source[1]):
            yield flow
            count += 1
            if count == MOST_FLOWS:
                return
