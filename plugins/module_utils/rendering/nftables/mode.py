# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render nftables mode: ServicePorts to the table ``kube-proxy`` of one family.

The text of entries is imported late (see docs/architecture.md): most runs of a module show none.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_pton
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence

from ...base.addresses import IPV6
from ...serviceports.info import Endpoint, ServicePortInfo
from ...serviceports.weights import slots
from ..merged import Entry
from ..rendering import Rendering
from ..settings import Arrival, Client, DataplaneSettings, Shares
from . import balancing, hashing, layout, traffic
from .affinity import AffinityChains
from .balancing import CLUSTER, LOCAL, Choice
from .firewall import firewall_entries
from .keys import address_key, transport_key
from .layout import NODE_PORT_KEY, SERVICE_KEY, static_entries
from .objects import RESOURCE, ChainValue, ElementKey, ObjectKey

REJECT = f"goto {layout.REJECT_CHAIN}"


class _PortData(dict[int, bytes]):
    """The data of port numbers, computed on first use: the number and padding to a whole register."""

    def __missing__(self, port: int) -> bytes:
        data = self[port] = port.to_bytes(2, "big") + b"\x00\x00"
        return data


_PORT_DATA = _PortData()


def _data(family: str, endpoints: Iterable[Endpoint]) -> tuple[bytes, ...]:
    # A first load converts tens of thousands of endpoints: a call to Python for each, or a cache, would only cost time.
    number = AF_INET6 if family == IPV6 else AF_INET
    return tuple([inet_pton(number, endpoint[0]) + _PORT_DATA[endpoint[1]] for endpoint in endpoints])


@lru_cache(maxsize=1024)
def _chooser_entries(family: str, kind: str, policy: str, choice: Choice) -> tuple[Entry, ...]:
    """Return the entries of a chain that selects, and of its map of slots; many Services share them."""
    chain = ObjectKey("chain", balancing.chooser_name(kind, policy, choice))
    entry = (RESOURCE, chain, balancing.chooser(family, kind, policy, choice))
    if not choice.is_hash:
        return (entry,)
    key = ObjectKey("set", balancing.endpoints_map(kind, policy, choice))
    return (RESOURCE, key, balancing.slots_map(family, kind)), entry


def _places(info: ServicePortInfo, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """Return the endpoints under the indices of a list: each once, or several times in proportion to its weight."""
    return slots(endpoints) if info.weighted else endpoints


class _Choices(NamedTuple):
    """The ways to choose a ServicePort's endpoints: among all, and among those on this node."""

    cluster: Choice
    local: Choice


def _choices(info: ServicePortInfo, settings: DataplaneSettings, key: bytes) -> _Choices:
    """Return how the endpoints of a ServicePort are chosen; ``key``: of its cluster IP, protocol and port."""
    if not hashing.is_hashed(info, settings):
        cluster, local = _places(info, info.cluster), _places(info, info.local)
        return _Choices(balancing.at_random(len(cluster)), balancing.at_random(len(local)))
    choice = balancing.by_slots(key, hashing.by_port(info))
    none = balancing.at_random(0)
    return _Choices(choice if info.cluster else none, choice if info.local else none)


def _list(info: ServicePortInfo, kind: str, policy: str, key: bytes, choice: Choice) -> Iterator[Entry]:
    """Yield the chain of a frontend that selects an endpoint, and the list of endpoints from which it does."""
    endpoints = info.local if policy == LOCAL else info.cluster
    if choice.is_hash:
        data = _data(info.family, endpoints)
        data = tuple([data[position] for position in hashing.slots_of(endpoints)])
    else:
        data = _data(info.family, _places(info, endpoints))
    yield from _chooser_entries(info.family, kind, policy, choice)
    yield RESOURCE, ElementKey("list", balancing.endpoints_map(kind, policy, choice), key), data


def _lists(info: ServicePortInfo, kind: str, key: bytes, external: bool, choices: _Choices) -> Iterator[Entry]:
    """Yield the chains of a frontend that select endpoints, and the lists of endpoints from which they do."""
    local_only = not external and info.internal_local
    if info.cluster and not local_only:
        yield from _list(info, kind, CLUSTER, key, choices.cluster)
    if info.local and (local_only or (external and info.external_local)):
        yield from _list(info, kind, LOCAL, key, choices.local)


def _external_chain(
    info: ServicePortInfo, settings: DataplaneSettings, kind: str, choices: _Choices
) -> tuple[str, Optional[ChainValue]]:
    """Return name and value of the chain for external traffic; the name is empty if there is no endpoint."""
    mark = settings.masquerade_mark
    cluster, local = choices
    if not info.external_local:
        if not cluster.size:
            return "", None
        return balancing.masquerade_name(kind, cluster), balancing.masquerading_chooser(kind, mark, cluster)
    value = balancing.external_local(kind, settings.local_traffic, mark, cluster, local)
    return balancing.external_local_name(kind, cluster, local), value


def _internal(
    info: ServicePortInfo, key: bytes, choices: _Choices, affinity: Optional[AffinityChains], entries: list[Entry]
) -> None:
    if not info.has_any or (info.internal_local and not info.local):
        refuse = REJECT if not info.has_any else "drop"
        entries.append((RESOURCE, ElementKey("element", layout.NO_ENDPOINT_SERVICES, key), refuse))
        return
    endpoints = info.local if info.internal_local else info.cluster
    if not endpoints:
        return
    if affinity is not None:
        target = affinity.internal
    else:
        entries.extend(_lists(info, SERVICE_KEY, key, False, choices))
        policy, choice = (LOCAL, choices.local) if info.internal_local else (CLUSTER, choices.cluster)
        target = balancing.chooser_name(SERVICE_KEY, policy, choice)
    entries.append((RESOURCE, ElementKey("element", layout.FRONTENDS, key), f"goto {target}"))


def _external(
    info: ServicePortInfo,
    settings: DataplaneSettings,
    kind: str,
    keys: list[bytes],
    *,
    choices: _Choices,
    affinity: Optional[AffinityChains],
    entries: list[Entry],
) -> None:
    node_port = kind == NODE_PORT_KEY
    if not info.has_any or (info.external_local and not info.local):
        refusals = layout.NO_ENDPOINT_NODE_PORTS if node_port else layout.NO_ENDPOINT_SERVICES
        refuse = REJECT if not info.has_any else "drop"
        entries.extend((RESOURCE, ElementKey("element", refusals, key), refuse) for key in keys)
    if not info.has_any:
        return
    if affinity is not None:
        target = affinity.external
    else:
        target, chain = _external_chain(info, settings, kind, choices)
        if not target:
            return
        for key in keys:
            entries.extend(_lists(info, kind, key, True, choices))
        entries.append((RESOURCE, ObjectKey("chain", target), chain))
    frontends = layout.NODE_PORT_FRONTENDS if node_port else layout.FRONTENDS
    entries.extend((RESOURCE, ElementKey("element", frontends, key), f"goto {target}") for key in keys)


def service_port_entries(info: ServicePortInfo, settings: DataplaneSettings) -> list[Entry]:
    """Return the entries of one ServicePort: (resource table, key, value), in an order in which they can be created.

    Several may contribute the same key: chains, sets of source ranges, the ClusterIP of a Service with several ports.
    """
    entries: list[Entry] = []
    transport = transport_key(info.protocol, info.port)
    cluster_ip = address_key(info.cluster_ip)
    affinity = None
    if info.affinity_seconds:
        affinity = AffinityChains(info, settings)
        entries.extend(affinity.entries)
    entries.append((RESOURCE, ElementKey("element", layout.CLUSTER_IPS, cluster_ip), True))
    for endpoint in info.reachable:
        if endpoint.is_local:
            ip = address_key(endpoint.ip)
            key = ip + ip + transport_key(info.protocol, endpoint.port)
            entries.append((RESOURCE, ElementKey("element", layout.HAIRPIN, key), True))
    choices = _choices(info, settings, cluster_ip + transport)
    _internal(info, cluster_ip + transport, choices, affinity, entries)
    addresses = dict.fromkeys((*info.external_ips, *info.load_balancer_ips))
    if addresses:
        keys = [address_key(address) + transport for address in addresses]
        _external(info, settings, SERVICE_KEY, keys, choices=choices, affinity=affinity, entries=entries)
    node_port = transport_key(info.protocol, info.node_port) if info.node_port else b""
    if node_port:
        _external(info, settings, NODE_PORT_KEY, [node_port], choices=choices, affinity=affinity, entries=entries)
        if info.protocol in settings.localhost_rejected:
            refused = ElementKey("element", layout.LOCALHOST_REJECTED, node_port)
            entries.append((RESOURCE, refused, f"goto {layout.LOCALHOST_REJECT}"))
    if settings.count_bytes:
        entries.extend(traffic.service_entries(info, transport, node_port))
    if info.is_restricted:
        entries.extend(firewall_entries(info, settings, transport, node_port))
    return entries


class NftablesRendering(Rendering[DataplaneSettings]):
    """One table, ``nftables``, whose keys and values are described in ``objects``."""

    name = "nftables"
    tables = (RESOURCE,)
    most_lists = hashing.MOST_LISTS
    most_lists_of_service = hashing.MOST_LISTS_OF_SERVICE

    def context(self, settings: DataplaneSettings) -> DataplaneSettings:
        """See the base class."""
        return settings

    def static_entries(self, context: DataplaneSettings) -> list[Entry]:
        """Return base chains, sets and maps, and the rules that look up ServicePorts."""
        return static_entries(context)

    def entries(self, service_port: ServicePortInfo, context: DataplaneSettings) -> list[Entry]:
        """See the base class."""
        return service_port_entries(service_port, context)

    def ignored_annotation(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> Sequence[str]:
        """See the base class; schedulers that hash the source are stable hashing here."""
        policy = service_port.policy
        if policy.scheduler not in hashing.SCHEDULERS:
            return super().ignored_annotation(service_port, settings)
        rest = service_port._replace(policy=policy._replace(scheduler="", scheduler_flags=()))
        return [*super().ignored_annotation(rest, settings), *hashing.ignored(service_port, settings)]

    def requested_schedulers(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> frozenset[str]:
        """See the base class."""
        return hashing.requested(service_port)

    def slot_lists(self, service_port: ServicePortInfo) -> int:
        """See the base class."""
        return hashing.slot_lists(service_port)

    def hash_input(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """See the base class."""
        if not hashing.is_hashed(service_port, settings):
            return ""
        return "address and port" if hashing.by_port(service_port) else "address"

    def endpoint_of(
        self, service_port: ServicePortInfo, endpoints: Sequence[Endpoint], client: Client, settings: DataplaneSettings
    ) -> Optional[Endpoint]:
        """See the base class."""
        if not endpoints or not hashing.is_hashed(service_port, settings):
            return None
        if hashing.by_port(service_port) and not client.port:
            return None
        return hashing.endpoint_of(service_port, endpoints, client.address, client.port)

    def shares_of(
        self, service_port: ServicePortInfo, endpoints: Sequence[Endpoint], settings: DataplaneSettings
    ) -> Shares:
        """See the base class."""
        if endpoints and hashing.is_hashed(service_port, settings):
            owned = Counter(hashing.slots_of(endpoints))
            return tuple(owned[position] for position in range(len(endpoints)))
        if not service_port.weighted:
            return (1,) * len(endpoints)
        places = Counter(slots(tuple(endpoints)))
        return tuple(places[endpoint] for endpoint in endpoints)

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """See the base class."""
        from .reached import objects_for

        return objects_for(family, tables.get(RESOURCE, {}), place)

    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return an entry in the syntax of the nft program."""
        from .text import describe

        return describe(family, key, value)

    def summary(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """See the base class; of slots, only how many each endpoint has."""
        from .text import describe, describe_slots

        return describe_slots(family, key, value) or describe(family, key, value)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """See the base class."""
        from .text import restore_text

        return {f"nft {family}": restore_text(family, tables)}


RENDERING = NftablesRendering()
