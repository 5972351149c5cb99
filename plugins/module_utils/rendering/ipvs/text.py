# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tables of ipvs mode as input of the usual tools: ``ipvsadm -R``, ``ipset restore``, ``ip -batch``."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

from ...base.addresses import IPV6, address_and_port, address_bits, family_of
from ...base.ipvs_schedulers import flag_names
from . import model
from .sets import BITMAP_PORT

_PROTOCOL_OPTIONS = {"tcp": "-t", "udp": "-u", "sctp": "--sctp-service"}
_FORWARDING_OPTIONS = {"masquerade": "-m", "route": "-g", "tunnel": "-i"}


def _service(key: model.VirtualServerKey) -> str:
    if key.protocol == model.FIREWALL_MARK:
        return f"-f {key.port} -6" if family_of(key.address) == IPV6 else f"-f {key.port}"
    return f"{_PROTOCOL_OPTIONS[key.protocol]} {address_and_port(key.address, key.port)}"


def virtual_server_line(key: model.VirtualServerKey, value: model.VirtualServer) -> str:
    """Return a virtual server as ``ipvsadm -Sn`` prints it."""
    words = ["-A", _service(key), "-s", value.scheduler]
    if value.flags & model.PERSISTENT:
        words += ["-p", str(value.timeout)]
        family = family_of(key.address)
        if value.netmask != model.host_prefix(family):
            words += ["-M", str(value.netmask) if family == IPV6 else _dotted(value.netmask)]
    if value.flags & model.ONE_PACKET:
        words.append("-o")
    flags = [name for bit, name in flag_names(value.scheduler).items() if value.flags & bit]
    if flags:
        words += ["-b", ",".join(flags)]
    return " ".join(words)


def _dotted(length: int) -> str:
    mask = (0xFFFFFFFF << (32 - length)) & 0xFFFFFFFF
    return ".".join(str(mask >> shift & 255) for shift in (24, 16, 8, 0))


def real_server_line(key: model.RealServerKey, value: model.RealServer) -> str:
    """Return a real server as ``ipvsadm -Sn`` prints it."""
    forwarding = _FORWARDING_OPTIONS.get(value.forwarding, "-m")
    return f"-a {_service(key.server)} -r {address_and_port(key.ip, key.port)} {forwarding} -w {value.weight}"


def _with_members(owners: Iterable[tuple[Any, str]], members: Iterable[tuple[Any, str]]) -> str:
    """Return the line of each owner, followed by those of its members; both are pairs of an owner and a line."""
    by_owner: dict[Any, list[str]] = {}
    for owner, line in members:
        by_owner.setdefault(owner, []).append(line)
    return "".join(f"{line}\n" for owner, first in owners for line in (first, *by_owner.get(owner, ())))


def ipvsadm_text(
    servers: Mapping[model.VirtualServerKey, model.VirtualServer],
    real_servers: Mapping[model.RealServerKey, model.RealServer],
) -> str:
    """Return both tables as input of ``ipvsadm -R``: sorted, each virtual server followed by its real servers."""
    return _with_members(
        ((key, virtual_server_line(key, value)) for key, value in sorted(servers.items())),
        ((key.server, real_server_line(key, value)) for key, value in sorted(real_servers.items())),
    )


def set_line(name: str, definition: model.SetDefinition) -> str:
    """Return a set as ``ipset save`` prints it, without the options that newer kernels add."""
    if definition.type == BITMAP_PORT:
        return f"create {name} {definition.type} range 0-65535"
    family = "inet6" if definition.family == IPV6 else "inet"
    return f"create {name} {definition.type} family {family} hashsize 1024 maxelem {definition.limit}"


def element_line(key: model.SetElementKey) -> str:
    """Return an element of a set as ``ipset save`` prints it."""
    return f"add {key.set} {key.element}"


def ipset_text(sets: Mapping[str, model.SetDefinition], elements: Iterable[model.SetElementKey]) -> str:
    """Return sets and elements as input of ``ipset restore``: sorted, each set followed by its elements."""
    return _with_members(
        ((name, set_line(name, definition)) for name, definition in sorted(sets.items())),
        ((key.set, element_line(key)) for key in sorted(elements)),
    )


def device_line(device: str) -> str:
    """Return the dummy device as an argument list of ``ip``."""
    return f"link add {device} type dummy"


def address_line(address: str, device: str = model.DEVICE) -> str:
    """Return an address on the dummy device as an argument list of ``ip``."""
    return f"address add {address}/{address_bits(family_of(address))} dev {device}"


def ip_batch_text(addresses: Iterable[str], device: str = model.DEVICE) -> str:
    """Return the dummy device and its addresses as input of ``ip -batch``."""
    lines = [device_line(device), *(address_line(address, device) for address in sorted(addresses))]
    return "".join(f"{line}\n" for line in lines)
