# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The types of the fields of a configuration: how each is read, validated and written."""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Mapping, NamedTuple, Optional

from ..base.addresses import canonical_address, canonical_network, port_number, split_port
from ..base.durations import format_duration
from ..cluster.fields import is_dns_label, shown
from ..cluster.parsing.service_policy import RESET_FORMS, parse_reset_after
from .reader import Section

_LARGEST = 2**31 - 1
# The name becomes part of kernel messages: IP_VS_SCHEDNAME_MAXLEN is 16, including the final zero byte.
_SCHEDULER = re.compile(r"[a-z0-9_-]{1,15}")
_NODE_PORT_WORDS: Mapping[str, tuple[str, ...]] = {
    "all": ("0.0.0.0/0", "::/0"),
    "localhost": ("127.0.0.0/8", "::1/128"),
}
_PORT_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_API_SERVER_PORT = 6443
_HOST = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.IGNORECASE)


class FieldType(NamedTuple):
    """The type of a field.

    ``read`` returns the value of a field of a section, by name and default, and records a wrong type there. ``problem``
    returns why a value is invalid, or an empty string. ``to_json`` returns a value in the form of the file.
    """

    read: Callable[[Section, str, Any], Any]
    problem: Callable[[Any], str] = lambda _value: ""
    to_json: Callable[[Any], Any] = lambda value: value


def _not_host_port(value: Any) -> str:
    try:
        split_host_port(value)
    except ValueError as error:
        return str(error)
    return ""


def _not_scheduler(value: Any) -> str:
    return "" if not value or _SCHEDULER.fullmatch(value) else f"{shown(value)} is not a valid name of a scheduler"


def _flush_frequency(section: Section, name: str, default: Any) -> Any:
    # The logging API accepts an integer number of nanoseconds as well as a duration.
    given = dict(section.rest((name,))).get(name)
    if isinstance(given, int) and not isinstance(given, bool):
        return given / 10**9
    return section.duration(name, default)


def _node_port_addresses(section: Section, name: str, _default: Any) -> Any:
    given = section.strings(name)
    return _canonical(tuple(cidr for value in given for cidr in _NODE_PORT_WORDS.get(value, (value,))))


def _joined_networks(section: Section, name: str, _default: Any) -> Any:
    return _canonical(tuple(part.strip() for part in section.text(name).split(",") if part.strip()))


def _canonical(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return CIDRs in canonical form; keep other text as it is, for ``validate`` to report."""
    return tuple(canonical_network(value) or value for value in values)


def converted(convert: Callable[[str], Any], expected: str) -> FieldType:
    """Return the type of a field whose text ``convert`` turns into its value, or None if it is not ``expected``."""

    def read(section: Section, name: str, default: Any) -> Any:
        text = section.text(name)
        value = convert(text) if text else default
        if value is None:
            section.wrong(name, text, expected)
        return default if value is None else value

    return FieldType(read)


def _reset_text(seconds: float) -> str:
    if math.isinf(seconds):
        return "keep"
    return f"reset-after={int(seconds * 1000)}ms" if seconds else "reset"


def choice(*words: str) -> FieldType:
    """Return the type of a field with one of several words."""
    expected = " or ".join(words) if len(words) == 2 else f"one of {', '.join(words)}"
    return FieldType(Section.text, lambda value: "" if value in words else f"{shown(value)} is not {expected}")


def list_of(convert: Callable[[str], Any], expected: str, most: int = 0) -> FieldType:
    """Return the type of a list of at most ``most`` texts (0: any number), each converted as by :func:`converted`."""

    def read(section: Section, name: str, _default: Any) -> Any:
        texts = section.strings(name)
        if most and len(texts) > most:
            section.findings.problem(section.field(name), f"has more than {most} {name}")
        values = [convert(text) for text in texts[: most or None]]
        for index, value in enumerate(values):
            if value is None:
                section.wrong(f"{name}[{index}]", texts[index], expected)
        return tuple(value for value in values if value is not None)

    return FieldType(read)


def integer(
    low: int = 0, high: int = _LARGEST, *, zero_is_unset: bool = False, in_every_mode: bool = True
) -> FieldType:
    """Return the type of an integer from ``low`` to ``high``.

    ``zero_is_unset``: 0 gives the default. ``in_every_mode``: the range is checked when the field is read; otherwise
    only in the mode that has the field's section, as by kube-proxy 1.36.
    """
    accepted = (low, high) if in_every_mode else (-_LARGEST, _LARGEST)

    def read(section: Section, name: str, default: Any) -> Any:
        value = section.integer(name, default, *accepted)
        return default if zero_is_unset and not value else value

    def problem(value: Any) -> str:
        return "" if low <= value <= high else f"{value} is not between {low} and {high}"

    return FieldType(read, problem)


def duration(*, zero_is_unset: bool = False, positive: bool = False) -> FieldType:
    """Return the type of a duration. ``zero_is_unset``: 0 gives the default; ``positive``: it must exceed 0."""

    def read(section: Section, name: str, default: Any) -> Any:
        return section.duration(name, default, default if zero_is_unset else None)

    def problem(value: Any) -> str:
        if positive:
            return "" if value > 0 else "must be greater than 0"
        return "must not be negative" if value < 0 else ""

    return FieldType(read, problem, format_duration)


def duration_between(low: float, high: float) -> FieldType:
    """Return the type of a duration in a range."""
    shortest, longest = (format_duration(end) if end else "0" for end in (low, high))
    reason = f"must be between {shortest} and {longest}"
    return duration()._replace(problem=lambda value: "" if low <= value <= high else reason)


def _port_range(text: str) -> Optional[tuple[int, int]]:
    match = _PORT_RANGE.fullmatch(text)
    if match is None:
        return None
    first, last = int(match.group(1)), int(match.group(2))
    return (first, last) if 1 <= first <= last <= 65535 else None


def _host_and_port(text: str) -> Optional[tuple[str, int]]:
    found = split_port(text, _API_SERVER_PORT)
    if found is None:
        return None
    host = canonical_address(found[0]) or (found[0] if _HOST.fullmatch(found[0]) else "")
    return (host, found[1]) if host else None


def _service_key(text: str) -> Optional[str]:
    namespace, _slash, name = text.partition("/")
    return text if is_dns_label(namespace) and is_dns_label(name) else None


TEXT = FieldType(Section.text)
HOST_NAME = FieldType(lambda section, name, default: section.text(name, default).strip().lower())
ADDRESS = converted(canonical_address, "an IP address")
# The default depends on other fields, so an absent field is read as an empty string.
HOST_PORT = FieldType(lambda section, name, _default: section.text(name), _not_host_port)
SCHEDULER = FieldType(Section.text, _not_scheduler)
FLAG = FieldType(Section.flag)
NUMBER = FieldType(Section.number, to_json=lambda value: int(value) if value == int(value) else value)
PERIOD = duration(zero_is_unset=True, positive=True)
MINIMUM_PERIOD = duration(zero_is_unset=True)
TIMEOUT = duration()
FLUSH_FREQUENCY = FieldType(_flush_frequency, to_json=format_duration)
NETWORKS = FieldType(lambda section, name, _default: _canonical(section.strings(name)), to_json=list)
#: CIDRs, with the words ``all`` and ``localhost`` (Kubernetes 1.37) expanded; ``primary`` is kept.
NODE_PORT_ADDRESSES = FieldType(_node_port_addresses, to_json=list)
#: CIDRs in one string, separated by commas.
JOINED_NETWORKS = FieldType(_joined_networks, to_json=",".join)
#: CIDRs that are valid in every mode.
CIDRS = list_of(canonical_network, "a CIDR")
NAMESPACES = list_of(lambda text: text if is_dns_label(text) else None, "a namespace")
SERVICES = list_of(_service_key, "a Service, NAMESPACE/NAME")
API_SERVERS = list_of(_host_and_port, "of the form ADDRESS, NAME, ADDRESS:PORT or [ADDRESS]:PORT", most=64)
PORT_RANGE = converted(_port_range, "a range of ports from 1 to 65535, such as 30000-32767")
REMOVED_ENDPOINTS = converted(parse_reset_after, RESET_FORMS)._replace(to_json=_reset_text)
ABSOLUTE_PATH = converted(lambda text: text if text.startswith("/") else None, "an absolute path")


def split_host_port(value: str) -> tuple[str, int]:
    """Parse ``1.2.3.4:80`` or ``[::]:80`` and return the canonical address and the port. Raises ValueError."""
    if value.startswith("["):
        host, bracket, port = value[1:].partition("]:")
        if not bracket or ":" not in host:
            raise ValueError(f"{shown(value)} is not ADDRESS:PORT")
    else:
        host, colon, port = value.rpartition(":")
        if not colon or ":" in host:
            raise ValueError(f"{shown(value)} is not ADDRESS:PORT")
    address = canonical_address(host)
    if address is None:
        raise ValueError(f"{shown(host)} is not an IP address")
    number = port_number(port)
    if number is None:
        raise ValueError(f"{shown(port)} is not a port between 1 and 65535")
    return address, number
