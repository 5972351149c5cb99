# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Virtual servers, real servers and timeouts of IPVS as resources.

Needs the module ip_vs (the generic netlink family IPVS) and CAP_NET_ADMIN in the network namespace. A whole change is
sent in a few system calls; creating what exists and removing what does not exist are not errors. Firewall mark
services, and protocols other than TCP, UDP and SCTP, are ignored.
"""

from __future__ import annotations

import contextlib
import errno
from typing import Callable, Iterable, Iterator, Mapping, Optional, Sequence, TypeVar

from ...base.addresses import IPV4, family_of
from ...base.closing import Closing, closed_on_error
from ...base.errors import KernelError
from ...rendering.ipvs.model import RealServer, RealServerKey, VirtualServer, VirtualServerKey
from ...rendering.ipvs.text import real_server_line, virtual_server_line
from ...resources import Change, Kind, Resource
from ..facts import PROC_IPVS
from ..netlink.generic import generic_family, has_number
from ..netlink.outcomes import MessageError, NetlinkRefusal, Reply, is_existing, is_missing, refusals_as
from ..netlink.protocol import NETLINK_GENERIC, Slice
from ..netlink.socket import NetlinkSocket
from . import messages

_FAMILY = "IPVS"
Key = TypeVar("Key")
Value = TypeVar("Value")


class IpvsSocket(Closing):
    """A connection to IPVS in the network namespace of the calling thread; a context manager.

    Raises KernelError if the kernel has no IPVS (module ip_vs not loaded) or no socket can be opened.

    ``lost``: a request has shown that ip_vs was unloaded, which an open socket does not prevent. No request succeeds
    any more, even if the module was loaded again: another socket is needed.
    """

    def __init__(self) -> None:
        self.lost = False
        self.netlink = NetlinkSocket(NETLINK_GENERIC)
        with closed_on_error(self.netlink):
            self.family_id = generic_family(self.netlink, _FAMILY)

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self.netlink.close()

    def _check_family(self, errors: Iterable[MessageError]) -> None:
        """Raise KernelError if ip_vs was unloaded: the kernel then answers as for a server that does not exist."""
        missing = any(error.errno == errno.ENOENT for error in errors)
        if missing and not has_number(self.netlink, _FAMILY, self.family_id):
            self.lost = True
            raise KernelError("IPVS: the module ip_vs was unloaded")

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise KernelError for a request that the kernel refuses because ip_vs was unloaded."""
        try:
            yield
        except NetlinkRefusal as refusal:
            self._check_family([refusal.error])
            raise

    def _dump(self, payload: bytes) -> list[Slice]:
        """Return a dump of IPVS. Raises NetlinkRefusal; KernelError, also if ip_vs was unloaded."""
        with self._checked():
            return self.netlink.dump(self.family_id, payload)

    def _request(self, payload: bytes) -> list[Reply]:
        """Send one request and return its answers. Raises as :meth:`_dump` does."""
        with self._checked():
            return self.netlink.request(self.family_id, payload)

    def services(
        self, family: str, marks: bool = False
    ) -> Iterator[tuple[VirtualServerKey, VirtualServer, dict[int, memoryview]]]:
        """Yield all virtual servers of a family with all their attributes.

        ``marks``: also those that are named by a firewall mark. Raises KernelError.
        """
        with refusals_as("virtual servers cannot be listed"):
            dump = self._dump(messages.header(messages.GET_SERVICE))
        for buffer, _kind, start, end in dump:
            attributes = messages.service_attributes(buffer, start, end)
            entry = messages.decode_service(attributes, marks)
            if entry is not None and family_of(entry[0].address) == family:
                yield (*entry, attributes)

    def real_server_messages(self, server: VirtualServerKey) -> Iterator[tuple[memoryview, int, int]]:
        """Yield the encoded real servers of a virtual server: buffer, start and end of the message in it.

        A virtual server that does not exist has none. Raises KernelError.
        """
        request = messages.header(messages.GET_DEST) + messages.service_identity(server)
        dump: list[Slice] = []
        with refusals_as(f"real servers of {server} cannot be listed", is_missing):
            dump = self._dump(request)
        for view, _kind, start, end in dump:
            yield view, start, end

    def virtual_servers(self, family: str, marks: bool = False) -> dict[VirtualServerKey, VirtualServer]:
        """Return all virtual servers of a family; with ``marks``, also those of firewall marks. Raises KernelError."""
        return {key: value for key, value, _attributes in self.services(family, marks)}

    def real_servers(self, family: str, marks: bool = False) -> messages.RealServerTable:
        """Return all real servers of a family, and their connections. Raises KernelError.

        ``marks``: also those of virtual servers that are named by a firewall mark.
        """
        return self._complete(self._proc_table(family), self.virtual_servers(family, marks))

    def real_servers_of(self, servers: Iterable[VirtualServerKey]) -> messages.RealServerTable:
        """Return the real servers of some virtual servers, and their connections. Raises KernelError.

        A virtual server that does not exist has none.
        """
        return self._complete(messages.empty_table(), servers)

    def _complete(
        self, table: messages.RealServerTable, servers: Iterable[VirtualServerKey]
    ) -> messages.RealServerTable:
        """Add the real servers of the virtual servers that the table lacks, by a dump for each."""
        for server in servers:
            if server in table.seen:
                continue
            table.seen.add(server)
            for view, start, end in self.real_server_messages(server):
                messages.decode_dest(view, start, end, server, table)
        return table

    @staticmethod
    def _proc_table(family: str) -> messages.RealServerTable:
        """Parse /proc, which has gaps if other network namespaces have virtual servers; empty without /proc."""
        try:
            with open(PROC_IPVS, encoding="ascii") as stream:
                return messages.parse_proc(stream.read().splitlines(), family)
        except FileNotFoundError:
            return messages.empty_table()
        except OSError as error:
            raise KernelError(f"real servers cannot be listed: {PROC_IPVS}: {error.strerror}") from error

    def timeouts(self) -> dict[str, int]:
        """Return the timeouts of connections in seconds, by name: tcp, tcp_fin, udp. Raises KernelError."""
        with refusals_as("IPVS timeouts cannot be read"):
            replies = self._request(messages.header(messages.GET_CONFIG))
        return messages.decode_timeouts(replies[0].payload) if replies else {}

    def set_timeouts(self, seconds: dict[str, int]) -> None:
        """Set timeouts by name (tcp, tcp_fin, udp); those absent or 0 are not changed. Raises KernelError."""
        with refusals_as(f"IPVS timeouts cannot be set to {seconds}"):
            self._request(messages.encode_timeouts(seconds))

    def send(
        self,
        batch: Iterable[bytes],
        name_of: Callable[[int], str],
        verb: str,
        fine: Callable[[MessageError], bool],
        hints: Mapping[int, str],
    ) -> None:
        """Send messages; raise the first error that is not ``fine`` as KernelError.

        ``name_of`` returns the name of the object of the message at a position, ``verb`` is the failed operation,
        ``hints`` are texts to append to errors by their number.
        """
        errors = self.netlink.transact_ready(batch).errors
        self._check_family(errors)
        refused = [error for error in errors if not fine(error)]
        if refused:
            raise KernelError(_refusal_text(refused, name_of, verb, hints))


def _refusal_text(
    refused: Sequence[MessageError], name_of: Callable[[int], str], verb: str, hints: Mapping[int, str]
) -> str:
    first = refused[0]
    hint = hints.get(first.errno, "")
    others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return f"{name_of(first.position)} cannot be {verb}: {first}{hint}{others}"


def _steps(
    change: Change[Key, Value], commands: tuple[int, int, int], added: str
) -> Iterator[tuple[int, dict[Key, Optional[Value]], str, Callable[[MessageError], bool]]]:
    """Yield the steps of a change: a command, the entries it is about, the verb for errors, and which are none."""
    new, edit, delete = commands
    yield new, {**change.added}, added, is_existing
    yield edit, {key: value for key, (_old, value) in change.replaced.items()}, "changed", lambda _error: False
    # If a virtual server is missing, its real servers are as well.
    yield delete, dict.fromkeys(change.removed), "removed", is_missing


class VirtualServersResource(Resource[VirtualServerKey, VirtualServer]):
    """The virtual servers of a family: VirtualServerKey -> VirtualServer.

    It sees all of the family, since virtual servers do not record which program created them; use
    ``draining.with_excluded`` to keep those that excludeCIDRs assign to other programs. Those of firewall marks
    are never kube-proxy's; they are omitted unless ``marks`` is set.
    """

    kind = Kind.VIRTUAL_SERVERS

    def __init__(self, sock: IpvsSocket, family: str = IPV4, marks: bool = False) -> None:
        self._socket = sock
        self.family = family
        self._marks = marks

    def observe(self) -> dict[VirtualServerKey, VirtualServer]:
        """See the class. Raises KernelError."""
        return self._socket.virtual_servers(self.family, self._marks)

    def apply(self, change: Change[VirtualServerKey, VirtualServer]) -> None:
        """Create, edit in place and remove virtual servers. Raises KernelError naming the first that was refused."""
        missing = "; the scheduler's module is missing or its name is wrong"
        hints = {errno.ENOENT: missing, errno.EPERM: "; CAP_NET_ADMIN is needed"}
        encode = messages.ServiceEncoder(self._socket.family_id).message
        commands = (messages.NEW_SERVICE, messages.SET_SERVICE, messages.DELETE_SERVICE)
        for command, entries, verb, fine in _steps(change, commands, "created"):
            # A list, so that nothing is sent if one of them cannot be encoded.
            batch = [encode(command, key, value) for key, value in entries.items()]
            names = [
                f"virtual server {key}{f' with scheduler {value.scheduler}' if value else ''}"
                for key, value in entries.items()
            ]
            self._socket.send(batch, names.__getitem__, verb, fine, hints)

    @staticmethod
    def describe(key: VirtualServerKey, value: VirtualServer) -> list[str]:
        """Return one line as ``ipvsadm -Sn`` prints it."""
        return [virtual_server_line(key, value)]


class RealServersResource(Resource[RealServerKey, RealServer]):
    """The real servers of a family: RealServerKey -> RealServer; ``marks`` as for VirtualServersResource.

    After ``observe``, ``connections`` has the number of connections of those that have any, which
    ``draining.with_draining`` needs, and ``used`` the number of those in use.
    """

    kind = Kind.REAL_SERVERS

    def __init__(self, sock: IpvsSocket, family: str = IPV4, marks: bool = False) -> None:
        self._socket = sock
        self.family = family
        self._marks = marks
        self.connections: dict[RealServerKey, int] = {}
        self.used: dict[RealServerKey, int] = {}

    def observe(self) -> dict[RealServerKey, RealServer]:
        """See the class. Raises KernelError."""
        table = self._socket.real_servers(self.family, self._marks)
        self.connections, self.used = table.connections, table.used
        return table.servers

    def apply(self, change: Change[RealServerKey, RealServer]) -> None:
        """Add, edit and remove real servers. Raises KernelError naming the first that was refused.

        They are added in the order of their keys. The schedulers mh and sh depend on the order, so nodes that make the
        same change send a client to the same endpoint.
        """
        hints = {errno.ESRCH: "; its virtual server does not exist", errno.EPERM: "; CAP_NET_ADMIN is needed"}
        encode = messages.RealServerEncoder(self._socket.family_id).messages
        ordered = Change(dict(sorted(change.added.items())), change.replaced, change.removed)
        for command, entries, verb, fine in _steps(
            ordered, (messages.NEW_DEST, messages.SET_DEST, messages.DELETE_DEST), "added"
        ):
            self._socket.send(encode(command, entries.items()), self._namer(entries), verb, fine, hints)

    @staticmethod
    def _namer(keys: Iterable[RealServerKey]) -> Callable[[int], str]:
        return lambda position: f"real server {list(keys)[position]}"

    @staticmethod
    def describe(key: RealServerKey, value: RealServer) -> list[str]:
        """Return one line as ``ipvsadm -Sn`` prints it."""
        return [real_server_line(key, value)]


class TimeoutsResource(Resource[str, int]):
    """Timeouts of IPVS connections in seconds: tcp, tcp_fin, udp. Only those named are managed, and never undone."""

    kind = Kind.TIMEOUTS

    def __init__(self, sock: IpvsSocket, names: Iterable[str]) -> None:
        self._socket = sock
        self._names: tuple[str, ...] = tuple(names)

    def observe(self) -> dict[str, int]:
        """Return the kernel's value of each named timeout. Raises KernelError."""
        known = self._socket.timeouts() if self._names else {}
        return {name: known[name] for name in self._names if name in known}

    def apply(self, change: Change[str, int]) -> None:
        """Set all new or different values in one message. Raises KernelError."""
        wanted = change.new_values()
        if wanted:
            self._socket.set_timeouts(wanted)

    @staticmethod
    def describe(key: str, value: int) -> list[str]:
        """Return one line such as ``ipvs timeout tcp 900``."""
        return [f"ipvs timeout {key} {value}"]
