# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ends of a connection that ``explain --from END --to END`` is about."""

from __future__ import annotations

import re
from typing import NamedTuple, Tuple

from ..base.addresses import address_and_port, canonical_address, without_brackets
from ..base.errors import ConfigurationError
from .target import check_port, checked_protocol

#: Protocols that an end may name; icmp means all protocols without ports.
PROTOCOLS = ("tcp", "udp", "sctp", "icmp")
_NAME = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_POD = re.compile(rf"(?P<namespace>{_NAME})/(?P<name>{_NAME})(?::(?P<port>[0-9]+))?(?:/(?P<protocol>[A-Za-z]+))?")
_FORMS = "NAMESPACE/POD or an address, with :PORT[/PROTOCOL] for the destination"


class End(NamedTuple):
    """One end of a connection: a pod or Service by name, or an address if ``name`` is empty. ``port``: 0 for none."""

    namespace: str
    name: str
    address: str
    port: int
    protocol: str

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.name}" if self.name else self.address
        if self.port:
            place = f"{place}:{self.port}" if self.name else address_and_port(self.address, self.port)
        return f"{place}/{self.protocol}" if self.protocol else place


def parse_end(text: str, destination: bool) -> End:
    """Parse ``shop/web`` or ``10.244.1.7:5555``; for a destination ``shop/db:5432/tcp``, ``[fd00::1]:80``, ``db/icmp``.

    A destination has a port, of TCP unless a protocol is given, or the protocol icmp. A source may have a port. Raises
    ConfigurationError.
    """
    words = text.strip()
    match = _POD.fullmatch(words)
    host, _slash, protocol = words.partition("/")
    port = ""
    if canonical_address(without_brackets(host)) is None:
        host, _colon, port = host.rpartition(":")
    address = canonical_address(without_brackets(host))
    if address is not None:
        end = _end(text, ("", ""), address, port, protocol)
    elif match is not None:
        name = (match.group("namespace"), match.group("name"))
        end = _end(text, name, "", match.group("port") or "", match.group("protocol") or "")
    else:
        raise ConfigurationError(f"{text!r} is not {_FORMS}")
    if not destination:
        if end.protocol:
            raise ConfigurationError(f"{text!r}: the protocol belongs to the destination")
        return end
    if end.port and end.protocol != "icmp":
        return end._replace(protocol=end.protocol or "tcp")
    if end.protocol == "icmp" and not end.port:
        return end
    raise ConfigurationError(f"{text!r}: the destination needs :PORT[/PROTOCOL] or /icmp")


def _end(text: str, name: Tuple[str, str], address: str, port: str, protocol: str) -> End:
    if port:
        check_port(text, port)
    return End(*name, address, int(port or 0), checked_protocol(text, protocol, PROTOCOLS))
