# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Selection of the proxy of a connection by the rules of Go's httpproxy package, which client-go uses."""

from __future__ import annotations

import ipaddress
import urllib.parse
from typing import Mapping, NamedTuple, Optional, Union

from ....base.errors import ConfigurationError
from .credentials import Headers, basic

_PORTS = {"http": 80, "https": 443, "socks5": 1080}

_Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


class Proxy(NamedTuple):
    """A proxy; its ``user`` is empty if it needs no authentication. ``scheme``: http, https or socks5."""

    host: str
    port: int
    scheme: str = "http"
    user: str = ""
    password: str = ""

    @property
    def headers(self) -> Headers:
        """The headers that authenticate to it."""
        return [("Proxy-Authorization", basic(self.user, self.password)[0][1])] if self.user else []


def parse_proxy(url: str, source: str) -> Proxy:
    """Return the proxy that a URL names. Raises ConfigurationError."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{source}: is not the URL of a proxy") from error
    if parts.scheme not in _PORTS or "://" not in url:
        raise ConfigurationError(f"{source}: is not the URL of a proxy of the kinds {', '.join(_PORTS)}")
    if not host:
        raise ConfigurationError(f"{source}: names no proxy host")
    user, password = (urllib.parse.unquote(part or "") for part in (parts.username, parts.password))
    return Proxy(host, port or _PORTS[parts.scheme], parts.scheme, user, password)


def environment_proxy(scheme: str, host: str, port: int, environment: Mapping[str, str]) -> Optional[Proxy]:
    """Return the proxy for a server, from HTTPS_PROXY or HTTP_PROXY unless NO_PROXY exempts it.

    Names in capitals take precedence. Loopback addresses are never proxied. Raises ConfigurationError.
    """
    name = f"{scheme.upper()}_PROXY"
    url = environment.get(name) or environment.get(name.lower()) or ""
    excepted = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    if not url or is_excepted(host, port, excepted):
        return None
    # Only here, the scheme may be missing.
    return parse_proxy(url if "://" in url else f"http://{url}", name)


def is_excepted(host: str, port: int, excepted: str) -> bool:
    """Return whether a server is connected to directly with this value of NO_PROXY.

    Entries are host names (which include their subdomains; with a leading dot subdomains only), addresses, both with an
    optional port, CIDRs, or ``*``.
    """
    host = host.lower().rstrip(".")
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(_matches(entry.strip().lower(), host, port, address) for entry in excepted.split(",") if entry.strip())


def _address(text: str) -> Optional[_Address]:
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None


def _matches(entry: str, host: str, port: int, address: Optional[_Address]) -> bool:
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name, colon, tail = entry.rpartition(":")
    if colon and tail.isdecimal() and _address(entry) is None:
        if int(tail) != port:
            return False
        entry = name
    if address is not None:
        return _address(entry) == address
    domain = entry[1:] if entry.startswith("*.") else entry
    return host.endswith(domain) if domain.startswith(".") else host == domain or host.endswith(f".{domain}")
