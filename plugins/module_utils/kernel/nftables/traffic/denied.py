# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packets that network policies dropped, by pod or interface: the counters of the table's elements."""

from __future__ import annotations

from typing import Dict, Tuple

from ....base.addresses import FAMILIES
from ....networkpolicy.matching.owners import Address
from ....rendering.networkpolicy import sets
from ....rendering.networkpolicy.bridge_keys import BRIDGE
from ...netlink.protocol import NETLINK_NETFILTER
from ...netlink.socket import NetlinkSocket
from .element_counters import counted_elements


def denied_packets() -> Dict[Tuple[str, Address], int]:
    """Return the packets denied since the pod came, by side (``in``, ``out``) and address of a pod of this node.

    It is empty if there is no table. Raises KernelError.
    """
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return {
            (side, element.key): element.packets
            for family in FAMILIES
            for side in sets.SIDES
            for element in counted_elements(sock, "inet", sets.TABLE_NAME, sets.name(sets.DENIED, family, side))
        }


def forged_packets() -> Dict[str, int]:
    """Return the packets dropped for their source since an interface of pods came, by its name; frames by their port.

    It is empty if there is no table. Raises KernelError.
    """
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return {
            element.key.rstrip(b"\0").decode(): element.packets
            for family in ("inet", BRIDGE)
            for element in counted_elements(sock, family, sets.TABLE_NAME, sets.FORGED)
        }
