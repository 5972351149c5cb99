# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The few system calls of the laboratory that Python 3.9 does not offer, and small process helpers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
from pathlib import Path
from typing import Iterator, Optional, Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY = 0x1
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2
REBOOT_POWER_OFF = 0x4321FEDC
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_OF_DEVICES = {"accept_local": 0, "arp_announce": 0, "arp_ignore": 0, "route_localnet": 0, "rp_filter": 0}
#: Settings of a network namespace on an unconfigured machine, as paths below /proc/sys/net, in this order: the first
#: changes others. A new namespace copies some from the initial one, where container engines, sysctl.conf and other
#: programs have set their own.
NETWORK_DEFAULTS: dict[str, int] = {
    "ipv4/ip_forward": 0,
    "ipv6/conf/all/forwarding": 0,
    **{f"ipv4/conf/{of}/{name}": value for of in ("all", "default") for name, value in _OF_DEVICES.items()},
    **{f"bridge/bridge-nf-call-{program}": 1 for program in ("iptables", "ip6tables", "arptables")},
}

_libc = ctypes.CDLL(None, use_errno=True)


class LabError(Exception):
    """The laboratory has failed; the text is one line for the user."""


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise LabError(f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """Mount ``source`` of file system ``kind`` at ``target``, which must exist."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {kind or source} at {target}")


def unmount(target: str) -> None:
    """Detach the mount at ``target`` now; it ends when its last user ends."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def unshare(flags: int) -> None:
    """Give this process new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def enter(path: str, kind: int) -> None:
    """Move this process into the namespace at ``path``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"namespace {path}: {error.strerror}") from error
    try:
        _check(_libc.setns(descriptor, kind), f"enter {path}")
    finally:
        os.close(descriptor)


def pivot_root(new_root: str) -> None:
    """Make ``new_root``, a mount point, the root of the mount namespace and let go of the old root."""
    os.chdir(new_root)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise LabError(f"no support for machine type {os.uname().machine}")
    _check(_libc.syscall(ctypes.c_long(number), b".", b"mnt"), f"pivot_root {new_root}")
    os.chroot(".")
    os.chdir("/")
    unmount("/mnt")


def power_off() -> None:
    """Stop the machine; for the first process of a guest."""
    os.sync()
    _check(_libc.reboot(ctypes.c_int(REBOOT_POWER_OFF)), "power off")


def forget_host_settings() -> None:
    """Give the network namespace of this process the values of :data:`NETWORK_DEFAULTS`, where the kernel has them."""
    for name, value in NETWORK_DEFAULTS.items():
        path = Path("/proc/sys/net", name)
        if path.exists():
            path.write_text(str(value), encoding="ascii")


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Enter the network namespace at ``namespace`` (a path), and return to the caller's at the end of the block."""
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(namespace, CLONE_NEWNET)
        try:
            yield
        finally:
            _check(_libc.setns(descriptor, CLONE_NEWNET), "return to the own network namespace")
    finally:
        os.close(descriptor)


def socket_inside(namespace: Optional[str], family: int, kind: int) -> socket.socket:
    """Return a socket in the network namespace at ``namespace`` (a path; None for the caller's)."""
    if namespace is None:
        return socket.socket(family, kind)
    with inside(namespace):
        return socket.socket(family, kind)


def run(argv: Sequence[str], stdin: Optional[str] = None) -> str:
    """Run a command to its end and return its output; failure raises LabError with the tool's own words."""
    try:
        done = subprocess.run(list(argv), input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LabError(f"command {argv[0]} is not installed") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise LabError(f"{' '.join(argv)}: {words}")
    return done.stdout


def ip_batch(lines: Sequence[str], namespace: Optional[str] = None) -> None:
    """Run lines of ip(8) in a named network namespace, None for the caller's.

    600 lines take 0.08 s of processor time, a process for each 1.4 s, and pyroute2 1.0 s, of which its import is 0.2 s.
    The addresses in a line determine its family, except in rules: those are IPv4, or IPv6 if the line begins with
    ``-6``. Such lines come last, in a separate process. Raises LabError for the first line that fails.
    """
    place = ["-n", namespace] if namespace else []
    plain = [line for line in lines if not line.startswith("-6 ")]
    six = [line[3:] for line in lines if line.startswith("-6 ")]
    for option, chosen in (([], plain), (["-6"], six)):
        if chosen:
            run(["ip", *option, *place, "-batch", "-"], "\n".join(chosen) + "\n")
