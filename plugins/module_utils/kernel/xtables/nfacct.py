# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of the nfacct counters of this network namespace (linux/netfilter/nfnetlink_acct.h).

kube-proxy counts dropped invalid packets and connections to localhost node ports with them; rules bear the match only
where the counter exists. Reading creates none (the kernel may load its module nfnetlink_acct to answer).
"""

from __future__ import annotations

import struct
from typing import Set, Tuple

from ..netlink import NETLINK_NETFILTER, NetlinkRefusal, NetlinkSocket, attribute_text, parse_attributes

_GET = 7 << 8 | 1
_NAME = 1
_FAMILY_HEADER = struct.pack("=BBH", 0, 0, 0)


def nfacct_counters() -> Tuple[str, ...]:
    """The names of all counters, sorted; none where the kernel has no nfacct or does not let this process read it.

    Raises KernelError if netlink itself fails.
    """
    names: Set[str] = set()
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        try:
            for buffer, _kind, start, end in sock.dump(_GET, _FAMILY_HEADER):
                attributes = parse_attributes(buffer, start + len(_FAMILY_HEADER), end)
                if _NAME in attributes:
                    names.add(attribute_text(attributes[_NAME]))
        except NetlinkRefusal:
            return ()
    return tuple(sorted(names))
