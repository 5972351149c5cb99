# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From IPv4 to IPv6: the counterparts of the lab's addresses, in objects, flows and recordings.

Every host of the lab has an address of both families, and the last part of both reads the same. So most recordings for
IPv4 alone apply to IPv6 as well:

    127.0.0.1, 127.0.0.0/8          ::1, ::1/128
    172.18.0.H, 172.19.0.H          fd00:172:18::H, fd00:172:19::H
    203.0.113.H                     2001:db8:113::H
    198.51.100.H, 192.0.2.H         2001:db8:51::H, 2001:db8:2::H
    10.244.N.H                      fd00:10:244:N::H
    10.96.0.0/12, address a.b.C.D   fd00:10:96::/112, fd00:10:96::CCDD, the two numbers in hexadecimal
    10.111.255.1 (the sentinel)     fd00:10:96::ffe1
    icmp 3/3 (port unreachable)     icmp6 1/4
    icmp 3/2 (protocol unreachable) icmp6 4/1 (unrecognised next header)

A whole network is translated with its usual prefix length, a single address as /128.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from . import sentinel
from .addressing import CLUSTER_CIDR, SERVICE_CIDR

NETWORKS = {
    "0.0.0.0/0": "::/0",
    "127.0.0.0/8": "::1/128",
    SERVICE_CIDR[4]: SERVICE_CIDR[6],
    CLUSTER_CIDR[4]: CLUSTER_CIDR[6],
    **{f"10.244.{number}.0/24": f"fd00:10:244:{number}::/64" for number in (1, 2, 3)},
    "172.18.0.0/24": "fd00:172:18::/64",
    "172.19.0.0/24": "fd00:172:19::/64",
    "203.0.113.0/24": "2001:db8:113::/64",
    "198.51.100.0/24": "2001:db8:51::/64",
    "192.0.2.0/24": "2001:db8:2::/64",
}
_HOST_PREFIXES = {
    "172.18.0.": "fd00:172:18::",
    "172.19.0.": "fd00:172:19::",
    "203.0.113.": "2001:db8:113::",
    "198.51.100.": "2001:db8:51::",
    "192.0.2.": "2001:db8:2::",
    **{f"10.244.{number}.": f"fd00:10:244:{number}::" for number in (1, 2, 3)},
}
#: The annotation whose value is a list with commas.
SOURCES = "kubenode.proxy/allowed-sources"
_SINGLE = {"0.0.0.0": "::", "127.0.0.1": "::1", sentinel.ADDRESS[4]: sentinel.ADDRESS[6]}
_REFUSALS = {"icmp 3/3": "icmp6 1/4", "icmp 3/2": "icmp6 4/1"}
_SERVICES = ipaddress.ip_network(SERVICE_CIDR[4])

_ADDRESS = re.compile(r"^\d+\.\d+\.\d+\.\d+$")
_NETWORK = re.compile(r"^\d+\.\d+\.\d+\.\d+/\d+$")
_IN_TEXT = re.compile(r"(?<![\d.])(\d+\.\d+\.\d+\.\d+)(?:(/\d+)\b|:(\d+)\b)?(?![\d.])")
_ICMP = re.compile(r"\bicmp \d+/\d+")


class Untranslatable(ValueError):
    """The address plan has no IPv6 counterpart for it."""


def address(ipv4: str) -> str:
    """Return the IPv6 counterpart of an address. Raises Untranslatable if it is not of the lab."""
    if ipv4 in _SINGLE:
        return _SINGLE[ipv4]
    prefix, _, host = ipv4.rpartition(".")
    if prefix + "." in _HOST_PREFIXES:
        return _HOST_PREFIXES[prefix + "."] + host
    if ipaddress.ip_address(ipv4) in _SERVICES:
        third, fourth = (int(part) for part in ipv4.split(".")[2:])
        return str(ipaddress.ip_address(f"fd00:10:96::{third << 8 | fourth:x}"))
    raise Untranslatable(f"{ipv4} has no IPv6 counterpart in the lab")


def network(ipv4: str) -> str:
    """Return the IPv6 counterpart of a network, or of an address with a prefix length of 32."""
    if ipv4 in NETWORKS:
        return NETWORKS[ipv4]
    host, _, bits = ipv4.partition("/")
    if bits != "32":
        raise Untranslatable(f"{ipv4} has no IPv6 counterpart in the lab")
    return address(host) + "/128"


def text(line: str) -> str:
    """Return a flow or an outcome with every address translated, in brackets where a port follows."""

    def translated(match: re.Match[str]) -> str:
        ipv4, bits, port = match.groups()
        if bits:
            return network(ipv4 + bits)
        return f"[{address(ipv4)}]:{port}" if port else address(ipv4)

    return _ICMP.sub(lambda match: _REFUSALS.get(match.group(), match.group()), _IN_TEXT.sub(translated, line))


def sources(listed: str) -> str:
    """Return a list of addresses and networks with commas, translated; what is neither is unchanged."""
    parts = [part.strip() for part in listed.split(",")]
    return ",".join(network(part) if _NETWORK.match(part) else str(content(part)) for part in parts)


def content(value: Any) -> Any:
    """Return objects or configuration with whole addresses and networks and the names of the families translated.

    What a list has already in IPv6 is not repeated.
    """
    if isinstance(value, dict):
        return {key: sources(entry) if key == SOURCES else content(entry) for key, entry in value.items()}
    if isinstance(value, list):
        translated: list[Any] = []
        for entry in map(content, value):
            if entry not in translated:
                translated.append(entry)
        return translated
    if not isinstance(value, str):
        return value
    if value == "IPv4":
        return "IPv6"
    if _ADDRESS.match(value):
        return address(value)
    bare = value.strip()  # source ranges may have blanks around them, and keep them
    return value.replace(bare, network(bare)) if _NETWORK.match(bare) else value
