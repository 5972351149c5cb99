# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The devices of ipvs and userspace mode and the addresses on one of them, over route netlink.

Addresses are bound as single hosts (/32, /128); link-local IPv6 addresses are ignored. The device with
the addresses is never brought up: for local delivery the addresses need only exist.
"""

from __future__ import annotations

import socket
import struct
from typing import Callable, Iterable, Mapping, NamedTuple, Optional

from ...base.addresses import IPV6, address_bits, is_link_local, packed, unpacked
from ...base.errors import KernelError
from ...rendering.ipvs.model import DEVICE
from ...rendering.ipvs.text import address_line
from ...resources import Change, Kind, Resource
from ..netlink.attributes import attribute, nested, parse_attributes, text_attribute
from ..netlink.outcomes import MessageError, NetlinkRefusal, is_existing, is_missing, is_unsupported, refusals_as
from ..netlink.protocol import NLM_F_CREATE, NLM_F_EXCL, Message
from ..netlink.socket import NetlinkSocket
from .addresses import IFA_ADDRESS, IFA_CACHEINFO, IFA_LOCAL, IFADDRMSG, RTM_DELADDR, RTM_NEWADDR, each_address
from .ports import IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINKINFO, LINK, RTM_GETLINK, RTM_NEWLINK, kind_of

_RTM_DELLINK = 17
_IFA_F_NODAD = 0x02
_IFF_UP = 1

#: The device that copies every netlink message of its network namespace (drivers/net/nlmon.c).
MONITORING_DEVICE = "kube-nlmon0"
MONITORING_KIND = "nlmon"
#: struct ifa_cacheinfo: an address that is valid forever and deprecated from the start.
_DEPRECATED = struct.pack("=IIII", 0, 0xFFFFFFFF, 0, 0)


class Link(NamedTuple):
    """A network device: its interface index and its kind (``dummy``, ``veth``, ...; empty for hardware)."""

    number: int
    kind: str


def find_link(sock: NetlinkSocket, name: str) -> Optional[Link]:
    """Return the device of that name, or None. ``sock`` is a NETLINK_ROUTE socket. Raises KernelError."""
    payload = LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text_attribute(IFLA_IFNAME, name)
    with refusals_as(f"device {name} cannot be read", is_missing):
        for reply in sock.request(RTM_GETLINK, payload):
            view = memoryview(reply.payload)
            return Link(LINK.unpack_from(view)[2], kind_of(parse_attributes(view, LINK.size, len(view))))
    return None


def make_device(sock: NetlinkSocket, name: str, kind: str) -> None:
    """Create a device; an existing one of that name is accepted. Raises KernelError."""
    attributes = nested(IFLA_LINKINFO, text_attribute(IFLA_INFO_KIND, kind))
    hint = f"; the kernel has no {kind} devices (module {kind})"
    _change_device(
        sock, RTM_NEWLINK, name, verb="created", attributes=attributes, flags=NLM_F_CREATE | NLM_F_EXCL, hint=hint
    )


def set_device_up(sock: NetlinkSocket, name: str) -> None:
    """Bring a device up. A missing one is ignored. Raises KernelError."""
    _change_device(sock, RTM_NEWLINK, name, verb="brought up", flag=_IFF_UP)


def remove_device(sock: NetlinkSocket, name: str) -> None:
    """Remove a device; a missing one is ignored. Raises KernelError."""
    _change_device(sock, _RTM_DELLINK, name, verb="removed")


def _change_device(
    sock: NetlinkSocket,
    message: int,
    name: str,
    *,
    verb: str,
    attributes: bytes = b"",
    flags: int = 0,
    flag: int = 0,
    hint: str = "",
) -> None:
    """Send one request about a device. ``flag`` is the flag to set on the device.

    ``hint`` is the text to append if the kernel does not support such devices.
    """
    head = LINK.pack(socket.AF_UNSPEC, 0, 0, flag, flag) + text_attribute(IFLA_IFNAME, name)
    try:
        sock.request(message, head + attributes, flags)
    except NetlinkRefusal as refusal:
        if is_existing(refusal.error) or is_missing(refusal.error):
            return
        more = hint if is_unsupported(refusal.error) else ""
        raise KernelError(f"device {name} cannot be {verb}: {refusal.error}{more}") from refusal


class _DeviceResource(Resource[str, str]):
    """One device: its name -> its kind."""

    kind = Kind.DEVICES

    def __init__(self, sock: NetlinkSocket, device: str = DEVICE) -> None:
        self._socket = sock
        self._device = device

    def observe(self) -> dict[str, str]:
        """Return the device and its kind, if it exists. Raises KernelError."""
        link = find_link(self._socket, self._device)
        return {} if link is None else {self._device: link.kind or "a physical device"}

    def describe(self, key: str, value: str) -> list[str]:
        """Return one line of arguments for ``ip``."""
        return [f"link add {key} type {value}"]


class DummyDeviceResource(_DeviceResource):
    """One dummy device: its name -> the kind of the existing device (``dummy``).

    Removing it removes all its addresses. A device of that name but another kind is never touched.
    """

    #: The kinds that it may have, by preference, and what a device of any other kind is not.
    kinds: tuple[str, ...] = ("dummy",)
    expected = "not a dummy device"

    def apply(self, change: Change[str, str]) -> None:
        """Create or remove the device. Raises KernelError, also if the existing device is of another kind."""
        occupied = {key: old for key, (old, _new) in change.replaced.items()}
        occupied.update({key: old for key, old in change.removed.items() if old not in self.kinds})
        for key, kind in occupied.items():
            raise KernelError(f"device {key}: it is {self.expected} but {kind}; remove or rename it")
        for key in change.added:
            self._make(key)
        for key in change.removed:
            remove_device(self._socket, key)

    def _make(self, name: str) -> None:
        refusals = []
        for kind in self.kinds:
            try:
                make_device(self._socket, name, kind)
                return
            except KernelError as error:
                refusals.append(str(error))
        raise KernelError("; ".join(refusals))


class AddressDeviceResource(DummyDeviceResource):
    """The device that has the service addresses of userspace mode: its name -> its kind.

    It is a dummy device, or a bridge without ports where the kernel has no dummy devices. A device of that name but
    another kind is never touched.
    """

    kinds = ("dummy", "bridge")
    expected = "neither a dummy device nor a bridge"

    def desired(self, observed: Mapping[str, str]) -> dict[str, str]:
        """Return the table for a device that must exist; either kind will do."""
        kind = observed.get(self._device, "")
        return {self._device: kind if kind in self.kinds else self.kinds[0]}


class MonitoringDeviceResource(_DeviceResource):
    """The device with which an agent in ipvs mode detects other programs' requests: its name -> its kind (``nlmon``).

    A device of that name but another kind belongs to another program: it is not observed, and so never touched.
    """

    qualifier = "monitoring"

    def __init__(self, sock: NetlinkSocket) -> None:
        super().__init__(sock, MONITORING_DEVICE)

    def observe(self) -> dict[str, str]:
        """Return the device and its kind, if it exists. Raises KernelError."""
        link = find_link(self._socket, MONITORING_DEVICE)
        return {MONITORING_DEVICE: link.kind} if link is not None and link.kind == MONITORING_KIND else {}

    def apply(self, change: Change[str, str]) -> None:
        """Create the device and bring it up, or remove it. Raises KernelError, also if it is of another kind."""
        for key, kind in change.added.items():
            link = find_link(self._socket, key)
            if link is not None and link.kind != kind:
                raise KernelError(f"device {key}: it is not of the kind {kind} but {link.kind or 'hardware'}")
            make_device(self._socket, key, kind)
            set_device_up(self._socket, key)
        for key in change.removed:
            remove_device(self._socket, key)


class AddressesResource(Resource[str, bool]):
    """The addresses of a family on the dummy device: address -> True.

    ``deprecated``: the kernel does not choose an IPv6 address on it as the source of a connection (RFC 6724, rule 3).
    """

    kind = Kind.ADDRESSES

    def __init__(self, sock: NetlinkSocket, family: str, device: str = DEVICE, deprecated: bool = False) -> None:
        self._socket = sock
        self.family = family
        self._deprecated = deprecated and family == IPV6
        self._number = socket.AF_INET6 if family == IPV6 else socket.AF_INET
        self._device = device

    def observe(self) -> dict[str, bool]:
        """See the class; empty if there is no such device. Raises KernelError."""
        link = find_link(self._socket, self._device)
        found: dict[str, bool] = {}
        if link is None:
            return found
        # The kernel's own filter by device needs strict checking (4.20), so other devices' addresses are skipped here.
        for item in each_address(self._socket, self._number):
            address = unpacked(item.packed)
            if item.interface == link.number and item.family == self.family and not is_link_local(address):
                found[address] = True
        return found

    def apply(self, change: Change[str, bool]) -> None:
        """Bind and unbind addresses. Raises KernelError naming the first address that was refused."""
        if not change:
            return
        link = find_link(self._socket, self._device)
        if link is None:
            if change.added:
                raise KernelError(f"device {self._device}: it does not exist, so no address can be bound to it")
            return
        add = NLM_F_CREATE | NLM_F_EXCL
        self._send(RTM_NEWADDR, add, link.number, addresses=list(change.added), verb="bound", fine=is_existing)
        self._send(RTM_DELADDR, 0, link.number, addresses=list(change.removed), verb="unbound", fine=is_missing)

    def _send(
        self,
        kind: int,
        flags: int,
        index: int,
        *,
        addresses: list[str],
        verb: str,
        fine: Callable[[MessageError], bool],
    ) -> None:
        refused = [
            error
            for error in self._socket.transact(self._messages(kind, flags, index, addresses)).errors
            if not fine(error)
        ]
        if refused:
            others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            address = addresses[refused[0].position]
            raise KernelError(f"address {address} cannot be {verb} on {self._device}: {refused[0]}{others}")

    def _messages(self, kind: int, request_flags: int, index: int, addresses: Iterable[str]) -> list[Message]:
        # Without duplicate address detection, which would never end on a device that is down.
        flags = _IFA_F_NODAD if self._deprecated else 0
        head = IFADDRMSG.pack(self._number, address_bits(self.family), flags, 0, index)
        tail = attribute(IFA_CACHEINFO, _DEPRECATED) if self._deprecated else b""
        found = []
        for address in addresses:
            raw = packed(address)
            if raw is None or len(raw) * 8 != address_bits(self.family):
                raise KernelError(f"address {address!r} cannot be bound: it is not an {self.family} address")
            found.append((kind, request_flags, head + attribute(IFA_LOCAL, raw) + attribute(IFA_ADDRESS, raw) + tail))
        return found

    def describe(self, key: str, value: bool) -> list[str]:
        """Return one line of arguments for ``ip``."""
        return [address_line(key, self._device)]
