# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network namespaces of a lab, and sockets inside them."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.lab.system import ip_batch

CLONE_NEWNET = 0x40000000
NETNS_DIRECTORY = "/run/netns/"

_libc = ctypes.CDLL(None, use_errno=True)
_home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(descriptor: int) -> None:
    """Move this thread into a namespace; os.setns exists only from Python 3.12 on."""
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class NetworkNamespace:
    """A named network namespace, in which a process outside creates sockets.

    A socket stays in the namespace it was created in, so one event loop in one process serves every host of the lab.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._descriptor = os.open(NETNS_DIRECTORY + name, os.O_RDONLY | os.O_CLOEXEC)

    @contextmanager
    def inside(self) -> Iterator[None]:
        _enter(self._descriptor)
        try:
            yield
        finally:
            _enter(_home)

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """Return a new non-blocking socket inside the namespace."""
        with self.inside():
            made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made

    def set_sysctls(self, values: Mapping[str, object]) -> None:
        """Write ``net.*`` parameters, given as paths below /proc/sys/net.

        Skip those that this kernel lacks (bridge without br_netfilter, IPv6 switched off): if one matters, the
        traffic of the lab fails.
        """
        with self.inside():
            for path, value in values.items():
                try:
                    with open("/proc/sys/net/" + path, "w", encoding="ascii") as parameter:
                        parameter.write(str(value))
                except OSError:
                    continue

    def close(self) -> None:
        os.close(self._descriptor)


class NamespaceSet:
    """The network namespaces of one lab, whose names begin with ``prefix``; built and removed together."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        self._prefix = prefix
        self.names = tuple(names)
        self.namespaces: dict[str, NetworkNamespace] = {}

    def full_name(self, name: str) -> str:
        """Return the name by which ``ip netns`` knows a namespace."""
        return self._prefix + name

    def create(self) -> None:
        """Create the namespaces, empty ones in place of those of an earlier run. Raises LabError."""
        self.destroy()
        ip_batch(["netns add " + self.full_name(name) for name in self.names])
        self.namespaces = {name: NetworkNamespace(self.full_name(name)) for name in self.names}

    def destroy(self) -> None:
        """Remove the namespaces, including those that an earlier run left. Raises LabError."""
        for namespace in self.namespaces.values():
            namespace.close()
        self.namespaces = {}
        present = [name for name in map(self.full_name, self.names) if os.path.exists(NETNS_DIRECTORY + name)]
        ip_batch(["netns del " + name for name in present])


def pod_links(devices: Sequence[str], *, bridge: bool) -> Iterator[str]:
    """Yield the lines of ip(8) that set up the node's ends of its pods' cables, with ``bridge`` as ports of cni0."""
    if bridge:
        yield from ("link add cni0 type bridge", "link set cni0 up")
    for device in devices:
        if bridge:
            yield f"link set {device} master cni0"
        yield f"link set {device} up"
        if bridge:
            yield f"link set {device} type bridge_slave hairpin on"
