# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sources that may use the external addresses and node ports of a Service, combined from all restrictions."""

from __future__ import annotations

from typing import Iterable, Iterator, Optional, Tuple

from ..base.addresses import Network, address_bits, networks_of
from .info import Sources


def sources_of_family(cidrs: Optional[Tuple[str, ...]], family: str) -> Sources:
    """Return the CIDRs of a family; None if every source of it is allowed.

    ``cidrs`` are of both families, None without a restriction. If none is of the family, no source of it is allowed.
    """
    if cidrs is None:
        return None
    own = tuple(item for item in cidrs if (":" in item) == (family == "IPv6"))
    return None if any(item.endswith("/0") for item in own) else own


def both(first: Sources, second: Sources) -> Sources:
    """Return the sources that two restrictions both allow.

    The cost is linear in the number of CIDRs, of which the owner of a Service may give tens of thousands.
    """
    if first is None or second is None:
        return second if first is None else first
    one, other = networks_of(first), networks_of(second)
    # Two CIDRs are disjoint, or one contains the other: then both allow the smaller one.
    return tuple(dict.fromkeys(str(item) for item in (*_inside(one, other), *_inside(other, one))))


def _inside(networks: Iterable[Network], others: Iterable[Network]) -> Iterator[Network]:
    """Return the networks that one of the others contains or equals."""
    prefixes = {(_prefix(item, item.prefix_length), item.prefix_length) for item in others}
    lengths = {length for _prefix_bits, length in prefixes}
    for item in networks:
        if any(length <= item.prefix_length and (_prefix(item, length), length) in prefixes for length in lengths):
            yield item


def _prefix(network: Network, length: int) -> int:
    return network.first >> (address_bits(network.family) - length)
