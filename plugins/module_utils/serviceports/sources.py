# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sources that may use the external addresses and node ports of a Service, combined from all that restricts them."""

from __future__ import annotations

from typing import Dict, Iterable, Optional, Tuple

from ..addresses import Network, parse_network
from .info import Sources


def sources_of_family(cidrs: Optional[Tuple[str, ...]], family: str) -> Sources:
    """Return the CIDRs of a family; None if every source of it is allowed.

    ``cidrs`` are of both families, None without a restriction. Where none is of the family, no source of it is allowed.
    """
    if cidrs is None:
        return None
    own = tuple(item for item in cidrs if (":" in item) == (family == "IPv6"))
    return None if any(item.endswith("/0") for item in own) else own


def both(first: Sources, second: Sources) -> Sources:
    """Return the sources that two restrictions both allow."""
    if first is None or second is None:
        return second if first is None else first
    found: Dict[str, None] = {}
    for one in _networks(first):
        for other in _networks(second):
            if one.prefix_length >= other.prefix_length and other.contains(_start(one)):
                found[str(one)] = None
            elif other.prefix_length > one.prefix_length and one.contains(_start(other)):
                found[str(other)] = None
    return tuple(found)


def _networks(sources: Iterable[str]) -> Iterable[Network]:
    return [network for network in map(parse_network, sources) if network is not None]


def _start(network: Network) -> str:
    return str(network).partition("/")[0]
