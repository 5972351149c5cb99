# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts about the running node: interface addresses, kernel release, cores, memory, distribution, confinement.

This module only reads. Functions that read files take ``root``, the directory under which ``/proc``, ``/sys`` and
``/etc`` are found: empty on a node, a scratch directory in tests.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from typing import NamedTuple, Optional

from ..base.addresses import FAMILIES, IPV4, IPV6, family_of, unpacked
from ..base.errors import KernelError
from .netlink.protocol import NETLINK_ROUTE
from .netlink.socket import NetlinkSocket
from .rtnetlink.addresses import each_address

# linux/rtnetlink.h, linux/if_addr.h
# linux/capability.h
CAP_NET_ADMIN = 12
#: The virtual servers and real servers of the calling thread's network namespace; it exists once IPVS is loaded.
PROC_IPVS = "/proc/thread-self/net/ip_vs"
_SCOPES = {0: "global", 200: "site", 253: "link", 254: "host"}

_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_CPU = re.compile(r"cpu\d+\Z")
_NODE = re.compile(r"node\d+\Z")


class InterfaceAddress(NamedTuple):
    """One address of an interface: canonical text, prefix length in bits, and scope as ``ip address`` prints it."""

    interface: str
    address: str
    prefix_length: int
    scope: str

    @property
    def family(self) -> str:
        """Return ``IPv4`` or ``IPv6``."""
        return family_of(self.address)


class Distribution(NamedTuple):
    """The node's operating system: os-release's ID, the IDs it is like, its version and its full name."""

    id: str
    like: tuple[str, ...]
    version: str
    name: str

    def is_like(self, *ids: str) -> bool:
        """Return whether the distribution is, or declares itself similar to, one of ``ids``."""
        return any(item in ids for item in (self.id, *self.like))


class NodeFacts(NamedTuple):
    """The facts about the node that the engine needs in addition to the cluster state.

    ``kernel_version``: three numbers. ``cores``: as kube-proxy counts them.
    ``families``: the address families the kernel supports. ``conntrack_liberal``: nf_conntrack_tcp_be_liberal is set.
    """

    kernel_version: tuple[int, int, int]
    cores: int
    conntrack_liberal: bool
    families: tuple[str, ...]


def read_text(path: str) -> Optional[str]:
    """Return the content of a small file, or None if it does not exist or may not be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return None


def capabilities(process: str = "/proc/thread-self") -> int:
    """Return the effective capabilities of a process as a bit mask; 0 if its directory does not show them."""
    for line in (read_text(f"{process}/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def may_change_network(process: str = "/proc/thread-self") -> bool:
    """Return whether a process may change addresses, devices and rules of the network (CAP_NET_ADMIN)."""
    return bool(capabilities(process) >> CAP_NET_ADMIN & 1)


# -- addresses ---------------------------------------------------------------------------------------------------------


def interface_addresses() -> list[InterfaceAddress]:
    """Return all addresses of all interfaces in this network namespace, IPv4 first, in the order of the interfaces.

    Raises KernelError if route netlink cannot be queried.
    """
    try:
        with NetlinkSocket(NETLINK_ROUTE) as connection:
            found = list(each_address(connection))
        names = dict(socket.if_nameindex())
    except KernelError as error:
        raise KernelError(f"addresses of the interfaces cannot be listed: {error}") from error
    except OSError as error:
        raise KernelError(f"names of the interfaces cannot be listed: {error.strerror or error}") from error
    return [
        InterfaceAddress(
            names.get(item.interface, f"if{item.interface}"),
            unpacked(item.packed),
            item.prefix_length,
            _SCOPES.get(item.scope, str(item.scope)),
        )
        for family in FAMILIES
        for item in found
        if item.family == family
    ]


# -- machine -----------------------------------------------------------------------------------------------------------


def boot_identity() -> str:
    """Return the kernel's boot ID, by which what a reboot invalidates is recognised; empty if it is not available."""
    return (read_text("/proc/sys/kernel/random/boot_id") or "").strip()


def machine_identity() -> str:
    """Return what identifies this installation of a system (machine-id(5)), which a copied disk image should lack."""
    return (read_text("/etc/machine-id") or "").strip()


def kernel_release() -> str:
    """Return the running kernel's release, as ``uname -r`` prints it."""
    return platform.release()


def kernel_version(release: str) -> tuple[int, int, int]:
    """Return the leading numbers of a kernel release: ``6.1.0-13-amd64`` gives (6, 1, 0). Raises KernelError."""
    match = _RELEASE.match(release)
    if match is None:
        raise KernelError(f"kernel release {release!r} does not start with a version number")
    return int(match.group(1)), int(match.group(2)), int(match.group(3) or 0)


def _directories(path: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        return [os.path.join(path, name) for name in sorted(os.listdir(path)) if pattern.match(name)]
    except OSError:
        return []


def cores(root: str = "") -> int:
    """Count logical processors as kube-proxy does for conntrack: from the topology in sysfs, else as Python does.

    With NUMA nodes in sysfs: the processors of all nodes that are online and have a core_id; without: all processors
    that sysfs lists, online or not.
    """
    count = 0
    nodes = _directories(f"{root}/sys/devices/system/node", _NODE)
    for node in nodes:
        for cpu in _directories(node, _CPU):
            online = read_text(f"{cpu}/online")
            if (online is None or online.strip() == "1") and read_text(f"{cpu}/topology/core_id") is not None:
                count += 1
    if not nodes:
        count = len(_directories(f"{root}/sys/devices/system/cpu", _CPU))
    return count or os.cpu_count() or 1


def memory_bytes(root: str = "") -> int:
    """Return the node's memory (MemTotal) in bytes; 0 if it cannot be read."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", read_text(f"{root}/proc/meminfo") or "", re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def conntrack_liberal(root: str = "") -> bool:
    """Return whether net.netfilter.nf_conntrack_tcp_be_liberal is set; False when conntrack is not loaded."""
    return (read_text(f"{root}/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal") or "").strip() == "1"


def ipv6_supported(root: str = "") -> bool:
    """Return whether the kernel has IPv6 and it is not disabled for all interfaces (the rule of kube-proxy 1.36)."""
    if not os.path.exists(f"{root}/proc/net/if_inet6"):
        return False
    return (read_text(f"{root}/proc/sys/net/ipv6/conf/all/disable_ipv6") or "").strip() != "1"


def supported_families(root: str = "") -> tuple[str, ...]:
    """Return the address families that the node's kernel supports, IPv4 first."""
    return (IPV4, IPV6) if ipv6_supported(root) else (IPV4,)


def distribution(root: str = "") -> Distribution:
    """Read the distribution from os-release; empty fields if there is no such file."""
    text = read_text(f"{root}/etc/os-release") or read_text(f"{root}/usr/lib/os-release") or ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            fields[name] = value.strip("\"'")
    like = tuple(fields.get("ID_LIKE", "").split())
    return Distribution(fields.get("ID", ""), like, fields.get("VERSION_ID", ""), fields.get("PRETTY_NAME", ""))


# -- confinement -------------------------------------------------------------------------------------------------------


def read_only_file(path: str) -> bool:
    """Return whether an existing file is read-only for every user.

    That is a file without any write bit (a key of the first network namespace, seen from a child namespace), or one on
    a read-only mount (/proc/sys in a container).
    """
    try:
        if os.stat(path).st_mode & 0o222 == 0:
            return True
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def in_container(root: str = "") -> bool:
    """Return whether the process runs in a container, by the marks that container engines and systemd leave."""
    if any(os.path.exists(f"{root}{mark}") for mark in ("/run/.containerenv", "/.dockerenv", "/run/systemd/container")):
        return True
    environment = read_text(f"{root}/proc/1/environ") or ""
    return any(item.startswith("container=") for item in environment.split("\0"))


def node_facts(root: str = "") -> NodeFacts:
    """Return the facts about the machine in one value. Raises KernelError."""
    return NodeFacts(
        kernel_version=kernel_version(kernel_release()),
        cores=cores(root),
        conntrack_liberal=conntrack_liberal(root),
        families=supported_families(root),
    )
