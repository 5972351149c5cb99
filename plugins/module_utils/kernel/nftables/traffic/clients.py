# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The clients in the sets that the packet path fills: session affinity of nftables mode."""

from __future__ import annotations

from typing import Optional

from ....base.addresses import packed
from ...netlink.attributes import each_attribute, parse_attributes
from ...netlink.outcomes import NetlinkRefusal, is_missing
from ...netlink.socket import NetlinkSocket
from .. import attributes as uapi
from .. import messages


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
        elements = parse_attributes(view, 4, len(view)).get(uapi.NFTA_SET_ELEM_LIST_ELEMENTS, memoryview(b""))
        for _kind, raw in each_attribute(elements, 0, len(elements)):
            left = parse_attributes(raw, 0, len(raw)).get(uapi.NFTA_SET_ELEM_EXPIRATION)
            return int.from_bytes(left, "big") / 1000 if left is not None else 0.0
    return None
