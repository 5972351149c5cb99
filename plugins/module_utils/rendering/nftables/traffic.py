# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The part of the table that counts packets and bytes (traffic.countBytes): sets of frontends with counters.

Each packet of a redirected connection looks up the address and port to which the connection was opened, which
connection tracking knows for both directions, and the direction. A packet passes either the hook postrouting or, if it
arrives from elsewhere for a program of the node, the hook input, so that it is counted once; both chains come behind
those of other programs, which may drop it. The sets do not depend on endpoints, so that a counter lasts as long as the
address and port of its Service, and packets of connections to past endpoints are counted as well.
"""

from __future__ import annotations

from typing import Iterator, List

from ...serviceports.info import ServicePortInfo
from ..merged import Entry
from . import expressions as x
from .keys import address_key
from .objects import (
    ADDRESS_TYPES,
    DIRECTION,
    ORIGINAL,
    PORT,
    PROTOCOL,
    PROTOCOL_NUMBERS,
    REPLY,
    RESOURCE,
    BaseHook,
    ChainValue,
    ElementKey,
    ObjectKey,
    SetValue,
)

SERVICE_TRAFFIC = "service-traffic"
NODE_PORT_TRAFFIC = "nodeport-traffic"
TRAFFIC = "traffic"
TRAFFIC_INPUT = "traffic-input"
TRAFFIC_POSTROUTING = "traffic-postrouting"
_PRIORITY = 300
_DIRECTIONS = tuple(bytes((number, 0, 0, 0)) for number in (ORIGINAL, REPLY))


def static_entries(family: str) -> List[Entry]:
    """Return the entries that exist without any Service."""
    redirected = x.rule(x.was_redirected(), x.verdict(f"goto {TRAFFIC}"))
    from_elsewhere = x.rule(x.interface_name("lo", False, False), *redirected.expressions)
    frontend = (ADDRESS_TYPES[family], PROTOCOL, PORT)
    # The nft program knows what a port is only behind its protocol, so each protocol needs rules of its own.
    rules = [
        x.rule(x.is_protocol(number), key, x.lookup(name), x.verdict("accept"))
        for name, key in (
            (SERVICE_TRAFFIC, x.original_destination(family)),
            (NODE_PORT_TRAFFIC, x.original_protocol_and_port()),
        )
        for number in PROTOCOL_NUMBERS.values()
    ]
    return [
        (RESOURCE, ObjectKey("set", SERVICE_TRAFFIC), SetValue((*frontend, DIRECTION), counted=True)),
        (RESOURCE, ObjectKey("set", NODE_PORT_TRAFFIC), SetValue((*frontend[1:], DIRECTION), counted=True)),
        (RESOURCE, ObjectKey("chain", TRAFFIC), ChainValue(tuple(rules))),
        (
            RESOURCE,
            ObjectKey("chain", TRAFFIC_INPUT),
            ChainValue((from_elsewhere,), BaseHook("filter", "input", _PRIORITY)),
        ),
        (
            RESOURCE,
            ObjectKey("chain", TRAFFIC_POSTROUTING),
            ChainValue((redirected,), BaseHook("filter", "postrouting", _PRIORITY)),
        ),
    ]


def service_entries(info: ServicePortInfo, transport: bytes, node_port: bytes) -> Iterator[Entry]:
    """Yield the elements of one ServicePort; ``transport``, ``node_port``: keys of its port and node port."""
    addresses = dict.fromkeys((info.cluster_ip, *info.external_ips, *info.load_balancer_ips))
    places = [(SERVICE_TRAFFIC, address_key(address) + transport) for address in addresses]
    if node_port:
        places.append((NODE_PORT_TRAFFIC, node_port))
    for name, key in places:
        for direction in _DIRECTIONS:
            yield RESOURCE, ElementKey("element", name, key + direction), True
