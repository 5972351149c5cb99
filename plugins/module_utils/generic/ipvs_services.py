# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User-declared virtual servers: desired tables for the IPVS resources, with the servers that are kept.

A task may declare a virtual server with all its real servers, or with some of them only, so that each real server can
be added and removed by a separate task.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Collection, Iterable, Mapping, NamedTuple, Optional

from ..base.addresses import IPV4, IPV6, UNSPECIFIED, address_bits, canonical_address, family_of
from ..base.errors import ConfigurationError, KernelError, errors_as
from ..base.ipvs_schedulers import SCHEDULER_FLAGS
from ..kernel.facts import kernel_release
from ..kernel.ipvs.servers import IpvsSocket, RealServersResource, TimeoutsResource, VirtualServersResource
from ..kernel.modules.module_profile import scheduler_module
from ..kernel.modules.modules import ModulesResource, available_modules
from ..rendering.ipvs.model import (
    FIREWALL_MARK,
    MASQUERADE,
    ONE_PACKET,
    PERSISTENT,
    RealServer,
    RealServerKey,
    VirtualServer,
    VirtualServerKey,
    host_prefix,
)
from ..resources import Stage

FORWARDING: Mapping[str, str] = {"nat": MASQUERADE, "dr": "route", "tunnel": "tunnel"}
_LONGEST_PERSISTENCE_SECONDS = 31 * 24 * 3600
# The kernel's limit: a number of ticks that fits into a signed integer, at up to 1,000 ticks per second.
_LONGEST_TIMEOUT_SECONDS = 0x7FFFFFFF // 1000
_LARGEST_WEIGHT = 65535
_DEFAULT_SCHEDULER = "wlc"
_FAMILIES: Mapping[str, str] = {"ipv4": IPV4, "ipv6": IPV6}


class ListedReal(NamedTuple):
    """A declared real server.

    ``port``: None for the virtual server's. ``forwarding``: nat, dr or tunnel. ``present``: False if it is to be
    removed.
    """

    address: str
    port: Optional[int] = None
    weight: int = 1
    forwarding: str = "nat"
    present: bool = True


class ListedServer(NamedTuple):
    """A virtual server as the user declares it: by address, port and protocol, or by firewall mark and family.

    ``scheduler`` to ``flags`` are its settings, None for the default. ``persistence``: seconds during which a client
    keeps its real server, 0 for none. ``persistence_prefix``: bits by which clients are grouped, None for no grouping.
    ``flags``: keys of SCHEDULER_FLAGS. ``real_servers``: None if they are not managed. ``exclusive``: whether real
    servers that are not listed are removed.
    """

    address: Optional[str] = None
    port: Optional[int] = None
    protocol: Optional[str] = None
    scheduler: Optional[str] = None
    persistence: Optional[int] = None
    persistence_prefix: Optional[int] = None
    one_packet: Optional[bool] = None
    flags: Optional[tuple[str, ...]] = None
    real_servers: Optional[tuple[ListedReal, ...]] = None
    exclusive: bool = True
    firewall_mark: Optional[int] = None
    family: Optional[str] = None

    @property
    def has_settings(self) -> bool:
        """Return whether the user gave any setting of the virtual server itself."""
        settings = (self.scheduler, self.persistence, self.persistence_prefix, self.one_packet, self.flags)
        return any(setting is not None for setting in settings)


@dataclasses.dataclass
class ListedTables:
    """The desired entries.

    ``managed``: virtual servers whose real servers are to be exactly those listed. ``lenient``: those that keep their
    settings if they exist. ``existing``: lenient ones that are not created, since the task only removes real servers of
    them. ``absent``: real servers that are to be removed.
    """

    servers: dict[VirtualServerKey, VirtualServer] = dataclasses.field(default_factory=dict)
    real_servers: dict[RealServerKey, RealServer] = dataclasses.field(default_factory=dict)
    managed: set[VirtualServerKey] = dataclasses.field(default_factory=set)
    lenient: set[VirtualServerKey] = dataclasses.field(default_factory=set)
    existing: set[VirtualServerKey] = dataclasses.field(default_factory=set)
    absent: set[RealServerKey] = dataclasses.field(default_factory=set)


def _address(where: str, text: str) -> str:
    address = canonical_address(text)
    if address is None:
        raise ConfigurationError(f"{where}.address: {text!r} is not an IP address")
    return address


def _number(where: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ConfigurationError(f"{where}: {value} is not between {least} and {most}")
    return value


def _settings(where: str, listed: ListedServer, key: VirtualServerKey) -> VirtualServer:
    scheduler = listed.scheduler or _DEFAULT_SCHEDULER
    with errors_as(ConfigurationError, f"{where}.scheduler", ConfigurationError):
        scheduler_module(scheduler)
    persistence = listed.persistence or 0
    flags = PERSISTENT if persistence else 0
    if listed.one_packet:
        if key.protocol not in ("udp", FIREWALL_MARK):
            raise ConfigurationError(f"{where}.one_packet: only for protocol udp and firewall marks")
        flags |= ONE_PACKET
    for name in listed.flags or ():
        its_scheduler, flag = SCHEDULER_FLAGS[name]
        if its_scheduler not in ("", scheduler):
            raise ConfigurationError(f"{where}.flags: {name} belongs to scheduler {its_scheduler}, not {scheduler}")
        flags |= flag
    if listed.persistence_prefix is not None and not persistence:
        raise ConfigurationError(f"{where}.persistence_prefix: only with persistence")
    family = family_of(key.address)
    prefix = host_prefix(family)
    if listed.persistence_prefix is not None:
        prefix = _number(f"{where}.persistence_prefix", listed.persistence_prefix, 1, address_bits(family))
    seconds = _number(f"{where}.persistence", persistence, 0, _LONGEST_PERSISTENCE_SECONDS)
    return VirtualServer(scheduler, flags, seconds, prefix)


def _key(where: str, listed: ListedServer) -> VirtualServerKey:
    if listed.firewall_mark is not None:
        for name, value in (("address", listed.address), ("port", listed.port), ("protocol", listed.protocol)):
            if value is not None:
                raise ConfigurationError(f"{where}.{name}: not together with firewall_mark")
        mark = _number(f"{where}.firewall_mark", listed.firewall_mark, 1, 0xFFFFFFFF)
        return VirtualServerKey(FIREWALL_MARK, UNSPECIFIED[_FAMILIES[listed.family or "ipv4"]], mark)
    if listed.family is not None:
        raise ConfigurationError(f"{where}.family: only with firewall_mark; an address has its own family")
    if listed.address is None or listed.port is None:
        raise ConfigurationError(f"{where}: needs address and port, or firewall_mark")
    # Port 0 means all ports for which the address has no virtual server of its own.
    port = _number(f"{where}.port", listed.port, 0, 65535)
    return VirtualServerKey(listed.protocol or "tcp", _address(where, listed.address), port)


def _real_key(where: str, server: VirtualServerKey, listed: ListedReal) -> RealServerKey:
    address = _address(where, listed.address)
    marked = server.protocol == FIREWALL_MARK
    # Behind a mark and a virtual server of all ports, port 0 means the port to which the packet was sent.
    usual = 0 if marked else server.port
    port = usual if listed.port is None else _number(f"{where}.port", listed.port, 1 if usual else 0, 65535)
    if listed.forwarding != "nat" and port != usual:
        other = "is given" if not usual else f"differs from the virtual server's {usual}"
        raise ConfigurationError(f"{where}.port: {port} {other}, which only forwarding nat can do")
    if listed.forwarding != "tunnel" and family_of(address) != family_of(server.address):
        raise ConfigurationError(f"{where}.address: {address} is of another family than {server.address}")
    return RealServerKey(server, address, port)


def listed_tables(listed: Iterable[ListedServer]) -> ListedTables:
    """Return the desired tables. Raises ConfigurationError naming the first invalid field."""
    tables = ListedTables()
    for number, server in enumerate(listed):
        where = f"services[{number}]"
        key = _key(where, server)
        if key in tables.servers:
            raise ConfigurationError(f"{where}: virtual server {key} is given twice")
        tables.servers[key] = _settings(where, server, key)
        if not server.exclusive and not server.has_settings:
            tables.lenient.add(key)
            if server.real_servers and not any(real.present for real in server.real_servers):
                tables.existing.add(key)
        elif not key.port and not server.persistence:
            raise ConfigurationError(f"{where}.port: 0, all ports, only with persistence")
        if server.real_servers is None:
            continue
        if server.exclusive:
            tables.managed.add(key)
        for position, real in enumerate(server.real_servers):
            place = f"{where}.real_servers[{position}]"
            real_key = _real_key(place, key, real)
            if real_key in tables.real_servers or real_key in tables.absent:
                raise ConfigurationError(f"{place}: real server {real_key} is given twice")
            if not real.present:
                tables.absent.add(real_key)
                continue
            weight = _number(f"{place}.weight", real.weight, 0, _LARGEST_WEIGHT)
            tables.real_servers[real_key] = RealServer(weight, FORWARDING[real.forwarding])
    return tables


def listed_timeouts(timeouts: Mapping[str, Optional[int]]) -> dict[str, int]:
    """Return the timeouts that are given, in seconds by name. Raises ConfigurationError."""
    return {
        name: _number(f"timeouts.{name}", value, 1, _LONGEST_TIMEOUT_SECONDS)
        for name, value in timeouts.items()
        if value is not None
    }


def purged_addresses(addresses: Iterable[str]) -> frozenset[str]:
    """Return canonical addresses. Raises ConfigurationError for the first invalid one."""
    return frozenset(_address(f"purge[{number}]", text) for number, text in enumerate(addresses))


def desired_servers(
    observed: Mapping[VirtualServerKey, VirtualServer], tables: ListedTables, purge: Collection[str], present: bool
) -> dict[VirtualServerKey, VirtualServer]:
    """Return all virtual servers as desired: those listed, and others unchanged unless their address is purged.

    Those of firewall marks have no address, so no purge removes them.
    """
    kept = {
        key: value
        for key, value in observed.items()
        if key not in tables.servers and (key.address not in purge or key.protocol == FIREWALL_MARK)
    }
    if not present:
        return kept
    unchanged = {key: observed[key] for key in tables.lenient if key in observed}
    listed = {key: value for key, value in tables.servers.items() if key not in tables.existing}
    return {**kept, **listed, **unchanged}


def desired_real_servers(
    observed: Mapping[RealServerKey, RealServer], tables: ListedTables, purge: Collection[str], present: bool
) -> dict[RealServerKey, RealServer]:
    """Return all real servers as desired: those listed, and others unchanged unless their virtual server is managed."""
    kept = {}
    for key, value in observed.items():
        listed = key.server in tables.servers
        removed = (key.server in tables.managed or key in tables.absent) if present else listed
        purged = key.server.address in purge and key.server.protocol != FIREWALL_MARK
        if not removed and (listed or not purged):
            kept[key] = value
    return {**kept, **tables.real_servers} if present else kept


def unavailable_schedulers(tables: ListedTables, root: str = "") -> str:
    """Return the fault of the schedulers of the desired virtual servers, in one line; empty if none is known.

    It uses the list of modules installed for the running kernel, so that a wrong name is found before any change.
    """
    release = kernel_release()
    if not available_modules(release, root):
        return ""
    created = [value for key, value in tables.servers.items() if key not in tables.existing]
    names = {scheduler_module(value.scheduler): value.scheduler for value in created}
    unavailable = ModulesResource(sorted(names), release=release, root=root).unavailable(sorted(names))
    return "; ".join(f"IPVS scheduler {names[name]}: module {name} {reason}" for name, reason in unavailable.items())


def connect(root: str = "") -> IpvsSocket:
    """Connect to IPVS. Raises KernelError that says what to do if the kernel has no IPVS."""
    try:
        return IpvsSocket()
    except KernelError as error:
        reason = ModulesResource(["ip_vs"], root=root).unavailable(["ip_vs"]).get("ip_vs", "load it: modprobe ip_vs")
        raise KernelError(f"{error}; module ip_vs: {reason}") from error


def stages(
    connection: IpvsSocket,
    tables: ListedTables,
    *,
    purge: Collection[str],
    present: bool,
    timeouts: Mapping[str, int],
    families: Collection[str] = (),
) -> list[Stage]:
    """Return the stages to plan and apply, by family; a family without declared or purged entries is skipped.

    ``families``: those to include in any case.
    """
    chosen = {family_of(address) for address in [*(key.address for key in tables.servers), *purge]}.union(families)
    result = [Stage(TimeoutsResource(connection, timeouts), timeouts)] if timeouts else []
    for family in sorted(chosen):
        servers = VirtualServersResource(connection, family, marks=True)
        real_servers = RealServersResource(connection, family, marks=True)
        wanted = dataclasses.replace(
            tables,
            servers={key: value for key, value in tables.servers.items() if family_of(key.address) == family},
            real_servers={
                key: value for key, value in tables.real_servers.items() if family_of(key.server.address) == family
            },
        )
        result.append(Stage(servers, partial(desired_servers, tables=wanted, purge=purge, present=present)))
        result.append(Stage(real_servers, partial(desired_real_servers, tables=wanted, purge=purge, present=present)))
    return result
