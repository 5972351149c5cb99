# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The nfacct counters of this network namespace (linux/netfilter/nfnetlink_acct.h).

kube-proxy counts dropped invalid packets and connections to localhost node ports with them; its rules have the match
only if the counter exists. Reading creates none (the kernel may load its module nfnetlink_acct to answer).
"""

from __future__ import annotations

import struct
from typing import Iterable

from ..facts import kernel_release
from ..modules.modules import asking_loads, available_modules, present_modules
from ..netlink.attributes import attribute_text, number_in, parse_attributes, text_attribute
from ..netlink.outcomes import NetlinkRefusal, is_busy, is_existing
from ..netlink.protocol import NETLINK_NETFILTER, NLM_F_CREATE
from ..netlink.socket import NetlinkSocket

_NEW, _GET = 7 << 8 | 0, 7 << 8 | 1
_NAME, _PACKETS = 1, 2
_MODULE = "nfnetlink_acct"
_MATCH_MODULE = "xt_nfacct"
_FAMILY_HEADER = struct.pack("=BBH", 0, 0, 0)


def nfacct_packets() -> dict[str, int]:
    """Return the packets of all counters by name; empty without nfacct in the kernel or permission to read.

    Raises KernelError if netlink itself fails.
    """
    found: dict[str, int] = {}
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        try:
            for buffer, _kind, start, end in sock.dump(_GET, _FAMILY_HEADER):
                attributes = parse_attributes(buffer, start + len(_FAMILY_HEADER), end)
                if _NAME in attributes:
                    found[attribute_text(attributes[_NAME])] = number_in(attributes, _PACKETS)
        except NetlinkRefusal:
            return {}
    return found


def nfacct_counters() -> tuple[str, ...]:
    """Return the names of all counters, sorted; see :func:`nfacct_packets`. Raises KernelError."""
    return tuple(sorted(nfacct_packets()))


def usable_nfacct_counters() -> tuple[str, ...]:
    """Return the names of all counters if rules can match them here, else none; the kernel loads no module.

    Raises KernelError.
    """
    release = kernel_release()
    # A module that is not loaded yet holds no counters.
    return () if asking_loads(_MODULE, release) or not _has_match(release) else nfacct_counters()


def _has_match(release: str) -> bool:
    """Return whether the kernel has the rules' match, a separate module, or can load it; nothing is loaded."""
    return _MATCH_MODULE in available_modules(release) or bool(present_modules([_MATCH_MODULE], release))


def make_nfacct_counters(names: Iterable[str]) -> bool:
    """Create missing counters; return whether this kernel can have them and match them in rules.

    Raises KernelError if netlink itself fails.
    """
    if not _has_match(kernel_release()):
        return False
    wanted = [(_NEW, NLM_F_CREATE, _FAMILY_HEADER + text_attribute(_NAME, name)) for name in names]
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        made = sock.transact(wanted)
    # The kernel reports an existing counter as busy.
    return all(is_busy(error) or is_existing(error) for error in made.errors)
