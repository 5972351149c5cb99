# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network namespaces: names, sockets made inside them, batches for ip(8)."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
NETNS_DIRECTORY = "/run/netns/"

_libc = ctypes.CDLL(None, use_errno=True)
_home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(descriptor: int) -> None:
    """Move this thread into a namespace. os.setns exists from Python 3.12 on only."""
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class NetworkNamespace:
    """A named network namespace; the lab stays outside and makes sockets inside.

    A socket belongs for life to the namespace it was made in, so one event loop in one process
    can speak for every host of the lab.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._descriptor = os.open(NETNS_DIRECTORY + name, os.O_RDONLY | os.O_CLOEXEC)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        _enter(self._descriptor)
        try:
            yield
        finally:
            _enter(_home)

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """A new non-blocking socket inside the namespace."""
        with self._inside():
            made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made

    def set_sysctls(self, values: Mapping[str, object]) -> None:
        """Write ``net.*`` parameters, given as paths below /proc/sys/net.

        One that this kernel has not (bridge without br_netfilter, IPv6 switched off) is passed over:
        the lab asks for more than every kernel offers, and its own traffic shows what is missing.
        """
        with self._inside():
            for path, value in values.items():
                try:
                    with open("/proc/sys/net/" + path, "w", encoding="ascii") as parameter:
                        parameter.write(str(value))
                except OSError:
                    continue

    def close(self) -> None:
        os.close(self._descriptor)


def exists(name: str) -> bool:
    """Is there a named namespace of that name?"""
    return os.path.exists(NETNS_DIRECTORY + name)


def ip_batch(lines: Sequence[str], namespace: str | None = None, *, ipv6: bool = False, check: bool = True) -> None:
    """Run many ip(8) commands in one process.

    With *check*, RuntimeError if any of them failed (the others are still carried out).
    """
    if not lines:
        return
    command = ["ip"]
    if ipv6:
        command.append("-6")
    if namespace:
        command += ["-n", namespace]
    done = subprocess.run(
        [*command, "-force", "-batch", "-"], input="\n".join(lines) + "\n", text=True, capture_output=True, check=False
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"ip batch failed in namespace {namespace}: {done.stderr.strip()}")
