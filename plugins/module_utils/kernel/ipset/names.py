# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The names of all ipsets, whichever program created them; loads nothing. Source: linux/netfilter/ipset/ip_set.h."""

from __future__ import annotations

import os
from typing import List

from ..netlink.attributes import NLA_F_NET_BYTEORDER, attribute, attribute_text, parse_attributes
from ..netlink.protocol import NETLINK_NETFILTER
from ..netlink.socket import NetlinkSocket

# It has a parameter (max_sets), so that the directory exists even if the module is built in.
_MODULE = "/sys/module/ip_set"
_LIST = 6 << 8 | 7
_PROTOCOL, _SETNAME, _FLAGS = 1, 2, 6
_OLDEST_PROTOCOL = b"\x06"
_FLAG_LIST_SETNAME = b"\0\0\0\x02"
_HEAD = 4


def set_names() -> List[str]:
    """Return the names of the ipsets of this network namespace; none if ipset is not loaded. Raises KernelError."""
    if not os.path.isdir(_MODULE):
        return []
    request = b"\0" * _HEAD + attribute(_PROTOCOL, _OLDEST_PROTOCOL)
    request += attribute(_FLAGS | NLA_F_NET_BYTEORDER, _FLAG_LIST_SETNAME)
    names = []
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        for view, _kind, start, end in sock.dump(_LIST, request):
            found = parse_attributes(view, start + _HEAD, end)
            if _SETNAME in found:
                names.append(attribute_text(found[_SETNAME]))
    return names
