# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sources that are allowed at external addresses and node ports: the chains, maps and sets of nftables mode.

The objects for node ports exist only while a node port is restricted: kube-proxy 1.36 has nothing like them, and every
packet would traverse them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Iterable, Sequence

from ...base.addresses import IPV6, Network, networks_of
from ...serviceports.info import ServicePortInfo, Sources
from ..merged import Entry
from ..settings import DataplaneSettings
from . import expressions as x
from . import layout
from . import objects as nft
from .keys import address_key
from .layout import NODE_PORT_CHECK, NODE_PORT_FIREWALLED, NODE_PORT_KEY, SERVICE_KEY

_MAPS = {SERVICE_KEY: layout.FIREWALLED, NODE_PORT_KEY: NODE_PORT_FIREWALLED}


def source_ranges_name(kind: str, length: int) -> str:
    """Return the name of the set of allowed source ranges with this prefix length, for a kind of frontend."""
    return f"{kind}{layout.SOURCE_RANGES}{length}"


def source_ranges_set(family: str, kind: str) -> nft.SetValue:
    """Return a set of (frontend, start of a source range).

    It is hashed, so that neither overlapping ranges nor their number matter.
    """
    address = nft.ADDRESS_TYPES[family]
    return nft.SetValue(
        (nft.PROTOCOL, nft.PORT, address) if kind == NODE_PORT_KEY else (address, nft.PROTOCOL, nft.PORT, address)
    )


def firewall_name(kind: str, lengths: tuple[int, ...]) -> str:
    """Return the name of the chain that accepts ranges with these prefix lengths."""
    return f"{kind}firewall-" + "-".join(str(length) for length in lengths)


@lru_cache(maxsize=1024)
def firewall(family: str, kind: str, lengths: tuple[int, ...]) -> nft.ChainValue:
    """Return the chain that drops packets from outside a frontend's source ranges; ``lengths``: longest first."""
    size = 16 if family == IPV6 else 4
    frontend = x.protocol_and_port() if kind == NODE_PORT_KEY else x.destination(family)
    word = 2 if kind == NODE_PORT_KEY else x.address_words(family) + 2
    rules: list[nft.Rule] = []
    for length in lengths:
        key = [*frontend, x.source_address(family, word)]
        if length < size * 8:
            key.append(x.bitwise(x.prefix_mask(length, size), bytes(size), word))
        rules.append(x.rule(key, x.lookup(source_ranges_name(kind, length)), x.verdict("return")))
    rules.append(x.rule(x.verdict("drop")))
    return nft.ChainValue(tuple(rules))


def _node_port_check(settings: DataplaneSettings) -> list[Entry]:
    """Return the entries that every restricted node port needs, in an order in which they can be created."""
    at_node_port = [*layout.node_port_match(settings, True), *x.protocol_and_port()]
    check = x.rule(at_node_port, x.verdict_lookup(NODE_PORT_FIREWALLED))
    jump = (x.rule(x.new_connection(), x.verdict(f"jump {NODE_PORT_CHECK}")),)
    return [
        (
            nft.RESOURCE,
            nft.ObjectKey("set", NODE_PORT_FIREWALLED),
            nft.SetValue((nft.PROTOCOL, nft.PORT), (nft.VERDICT,)),
        ),
        (nft.RESOURCE, nft.ObjectKey("chain", NODE_PORT_CHECK), nft.ChainValue((check,))),
        *(
            (nft.RESOURCE, nft.ObjectKey("chain", name), nft.ChainValue(jump, nft.BaseHook("filter", hook, -110)))
            for hook, name in layout.NODE_PORT_HOOKS.items()
        ),
    ]


def firewall_entries(
    info: ServicePortInfo, settings: DataplaneSettings, transport: bytes, node_port: bytes
) -> list[Entry]:
    """Return the entries that restrict the ServicePort's external addresses and its node port to allowed sources.

    ``transport``: protocol and port as in a key, ``node_port``: protocol and node port. Where a range contains the node
    itself, an external address is allowed as its own source: the node may have used it.
    """
    entries: list[Entry] = []
    addresses: dict[bytes, Sources] = {address_key(address): info.external_ip_sources for address in info.external_ips}
    addresses.update((address_key(address), info.source_ranges) for address in info.load_balancer_ips)
    by_sources: dict[Sources, list[bytes]] = {}
    for address, sources in addresses.items():
        by_sources.setdefault(sources, []).append(address)
    for sources, own in by_sources.items():
        if sources is not None:
            keys = [address + transport for address in own]
            entries += restrict(info.family, SERVICE_KEY, keys=keys, sources=sources, own=own, node_ip=settings.node_ip)
    if info.node_port and info.node_port_sources is not None:
        restricted = restrict(
            info.family,
            NODE_PORT_KEY,
            keys=[node_port],
            sources=info.node_port_sources,
            own=(),
            node_ip=settings.node_ip,
        )
        entries += [*_node_port_check(settings), *restricted] if restricted else []
    return entries


@lru_cache(maxsize=8)
def _networks(sources: tuple[str, ...]) -> list[Network]:
    """Return the ranges of sources, which all ports of a Service share."""
    return networks_of(sources)


def restrict(
    family: str, kind: str, *, keys: Iterable[bytes], sources: Sequence[str], own: Iterable[bytes], node_ip: str
) -> list[Entry]:
    """Return the entries that restrict frontends of a kind, given by their keys, to allowed sources.

    Where a range contains ``node_ip``, the addresses ``own`` are allowed as well. Nothing is restricted by a range of
    all addresses.
    """
    networks = _networks(tuple(sources))
    if any(network.prefix_length == 0 for network in networks):
        return []
    size = 16 if family == IPV6 else 4
    allowed = {(network.prefix_length, network.first) for network in networks}
    if node_ip and any(network.contains(node_ip) for network in networks):
        allowed.update((size * 8, int.from_bytes(address, "big")) for address in own)
    entries: list[Entry] = []
    verdict = "drop"
    if allowed:
        lengths = tuple(sorted({length for length, _first in allowed}, reverse=True))
        for length in lengths:
            name = nft.ObjectKey("set", source_ranges_name(kind, length))
            entries.append((nft.RESOURCE, name, source_ranges_set(family, kind)))
        chain = firewall_name(kind, lengths)
        entries.append((nft.RESOURCE, nft.ObjectKey("chain", chain), firewall(family, kind, lengths)))
        verdict = f"goto {chain}"
    for key in keys:
        for length, first in sorted(allowed):
            element = nft.ElementKey("element", source_ranges_name(kind, length), key + first.to_bytes(size, "big"))
            entries.append((nft.RESOURCE, element, True))
        entries.append((nft.RESOURCE, nft.ElementKey("element", _MAPS[kind], key), verdict))
    return entries
