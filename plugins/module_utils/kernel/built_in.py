# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect built-in kernel code that no module list names. No query changes anything.

The kernel answers a query about code that it lacks by trying to load the module. So query only modules whose file is
not installed, and only through a subsystem that is in the kernel already or cannot be loaded either.

Sources: linux/netfilter/ipset/ip_set.h, linux/ip_vs.h, linux/netfilter/nf_tables_compat.h.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Callable, Mapping

from ..base.addresses import IPV4
from ..base.errors import KernelError
from ..rendering.ipvs.model import SetDefinition, VirtualServer, VirtualServerKey
from .facts import read_text
from .ipset.messages import TYPE, type_query
from .ipset.sets import IpsetSocket
from .ipvs.messages import NEW_SERVICE, ServiceEncoder
from .ipvs.servers import IpvsSocket
from .netlink.attributes import attribute, text_attribute
from .netlink.outcomes import NetlinkRefusal
from .netlink.protocol import NETLINK_NETFILTER
from .netlink.socket import NetlinkSocket

_SCHEDULER_PREFIX = "ip_vs_"
_SET_TYPES: Mapping[str, str] = {
    "ip_set_bitmap_port": "bitmap:port",
    "ip_set_hash_ip": "hash:ip",
    "ip_set_hash_ipport": "hash:ip,port",
    "ip_set_hash_ipportip": "hash:ip,port,ip",
    "ip_set_hash_ipportnet": "hash:ip,port,net",
}
# By module, for matches that are separate modules.
_MATCHES: Mapping[str, str] = {"xt_set": "set", "xt_nfacct": "nfacct"}
_PROC_MATCHES = "/proc/net/ip_tables_matches"
# NFNL_MSG_COMPAT_GET of NFNL_SUBSYS_NFT_COMPAT, and its attributes.
_COMPAT_GET = 11 << 8 | 0
_COMPAT_NAME, _COMPAT_REVISION, _COMPAT_TYPE = 1, 2, 3
# The smallest revisions of the matches that this project uses.
_REVISIONS: Mapping[str, int] = {"set": 1}


def answers(module: str, may_ask: Callable[[str], bool]) -> bool:
    """Return whether the kernel reports that it has the code of a module; False if there is no way to query it.

    ``may_ask`` returns for the module of a subsystem whether a request to it would not load that module.
    """
    try:
        if module in _SET_TYPES:
            return may_ask("ip_set") and _has_set_type(_SET_TYPES[module])
        if module in _MATCHES:
            return _has_match(_MATCHES[module], may_ask)
        if module.startswith(_SCHEDULER_PREFIX):
            return may_ask("ip_vs") and _has_scheduler(module[len(_SCHEDULER_PREFIX) :])
    except KernelError:
        # The subsystem is not in the kernel, or this process may not ask.
        return False
    return False


def _has_set_type(name: str) -> bool:
    with IpsetSocket() as sock:
        try:
            return bool(sock.netlink.request(TYPE, type_query(sock.protocol, SetDefinition(name, IPV4))))
        except NetlinkRefusal:
            return False


def _has_scheduler(name: str) -> bool:
    """Request a virtual server that IPVS must refuse: it looks for the scheduler before it checks the prefix length."""
    key, impossible = VirtualServerKey("tcp", "2001:db8::1", 9), VirtualServer(name, 0, 0, 0)
    with IpvsSocket() as sock:
        message = ServiceEncoder(sock.family_id).message(NEW_SERVICE, key, impossible)
        errors = sock.netlink.transact_ready([message]).errors
    return [error.errno for error in errors] == [errno.EINVAL]


def _has_match(name: str, may_ask: Callable[[str], bool]) -> bool:
    """Return whether a match of iptables is registered, by the legacy tables' list or by nf_tables, which shares it."""
    if name in (read_text(_PROC_MATCHES) or "").split():
        return True
    if not may_ask("nft_compat"):
        return False
    question = struct.pack("=BBH", socket.AF_INET, 0, 0) + text_attribute(_COMPAT_NAME, name)
    question += attribute(_COMPAT_REVISION, struct.pack(">I", _REVISIONS.get(name, 0)))
    question += attribute(_COMPAT_TYPE, struct.pack(">I", 0))
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        try:
            return bool(sock.request(_COMPAT_GET, question))
        except NetlinkRefusal:
            return False
