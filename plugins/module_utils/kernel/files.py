# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that the project owns, by path: written atomically and removed; files that are not named are never changed."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Iterable, Optional, Sequence

from ..base.errors import KernelError, os_errors
from ..base.whole_files import check_room, is_managed, remove_file, write_whole
from ..resources import Change, Kind, PlannedChange, Resource


def read_file(path: str) -> Optional[str]:
    """Return the text of a regular file, or None if it does not exist. Raises KernelError.

    Bytes that are not UTF-8 are kept as surrogates, so that such a file compares as different instead of failing.
    """
    with os_errors(KernelError, f"{path}: cannot be read"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise KernelError(f"{path}: exists but is not a regular file")
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    return None


def write_file(path: str, content: str, mode: int = 0o644) -> None:
    """Replace a file's content so that at any moment, power loss included, the old or the new text is complete.

    An existing file keeps its permission bits and owner; a new one gets ``mode``. Missing directories are created
    (0755). A symbolic link is followed: its target is replaced. Raises KernelError.
    """
    target = os.path.realpath(path)
    owner: Optional[tuple[int, int]] = None
    with os_errors(KernelError, f"{path}: cannot be written"):
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            existing = os.stat(target)
            mode = stat.S_IMODE(existing.st_mode)
            if (existing.st_uid, existing.st_gid) != (os.geteuid(), os.getegid()):
                owner = existing.st_uid, existing.st_gid
        write_whole(target, content.encode("utf-8", "surrogateescape"), mode, owner)


class FilesResource(Resource[str, str]):
    """Files by path; the value is the whole content. Owns exactly the given paths, whether the files exist or not."""

    kind = Kind.FILES
    diff_by_key = True

    def __init__(self, paths: Sequence[str], mode: int = 0o644) -> None:
        self.paths = tuple(paths)
        self.mode = mode

    def observe(self) -> dict[str, str]:
        """Return path to content of the owned files that exist. Raises KernelError."""
        found = {path: read_file(path) for path in self.paths}
        return {path: content for path, content in found.items() if content is not None}

    def apply(self, change: Change[str, str]) -> None:
        """Write and remove files, each atomically. Raises KernelError."""
        for path in [*change.added, *change.replaced, *change.removed]:
            if path not in self.paths:
                raise KernelError(f"{path}: is not one of the files this operation owns")
        for path, content in change.new_values().items():
            write_file(path, content, self.mode)
        for path in change.removed:
            remove_file(path)

    def describe(self, key: str, value: str) -> list[str]:
        """Return the file's lines."""
        return value.splitlines()


def refuse_unwritable(planned: Iterable[PlannedChange]) -> list[str]:
    """Raise KernelError if a planned change of a file cannot be made, before any other change of the plan is.

    A file of another program or of the administrator is not replaced. It is not removed either: it leaves the plan,
    and the returned warnings name it.
    """
    warnings = []
    for resource, change, *_observed in planned:
        if isinstance(resource, FilesResource):
            for path in [path for path, content in change.removed.items() if not is_managed(content)]:
                del change.removed[path]
                warnings.append(f"{path}: is kept, since this collection has not written its first line")
            for path, (content, _new) in change.replaced.items():
                if content.strip() and not is_managed(content):
                    reason = "this collection has not written its first line: name another file, or move this one away"
                    raise KernelError(f"{path}: would be replaced as a whole, but {reason}")
            for path in [*change.added, *change.replaced, *change.removed]:
                with os_errors(KernelError, f"{path}: cannot be written"):
                    check_room(path, room=0 if path in change.removed else 1)
    return warnings
