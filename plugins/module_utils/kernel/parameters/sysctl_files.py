# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel parameters at boot: find the file that sets each of them, and write our own one (sysctl.d(5)).

Functions take ``root``, the directory under which the files are found.
"""

from __future__ import annotations

import fnmatch
import os
from typing import Collection, Iterable, Mapping, NamedTuple, Optional

from ...base.whole_files import MANAGED_LINE
from .. import facts
from ..modules import boot_directories
from .sysctls import AtLeast, Including, Wanted, canonical_value, in_order, same_value, with_dots, with_ports

#: The file that the program sysctl reads last, and systemd-sysctl only through a link in one of the directories.
_SYSCTL_CONF = "/etc/sysctl.conf"
# One of these exists where systemd-sysctl sets the parameters.
_SYSTEMD = ("/run/systemd/system", "/usr/lib/systemd/systemd-sysctl", "/lib/systemd/systemd-sysctl")


class BootValue(NamedTuple):
    """The value of a key at boot, and the file that sets it."""

    value: str
    file: str


class _Line(NamedTuple):
    """What a file says about a key or a pattern: its value, None to exclude the key from patterns."""

    value: Optional[str]
    file: str


def _parse_lines(text: str) -> list[tuple[str, Optional[str]]]:
    """Return the keys or patterns of a sysctl.d file, each with its value, or None if patterns must not set it."""
    found: list[tuple[str, Optional[str]]] = []
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        left, equals, value = line.partition("=")
        unchecked = left.startswith("-")
        key = with_dots(left[1:].strip() if unchecked else left.strip())
        if key and equals:
            found.append((key, " ".join(value.split())))
        elif key and unchecked:
            found.append((key, None))
    return found


def parse_settings(text: str) -> dict[str, str]:
    """Parse keys and values of a sysctl.d file; later lines win. Keys may be patterns; a leading ``-`` is dropped."""
    last = dict(_parse_lines(text))
    return {key: value for key, value in last.items() if value is not None}


def _set_by_systemd(root: str) -> bool:
    return any(os.path.exists(f"{root}{path}") for path in _SYSTEMD)


def boot_files(root: str = "", assumed: Collection[str] = ()) -> list[str]:
    """Return files with kernel parameters in the order in which they are applied at boot.

    By file name over all directories. Without systemd, /etc/sysctl.conf comes last, as ``sysctl --system`` reads it.
    ``assumed``: files (path without ``root``) to be treated as existing.
    """
    chosen = boot_directories.files_read(boot_directories.SYSCTL, root, assumed)
    files = [chosen[name] for name in sorted(chosen)]
    if not _set_by_systemd(root) and (_SYSCTL_CONF in assumed or os.path.isfile(f"{root}{_SYSCTL_CONF}")):
        files.append(_SYSCTL_CONF)
    return files


def unread(path: str, root: str = "") -> str:
    """Return why no program sets the parameters of a file at boot, in one clause; empty if one does."""
    if os.path.normpath(path) == _SYSCTL_CONF:
        links = (os.path.realpath(f"{root}{name}") for name in boot_files(root))
        if not _set_by_systemd(root) or os.path.realpath(f"{root}{_SYSCTL_CONF}") in links:
            return ""
    return boot_directories.unread(path, boot_directories.SYSCTL, root)


def _matches(pattern: str, key: str) -> bool:
    """Return whether a pattern matches a key part by part: like a path's, its wildcards match no separator."""
    patterns, parts = pattern.split("."), key.split(".")
    return len(patterns) == len(parts) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _boot_lines(keys: Iterable[str], root: str, replaced: Mapping[str, str]) -> dict[str, _Line]:
    """Return the line that decides about each of ``keys``; see :func:`boot_values`.

    ``replaced``: files (path without ``root``) to be treated as if they had this content.
    """
    lines: dict[str, _Line] = {}
    for path in boot_files(root, replaced):
        text = replaced[path] if path in replaced else facts.read_text(f"{root}{path}") or ""
        for name, value in _parse_lines(text):
            # As in systemd-sysctl, the last line comes last, unless it repeats the value.
            if name in lines and lines[name].value != value:
                del lines[name]
            lines[name] = _Line(value, path)
    found: dict[str, _Line] = {}
    for key in keys:
        if key in lines:
            found[key] = lines[key]
            continue
        for name, line in lines.items():
            if line.value is not None and not set("*?[").isdisjoint(name) and _matches(name, key):
                found[key] = line
    return found


def boot_values(keys: Iterable[str], root: str = "") -> dict[str, BootValue]:
    """Return the value of each of ``keys`` at boot; keys that no file sets are omitted.

    A line that names the key beats one whose pattern matches it; among equals the last one wins. A line ``-KEY``
    without a value replaces earlier lines that name the key, and excludes it from patterns.
    """
    lines = _boot_lines(keys, root, {})
    return {key: BootValue(line.value, line.file) for key, line in lines.items() if line.value is not None}


def boot_conflicts(own_file: str, content: str, root: str = "") -> list[str]:
    """Return one line for each key of our file that another file sets differently, and later, at boot.

    Nothing is returned for a file that is not read at boot; see :func:`unread`.
    """
    path = os.path.normpath(own_file)
    if path not in boot_files(root, [path]):
        return []
    own = parse_settings(content)
    conflicts = []
    for key, line in _boot_lines(own, root, {path: content}).items():
        if line.file == path or (line.value is not None and same_value(key, line.value, own[key])):
            continue
        instead = f"sets {line.value} instead of {own[key]}" if line.value is not None else f"has -{key}: not set"
        conflicts.append(f"sysctl {key}: {line.file} is read after {own_file} and {instead} at boot")
    return conflicts


def sysctl_file(values: Mapping[str, str], reasons: Optional[Mapping[str, str]] = None) -> str:
    """Return the text of a sysctl.d file with these values, each preceded by a comment with its reason, if any.

    A key that resets others comes before them, so that the file has the same result however often it is applied.
    """
    lines = [MANAGED_LINE]
    for key in in_order(values):
        why = (reasons or {}).get(key, "")
        if why:
            lines += ["", "# " + " ".join(why.split())]
        lines.append(f"{key} = {values[key]}")
    return "\n".join(lines) + "\n"


def persistent_values(wanted: Mapping[str, Wanted], live: Mapping[str, str], own_file_text: str) -> dict[str, str]:
    """Return the values to write to our sysctl.d file for these wanted values.

    AtLeast(n) keeps the file's value if it is at least n, since the kernel rounds up and the running value may differ;
    otherwise it is the larger of n and the current value, so that a boot shrinks none. Including(ports) adds these to
    the file's ports, or in a new file to the current ones.
    """
    written = parse_settings(own_file_text)
    values: dict[str, str] = {}
    for key, value in wanted.items():
        text = canonical_value(key, int(value) if isinstance(value, AtLeast) else value)
        if isinstance(value, AtLeast):
            before = written.get(key, "")
            current = live.get(key, "")
            if before.isdecimal() and int(before) >= value:
                text = before
            elif current.isdecimal() and int(current) > value:
                text = current
        elif isinstance(value, Including):
            text = with_ports(value, written.get(key, live.get(key, "")))
        values[key] = text
    return values
