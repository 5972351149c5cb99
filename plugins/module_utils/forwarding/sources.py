# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which clients the source ranges of a Service admit."""

from __future__ import annotations

import functools
from typing import Dict, Set, Tuple

from ..addresses import IPV4, IPV6, address_bits, family_of_packed, packed, parse_network


@functools.lru_cache(maxsize=4096)
def _prefixes(sources: Tuple[str, ...]) -> Dict[str, Dict[int, Set[int]]]:
    """Return the prefixes of the ranges, by family and by the number of bits after the prefix."""
    found: Dict[str, Dict[int, Set[int]]] = {IPV4: {}, IPV6: {}}
    for network in map(parse_network, sources):
        if network is not None:
            shift = address_bits(network.family) - network.prefix_length
            found[network.family].setdefault(shift, set()).add(network.first >> shift)
    return found


def is_allowed(sources: Tuple[str, ...], client: str) -> bool:
    """Return whether source ranges admit a client (a canonical address); without ranges all clients are admitted.

    The cost does not depend on the number of ranges, of which the owner of a Service may give tens of thousands: every
    datagram is checked here, too.
    """
    if not sources:
        return True
    raw = packed(client)
    if raw is None:
        return False
    number = int.from_bytes(raw, "big")
    by_shift = _prefixes(sources)[family_of_packed(raw)]
    return any(number >> shift in prefixes for shift, prefixes in by_shift.items())
