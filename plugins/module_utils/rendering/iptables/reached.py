# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules of iptables that the packets of one destination meet, from a desired or an observed table of chains."""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from ...base.addresses import family_of, parse_network
from ..settings import Arrival
from .fixed import EXTERNAL_SERVICES, FILTER_SERVICES, NODE_PORTS, PROXY_FIREWALL, SERVICES
from .names import PREFIXES
from .tables import ChainKey

#: The chains that Services share, from which packets come to those of one ServicePort.
STARTS = (SERVICES, NODE_PORTS, FILTER_SERVICES, EXTERNAL_SERVICES, PROXY_FIREWALL)

_COMMENT = re.compile(r'-m comment --comment (?:"[^"]*"|\S+) ?')
_TARGET = re.compile(r" -[jg] (\S+)")
_DESTINATION = re.compile(r"(?:^| )-d (\S+)")
_PROTOCOL = re.compile(r"(?:^| )-p (\S+)")
_PORT = re.compile(r" --dport ([0-9]+)(?: |$)")


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match.group(1) if match is not None else ""


def _matches(rule: str, place: Arrival) -> bool:
    """Return whether a rule of a shared chain matches one destination, not all."""
    plain = _COMMENT.sub("", rule)
    if (_first(_PROTOCOL, plain), _first(_PORT, plain)) != (place.protocol, str(place.port)):
        return False
    destination = _first(_DESTINATION, plain)
    if not destination:
        return place.node_port
    bits = "" if "/" in destination else "/128" if family_of(destination) == "IPv6" else "/32"
    network = parse_network(destination + bits)
    return network is not None and network.contains(place.address)


def rules_for(chains: Mapping[Any, Any], place: Arrival, starts: Sequence[ChainKey] = STARTS) -> list[str]:
    """Return the rules about a destination, and those of the chains of the ServicePort that they lead to."""
    found: dict[str, None] = {}
    queue: list[tuple[ChainKey, bool]] = [(key, True) for key in starts]
    seen = {key for key, _shared in queue}
    for key, shared in queue:
        rules = chains.get(key)
        for rule in rules if isinstance(rules, tuple) else ():
            if shared and not _matches(rule, place):
                continue
            found[f"-t {key.table} -A {key.chain} {rule}"] = None
            target = ChainKey(key.table, _first(_TARGET, f" {rule}"))
            if target.chain.startswith(PREFIXES) and target not in seen:
                seen.add(target)
                queue.append((target, False))
    return list(found)
