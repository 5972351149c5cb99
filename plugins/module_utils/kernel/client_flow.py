# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A client's connection to an address that this node serves, whichever part of the kernel knows it."""

from __future__ import annotations

from typing import Callable, NamedTuple

#: Returns whether connections to a destination (protocol; address and port in network order) are wanted.
Wanted = Callable[[str, bytes], bool]


class ClientFlow(NamedTuple):
    """A connection: protocol (TCP, UDP, SCTP), source and destination as address and port in network order.

    ``used``: whether a server has answered and it has not ended. UDP has no end: an entry is in use until the kernel
    forgets it.
    """

    protocol: str
    source: bytes
    destination: bytes
    used: bool
