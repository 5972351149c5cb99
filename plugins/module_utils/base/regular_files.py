# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Open files only if they are regular files, even in directories that other users can write.

Root reads files that the agent's user writes, and the agent reads files that other programs write. A name in a
directory that another user can write may at any moment be a symbolic link (open(2), O_NOFOLLOW), a hard link to a file
elsewhere, a FIFO that blocks its reader (fifo(7), O_NONBLOCK), a device, a directory, or an endless file. Every such
name is opened by :func:`open_regular`, and further functions limit the size and the nesting of the content.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import stat
import zlib
from typing import Any, Iterator, Union

#: The largest small file in bytes: a lock, a record of a few settings, a token.
SMALL = 1 << 20
# The permissions of others than the owner to write.
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_CHUNK_BYTES = 1 << 20
#: The limit of the kernel itself (path_resolution(7)).
_MOST_LINKS = 40


def open_regular(path: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a file that is regular and has no other name; return its descriptor.

    ``flags``: as for os.open; a file created by O_CREAT gets the permission bits ``mode``. O_TRUNC must not be among
    them: nothing may be changed before the type of the opened file is known. A file that was removed meanwhile (and so
    has no name) is accepted. Raises OSError; its text says what the name refers to instead.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "is a symbolic link, which is not followed", path) from None
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise OSError(error.errno, "is not a regular file", path) from None
        raise
    found = os.fstat(descriptor)
    reason = "is not a regular file" if not stat.S_ISREG(found.st_mode) else ""
    reason = reason or ("is another name of a file elsewhere (a hard link)" if found.st_nlink > 1 else "")
    if reason:
        os.close(descriptor)
        raise OSError(errno.EINVAL, reason, path)
    return descriptor


def read_descriptor(descriptor: int, limit: int, path: str = "") -> bytes:
    """Return the content of a file from its beginning. Raises OSError if it is longer than ``limit`` bytes."""
    content = bytearray()
    while True:
        part = os.pread(descriptor, min(_CHUNK_BYTES, limit + 1 - len(content)), len(content))
        content += part
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit} bytes", path)
        if not part:
            return bytes(content)


def read_regular(path: str, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises OSError as :func:`open_regular` does."""
    with open(open_regular(path), "rb") as file:
        return read_descriptor(file.fileno(), limit, path)


def others_write(found: os.stat_result, owner: int = 0) -> str:
    """Return to whom a file or directory belongs, if another user than its ``owner`` may write it; else nothing."""
    if found.st_uid == owner and not found.st_mode & _OTHERS_WRITE:
        return ""
    return f"belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}"


def read_trusted(path: str, limit: int, owner: int = 0) -> bytes:
    """Return the content as :func:`read_regular` does, of a file of ``owner`` that no other user may write.

    Raises OSError.
    """
    with open(open_regular(path), "rb") as file:
        distrusted = others_write(os.fstat(file.fileno()), owner)
        if distrusted:
            raise PermissionError(errno.EPERM, f"{distrusted}; only root may write it", path)
        return read_descriptor(file.fileno(), limit, path)


def read_with_own_links(path: str, limit: int) -> bytes:
    """Return the content as :func:`read_regular` does, following symbolic links owned by root or the caller.

    A projected ServiceAccount token is such a link. Links of other users are refused, as fs.protected_symlinks does in
    sticky directories (proc_sys_fs(5)). Raises OSError.
    """
    for _link in range(_MOST_LINKS):
        try:
            return read_regular(path, limit)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        path = os.path.join(os.path.dirname(path), _own_target(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _own_target(path: str) -> str:
    """Return the target of a link. Raises OSError if its owner is neither root nor the caller."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(descriptor).st_uid
        if owner not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, f"is a symbolic link of user {owner}, which is not followed", path)
        return os.readlink("", dir_fd=descriptor)
    finally:
        os.close(descriptor)


def parse_json(text: Union[str, bytes]) -> Any:
    """Parse JSON text. Raises ValueError, including for nesting that is too deep for the parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def gunzip(content: bytes, limit: int) -> bytes:
    """Decompress gzip content. Raises ValueError if it is damaged or decompresses to more than ``limit`` bytes.

    Like gzip(1), it accepts several compressed members in a row.
    """
    found = bytearray()
    rest = content
    while rest:
        decoder = zlib.decompressobj(_GZIP_WINDOW)
        try:
            found += decoder.decompress(rest, limit + 1 - len(found))
        except zlib.error as error:
            raise ValueError(f"it is not valid gzip: {error}") from None
        if len(found) > limit:
            raise ValueError(f"it decompresses to more than {limit} bytes")
        if not decoder.eof:
            raise ValueError("it is truncated")
        rest = decoder.unused_data
    if not content:
        raise ValueError("it is empty")
    return bytes(found)


def gunzip_lines(content: bytes, limit: int) -> Iterator[bytes]:
    """Yield each line of gzip content with its end, decompressed as it is read. Raises ValueError as :func:`gunzip`."""
    rest = limit
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            while True:
                line = stream.readline(rest + 1)
                if not line:
                    return
                rest -= len(line)
                if rest < 0:
                    raise ValueError(f"it decompresses to more than {limit} bytes")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it is not valid gzip: {error}") from None
