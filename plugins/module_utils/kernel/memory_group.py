# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory limit of this process's control group, and how much of it is in use; control groups of both versions.

The kernel kills a process of the group when what cannot be reclaimed reaches the limit. That includes programs which
the process runs, and the kernel's own memory for rules that they program.
"""

from __future__ import annotations

import os
from typing import Iterator, NamedTuple, Optional

from .facts import read_text

_GROUPS = "/sys/fs/cgroup"
_OWN = "/proc/self/cgroup"
#: Version 1 always reports a limit; this value means none.
_NO_LIMIT = 1 << 60


class _Names(NamedTuple):
    """File names of one cgroup version, below a group's directory."""

    limit: str
    usage: str
    cached: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}")
_V2 = _Names("memory.max", "memory.current", "{}")


class MemoryGroup(NamedTuple):
    """The control group with the smallest limit among this process's group and its ancestors.

    ``limit``: in bytes.
    """

    directory: str
    limit: int
    is_v1: bool = False

    def used(self) -> int:
        """Return the bytes in use that the kernel cannot reclaim, that is, without cached files. Raises OSError."""
        names = _V1 if self.is_v1 else _V2
        with open(f"{self.directory}/{names.usage}", encoding="ascii") as file:
            used = int(file.read())
        with open(f"{self.directory}/memory.stat", encoding="ascii") as file:
            values = dict(line.split() for line in file if " " in line)
        cached = (names.cached.format(name) for name in ("inactive_file", "active_file"))
        return max(0, used - sum(int(values.get(name, 0)) for name in cached))


def memory_group(groups: str = _GROUPS, own: str = _OWN) -> Optional[MemoryGroup]:
    """Return the control group that limits the memory of this process; None without a limit, or if it is unknown."""
    text = read_text(own)
    if text is None:
        return None
    paths = _paths(text)
    found = []
    for top, controller, is_v1 in ((f"{groups}/memory", "memory", True), (groups, "", False)):
        names = _V1 if is_v1 else _V2
        for directory in _upwards(top, paths.get(controller, "/")):
            limit = _limit(f"{directory}/{names.limit}")
            if limit is not None:
                found.append(MemoryGroup(directory, limit, is_v1))
    return min(found, key=lambda group: group.limit, default=None)


def _paths(text: str) -> dict[str, str]:
    """Return the path of the process's group by controller; the key of version 2 is empty."""
    paths = {}
    for line in text.splitlines():
        _number, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _upwards(top: str, path: str) -> Iterator[str]:
    """Yield the directories of a group and its ancestors. A container sees its own group as the topmost one."""
    directory = os.path.normpath(f"{top}/{path}")
    while directory.startswith(f"{top}/"):
        yield directory
        directory = os.path.dirname(directory)
    yield top


def _limit(path: str) -> Optional[int]:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None
