# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packets to node ports at loopback addresses that nftables mode refused, by protocol."""

from __future__ import annotations

from typing import Dict, Iterable, Tuple

from ....rendering.nftables.layout import LOCALHOST_COUNTS
from ....rendering.nftables.objects import PROTOCOL_NAMES, TABLE_NAME
from ...netlink.protocol import NETLINK_NETFILTER
from ...netlink.socket import NetlinkSocket
from .element_counters import counted_elements


def refused_at_loopback(families: Iterable[str]) -> Dict[Tuple[str, str], int]:
    """Return the packets since the table was made, by family and protocol in upper case. Raises KernelError."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return {
            (family, PROTOCOL_NAMES[element.key[0]].upper()): element.packets
            for family in families
            for element in counted_elements(sock, family, TABLE_NAME, LOCALHOST_COUNTS)
            if element.key[0] in PROTOCOL_NAMES
        }
