# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checked access to the fields of raw objects: every wrong type or value raises :class:`Invalid`.

An absent field and a null field are the same, as they are to the API server.
"""

from __future__ import annotations

import json
import re
import sys
from functools import lru_cache
from typing import Any, Callable, Collection, Iterable, Optional, TypeVar

from ..base.addresses import canonical_address, canonical_network, family_of

_Item = TypeVar("_Item")
_DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
# The syntax of names in the keys of labels (Kubernetes API conventions).
_LABEL_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SHOWN_CHARACTERS = 60
# Python 3.12 never frees interned strings, so changed values would leak.
_INTERNED_ARE_FREED = sys.version_info[:2] != (3, 12)
# In modules, Ansible replaces the function by one that accepts its classes of strings and takes three times as long.
_intern: Callable[[str], str] = getattr(sys.intern, "unpatched_implementation", sys.intern)


class Invalid(Exception):
    """A field that makes its object unusable: the path of the field, and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def under(self, parent: str) -> Invalid:
        """Return the same error with ``parent`` prefixed to the path."""
        joint = "" if not self.field or self.field.startswith("[") else "."
        return Invalid(f"{parent}{joint}{self.field}", self.reason)


def suggestion(written: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return a suggestion of a field with a similar name, empty if there is none; ``alike`` is difflib's ratio."""
    import difflib

    names = {name.lower(): name for name in known}
    similar = difflib.get_close_matches(written.lower(), names, 1, alike)
    return f"; did you mean {names[similar[0]]}?" if similar else ""


def shown(value: object) -> str:
    """Return an untrusted value as short printable text on one line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "a huge number"
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def mapping(value: object, field: str) -> dict[str, Any]:
    """Return an object, empty if ``value`` is null. Raises Invalid."""
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    raise Invalid(field, f"{shown(value)} is not an object")


def fields_of(value: object, known: Collection[str], field: str) -> dict[str, Any]:
    """Return an object, empty if ``value`` is null, that has only known fields. Raises Invalid.

    Use it where an object says what is allowed: without a condition that a later version of its API put into a new
    field, it would allow more.
    """
    raw = mapping(value, field)
    unknown = sorted(str(name) for name, item in raw.items() if item is not None and name not in known)
    if unknown:
        raise Invalid(field, f"has the field {shown(unknown[0])}, which is not known")
    return raw


def sequence(value: object, field: str) -> list[Any]:
    """Return a list, empty if ``value`` is null. Raises Invalid."""
    if isinstance(value, list):
        return value
    if value is None:
        return []
    raise Invalid(field, f"{shown(value)} is not a list")


def elements(value: object, field: str) -> list[tuple[Any, str]]:
    """Return each element of a list with the path of its field; none if ``value`` is null. Raises Invalid."""
    return [(item, f"{field}[{index}]") for index, item in enumerate(sequence(value, field))]


def leniently(
    read: Callable[[Any, str], _Item], value: object, field: str, skipped: list[Invalid], default: _Item
) -> _Item:
    """Return what ``read`` returns for a field; ``default`` if that is invalid, which is appended to ``skipped``."""
    try:
        return read(value, field)
    except Invalid as error:
        skipped.append(error)
        return default


def text(value: object, field: str) -> str:
    """Return a string, empty if ``value`` is null. Raises Invalid."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    raise Invalid(field, f"{shown(value)} is not a string")


def flag(value: object, field: str, default: bool = False) -> bool:
    """Return true or false, ``default`` if ``value`` is null. Raises Invalid."""
    if value is True or value is False:
        return value is True
    if value is None:
        return default
    raise Invalid(field, f"{shown(value)} is not true or false")


def integer(value: object, field: str, low: int, high: int, default: Optional[int] = None) -> int:
    """Return an integer from ``low`` to ``high``, ``default`` if ``value`` is null. Raises Invalid."""
    if value is None and default is not None:
        return default
    if value is None:
        raise Invalid(field, "is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise Invalid(field, f"{shown(value)} is not an integer")
    if not low <= value <= high:
        raise Invalid(field, f"{shown(value)} is not between {low} and {high}")
    return value


def is_dns_label(value: str) -> bool:
    """Return whether ``value`` is an RFC 1123 label in lower case, as namespaces, Services and ports are named."""
    return _DNS_LABEL.fullmatch(value) is not None


def is_dns_subdomain(value: str) -> bool:
    """Return whether ``value`` is an RFC 1123 subdomain in lower case."""
    return len(value) <= 253 and _DNS_SUBDOMAIN.fullmatch(value) is not None


def is_label_key(value: str) -> bool:
    """Return whether ``value`` is the key of a label or a taint: a name, after an optional subdomain and a slash."""
    prefix, slash, name = value.rpartition("/")
    return _LABEL_NAME.fullmatch(name) is not None and (not slash or is_dns_subdomain(prefix))


def interned(value: str) -> str:
    """Return the same object for equal strings, of which a cluster has many: names, namespaces, kinds, times."""
    # Ansible has classes of strings, which cannot be interned.
    return _intern(value) if _INTERNED_ARE_FREED and value.__class__ is str else value


def sharing(_kind: type[_Item]) -> Callable[[tuple[_Item, ...]], tuple[_Item, ...]]:
    """Return a function that returns the same object for equal tuples, for a kind of which a cluster has few values."""
    return lru_cache(maxsize=4096)(lambda items: items)


def dns_label(value: object, field: str) -> str:
    """Return an RFC 1123 label, of equal ones the same object, since clusters have many. Raises Invalid."""
    if isinstance(value, str) and _DNS_LABEL.fullmatch(value) is not None:
        return interned(value)
    if value is None or value == "":
        raise Invalid(field, "is missing")
    raise Invalid(field, f"{shown(value)} is not a DNS label (a-z, 0-9 and -, at most 63 characters)")


def optional_dns_label(value: object, field: str) -> str:
    """Return an RFC 1123 label, empty if ``value`` is null or empty. Raises Invalid."""
    return dns_label(value, field) if text(value, field) else ""


def dns_subdomain(value: object, field: str) -> str:
    """Return an RFC 1123 subdomain, of equal ones the same object. Raises Invalid."""
    if isinstance(value, str) and len(value) <= 253 and _DNS_SUBDOMAIN.fullmatch(value) is not None:
        return interned(value)
    if value is None or value == "":
        raise Invalid(field, "is missing")
    raise Invalid(field, f"{shown(value)} is not a DNS name (a-z, 0-9, - and ., at most 253 characters)")


def protocol(value: object, field: str) -> str:
    """Return ``TCP``, ``UDP`` or ``SCTP``; TCP, the API server's default, for null or empty. Raises Invalid."""
    if value == "TCP" or value is None or value == "":
        return "TCP"
    if value == "UDP" or value == "SCTP":
        return str(value)
    raise Invalid(field, f"{shown(value)} is not TCP, UDP or SCTP")


def converted(value: object, field: str, convert: Callable[[str], Optional[_Item]], expected: str) -> _Item:
    """Return what ``convert`` makes of a string. Raises Invalid if that is None: it is not ``expected``."""
    found = convert(text(value, field))
    if found is None:
        raise Invalid(field, f"{shown(value)} is not {expected}")
    return found


def address(value: object, field: str) -> str:
    """Return an address in canonical form. Raises Invalid."""
    return converted(value, field, canonical_address, "an IP address")


def cidr(value: object, field: str) -> str:
    """Return a CIDR in canonical form. Raises Invalid."""
    return converted(value, field, canonical_network, "a CIDR")


def ip_family(value: object, field: str) -> str:
    """Return ``IPv4`` or ``IPv6``. Raises Invalid."""
    if value == "IPv4" or value == "IPv6":
        return str(value)
    raise Invalid(field, f"{shown(value)} is not IPv4 or IPv6")


#: Results of :func:`special_use` for addresses that some fields may hold.
LOOPBACK, LINK_LOCAL = "a loopback address", "a link-local address"
_MAYBE_SPECIAL = ("0.", "127.", "169.254.", "224.0.0.", "255.", "::", "fe", "ff")


def special_use(canonical: str) -> str:
    """Return why a canonical address cannot belong to a Service or a pod (``a loopback address`` ...), or "".

    The classes are those that the API server forbids for endpoints and external IPs (of multicast only the link-local
    scope), and the broadcast address, which other programs on the node need.
    """
    # Nearly all addresses are decided here.
    if not canonical.startswith(_MAYBE_SPECIAL):
        return ""
    if family_of(canonical) == "IPv6":
        head = canonical.partition(":")[0]
        if canonical == "::":
            return "the unspecified address"
        if canonical == "::1":
            return LOOPBACK
        if len(head) == 4 and head.startswith("ff") and head[3] == "2":
            return "a link-local multicast address"
        return LINK_LOCAL if len(head) == 4 and head[:3] in ("fe8", "fe9", "fea", "feb") else ""
    first, second = canonical.split(".", 2)[:2]
    if canonical == "0.0.0.0":
        return "the unspecified address"
    if first == "127":
        return LOOPBACK
    if canonical.startswith("224.0.0."):
        return "a link-local multicast address"
    if canonical == "255.255.255.255":
        return "the broadcast address"
    return LINK_LOCAL if first == "169" and second == "254" else ""
