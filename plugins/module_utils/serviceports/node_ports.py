# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node addresses on which node ports answer (nodePortAddresses of the KubeProxyConfiguration)."""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

from ..base.addresses import IPV4, IPV6, Network, family_of, is_loopback, networks_of, parse_network
from ..base.errors import ConfigurationError

PRIMARY = "primary"

_LOOPBACK_START = "127.0.0.0"


class NodePortAddresses(NamedTuple):
    """The addresses selected for one family.

    ``cidrs``: canonical CIDRs of the family, at least one. ``match_all``: one of them covers every address, and then it
    is the only one. ``contains_loopback``: a CIDR covers IPv4 loopback addresses (False for IPv6).
    """

    family: str
    cidrs: tuple[str, ...]
    match_all: bool
    contains_loopback: bool

    def node_ips(self, addresses: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Return the node's addresses on which node ports answer, without duplicates, in the order given.

        ``addresses``: (interface, canonical address) of all interfaces and families, loopback included.
        """
        networks = networks_of(self.cidrs)
        of_family = (address for _interface, address in addresses if family_of(address) == self.family)
        chosen = (item for item in of_family if self.match_all or any(network.contains(item) for network in networks))
        return tuple(dict.fromkeys(chosen))


def resolve_primary(values: Sequence[str], node_ips: Iterable[str]) -> tuple[str, ...]:
    """Return ``values`` with the word ``primary`` replaced by the host CIDRs of the node's own addresses.

    ``node_ips``: the addresses known for the node, at most one of each family; loopback ones count as unknown. If
    ``primary`` stands alone and none is known the result is empty, which means all addresses.
    """
    known = [address for address in node_ips if address and not is_loopback(address)]
    own = tuple(f"{address}/{128 if ':' in address else 32}" for address in known)
    return tuple(cidr for value in values for cidr in (own if value == PRIMARY else (value,)))


def node_port_addresses(values: Sequence[str], family: str) -> NodePortAddresses:
    """Return the addresses that CIDRs of both families select for ``family``; all addresses if none is of the family.

    Raises ConfigurationError for a value that is not a CIDR (``primary`` must have been resolved).
    """
    networks: list[Network] = []
    for value in values:
        network = parse_network(value)
        if network is None:
            raise ConfigurationError(f"nodePortAddresses: {value!r} is not a CIDR")
        if network.family == family:
            networks.append(network)
    everything = parse_network("::/0" if family == IPV6 else "0.0.0.0/0")
    if not networks and everything is not None:
        networks = [everything]
    loopback = False
    for network in networks:
        loopback = loopback or (family == IPV4 and _covers_loopback(network))
        if network.prefix_length == 0:
            return NodePortAddresses(family, (str(network),), True, loopback)
    return NodePortAddresses(family, tuple(dict.fromkeys(str(network) for network in networks)), False, loopback)


def names_loopback(values: Iterable[str], family: str) -> bool:
    """Return whether a CIDR of the family begins with a loopback address; one that merely covers them does not."""
    return any(item.family == family and is_loopback(str(item).partition("/")[0]) for item in networks_of(values))


def _covers_loopback(network: Network) -> bool:
    return network.contains(_LOOPBACK_START) or network.first >> 24 == 127
