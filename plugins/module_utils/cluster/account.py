# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The account of cost: how many entries of the kernel an object makes in each mode, and how many bytes these take.

An *entry* is an element of a set or map, a chain, a rule, a virtual or real server, an address on the dummy device, or
a listener. A Service makes products of its ports, addresses, endpoints and sources, which its annotations multiply
further: weights repeat endpoints in a list, hashing fills a list of slots for each address, affinity gives each
endpoint objects of its own. Whatever limits or divides work uses these numbers: the limit of a Service, the memory
budget, the limit of hashing, the portions of a sync; and the limits of network policies have the same unit.

The account of a Service follows from its objects alone, on the node that has most of them: the one that runs all
endpoints. It is computed without expanding anything, and is an upper bound. Hashing is accounted apart, because a limit
of its own decides which Services are hashed (see ``rendering.slot_limit``).
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Callable, Iterable, NamedTuple, Sequence

from ..base.addresses import IPV4, IPV6, family_of
from .model import Service, ServicePort
from .owned_slices import EndpointCounts

#: The places in a list of endpoints with different shares: at most MOST_PLACES, or PLACES_OF_ENDPOINT for each if that
#: is more (see ``serviceports.weights``).
MOST_PLACES, PLACES_OF_ENDPOINT = 256, 4
#: Slow start multiplies shares by up to this.
EIGHTHS = 8
#: The slots of one hashed address or node port (see ``rendering.nftables.slots``).
SLOTS = 600


class Entries(NamedTuple):
    """Numbers by the kind of entry. Kinds that nftables mode makes by the product, each with a key and a size of its
    own, are apart from ``others``: ``listed`` elements of lists, ``sources`` that are allowed at a frontend,
    ``frontends`` at addresses other than the cluster IP, which have a verdict and lists, and the chains, rules and sets
    of session ``affinity``.
    """

    others: int
    listed: int = 0
    sources: int = 0
    frontends: int = 0
    affinity: int = 0

    @property
    def total(self) -> int:
        """Return all of them."""
        return sum(self)

    def times(self, rates: Entries) -> int:
        """Return what they take at a rate of each kind."""
        return sum(map(mul, self, rates))


#: The bytes of an entry of each kind in nftables mode: in the kernel, in the table, and in a comparison of both; of
#: sources in an agent that repairs everything, which takes more.
#: ``tests.kernel.test_bytes_of_entries`` compares them with the kernel.
BYTES_IN_NFTABLES = Entries(600, listed=350, sources=1200, frontends=1100, affinity=1300)
#: In iptables mode frontends are rules in chains that all Services share. iptables reads these chains for each change
#: of any Service. So what limits the rules is not the memory that they take but the time: under the default limit of
#: the role one namespace has 10,000 of each family, which are read in 0.1 s of processor time.
BYTES_IN_IPTABLES = Entries(1100, frontends=20_000)
#: The bytes of one list of slots.
BYTES_OF_SLOTS = SLOTS * BYTES_IN_NFTABLES.listed


class NodeFactors(NamedTuple):
    """What multiplies entries on one node, by its settings: ``addresses`` at which node ports answer, in some modes;
    ``counters`` of each frontend; ``sources`` that are allowed at every node port.
    """

    addresses: int = 1
    counters: int = 0
    sources: int = 0


#: A node without any.
ANY_NODE = NodeFactors()


class Restricted(NamedTuple):
    """Addresses of one kind that only some sources may use: ``ports`` and ``frontends`` with them, how many
    ``sources``, and how many of them there are, which may be sources of the node's ``own`` connections.
    """

    ports: int
    frontends: int
    sources: int
    own: int


class Shape(NamedTuple):
    """The numbers of a Service in one family from which its entries follow.

    ``ports``, ``endpoints`` (of all ports), ``places`` (the same with endpoints as often as weights repeat them), and
    those of ports with a node port. ``external``, ``balancers``: addresses; ``sources``, ``lengths``: allowed sources
    of each of the three kinds, and different prefix lengths among them, or -1 for no restriction. ``local``: 1 with
    externalTrafficPolicy Local; ``any_local``: with any policy Local.
    """

    ports: int
    endpoints: int
    places: int
    node_ports: int
    node_endpoints: int
    node_places: int
    external: int
    balancers: int
    sources: tuple[int, int, int]
    lengths: int
    local: int
    any_local: int
    has_affinity: bool

    def prefixes(self, sources: int) -> int:
        """Return the most different prefix lengths of this many sources, and of an address as its own source."""
        return min(sources, self.lengths) + 1

    @property
    def chains(self) -> int:
        """Return how many chains choose among the endpoints of a port: all of them, or those of the node."""
        return 2 if self.any_local and (self.addresses or self.node_ports) else 1

    @property
    def addresses(self) -> int:
        """Return the number of addresses other than the cluster IP."""
        return self.external + self.balancers

    def restricted(self, node: NodeFactors, addresses: int) -> list[Restricted]:
        """Return the kinds of addresses that are restricted. ``addresses``: at which node ports answer."""
        external, balancers, node_ports = self.sources
        if node.sources:
            node_ports = max(node_ports, 0) + node.sources
        found = (
            Restricted(self.ports, self.ports * self.external, external, self.external),
            Restricted(self.ports, self.ports * self.balancers, balancers, self.balancers),
            Restricted(self.node_ports, self.node_ports * addresses, node_ports, 1),
        )
        return [kind for kind in found if kind.frontends and kind.sources >= 0]


def _in_nftables(shape: Shape, node: NodeFactors) -> Entries:
    """Elements of cluster IP, frontends, hairpin connections and lists; with affinity also sets and chains."""
    frontends = shape.ports * shape.addresses + shape.node_ports
    # Each node port is refused at loopback addresses as well.
    others = 1 + shape.ports + shape.endpoints + shape.node_ports + node.counters * (shape.ports + frontends)
    listed = sources = affinity = 0
    if shape.has_affinity:
        chain = shape.ports + shape.endpoints + shape.places
        affinity = 4 * shape.endpoints + shape.chains * chain + (5 * shape.ports if frontends else 0)
    else:
        listed = shape.places + (1 + shape.local) * (shape.places * shape.addresses + shape.node_places)
    for kind in shape.restricted(node, 1):
        # Addresses of both kinds may have the same sources, and are each other's then.
        own = kind.own if shape.sources[0] < 0 else shape.addresses
        sources += kind.frontends * (kind.sources + own + 1)
        others += 2 * shape.prefixes(kind.sources) + 2
    return Entries(others, listed, sources, (1 + shape.local) * frontends, affinity)


def _in_iptables(shape: Shape, node: NodeFactors) -> Entries:
    """Rules that lead to a port; chains of ports, of their endpoints and of sources."""
    frontends = shape.ports * shape.addresses + shape.node_ports
    others = shape.ports * (2 + shape.chains)
    others += shape.endpoints * (3 + shape.chains * (1 + shape.has_affinity))
    if frontends:
        others += shape.ports * (3 + 3 * shape.local) + shape.node_ports
    for kind in shape.restricted(node, 1):
        others += max(kind.ports * (2 + kind.sources + kind.own) + kind.frontends, kind.frontends * (1 + kind.sources))
    return Entries(others, frontends=(1 + shape.local) * frontends)


def _in_ipvs(shape: Shape, node: NodeFactors) -> Entries:
    """Virtual servers with their real servers, addresses on the device, and elements of sets."""
    servers = shape.endpoints * (1 + shape.addresses) + shape.node_endpoints * node.addresses
    others = 2 + 2 * shape.addresses + shape.ports * 3 + shape.endpoints + servers
    others += shape.ports * shape.addresses * (2 + 4 * shape.local) + shape.ports * shape.local
    others += shape.node_ports * (node.addresses * (1 + 3 * shape.local) + 1 + shape.local)
    for kind in shape.restricted(node, node.addresses):
        others += kind.frontends * (kind.sources + 3) + 2 * shape.prefixes(kind.sources) + 2
    return Entries(others)


def _in_userspace(shape: Shape, node: NodeFactors) -> Entries:
    """Listeners with their endpoints and sources, and addresses on the device."""
    frontends = shape.ports * shape.addresses + shape.node_ports * node.addresses
    places = shape.places * (1 + shape.addresses) + shape.node_places * node.addresses
    allowed = sum(kind.frontends * (kind.sources + 1) for kind in shape.restricted(node, node.addresses))
    return Entries(1 + shape.addresses + shape.ports + frontends + places + allowed)


class Rates(NamedTuple):
    """What objects cost in a mode.

    ``entries``: of a Service in one family. ``bytes_of_object``: the bytes of memory for each byte of the cluster's
    objects as :mod:`.parsing.prune` leaves them; ``bytes_of_entry``: for each entry, by its kind, beyond those that the
    size of its objects suggests. Both are those of the worst moment of the mode (a repair of everything), with the
    programs that the agent runs and the kernel's memory; measured by ``tests.benchmarks.agent_memory`` and
    ``tests.benchmarks.hostile_services``.
    """

    entries: Callable[[Shape, NodeFactors], Entries]
    bytes_of_object: float
    bytes_of_entry: Entries
    node: NodeFactors = ANY_NODE

    def of(self, shapes: Sequence[Shape]) -> Entries:
        """Return the entries of a Service."""
        found = [self.entries(shape, self.node) for shape in shapes]
        return Entries(*map(sum, zip(Entries(0), *found)))

    def bytes(self, shapes: Sequence[Shape]) -> int:
        """Return the bytes of these entries."""
        return self.of(shapes).times(self.bytes_of_entry)


#: By the name of the mode. ipvs mode is estimated: no machine with IPVS could measure memory cgroups.
RATES: dict[str, Rates] = {
    "nftables": Rates(_in_nftables, 9.0, BYTES_IN_NFTABLES),
    "iptables": Rates(_in_iptables, 32.0, BYTES_IN_IPTABLES),
    "ipvs": Rates(_in_ipvs, 14.0, Entries(900)),
    "userspace": Rates(_in_userspace, 9.0, Entries(900)),
}


def rates_of(mode: str, node: NodeFactors = ANY_NODE) -> Rates:
    """Return what Services cost in a mode on a node."""
    return RATES.get(mode, RATES["nftables"])._replace(node=node)


def most_entries(shapes: Sequence[Shape]) -> int:
    """Return the entries of a Service in the mode that makes most of them."""
    return max([rates.of(shapes).total for rates in RATES.values()])


def within_share(taken: int, left: int) -> bool:
    """Return whether a namespace may have ``taken`` of a shared limit of which ``left`` is free.

    A namespace has at most as much as is left. So the one that takes most is refused first, however many objects it
    creates, and others still have as much room as it has itself.
    """
    return taken <= left


class Parts(NamedTuple):
    """How many parts of a Service are served, in the order of the object.

    ``node_ports``: how many of the ports keep their node port, if they have one.
    """

    ports: int
    node_ports: int
    balancers: int
    external: int

    @classmethod
    def of(cls, service: Service) -> Parts:
        """Return all parts of a Service."""
        ports = len(service.ports)
        return cls(ports, ports, len(service.load_balancer_ips), len(service.external_ips))


class _Family(NamedTuple):
    """The sums of a family's numbers over the first parts of a Service, by the number of parts."""

    endpoints: list[int]
    places: list[int]
    node_ports: list[int]
    node_endpoints: list[int]
    node_places: list[int]
    balancers: list[int]
    external: list[int]
    sources: tuple[int, int, int]
    lengths: int


class Products:
    """What a Service multiplies with its endpoints. ``node_weight``: the largest weight of a Node."""

    def __init__(self, service: Service, counts: EndpointCounts, node_weight: int = 1) -> None:
        self._local = int(service.external_traffic_policy_local)
        self._any_local = int(service.external_traffic_policy_local or service.internal_traffic_policy_local)
        self._has_affinity = bool(service.affinity_seconds)
        growth = node_weight * (EIGHTHS if service.policy.slow_start else 1)
        cluster_ips = ((IPV4, service.cluster_ip_v4), (IPV6, service.cluster_ip_v6))
        self._families = [_sums(service, family, counts, growth) for family, cluster_ip in cluster_ips if cluster_ip]

    def shapes(self, parts: Parts) -> list[Shape]:
        """Return the shape of these parts in each family of the Service."""
        ports, with_node_port = parts.ports, min(parts.ports, parts.node_ports)
        return [
            Shape(
                ports=ports,
                endpoints=family.endpoints[ports],
                places=family.places[ports],
                node_ports=family.node_ports[with_node_port],
                node_endpoints=family.node_endpoints[with_node_port],
                node_places=family.node_places[with_node_port],
                external=family.external[parts.external],
                balancers=family.balancers[parts.balancers],
                sources=family.sources,
                lengths=family.lengths,
                local=self._local,
                any_local=self._any_local,
                has_affinity=self._has_affinity,
            )
            for family in self._families
        ]


def _sums(service: Service, family: str, counts: EndpointCounts, growth: int) -> _Family:
    endpoints = [counts.of_port(family, port.name, port.protocol) for port in service.ports]
    places = endpoints
    if growth > 1 or counts.are_weighted:
        places = [_places(family, port, counts, growth) for port in service.ports]
    sources, lengths = _sources(service, family)
    has = [int(port.node_port > 0) for port in service.ports]
    return _Family(
        endpoints=_up_to(endpoints),
        places=_up_to(places),
        node_ports=_up_to(has),
        node_endpoints=_up_to(map(mul, has, endpoints)),
        node_places=_up_to(map(mul, has, places)),
        balancers=_up_to(family_of(address) == family for address in service.load_balancer_ips),
        external=_up_to(family_of(address) == family for address in service.external_ips),
        sources=sources,
        lengths=lengths,
    )


def _sources(service: Service, family: str) -> tuple[tuple[int, int, int], int]:
    """Return the allowed sources of a family at each kind of address, -1 if all are, and their prefix lengths."""
    given = service.policy.allowed_sources
    if given is None and not service.source_ranges:
        return (-1, -1, -1), 0
    allowed = [text for text in given or () if family_of(text) == family]
    ranges = [text for text in service.source_ranges if family_of(text) == family]
    if any(text.endswith("/0") for text in ranges):
        ranges = []
    at_external = len(allowed) if given is not None else -1
    at_others = max(at_external, 0) + len(ranges)
    return (at_external, at_others, at_others), len({text.rpartition("/")[2] for text in (*allowed, *ranges)})


def _up_to(numbers: Iterable[int]) -> list[int]:
    """Return the sums of the first 0, 1, 2 and so on of some numbers."""
    return [0, *accumulate(numbers)]


def _places(family: str, port: ServicePort, counts: EndpointCounts, growth: int) -> int:
    """Return the places of a port's endpoints in a list with their weights."""
    number = counts.of_port(family, port.name, port.protocol)
    shares = counts.shares_of_port(family, port.name, port.protocol) * growth
    return max(number, min(shares, max(MOST_PLACES, PLACES_OF_ENDPOINT * number) + number))
