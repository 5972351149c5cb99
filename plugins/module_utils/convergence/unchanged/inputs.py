# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Digests of the input of a run: options, the files that they name, static Services, and the engine's own source."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
import zlib
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Optional

from ...base.regular_files import open_regular

_CHUNK_BYTES = 1 << 20
_MOST_FILES = 256
#: The granularity of the times of files is coarser than a change: a file that changed this recently may change again
#: without a new time.
_RECENT_NANOSECONDS = 50_000_000


Signature = tuple[int, ...]
"""The signature of a file, which changes with every change of it; the last number is the time of the last one."""


class Unusable(Exception):
    """The input cannot be compared with the input of another run."""


class Files(NamedTuple):
    """Files that a run reads: their SHA-256 and their signatures, by path."""

    digests: dict[str, str]
    signatures: dict[str, Signature]

    @property
    def settled(self) -> bool:
        """Whether a later change of a file certainly changes its signature."""
        newest = max((signature[-1] for signature in self.signatures.values()), default=0)
        return abs(time.time_ns() - newest) > _RECENT_NANOSECONDS


def options_digest(options: Mapping[str, Any]) -> str:
    """Return the digest of a module's options. Raises Unusable."""
    try:
        text = json.dumps(options, sort_keys=True, ensure_ascii=True)
    except (TypeError, ValueError) as error:
        raise Unusable(str(error)) from error
    return hashlib.sha256(text.encode()).hexdigest()


def read_files(paths: Iterable[str], directory: str) -> Files:
    """Return the digests of files and of all files in a directory, which need not exist.

    Raises Unusable if a file is not regular, such as a FIFO, which can be read only once; OSError, also for a link in
    the directory.
    """
    digests: dict[str, str] = {}
    signatures: dict[str, Signature] = {}
    for path in paths:
        digests[path], signatures[path] = _read(_open_given(path))
    names = _entries(directory)
    if names is not None:
        signatures[directory] = _signature(os.stat(directory))
    for path in names or ():
        if stat.S_ISDIR(os.lstat(path).st_mode):
            digests[path] = "a directory"
        else:
            digests[path], signatures[path] = _read(open_regular(path))
    return Files(digests, signatures)


def _entries(directory: str) -> Optional[list[str]]:
    """Return the paths of the files in a directory, None if it does not exist. Raises Unusable, OSError."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return None
    if len(names) > _MOST_FILES:
        raise Unusable(directory)
    return [os.path.join(directory, name) for name in names]


def _open_given(path: str) -> int:
    """Open a file that an option names. Raises Unusable, OSError."""
    # Opening a FIFO would have an effect on its writer.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Unusable(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _read(descriptor: int) -> tuple[str, Signature]:
    """Read an open file to its end and close it. Raises Unusable, OSError."""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Unusable("a file is not regular")
        digest = hashlib.sha256()
        while True:
            part = os.read(descriptor, _CHUNK_BYTES)
            if not part:
                return digest.hexdigest(), _signature(found)
            digest.update(part)
    finally:
        os.close(descriptor)


def _signature(found: os.stat_result) -> Signature:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def engine_digest() -> str:
    """Return the digest of the running engine, the files of a module's payload or of a directory, and of Python.

    Raises Unusable, OSError.
    """
    top = __name__.rsplit(".", 3)[0]
    places = list(getattr(sys.modules.get(top), "__path__", ()))
    if not places:
        raise Unusable(top)
    plugins = os.path.dirname(places[0].rstrip("/"))
    files = _in_directory(plugins) if os.path.isdir(plugins) else _in_archive(plugins)
    return hashlib.sha256(repr((sys.version, sorted(files))).encode()).hexdigest()


def _in_directory(top: str) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and CRC-32 of the Python files."""
    for place, _directories, files in os.walk(top):
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(place, name)
                with open(path, "rb") as file:
                    content = file.read()
                yield os.path.relpath(path, top), len(content), zlib.crc32(content)


def _in_archive(top: str) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and CRC-32 of the files below a path in an archive, as the archive has them. Raises Unusable."""
    import zipfile

    archive = top
    while archive and not os.path.isfile(archive):
        archive = archive.rpartition("/")[0]
    prefix = top[len(archive) + 1 :].rstrip("/") + "/"
    try:
        with zipfile.ZipFile(archive) as packed:
            found = [(item.filename, item.file_size, item.CRC) for item in packed.infolist()]
    except (zipfile.BadZipFile, FileNotFoundError) as error:
        raise Unusable(top) from error
    for name, size, checksum in found:
        if name.startswith(prefix):
            yield name[len(prefix) :], size, checksum
