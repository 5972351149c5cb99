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

from typing import Iterator

from ...serviceports.info import ServicePortInfo
from ..merged import Entry
from . import expressions as x
from . import objects as nft
from .keys import address_key

SERVICE_TRAFFIC = "service-traffic"
NODE_PORT_TRAFFIC = "nodeport-traffic"
TRAFFIC = "traffic"
TRAFFIC_INPUT = "traffic-input"
TRAFFIC_POSTROUTING = "traffic-postrouting"
_PRIORITY = 300
_DIRECTIONS = tuple(bytes((number, 0, 0, 0)) for number in (nft.ORIGINAL, nft.REPLY))


def static_entries(family: str) -> list[Entry]:
    """Return the entries that exist without any Service."""
    redirected = x.rule(x.was_redirected(), x.verdict(f"goto {TRAFFIC}"))
    from_elsewhere = x.rule(x.interface_name("lo", False, False), *redirected.expressions)
    frontend = (nft.ADDRESS_TYPES[family], nft.PROTOCOL, nft.PORT)
    # The nft program knows what a port is only behind its protocol, so each protocol needs rules of its own.
    rules = [
        x.rule(x.is_protocol(number), key, x.lookup(name), x.verdict("accept"))
        for name, key in (
            (SERVICE_TRAFFIC, x.original_destination(family)),
            (NODE_PORT_TRAFFIC, x.original_protocol_and_port()),
        )
        for number in nft.PROTOCOL_NUMBERS.values()
    ]
    return [
        (nft.RESOURCE, nft.ObjectKey("set", SERVICE_TRAFFIC), nft.SetValue((*frontend, nft.DIRECTION), counted=True)),
        (
            nft.RESOURCE,
            nft.ObjectKey("set", NODE_PORT_TRAFFIC),
            nft.SetValue((*frontend[1:], nft.DIRECTION), counted=True),
        ),
        (nft.RESOURCE, nft.ObjectKey("chain", TRAFFIC), nft.ChainValue(tuple(rules))),
        (
            nft.RESOURCE,
            nft.ObjectKey("chain", TRAFFIC_INPUT),
            nft.ChainValue((from_elsewhere,), nft.BaseHook("filter", "input", _PRIORITY)),
        ),
        (
            nft.RESOURCE,
            nft.ObjectKey("chain", TRAFFIC_POSTROUTING),
            nft.ChainValue((redirected,), nft.BaseHook("filter", "postrouting", _PRIORITY)),
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
            yield nft.RESOURCE, nft.ElementKey("element", name, key + direction), True
