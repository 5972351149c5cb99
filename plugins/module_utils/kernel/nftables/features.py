# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Single features of nf_tables in this kernel, determined by experiment and not by version. No query changes anything.

A batch of messages without its end is validated like any other and then discarded (``nft --check`` does the same).
"""

from __future__ import annotations

from typing import Iterable

from ...rendering.nftables import expressions as x
from ...rendering.nftables.objects import BaseHook, TableIdentity
from ..netlink.outcomes import MessageError, NetlinkRefusal, is_forbidden, is_not_understood
from ..netlink.protocol import NETLINK_NETFILTER, Message
from ..netlink.socket import NetlinkSocket, is_supported
from .attributes import GENMSG, GET_GENERATION
from .messages import BATCH_BEGIN, Encoder

#: The table of all experiments. It never exists.
PROBE_TABLE = TableIdentity("kube-proxy-probe", "")


def answers() -> bool:
    """Return whether the kernel has nf_tables, by a query that changes nothing but may load the module.

    Raises KernelError if netlink itself fails.
    """
    if not is_supported(NETLINK_NETFILTER):
        return False
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        try:
            sock.request(GET_GENERATION, GENMSG)
        except NetlinkRefusal as refusal:
            # nfnetlink refuses requests to unknown subsystems this way; any other refusal comes from nf_tables.
            return not is_not_understood(refusal.error)
    return True


def refusals(messages: Iterable[Message]) -> list[MessageError]:
    """Have the kernel validate messages without applying them, and return its refusals; position 0 is the batch."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return sock.transact([BATCH_BEGIN, *messages], single_send=True, acknowledge=False).errors


def nat_refused(family: str) -> str:
    """Return why nf_tables of this kernel has no NAT for a family; empty if it has, or if that cannot be determined.

    The nf_tables variant of iptables needs it too, and lists empty tables even if it could not write to them.
    """
    encoder = Encoder(family, PROBE_TABLE)
    for error in refusals([encoder.table(), encoder.chain("nat", BaseHook("nat", "prerouting", -100))]):
        return "" if is_forbidden(error) else f"nf_tables has no NAT here ({error})"
    return ""


def has_bridge_family() -> bool:
    """Return whether nf_tables has chains for the frames of bridges. Raises KernelError if netlink itself fails."""
    encoder = Encoder("bridge", PROBE_TABLE)
    return not refusals([encoder.table(), encoder.chain("frames", BaseHook("filter", "prerouting", -300))])


def can_hash(family: str) -> bool:
    """Return whether nf_tables has the hash by which clients are assigned to slots; True if this is not permitted.

    The kernel loads the module. Raises KernelError if netlink itself fails.
    """
    encoder = Encoder(family, PROBE_TABLE)
    rule = x.rule(x.source_address(family), x.hashed_below(2, 1, 0, 4 * x.address_words(family)))
    batch = [encoder.table(), encoder.chain("hash", None), encoder.rule("hash", rule)]
    return all(map(is_forbidden, refusals(batch)))
