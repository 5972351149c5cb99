# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The names of all ipsets, whichever program created them; loads nothing. Source: linux/netfilter/ipset/ip_set.h."""

from __future__ import annotations

import os

from ..netlink.protocol import NETLINK_NETFILTER
from ..netlink.socket import NetlinkSocket
from .messages import LIST, OLDEST_PROTOCOL, list_request, listed_name

# It has a parameter (max_sets), so that the directory exists even if the module is built in.
_MODULE = "/sys/module/ip_set"


def set_names() -> list[str]:
    """Return the names of the ipsets of this network namespace; none if ipset is not loaded. Raises KernelError."""
    if not os.path.isdir(_MODULE):
        return []
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        dump = sock.dump(LIST, list_request(OLDEST_PROTOCOL, header_only=True))
        return [name for view, _kind, start, end in dump for name in [listed_name(view, start, end)] if name]
