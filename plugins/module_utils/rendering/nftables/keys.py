# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Addresses, protocols and ports as parts of keys: in network order, each padded to whole registers."""

from __future__ import annotations

from functools import lru_cache

from ...base.addresses import packed
from .objects import PROTOCOL_NUMBERS


@lru_cache(maxsize=1 << 18)
def address_key(text: str) -> bytes:
    """Return an address as in a key; empty for text that is not an address."""
    raw = packed(text)
    return b"" if raw is None else raw


def protocol_key(protocol: str) -> bytes:
    """Return a protocol, in lower case, as in a key."""
    return bytes((PROTOCOL_NUMBERS[protocol], 0, 0, 0))


@lru_cache(maxsize=1 << 16)
def transport_key(protocol: str, port: int) -> bytes:
    """Return protocol and port as in a key: the protocol in lower case."""
    return protocol_key(protocol) + port.to_bytes(2, "big") + b"\x00\x00"
