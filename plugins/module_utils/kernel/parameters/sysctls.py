# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel parameters under /proc/sys: their keys and values, and how they are read and changed.

Keys are written with dots (``net.ipv4.ip_forward``); values are text with single blanks between their words. Functions
that read files take ``root``, the directory under which ``/proc/sys`` is found.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
from typing import Iterable, Mapping, Optional, Union

from ...base.errors import ConfigurationError, KernelError
from ...resources import Change, Kind, Resource
from .. import facts

_PART = re.compile(r"[A-Za-z0-9_@:.+-]{1,64}\Z")

HASH_SIZE = "net.netfilter.nf_conntrack_buckets"
RESERVED_PORTS = "net.ipv4.ip_local_reserved_ports"
TCP_BE_LIBERAL = "net.netfilter.nf_conntrack_tcp_be_liberal"

_READABLE = 0o444
# How often keys that the setting of others has reset are written.
_ROUNDS = 3

# Setting one of these resets keys of the same group ("all") and of the others (devinet.c, addrconf.c).
_FORWARDING = frozenset(("net.ipv4.ip_forward", "net.ipv4.conf.all.forwarding", "net.ipv6.conf.all.forwarding"))
_GROUP = re.compile(r"net\.ipv[46]\.(?:conf|neigh)\.([^.]+)\.")
# Setting one of these to a number sets its counterpart to 0 (page-writeback.c, util.c).
_ALTERNATIVES = frozenset(
    f"vm.{name}_{unit}"
    for name, units in (
        ("dirty", ("bytes", "ratio")),
        ("dirty_background", ("bytes", "ratio")),
        ("overcommit", ("kbytes", "ratio")),
    )
    for unit in units
)

# The kernel prints these as lists of numbers and ranges, joined and in order.
_LISTS = frozenset((RESERVED_PORTS, "kernel.watchdog_cpumask"))
# Text, or numbers without a prefix in base 16: what looks like a decimal number is none.
_VERBATIM = frozenset(
    ("kernel.hostname", "kernel.domainname", "net.core.flow_limit_cpu_bitmap", "net.core.rps_default_mask")
)
# Numbers as the kernel prints them, and as it reads them, like C: in base 16 with 0x, in base 8 with 0.
_PRINTED = re.compile(r"-?(?:0|[1-9][0-9]*)\Z")
_READ = re.compile(r"(-?)(?:0[xX]([0-9A-Fa-f]+)|(0[0-7]*)|([1-9][0-9]*))\Z")

# The kernel rounds these up to fill whole pages, so that a larger value read back is the requested one.
_ROUNDED_UP = frozenset((HASH_SIZE,))

_PROVIDERS: tuple[tuple[str, str], ...] = (
    ("net.ipv4.vs.", "ip_vs"),
    ("net.netfilter.", "nf_conntrack"),
    ("net.nf_conntrack_", "nf_conntrack"),
    ("net.bridge.", "br_netfilter"),
    ("net.ipv6.", "ipv6"),
)


class AtLeast(int):
    """A desired value that accepts any equal or larger one."""

    def __repr__(self) -> str:
        return f"AtLeast({int(self)})"


class Including(str):
    """A desired list of port ranges, such as ``30000-32767,8472``, that keeps other ranges."""

    def __repr__(self) -> str:
        return f"Including({str(self)!r})"


Wanted = Union[str, int, AtLeast, Including]


def port_ranges(text: str) -> list[tuple[int, int]]:
    """Parse a list such as ``1000-1009,8080``; return the first and last port of each range, joined and in order.

    The kernel prints such lists in this form. Raises ConfigurationError for an invalid list.
    """
    found: list[tuple[int, int]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (1, 0)
        if not first <= last <= 65535:
            raise ConfigurationError(f"{part!r} is not a port or a range of ports such as 30000-32767")
        found.append((first, last))
    joined: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def with_ports(wanted: str, others: str) -> str:
    """Return two lists of port ranges as one, as the kernel prints it. Raises ConfigurationError."""
    ranges = port_ranges(f"{wanted},{others}")
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def with_dots(text: str) -> str:
    """Return a key or a pattern of keys with dots between its parts; its first separator decides its style."""
    separators = re.search(r"[./]", text)
    if separators is not None and separators.group() == "/":
        return text.translate(str.maketrans("./", "/."))
    return text


def canonical_key(key: str) -> str:
    """Return a key with dots between its parts, as ``sysctl`` prints it.

    As in sysctl, the first separator decides the style: ``net/ipv4/conf/eth0.5/rp_filter`` is
    ``net.ipv4.conf.eth0/5.rp_filter``. Raises ConfigurationError for an invalid key.
    """
    text = with_dots(key.strip())
    parts = text.split(".")
    if len(parts) < 2 or any(not _PART.match(part.replace("/", ".")) or part in ("/", "//") for part in parts):
        raise ConfigurationError(f"sysctl {key!r}: not a key such as net.ipv4.ip_forward")
    return text


def key_path(key: str, root: str = "") -> str:
    """Return the file under /proc/sys that corresponds to a canonical key."""
    return f"{root}/proc/sys/" + key.translate(str.maketrans("./", "/."))


def canonical_value(key: str, value: object) -> str:
    """Return a value as text on one line, words separated by single blanks; booleans are 0 and 1.

    IPv6 addresses, and lists of numbers and ranges, are in the kernel's form. Raises ConfigurationError.
    """
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if any(ord(character) < 32 and character != "\t" for character in text.strip("\n")) or not text.strip():
        raise ConfigurationError(f"sysctl {key}: value {text!r} is not one line of text")
    if key.endswith(".stable_secret"):
        # The kernel prints all digits.
        try:
            return ipaddress.IPv6Address(text.strip()).exploded
        except ValueError as error:
            raise ConfigurationError(f"sysctl {key}: value is not in the form of an IPv6 address") from error
    if key in _LISTS:
        return _canonical_list(key, text)
    return " ".join(text.split())


def _canonical_list(key: str, text: str) -> str:
    """Return a list of numbers and ranges as the kernel prints it. Raises ConfigurationError."""
    try:
        found = with_ports(text, "")
    except ConfigurationError:
        found = ""
    if not found:
        raise ConfigurationError(f"sysctl {key}: {text!r} is not a list of numbers and ranges such as 8080,9000-9010")
    return found


def _number(word: str) -> Optional[str]:
    """Return a number as the kernel prints it, None if the kernel does not read the word as a number."""
    match = _READ.match(word)
    if match is None:
        return None
    sign, hexadecimal, octal, decimal = match.groups()
    number = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
    return str(-number if sign else number)


def as_printed(key: str, value: str, current: str) -> str:
    """Return a canonical value as the kernel will print it, judged by the current value of the key.

    Numbers may be written in base 16 and 8; of several numbers, those that are not given stay. Values of other forms
    are returned as they are.
    """
    if key in _LISTS or key in _VERBATIM:
        return value
    old, numbers = current.split(), [_number(word) for word in value.split()]
    if len(numbers) > len(old) or not all(map(_PRINTED.match, old)):
        return value
    printed = [word for word in numbers if word is not None]
    return value if len(printed) < len(numbers) else " ".join([*printed, *old[len(printed) :]])


def is_misread(key: str, value: str, current: str) -> bool:
    """Return whether the kernel cannot read a value: the current one consists of numbers, and it does not."""
    old = current.split()
    numbers = key not in _LISTS and key not in _VERBATIM and bool(old) and all(map(_PRINTED.match, old))
    return numbers and None in map(_number, value.split())


def same_value(key: str, one: str, other: str) -> bool:
    """Return whether two values, from files or from the kernel, mean the same."""
    if key in _LISTS and one and other:
        try:
            return port_ranges(one) == port_ranges(other)
        except ConfigurationError:
            return one == other
    return as_printed(key, one, other) == other or as_printed(key, other, one) == one


def provider(key: str) -> Optional[str]:
    """Return the module that provides a key, or None if every kernel has it or the module is not known."""
    for prefix, module in _PROVIDERS:
        if key.startswith(prefix):
            return module
    return None


def read_value(key: str, root: str = "") -> Optional[str]:
    """Return the current value of a canonical key; empty if it has none yet, None if the kernel has no such key.

    Raises KernelError, also for a key that can only be written.
    """
    path = key_path(key, root)
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return " ".join(stream.read().split())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.EIO:
            # The answer of net.ipv6.conf.*.stable_secret until it is set.
            return ""
        if error.errno == errno.EACCES and not os.stat(path).st_mode & _READABLE:
            raise KernelError(f"sysctl {key}: is an action, not a setting: it can be written but not read") from error
        raise KernelError(f"sysctl {key}: cannot be read: {error.strerror or error}") from error


def resolve(wanted: Mapping[str, Wanted], observed: Mapping[str, str]) -> dict[str, str]:
    """Compute the desired table from wanted values.

    AtLeast(n) is the observed value if that is n or more, else n; Including(ports) is these and the observed ones.
    Other values are in the form in which the kernel prints them.
    """
    desired: dict[str, str] = {}
    for key, value in wanted.items():
        current = observed.get(key, "")
        if isinstance(value, AtLeast) and current.isdecimal() and int(current) >= value:
            desired[key] = current
        elif isinstance(value, Including):
            desired[key] = with_ports(value, current)
        else:
            text = canonical_value(key, int(value) if isinstance(value, AtLeast) else value)
            desired[key] = as_printed(key, text, current)
    return desired


def _rank(key: str, value: str) -> tuple[int, bool]:
    if key in _FORWARDING or (key in _ALTERNATIVES and value == "0"):
        return 0, False
    group = _GROUP.match(key)
    level = 1 if group is None or group.group(1) == "all" else 2 if group.group(1) == "default" else 3
    # Setting an interface's stable_secret sets its addr_gen_mode.
    return level, key.endswith(".addr_gen_mode")


def in_order(values: Mapping[str, str]) -> list[str]:
    """Return keys in an order in which none resets an earlier one; keys that do not reset others keep their order.

    The file for the next boot is applied once, line by line, so that its order decides.
    """
    return sorted(values, key=lambda key: _rank(key, values[key]))


def unchangeable(keys: Iterable[str], root: str = "") -> dict[str, str]:
    """Return the keys that exist but cannot be changed here, each with the reason, without changing anything."""
    reasons: dict[str, str] = {}
    for key in keys:
        path = key_path(key, root)
        if os.path.exists(path) and facts.read_only_file(path):
            mounted = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
            where = "/proc/sys is mounted read-only, as in a container"
            if not mounted:
                where = "only the host's first network namespace may change it"
            reasons[key] = f"cannot be changed here ({where}): set it on the host"
    return reasons


def stated_difference(old: str, new: str) -> str:
    """Return a difference in words, the same in each module, so that Ansible prints a warning once."""
    return f"is {old or 'not set'}, wanted {new}"


def refused_value(key: str, old: str, new: str, reason: str = "") -> KernelError:
    """Return the error for a value that the kernel refuses; the reason is that of a value that it cannot read."""
    reason = reason or os.strerror(errno.EINVAL)
    return KernelError(f"sysctl {key}: {stated_difference(old, new)}: the kernel refused it: {reason}")


def _holds(key: str, current: Optional[str], wanted: str) -> bool:
    """Return whether a value read back is the wanted one, as the kernel rounds it."""
    if key in _ROUNDED_UP and current and current.isdecimal() and wanted.isdecimal():
        return int(current) >= int(wanted)
    return current is not None and as_printed(key, wanted, current) == current


class SysctlsResource(Resource[str, str]):
    """Current kernel parameters: canonical key to value. Owns the given keys; nothing is ever removed.

    A key that the kernel does not have is absent from ``observe()``, so a desired value for it is an addition, which
    fails with the name of the module that provides the key.
    """

    kind = Kind.SYSCTLS

    def __init__(self, keys: Iterable[str], root: str = "") -> None:
        self.keys = tuple(dict.fromkeys(canonical_key(key) for key in keys))
        self.root = root
        #: The keys that apply() has changed, also if it failed at a later one.
        self.written: list[str] = []

    def observe(self) -> dict[str, str]:
        """Return the current values of those keys that exist. Raises KernelError."""
        found = {key: read_value(key, self.root) for key in self.keys}
        return {key: value for key, value in found.items() if value is not None}

    def apply(self, change: Change[str, str]) -> None:
        """Write the new values and read all keys back. Raises KernelError naming the key and the reason.

        Setting one key may reset another: net.ipv4.ip_forward resets accept_redirects. Keys that have moved away from
        their new value or, without a change, from their previous one are written again.
        """
        if change.added:
            raise missing_key(*next(iter(change.added.items())), self.root)
        blocked = unchangeable(change.replaced, self.root)
        for key, (old, new) in change.replaced.items():
            if key in blocked:
                raise KernelError(f"sysctl {key}: {stated_difference(old, new)}: {blocked[key]}")
        kept = {key: value for key, value in self.observe().items() if key not in change.replaced and value}
        for key in unchangeable(kept, self.root):
            del kept[key]
        replaced = {key: new for key, (_old, new) in change.replaced.items()}
        goal = {**kept, **replaced}
        moved = {key: change.replaced[key] for key in in_order(replaced)}
        for _round in range(_ROUNDS):
            for key, (old, new) in moved.items():
                self._set(key, old, new)
                if key in change.replaced and key not in self.written:
                    self.written.append(key)
            found = self.observe()
            moved = {
                key: (found.get(key, ""), value)
                for key, value in goal.items()
                if not _holds(key, found.get(key), value)
            }
            if not moved:
                return
        key, (old, new) = next(iter(moved.items()))
        raise KernelError(
            f"sysctl {key}: {stated_difference(old, new)}: the kernel resets it when another of the keys is set"
        )

    def _set(self, key: str, old: str, new: str) -> None:
        """Write a value and read it back. If the kernel makes it another one, write the old one and raise KernelError.

        To accept the other value would mean to find a difference, and to change it, in every run.
        """
        refusal = self._write(key, new)
        if refusal:
            raise refused_value(key, old, new, refusal)
        current = read_value(key, self.root)
        if not _holds(key, current, new):
            made = f"sysctl {key}: wanted {new}, but the kernel made it {current or 'empty'}"
            raise KernelError(f"{made}; {self._put_back(key, old)}" if old != current else made)

    def _write(self, key: str, value: str) -> str:
        """Write a value and return the reason if the kernel refuses it, else empty text."""
        try:
            with open(key_path(key, self.root), "w", encoding="utf-8") as stream:
                stream.write(value)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _put_back(self, key: str, old: str) -> str:
        """Write the old value after the kernel has changed the new one; return what came of it, in one clause."""
        if not old:
            return "it had no value before"
        refusal = self._write(key, old)
        return f"it cannot be made {old} again: {refusal}" if refusal else f"it is {old} again"

    def describe(self, key: str, value: str) -> list[str]:
        """Return one line as ``sysctl`` prints it."""
        return [f"{key} = {value}"]


def _with_dotted_part(key: str, root: str) -> str:
    """Return the existing key that is meant if one part has dots itself, such as the interface eth0.103; else empty."""
    parts = key.split(".")
    for start in range(1, len(parts) - 1):
        for end in range(start + 2, len(parts)):
            meant = ".".join([*parts[:start], "/".join(parts[start:end]), *parts[end:]])
            if os.path.exists(key_path(meant, root)):
                return meant
    return ""


def missing_key(key: str, value: str, root: str = "") -> KernelError:
    """Return the error for a key that the running kernel does not have.

    It names the module that would provide the key, unless that is loaded: then no module has it.
    """
    module = provider(key)
    dotted = _with_dotted_part(key, root)
    if dotted:
        return KernelError(f"sysctl {key}: this kernel has no such key (wanted {value}); did you mean {dotted}?")
    if module is None or os.path.isdir(f"{root}/sys/module/{module}"):
        return KernelError(f"sysctl {key}: this kernel has no such key (wanted {value})")
    return KernelError(
        f"sysctl {key}: this kernel has no such key (wanted {value}); the module {module} provides it and is not loaded"
    )
