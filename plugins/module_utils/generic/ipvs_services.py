# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User-declared virtual servers, and which others are kept: desired tables for the IPVS resources."""

from __future__ import annotations

from functools import partial
from typing import Collection, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..addresses import address_bits, canonical_address, family_of
from ..errors import ConfigurationError, KernelError
from ..kernel.facts import kernel_release
from ..kernel.ipvs.servers import IpvsSocket, RealServersResource, VirtualServersResource
from ..kernel.modules import ModulesResource, available_modules, scheduler_module
from ..rendering.ipvs.model import (
    MASQUERADE,
    ONE_PACKET,
    PERSISTENT,
    SCHEDULER_FLAG_1,
    SCHEDULER_FLAG_2,
    SCHEDULER_FLAG_3,
    RealServer,
    RealServerKey,
    VirtualServer,
    VirtualServerKey,
    host_prefix,
)
from ..resources import Stage

FORWARDING: Mapping[str, str] = {"nat": MASQUERADE, "dr": "route", "tunnel": "tunnel"}
SCHEDULER_FLAGS: Mapping[str, Tuple[str, int]] = {
    "sh-fallback": ("sh", SCHEDULER_FLAG_1),
    "sh-port": ("sh", SCHEDULER_FLAG_2),
    "mh-fallback": ("mh", SCHEDULER_FLAG_1),
    "mh-port": ("mh", SCHEDULER_FLAG_2),
    "flag-1": ("", SCHEDULER_FLAG_1),
    "flag-2": ("", SCHEDULER_FLAG_2),
    "flag-3": ("", SCHEDULER_FLAG_3),
}
_LONGEST_PERSISTENCE_SECONDS = 31 * 24 * 3600
_LARGEST_WEIGHT = 65535


class ListedReal(NamedTuple):
    """A declared real server. ``port``: None for the virtual server's. ``forwarding``: nat, dr or tunnel."""

    address: str
    port: Optional[int] = None
    weight: int = 1
    forwarding: str = "nat"


class ListedServer(NamedTuple):
    """A virtual server as the user declares it.

    ``persistence``: seconds during which a client keeps its real server, 0 for none. ``persistence_prefix``: bits by
    which clients are grouped, None for no grouping. ``flags``: keys of SCHEDULER_FLAGS. ``real_servers``: None if they
    are not managed.
    """

    address: str
    port: int
    protocol: str = "tcp"
    scheduler: str = "wlc"
    persistence: int = 0
    persistence_prefix: Optional[int] = None
    one_packet: bool = False
    flags: Tuple[str, ...] = ()
    real_servers: Optional[Tuple[ListedReal, ...]] = None


class ListedTables(NamedTuple):
    """The desired entries. ``managed``: virtual servers whose real servers are to be exactly those listed."""

    servers: Dict[VirtualServerKey, VirtualServer]
    real_servers: Dict[RealServerKey, RealServer]
    managed: FrozenSet[VirtualServerKey]


def _address(where: str, text: str) -> str:
    address = canonical_address(text)
    if address is None:
        raise ConfigurationError(f"{where}.address: {text!r} is not an IP address")
    return address


def _number(where: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ConfigurationError(f"{where}: {value} is not between {least} and {most}")
    return value


def _settings(where: str, listed: ListedServer, family: str) -> VirtualServer:
    try:
        scheduler_module(listed.scheduler)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}.scheduler: {error}") from error
    flags = PERSISTENT if listed.persistence else 0
    if listed.one_packet:
        if listed.protocol != "udp":
            raise ConfigurationError(f"{where}.one_packet: only for protocol udp")
        flags |= ONE_PACKET
    for name in listed.flags:
        scheduler, flag = SCHEDULER_FLAGS[name]
        if scheduler not in ("", listed.scheduler):
            raise ConfigurationError(f"{where}.flags: {name} belongs to scheduler {scheduler}, not {listed.scheduler}")
        flags |= flag
    if listed.persistence_prefix is not None and not listed.persistence:
        raise ConfigurationError(f"{where}.persistence_prefix: only with persistence")
    prefix = host_prefix(family)
    if listed.persistence_prefix is not None:
        prefix = _number(f"{where}.persistence_prefix", listed.persistence_prefix, 1, address_bits(family))
    seconds = _number(f"{where}.persistence", listed.persistence, 0, _LONGEST_PERSISTENCE_SECONDS)
    return VirtualServer(listed.scheduler, flags, seconds, prefix)


def _real(where: str, key: VirtualServerKey, listed: ListedReal) -> Tuple[RealServerKey, RealServer]:
    address = _address(where, listed.address)
    port = key.port if listed.port is None else _number(f"{where}.port", listed.port, 1, 65535)
    if listed.forwarding != "nat" and port != key.port:
        raise ConfigurationError(
            f"{where}.port: {port} differs from the virtual server's {key.port}, which only forwarding nat can do"
        )
    if listed.forwarding != "tunnel" and family_of(address) != family_of(key.address):
        raise ConfigurationError(f"{where}.address: {address} is of another family than {key.address}")
    weight = _number(f"{where}.weight", listed.weight, 0, _LARGEST_WEIGHT)
    return RealServerKey(key, address, port), RealServer(weight, FORWARDING[listed.forwarding])


def listed_tables(listed: Iterable[ListedServer]) -> ListedTables:
    """Return the desired tables. Raises ConfigurationError naming the first invalid field."""
    tables = ListedTables({}, {}, frozenset())
    managed: Set[VirtualServerKey] = set()
    for number, server in enumerate(listed):
        where = f"services[{number}]"
        address = _address(where, server.address)
        key = VirtualServerKey(server.protocol, address, _number(f"{where}.port", server.port, 1, 65535))
        if key in tables.servers:
            raise ConfigurationError(f"{where}: virtual server {key} is given twice")
        tables.servers[key] = _settings(where, server, family_of(address))
        if server.real_servers is None:
            continue
        managed.add(key)
        for position, real in enumerate(server.real_servers):
            place = f"{where}.real_servers[{position}]"
            real_key, value = _real(place, key, real)
            if real_key in tables.real_servers:
                raise ConfigurationError(f"{place}: real server {real_key} is given twice")
            tables.real_servers[real_key] = value
    return tables._replace(managed=frozenset(managed))


def purged_addresses(addresses: Iterable[str]) -> FrozenSet[str]:
    """Return canonical addresses. Raises ConfigurationError for the first invalid one."""
    return frozenset(_address(f"purge[{number}]", text) for number, text in enumerate(addresses))


def desired_servers(
    observed: Mapping[VirtualServerKey, VirtualServer], tables: ListedTables, purge: Collection[str], present: bool
) -> Dict[VirtualServerKey, VirtualServer]:
    """Return all virtual servers as desired: those listed, and others unchanged unless their address is purged."""
    kept = {key: value for key, value in observed.items() if key not in tables.servers and key.address not in purge}
    return {**kept, **tables.servers} if present else kept


def desired_real_servers(
    observed: Mapping[RealServerKey, RealServer], tables: ListedTables, purge: Collection[str], present: bool
) -> Dict[RealServerKey, RealServer]:
    """Return all real servers as desired: those listed for managed virtual servers, others unchanged."""
    kept = {}
    for key, value in observed.items():
        listed = key.server in tables.servers
        replaced = key.server in tables.managed if present else listed
        if not replaced and (listed or key.server.address not in purge):
            kept[key] = value
    return {**kept, **tables.real_servers} if present else kept


def unavailable_schedulers(tables: ListedTables, root: str = "") -> str:
    """Return what is wrong with the schedulers of the desired virtual servers, in one line; empty if nothing is known.

    It uses the list of modules installed for the running kernel, so that a wrong name shows before any change.
    """
    release = kernel_release()
    if not available_modules(release, root):
        return ""
    names = {scheduler_module(value.scheduler): value.scheduler for value in tables.servers.values()}
    unavailable = ModulesResource(sorted(names), release=release, root=root).unavailable(sorted(names))
    return "; ".join(f"IPVS scheduler {names[name]}: module {name} {reason}" for name, reason in unavailable.items())


def connect(root: str = "") -> IpvsSocket:
    """Connect to IPVS. Raises KernelError that says what to do if the kernel has no IPVS."""
    try:
        return IpvsSocket()
    except KernelError as error:
        reason = ModulesResource(["ip_vs"], root=root).unavailable(["ip_vs"]).get("ip_vs", "load it: modprobe ip_vs")
        raise KernelError(f"{error}; module ip_vs: {reason}") from error


def stages(connection: IpvsSocket, tables: ListedTables, purge: Collection[str], present: bool) -> List[Stage]:
    """Return the stages to plan and apply, by family; a family without declared or purged entries is skipped."""
    families = {family_of(address) for address in [*(key.address for key in tables.servers), *purge]}
    result = []
    for family in sorted(families):
        servers = VirtualServersResource(connection, family)
        real_servers = RealServersResource(connection, family)
        wanted = ListedTables(
            {key: value for key, value in tables.servers.items() if family_of(key.address) == family},
            {key: value for key, value in tables.real_servers.items() if family_of(key.server.address) == family},
            tables.managed,
        )
        result.append(Stage(servers, partial(desired_servers, tables=wanted, purge=purge, present=present)))
        result.append(Stage(real_servers, partial(desired_real_servers, tables=wanted, purge=purge, present=present)))
    return result
