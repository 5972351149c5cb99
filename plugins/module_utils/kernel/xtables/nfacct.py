# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The nfacct counters of this network namespace (linux/netfilter/nfnetlink_acct.h).

kube-proxy counts dropped invalid packets and connections to localhost node ports with them; rules bear the match only
where the counter exists. Reading creates none (the kernel may load its module nfnetlink_acct to answer).
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Dict, Iterable, Tuple

from ..facts import kernel_release
from ..modules import available_modules, present_modules
from ..netlink import (
    NETLINK_NETFILTER,
    NLM_F_CREATE,
    NetlinkRefusal,
    NetlinkSocket,
    attribute_text,
    parse_attributes,
    text_attribute,
)

_NEW, _GET = 7 << 8 | 0, 7 << 8 | 1
_NAME, _PACKETS = 1, 2
_MODULE = "/sys/module/nfnetlink_acct"
_MATCH = "xt_nfacct"
_FAMILY_HEADER = struct.pack("=BBH", 0, 0, 0)


def nfacct_packets() -> Dict[str, int]:
    """The packets of all counters by name; none where the kernel has no nfacct or does not let this process read it.

    Raises KernelError if netlink itself fails.
    """
    found: Dict[str, int] = {}
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        try:
            for buffer, _kind, start, end in sock.dump(_GET, _FAMILY_HEADER):
                attributes = parse_attributes(buffer, start + len(_FAMILY_HEADER), end)
                if _NAME in attributes:
                    packets = bytes(attributes.get(_PACKETS, b""))
                    found[attribute_text(attributes[_NAME])] = int.from_bytes(packets, "big")
        except NetlinkRefusal:
            return {}
    return found


def nfacct_counters() -> Tuple[str, ...]:
    """The names of all counters, sorted; see :func:`nfacct_packets`. Raises KernelError."""
    return tuple(sorted(nfacct_packets()))


def usable_nfacct_counters() -> Tuple[str, ...]:
    """The same, but none if rules cannot match them here, and without having the kernel load anything.

    Raises KernelError.
    """
    return nfacct_counters() if os.path.isdir(_MODULE) and _has_match() else ()


def _has_match() -> bool:
    """The rules' match is a module of its own, which need not be there where the counters are."""
    release = kernel_release()
    return bool(present_modules([_MATCH], release)) or _MATCH in available_modules(release)


def make_nfacct_counters(names: Iterable[str]) -> bool:
    """Make counters that are not there yet; tells whether this kernel can have them and match them in rules.

    Raises KernelError if netlink itself fails.
    """
    if not _has_match():
        return False
    wanted = [(_NEW, NLM_F_CREATE, _FAMILY_HEADER + text_attribute(_NAME, name)) for name in names]
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        made = sock.transact(wanted)
    # Busy: it is there.
    return all(error.errno in (errno.EBUSY, errno.EEXIST) for error in made.errors)
