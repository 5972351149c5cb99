# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of the node that the result of a run depends on, except for the cluster: as JSON values, to be compared.

Everything here is read at a cost that does not depend on the number of Services. The tables of nf_tables are
represented by their generation. IPVS, ipsets and the tables of legacy iptables have no such counter, so a node that has
anything in them is never judged unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from typing import Any, Iterable

from ...base.errors import KernelError
from ...base.regular_files import parse_json, read_regular
from ...kernel import facts
from ...kernel.facts import capabilities
from ...kernel.ipset.names import set_names
from ...kernel.nftables.generation import read_generation
from ...preflight.processes import process_findings, processes, ufw_findings
from ..runtime.state_directory import LEDGER, LEDGER_BYTES, PENDING
from .record import State

#: Devices of modes that an earlier run may have left.
DEVICES = ("kube-ipvs0", "kube-nlmon0", "kube-userspace0")
#: The beginning of the names of all ipsets of ipvs mode.
_SETS = "KUBE-"
_NETWORK = "/proc/thread-self/net"
_LEGACY_TABLES = ("ip_tables_names", "ip6_tables_names")
#: The lines above the virtual servers.
_IPVS_HEAD_LINES = 3
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_PROGRAMS = tuple(
    f"{family}{variant}{purpose}"
    for family in ("iptables", "ip6tables")
    for variant in ("", "-legacy", "-nft")
    for purpose in ("", "-save", "-restore")
)
_MODULE_PARAMETERS = "/sys/module/nf_conntrack/parameters"
_ANY_WRITE = 0o222
# linux/socket.h; Linux 5.14. Unlike the number of the namespace's inode, no other namespace ever has the same.
_SO_NETNS_COOKIE = 71


class NotComparable(Exception):
    """The state of this node cannot be compared with an earlier one."""


def boot_seconds() -> float:
    """Return the seconds since boot, including time suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def obstacles() -> list[str]:
    """Return the objects of this node that could change without a trace, or that only a complete run handles."""
    found = [f"legacy iptables has tables ({name})" for name in _LEGACY_TABLES if _lines(f"{_NETWORK}/{name}")]
    if len(_lines(f"{_NETWORK}/ip_vs")) > _IPVS_HEAD_LINES:
        found.append("IPVS has virtual servers")
    found += [f"the device {name} exists" for name in DEVICES if _device_exists(name)]
    found += [f"the ipset {name} exists" for name in set_names() if name.startswith(_SETS)]
    if os.path.lexists(PENDING):
        found.append("a change waits to be confirmed")
    return found


def surroundings(directory: str, sysctls: Iterable[str]) -> State:
    """Return the state of the node; ``directory``: with the ledger, ``sysctls``: the keys that the run compared.

    Raises NotComparable, KernelError, OSError.
    """
    lacking = obstacles()
    if lacking:
        raise NotComparable("; ".join(lacking))
    generation = read_generation()
    found = {
        "boot": _required("/proc/sys/kernel/random/boot_id"),
        "process": [os.geteuid(), capabilities()],
        "namespace": _namespace(),
        "kernel": tuple(os.uname()),
        "facts": facts.node_facts(),
        "addresses": sorted(facts.interface_addresses()),
        "modules": _modules(),
        "parameters": _parameters(),
        "sysctls": {key: _sysctl(key) for key in sysctls},
        "programs": _programs(),
        "findings": [*process_findings(processes()), *ufw_findings()],
        "ledger": _ledger(directory),
        "generation": generation.number,
        "tables": generation.tables,
    }
    # The form in which it is read back from the record.
    comparable: State = parse_json(json.dumps(found))
    return comparable


def _lines(path: str) -> list[str]:
    """Return the lines of a file of the kernel, none if it does not exist. Raises OSError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().splitlines()
    except FileNotFoundError:
        return []


def _required(path: str) -> str:
    with open(path, encoding="ascii") as stream:
        return stream.read().strip()


def _device_exists(name: str) -> bool:
    try:
        return bool(socket.if_nametoindex(name))
    except OSError:
        return False


def _namespace() -> list[int]:
    """Return the identity of the network namespace. Raises NotComparable, OSError."""
    found = os.stat("/proc/thread-self/ns/net")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError as error:
            raise NotComparable("this kernel has no cookies of network namespaces") from error
    return [found.st_dev, found.st_ino, int.from_bytes(cookie, "little")]


def _modules() -> list[Any]:
    """Return the loaded modules, and the identity of the list of installed modules, which packages replace."""
    loaded = sorted(line.split(" ", 1)[0] for line in _lines("/proc/modules") if " Live " in line)
    release = facts.kernel_release()
    installed = f"/lib/modules/{release}"
    lists = (f"{installed}/modules.dep", f"{installed}/modules.builtin", f"/boot/config-{release}")
    return [loaded, *map(_identity, lists)]


def _parameters() -> dict[str, str]:
    """Return the parameters of connection tracking."""
    try:
        names = sorted(os.listdir(_MODULE_PARAMETERS))
    except FileNotFoundError:
        return {}
    return {name: facts.read_text(f"{_MODULE_PARAMETERS}/{name}") or "" for name in names}


def _sysctl(key: str) -> list[Any]:
    """Return the value of a key and whether it can be changed here; nothing if the kernel does not have it."""
    path = "/proc/sys/" + key.translate(str.maketrans("./", "/."))
    text = facts.read_text(path)
    if text is None:
        return []
    writable = bool(os.stat(path).st_mode & _ANY_WRITE) and not os.statvfs(path).f_flag & os.ST_RDONLY
    return [" ".join(text.split()), writable]


def _identity(path: str) -> list[int]:
    """Return the identity of a file, which changes when the file is replaced; empty if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def _programs() -> list[Any]:
    """Return the iptables programs; without them, a run removes no leftovers of other modes from their tables."""
    path = os.environ.get("PATH", os.defpath)
    places = [*path.split(os.pathsep), *_SBIN]
    paths = [os.path.join(place, name) for place in dict.fromkeys(places) for name in _PROGRAMS]
    return [path, {name: identity for name, identity in ((name, _identity(name)) for name in paths) if identity}]


def _ledger(directory: str) -> str:
    """Return the digest of the ledger; empty if there is none. Raises KernelError."""
    try:
        return hashlib.sha256(read_regular(os.path.join(directory, LEDGER), LEDGER_BYTES)).hexdigest()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise KernelError(f"{LEDGER}: {error.strerror}") from error
