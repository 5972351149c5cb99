# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A control group whose memory is measured or limited, on machines whose memory controller tests may use."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Iterator, NamedTuple, Optional

_ROOT = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """The names of the memory controller's files in one version of control groups."""

    limit: str
    usage: str
    peak: str
    events: str
    no_peak: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control", "0")
_V2 = _Files("memory.max", "memory.current", "memory.peak", "memory.events", "")


class MemoryGroup:
    """A control group of its own for processes that call :meth:`enter`."""

    def __init__(self, directory: Path, files: _Files) -> None:
        self._directory = directory
        self._files = files

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Optional[MemoryGroup]]:
        """Make a group and remove it at the end, when its processes have ended; None where that is not possible."""
        v1 = (_ROOT / "memory" / _V1.limit).exists()
        directory = (_ROOT / "memory" if v1 else _ROOT) / f"kubenode-test-{os.getpid()}-{time.monotonic_ns()}"
        group = cls(directory, _V1 if v1 else _V2)
        try:
            directory.mkdir()
        except OSError:
            yield None
            return
        try:
            yield group if (directory / group._files.limit).exists() else None
        finally:
            directory.rmdir()

    def enter(self) -> None:
        """Move the calling process into the group; for ``preexec_fn``."""
        (self._directory / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def limit(self, size: int) -> None:
        """Limit the memory of the group, in bytes."""
        (self._directory / self._files.limit).write_text(str(size), encoding="ascii")

    def usage(self) -> int:
        """Return the memory in use, in bytes."""
        return int((self._directory / self._files.usage).read_text(encoding="ascii"))

    def reset_peak(self) -> None:
        """Begin to measure the peak, where the kernel can begin it again; otherwise it is that of the group's life."""
        if self._files.no_peak:
            (self._directory / self._files.peak).write_text(self._files.no_peak, encoding="ascii")

    def peak(self) -> int:
        """Return the largest memory in use since :meth:`reset_peak`, in bytes."""
        return int((self._directory / self._files.peak).read_text(encoding="ascii"))

    def kills(self) -> int:
        """Return how many processes the kernel has killed because of the limit."""
        for line in (self._directory / self._files.events).read_text(encoding="ascii").splitlines():
            name, _blank, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0
