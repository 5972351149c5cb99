# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The messages between echo servers and probes: a line of text, or on port 53 a DNS message.

An answer is ``BACKEND PEER``: the name of the pod that answered and the address that it saw.
"""

from __future__ import annotations

import struct

DNS_PORT = 53
_HEADER = struct.Struct("!6H")
_TXT, _INTERNET = 16, 1


def dns_query(number: int, name: str = "whoami.lab") -> bytes:
    """Return a query for the TXT records of ``name`` (RFC 1035, section 4.1)."""
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.split("."))
    return _HEADER.pack(number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", _TXT, _INTERNET)


def dns_response(query: bytes, text: str) -> bytes:
    """Return the answer to ``query``: its question and one TXT record with ``text``."""
    number = struct.unpack_from("!H", query)[0]
    end = query.index(b"\0", _HEADER.size) + 5
    data = bytes([len(text)]) + text.encode("ascii")
    record = struct.pack("!HHHIH", 0xC000 | _HEADER.size, _TXT, _INTERNET, 0, len(data)) + data
    return _HEADER.pack(number, 0x8580, 1, 1, 0, 0) + query[_HEADER.size : end] + record


def dns_text(response: bytes) -> str:
    """Return the text of the TXT record in a response made by dns_response."""
    end = response.index(b"\0", _HEADER.size) + 5
    return response[end + 13 :].decode("ascii")
