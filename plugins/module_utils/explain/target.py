# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ``explain`` is about: an address and port, a Service by its name, or the two ends of a connection."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Sequence, Union

from ..base.addresses import address_and_port, canonical_address, port_number, without_brackets
from ..base.errors import ConfigurationError

PROTOCOLS = ("tcp", "udp", "sctp")
# RFC 1123 label: namespaces, Services and the names of their ports.
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_PORT = rf"(?::(?P<port>{_LABEL}))?(?:/(?P<protocol>[A-Za-z]+))?"
_SLASHED = re.compile(rf"(?P<namespace>{_LABEL})/(?P<name>{_LABEL}){_PORT}")
_DOTTED = re.compile(rf"(?P<name>{_LABEL})\.(?P<namespace>{_LABEL})(?:\.svc(?:\.[a-z0-9.-]+)?)?{_PORT}")
_FORMS = "ADDRESS:PORT[/PROTOCOL], NAMESPACE/SERVICE[:PORT] or SERVICE.NAMESPACE[:PORT]"


class Destination(NamedTuple):
    """An address, a port and a protocol (tcp, udp or sctp; empty for any)."""

    address: str
    port: int
    protocol: str

    def __str__(self) -> str:
        text = address_and_port(self.address, self.port)
        return f"{text}/{self.protocol}" if self.protocol else text


class ServiceTarget(NamedTuple):
    """A Service. ``port``: name or number of one of its ports, empty for all; ``protocol``: as of a Destination."""

    namespace: str
    name: str
    port: str
    protocol: str

    def __str__(self) -> str:
        text = f"{self.namespace}/{self.name}"
        text += f":{self.port}" if self.port else ""
        return f"{text}/{self.protocol}" if self.protocol else text


Target = Union[Destination, ServiceTarget]


def parse_target(text: str) -> Target:
    """Parse the text of a target.

    ``10.96.0.10:53/udp`` and ``[fd00::1]:80`` are destinations; ``shop/web``, ``shop/web:http``, ``web.shop`` and
    ``web.shop.svc.cluster.local:80`` name a Service. Raises ConfigurationError.
    """
    words = text.strip()
    destination = _destination(words)
    if destination is not None:
        return destination
    match = _SLASHED.fullmatch(words) or _DOTTED.fullmatch(words)
    if match is None:
        raise ConfigurationError(f"{text!r} is not {_FORMS}, such as 10.96.0.10:53/udp, [fd00::1]:80 or shop/web:http")
    port = match.group("port") or ""
    if port.isdecimal():
        check_port(text, port)
    return ServiceTarget(
        match.group("namespace"), match.group("name"), port, checked_protocol(text, match.group("protocol") or "")
    )


def _destination(text: str) -> Optional[Destination]:
    place, _slash, protocol = text.partition("/")
    host, _colon, port = place.rpartition(":")
    address = canonical_address(without_brackets(host))
    if address is None or not port.isdecimal():
        return None
    check_port(text, port)
    return Destination(address, int(port), checked_protocol(text, protocol))


def check_port(text: str, port: str) -> None:
    """Raise ConfigurationError if a part of a text is not a port."""
    if port_number(port) is None:
        raise ConfigurationError(f"{text!r}: the port must be between 1 and 65535")


def checked_protocol(text: str, protocol: str, known: Sequence[str] = PROTOCOLS) -> str:
    """Return a protocol, which is a part of a text, in lower case; it may be empty. Raises ConfigurationError."""
    if protocol and protocol.lower() not in known:
        raise ConfigurationError(f"{text!r}: the protocol must be one of {', '.join(known)}")
    return protocol.lower()


#: Protocols that an end may name; icmp means all protocols without ports.
_END_PROTOCOLS = (*PROTOCOLS, "icmp")
_NAME = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_POD = re.compile(rf"(?P<namespace>{_NAME})/(?P<name>{_NAME})(?::(?P<port>[0-9]+))?(?:/(?P<protocol>[A-Za-z]+))?")
_END_FORMS = "NAMESPACE/POD or an address, with :PORT[/PROTOCOL] for the destination"


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
        raise ConfigurationError(f"{text!r} is not {_END_FORMS}")
    if not destination:
        if end.protocol:
            raise ConfigurationError(f"{text!r}: the protocol belongs to the destination")
        return end
    if end.port and end.protocol != "icmp":
        return end._replace(protocol=end.protocol or "tcp")
    if end.protocol == "icmp" and not end.port:
        return end
    raise ConfigurationError(f"{text!r}: the destination needs :PORT[/PROTOCOL] or /icmp")


def _end(text: str, name: tuple[str, str], address: str, port: str, protocol: str) -> End:
    if port:
        check_port(text, port)
    return End(*name, address, int(port or 0), checked_protocol(text, protocol, _END_PROTOCOLS))
