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
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

_CHUNK_BYTES = 1 << 20
_MOST_FILES = 256
#: The granularity of the times of files is coarser than a change: a file that changed this recently may change again
#: without a new time.
_RECENT_NANOSECONDS = 50_000_000


class Unusable(Exception):
    """The input cannot be compared with that of another run."""


class Files(NamedTuple):
    """Files that a run reads: SHA-256 by path, and what changes with every change of one of them, by path."""

    digests: Dict[str, str]
    signatures: Dict[str, Tuple[int, ...]]

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

    Raises Unusable if one is no regular file, such as a FIFO, which can be read only once, or if a file in the
    directory has another name elsewhere; OSError.
    """
    digests: Dict[str, str] = {}
    signatures: Dict[str, Tuple[int, ...]] = {}
    for path in paths:
        digests[path], signatures[path] = _read(path)
    names = _entries(directory)
    if names is not None:
        signatures[directory] = _signature(os.stat(directory))
    for path in names or ():
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode):
            digests[path] = "a directory"
        elif stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            digests[path], signatures[path] = _read(path)
        else:
            raise Unusable(path)
    return Files(digests, signatures)


def _entries(directory: str) -> Optional[List[str]]:
    """Return the paths of the files in a directory, None if it does not exist. Raises Unusable, OSError."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return None
    if len(names) > _MOST_FILES:
        raise Unusable(directory)
    return [os.path.join(directory, name) for name in names]


def _read(path: str) -> Tuple[str, Tuple[int, ...]]:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Unusable(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Unusable(path)
        digest = hashlib.sha256()
        while True:
            part = os.read(descriptor, _CHUNK_BYTES)
            if not part:
                break
            digest.update(part)
    finally:
        os.close(descriptor)
    return digest.hexdigest(), _signature(found)


def _signature(found: os.stat_result) -> Tuple[int, ...]:
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


def _in_directory(top: str) -> Iterator[Tuple[str, int, int]]:
    """Yield path, size and CRC-32 of the Python files."""
    for place, _directories, files in os.walk(top):
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(place, name)
                with open(path, "rb") as file:
                    content = file.read()
                yield os.path.relpath(path, top), len(content), zlib.crc32(content)


def _in_archive(top: str) -> Iterator[Tuple[str, int, int]]:
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
