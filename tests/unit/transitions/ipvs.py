# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A kernel with IPVS, addresses of Services, chains and tables, to which the messages of all modes are applied."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence, cast
from unittest import mock

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import unpacked
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import removal
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext, FamilyTables
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes import ipvs as mode_module
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.iptables import IPTABLES_MODE
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.ipvs_iptables import IPVS_MODE
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.ipvs_nftables import IPVS_WITH_NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.mode import Mode
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.nftables import NFTABLES_MODE
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages import chains as chains_module
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages import ipvs as stages_module
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipset import messages as ipset_messages
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipset.sets import IpsetSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs import messages
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import IpvsSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import parse_attributes
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.outcomes import MessageError, Outcome
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.ipvs_table import IpvsTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import (
    ELEMENTS_PER_TRANSACTION as MOST_ELEMENTS,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Labelled
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink import links
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink.addresses import IFADDRMSG
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.restore import RestoreError
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    SetDefinition,
    SetElementKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Resource, Stage, UnloadedResource
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext

from .iptables import Held as Chains
from .iptables import Programs, empty, variant_of
from .nftables import Crashed, Simulated, Table
from .states import Node

#: Those of ipvs mode by the filter backend.
MODES: dict[str, Mode] = {
    "iptables": IPVS_MODE,
    "nftables": IPVS_WITH_NFTABLES,
    "iptables mode": IPTABLES_MODE,
    "nftables mode": NFTABLES_MODE,
}
Tables = Mapping[str, Mapping[Any, Any]]
_SET = re.compile(r"--match-set (\S+)")
_DEVICE = 7
_BUSY = 4100
_IFA_LOCAL = 2
#: What a message that only names a virtual server lacks: flags, timeout and netmask.
_UNSET = {messages.IPVS_SVC_ATTR_FLAGS: memoryview(bytes(8))} | dict.fromkeys(
    (messages.IPVS_SVC_ATTR_TIMEOUT, messages.IPVS_SVC_ATTR_NETMASK), memoryview(bytes(4))
)


class Contents(NamedTuple):
    """What the kernel holds between two steps; nothing in it ever changes.

    ``table``: the one beside IPVS. ``services``: that of nftables mode.
    """

    servers: Mapping[VirtualServerKey, VirtualServer] = {}
    real_servers: Mapping[RealServerKey, RealServer] = {}
    addresses: Mapping[str, bool] = {}
    sets: Mapping[str, SetDefinition] = {}
    elements: Mapping[SetElementKey, bool] = {}
    chains: Chains = empty()
    table: Table = Table({})
    services: Table = Table({})


def _with(table: Mapping[Any, Any], key: Any, value: Any) -> dict[Any, Any]:
    """Return a table with another value of a key, None without the key."""
    rest = {other: kept for other, kept in table.items() if other != key or value is not None}
    return rest if value is None else {**rest, key: value}


class Refused(Exception):
    """The kernel refuses a message; the argument is the error's number."""


class Kernel:
    """A kernel that takes messages of netlink one by one, each element of a set too, and other changes in transactions.

    ``seen``: called with the state after each step. ``stop``: the number of the step after which the process ends, or
    with ``refuses`` the number of the message that the kernel refuses for want of memory; never if negative.
    """

    def __init__(
        self,
        held: Contents,
        seen: Callable[[Contents], None] = lambda _state: None,
        stop: int = -1,
        refuses: bool = False,
        family: str = "IPv4",
    ) -> None:
        self.held = held
        self.family = family
        self.steps = 0
        self.stopped = False
        #: The number of connections of each real server.
        self.connections: dict[RealServerKey, int] = {}
        #: Called with the name of a part, what it was sent, and what of that was refused.
        self.mirror: Callable[[str, Any, Sequence[MessageError]], None] = lambda *_words: None
        self._seen, self._stop, self._refuses = seen, stop, refuses
        #: The most elements of a transaction of nftables mode.
        self.most_elements = MOST_ELEMENTS
        self.programs = _Programs(self)
        self.programs.held = held.chains

    def step(self, **parts: Any) -> None:
        """Change parts of the state."""
        self.steps += 1
        self.held = self.held._replace(**parts)
        self._seen(self.held)
        if self.steps == self._stop and not self._refuses:
            self.stopped = True
            raise Crashed

    def send(self, part: str, sent: Iterable[Any], apply: Callable[[Any], None]) -> Outcome:
        """Apply messages to a part; return the errors of those that were refused."""
        outcome = Outcome([], [])
        for position, message in enumerate(sent):
            refused = []
            try:
                if self._refuses and self.steps + 1 == self._stop and not self.stopped:
                    self.stopped = True
                    raise Refused(errno.ENOMEM)
                apply(message)
            except Refused as error:
                refused.append(MessageError(position, error.args[0], "", b""))
            self.mirror(part, message, refused)
            outcome.errors.extend(refused)
        return outcome

    def handles(self) -> Any:
        """Return this kernel in place of the sockets of a convergence."""

        def table(kind: type[_Table], part: str, family: str) -> Any:
            simulated = kind(family, self.most_elements if part == "services" else MOST_ELEMENTS)
            simulated.kernel = self
            simulated.held = getattr(self.held, part) if family == self.family else Table({})
            simulated.seen = lambda table: self.step(**{part: table})
            return simulated

        route = SimpleNamespace(transact=lambda sent: self.send("addresses", sent, self._bind))
        loaded = dict.fromkeys(("has_ipvs", "has_ipset", "has_nftables"), lambda: True)
        return SimpleNamespace(
            ipvs=_Ipvs(self),
            ipset=_Ipset(self),
            route=route,
            ipvs_table=partial(table, _TableBesideIpvs, "table"),
            nftables=partial(table, _Services, "services"),
            loads=True,
            **loaded,
        )

    def _bind(self, message: Any) -> None:
        kind, _flags, payload = message
        found = parse_attributes(memoryview(payload), IFADDRMSG.size, len(payload))
        address, added = unpacked(bytes(found[_IFA_LOCAL])), kind == links.RTM_NEWADDR
        if (address in self.held.addresses) == added:
            raise Refused(errno.EEXIST if added else errno.EADDRNOTAVAIL)
        self.step(addresses=_with(self.held.addresses, address, added or None))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let resources use this kernel."""

        def addresses(_socket: Any, family: int) -> list[Any]:
            return [
                SimpleNamespace(packed=packed, interface=_DEVICE, family="IPv6" if ":" in address else "IPv4")
                for address in self.held.addresses
                if (":" in address) == (family == socket.AF_INET6)
                for packed in [socket.inet_pton(family, address)]
            ]

        def used(family: str) -> dict[RealServerKey, int]:
            return self.counted() if family == self.family else {}

        def no_stages(*_arguments: Any) -> list[Stage]:
            return []

        device = mock.patch.multiple(links, find_link=lambda *_: links.Link(_DEVICE, ""), each_address=addresses)
        no_device = Stage(UnloadedResource("devices", "", lambda *_entry: []), {})
        made = mock.patch.object(mode_module, "device_stage", lambda _handles: no_device)
        kept = mock.patch.object(stages_module, "device_removal_stages", lambda _handles, found, _kept: found)
        listed = mock.patch.object(stages_module, "used_connections", used)
        unread = no_device.resource
        # These read and set what is not simulated: a kernel parameter, and tables that iptables-nft leaves empty.
        beside = mock.patch.multiple(
            chains_module,
            localnet_stage=lambda _chains: no_device,
            EmptyTablesResource=lambda _chains: unread,
        )
        listeners = mock.patch.object(removal, "userspace_removal_stages", no_stages)
        with device, self.programs.used(), made, kept, listed, beside, listeners:
            yield

    def counted(self) -> dict[RealServerKey, int]:
        """Return the number of connections of each real server that has any."""
        return {key: count for key, count in self.connections.items() if key in self.held.real_servers}


class _Table(Simulated):
    """A table of the kernel."""

    kernel: Kernel
    parts = Resource.parts

    def _send(self, labelled: list[Labelled]) -> None:
        super()._send(labelled)
        self.kernel.mirror("table", labelled, ())


class _Services(_Table):
    """The table of nftables mode."""


class _TableBesideIpvs(_Table, IpvsTableResource):
    """The table beside IPVS."""


class _Programs(Programs):
    """The programs of iptables; a rule may name only a set that exists."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__({}, lambda held: kernel.step(chains=held))
        self._kernel = kernel

    def restore(self, _variant: Any, text: str, *_arguments: Any) -> int:
        super().restore(_variant, text)
        self._kernel.mirror("chains", text, ())
        return 0

    def _after(self, table: str, lines: list[str]) -> Chains:
        held = super()._after(table, lines)
        missing = _named(held) - self._kernel.held.sets.keys()
        if missing:
            raise RestoreError(f"sets {missing} do not exist")
        return held


def _named(chains: Chains) -> set[str]:
    return {name for rules in chains.values() for rule in rules for name in _SET.findall(rule)}


class _Ipvs(IpvsSocket):
    """IPVS: virtual and real servers."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.lost, self.family_id = False, 20
        self.netlink = SimpleNamespace(transact_ready=self._transact)  # type: ignore[assignment]

    def close(self) -> None:
        return None

    def _check_family(self, errors: Any) -> None:
        return None

    def virtual_servers(self, family: str, marks: bool = False) -> dict[VirtualServerKey, VirtualServer]:
        return dict(self._kernel.held.servers) if family == self._kernel.family else {}

    def real_servers(self, family: str, marks: bool = False) -> messages.RealServerTable:
        kernel = self._kernel
        if family != kernel.family:
            return messages.empty_table()
        counts = kernel.counted()
        return messages.RealServerTable(dict(kernel.held.real_servers), counts, counts, set(kernel.held.servers))

    def _transact(self, sent: Any) -> Outcome:
        return self._kernel.send("servers", sent, self._apply)

    def _apply(self, message: bytes) -> None:
        raw = memoryview(message)
        command, held = raw[16], self._kernel.held
        found = messages.decode_service({**_UNSET, **messages.service_attributes(raw, 16, len(raw))})
        assert found is not None
        key, value = found
        if command not in (messages.NEW_SERVICE, messages.DELETE_SERVICE) and key not in held.servers:
            raise Refused(errno.ESRCH)
        if command in (messages.NEW_SERVICE, messages.SET_SERVICE):
            if command == messages.NEW_SERVICE and key in held.servers:
                raise Refused(errno.EEXIST)
            self._kernel.step(servers={**held.servers, key: value})
        elif command == messages.DELETE_SERVICE:
            if key not in held.servers:
                raise Refused(errno.ESRCH)
            rest = {other: kept for other, kept in held.real_servers.items() if other.server != key}
            self._kernel.step(servers=_with(held.servers, key, None), real_servers=rest)
        else:
            self._apply_to_real_server(command, key, raw)

    def _apply_to_real_server(self, command: int, server: VirtualServerKey, raw: memoryview) -> None:
        attributes, held = messages.dest_attributes(raw, 16, len(raw)), self._kernel.held.real_servers
        key = messages.real_server_key(attributes, server)
        if (key in held) == (command == messages.NEW_DEST):
            raise Refused(errno.EEXIST if command == messages.NEW_DEST else errno.ENOENT)
        value = None
        if command != messages.DELETE_DEST:
            table = messages.empty_table()
            messages.decode_dest(raw, 16, len(raw), server, table)
            value = table.servers[key]
        self._kernel.step(real_servers=_with(held, key, value))


class _Ipset(IpsetSocket):
    """ipset."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.protocol = ipset_messages.NEWEST_PROTOCOL
        self.netlink = SimpleNamespace(transact=self._transact)  # type: ignore[assignment]

    def headers(self) -> dict[str, SetDefinition]:
        return dict(self._kernel.held.sets)

    def elements(self, name: str) -> list[str]:
        return [key.element for key in self._kernel.held.elements if key.set == name]

    def _revision(self, definition: SetDefinition) -> int:
        return 0

    def _transact(self, sent: Any) -> Outcome:
        return self._kernel.send("sets", sent, self._apply)

    def _apply(self, message: Any) -> None:
        command, _flags, payload = message
        view, held = memoryview(payload), self._kernel.held
        name = ipset_messages.listed_name(view, 0, len(view))
        if command == ipset_messages.CREATE:
            header = ipset_messages.decode_header(view, 0, len(view))
            assert header is not None
            self._kernel.step(sets={**held.sets, name: header[1]})
            return
        if name not in held.sets:
            raise Refused(errno.ENOENT)
        if command == ipset_messages.DESTROY:
            if name in _named(held.chains):
                raise Refused(_BUSY)
            elements = {key: True for key in held.elements if key.set != name}
            self._kernel.step(sets=_with(held.sets, name, None), elements=elements)
            return
        added = command == ipset_messages.ADD
        for element in ipset_messages.decode_elements(view, 0, len(view)):
            self._kernel.step(elements=_with(self._kernel.held.elements, SetElementKey(name, element), added or None))


def stages(kernel: Kernel, node: Node, mode: str, desired: Tables, variant: str = "legacy") -> list[Stage]:
    """Return the stages of a mode with these tables."""
    settings = SimpleNamespace(ipvs=SimpleNamespace(tcp_timeout=0, tcp_fin_timeout=0, udp_timeout=0))
    context = context_of(node, variant)
    made: Mode = MODES[mode]
    found = made.stages(cast(Any, settings), [FamilyTables(context, desired)], kernel.handles())
    return [*found, *made.extra_stages([context])]


def context_of(node: Node, variant: str) -> FamilyContext:
    return FamilyContext(node.settings(), NodeContext(node.family, "node1"), variant_of(node.family, variant))


def leaving(kernel: Kernel, mode: str) -> list[Stage]:
    """Return the stages with which a node leaves the modes that it had before."""
    handles = kernel.handles()
    return removal.leaving_stages(MODES[mode], handles) if mode else removal.server_removal_stages(handles)


def leftovers(kernel: Kernel, node: Node, mode: str, variant: str) -> list[Stage]:
    """Return the stages that remove what other modes have left, or everything without a mode."""
    handles, contexts = kernel.handles(), [context_of(node, variant)]
    if mode:
        return removal.leftover_stages(MODES[mode], handles, [] if MODES[mode].subsystems.chains else contexts)
    with mock.patch.object(removal, "policy_removal_stages", lambda _handles: []):
        return removal.removal_stages(contexts, handles)
