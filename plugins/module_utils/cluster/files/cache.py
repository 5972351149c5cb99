# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cache file of the last good cluster state, with which a node boots before it can reach the API server.

The file is one header line of JSON (format, version, SHA-256 of the payload, time written, kinds that are completely
known) followed by the gzip-compressed objects, one a line, as a List that ``cluster.snapshot`` reads. It is written to
a temporary file, synced and renamed, so it is either complete or absent.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import time
from typing import AbstractSet, Any, Callable, Iterable, Iterator, NamedTuple

from ...base.errors import SnapshotError, errors_as, os_errors
from ...base.regular_files import gunzip_lines, parse_json, read_regular
from ...base.whole_files import write_whole
from ..parsing.objects import ObjectKey, object_key

FORMAT = "kubenode-proxy-cluster-state"
VERSION = 1
#: Limits in bytes of a file, and of the objects in it: 10,000 Services with 50,000 endpoints take about 40 MB.
MOST_BYTES, _MOST_TEXT = 256 << 20, 1 << 30

_BEGIN, _BETWEEN, _LAST = b'{"apiVersion":"v1","kind":"List","items":[\n', b",\n", b"]}"


class CacheFile(NamedTuple):
    """An intact file: its compressed objects, when it was written, and the kinds that are completely known.

    ``written``: in seconds since the epoch. ``kinds``: also those without any object. ``boot``: the kernel's boot ID
    when it was written, empty if not known.
    """

    path: str
    payload: bytes
    written: float
    kinds: frozenset[str]
    boot: str = ""

    def texts(self) -> Iterator[bytes]:
        """Yield each object as it was written, decompressed as it is read. Raises SnapshotError."""
        # JSON as it is written here has no line ends of its own.
        last = b""
        with errors_as(SnapshotError, f"{self.path}: the cached cluster state cannot be read", ValueError):
            for number, last in enumerate(gunzip_lines(self.payload, _MOST_TEXT)):
                if not number and last != _BEGIN:
                    break
                text = last.rstrip(b",\n")
                if number and text and last != _LAST:
                    yield text
        if last != _LAST:
            raise SnapshotError(f"{self.path}: the cached cluster state is not a list of objects")

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yield each object. Raises SnapshotError."""
        return (raw for raw, _text in self._parsed(self.texts()))

    def texts_of(self, wanted: Callable[[ObjectKey], bool], parts: AbstractSet[str]) -> Iterator[bytes]:
        """Yield each object whose key is wanted, as :meth:`texts` does. Raises SnapshotError.

        ``parts``: kinds or names of which each wanted object has one. Objects without any of them are not parsed,
        which would take most of the time.
        """
        written = [json.dumps(part).encode() for part in parts]
        candidates = (text for text in self.texts() if any(part in text for part in written))
        return (text for raw, text in self._parsed(candidates) if wanted(object_key(raw)))

    def _parsed(self, texts: Iterable[bytes]) -> Iterator[tuple[dict[str, Any], bytes]]:
        for text in texts:
            with errors_as(SnapshotError, f"{self.path}: the cached cluster state cannot be read", ValueError):
                raw = parse_json(text)
            if not isinstance(raw, dict):
                raise SnapshotError(f"{self.path}: the cached cluster state is not a list of objects")
            yield raw, text


def write_cache(path: str, objects: Iterable[bytes], kinds: AbstractSet[str], boot: str = "") -> None:
    """Write objects, each encoded as JSON, replacing an older cache atomically. Raises SnapshotError.

    ``kinds``: those that are completely known. ``boot``: the kernel's boot ID.
    """
    payload = _compressed(objects)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kinds": sorted(kinds),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "written": time.time(),
        "boot": boot,
    }
    with os_errors(SnapshotError, f"{path}: the cluster state cannot be written"):
        os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)
        write_whole(path, json.dumps(header).encode() + b"\n" + payload)


def _compressed(objects: Iterable[bytes]) -> bytes:
    """Return the List of the objects, compressed as it is put together: it is ten times as large."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as stream:
        before = _BEGIN
        for item in objects:
            stream.write(before + item)
            before = _BETWEEN
        stream.write((b"" if before == _BETWEEN else before) + b"\n" + _LAST)
    return packed.getvalue()


def read_cache(path: str) -> list[dict[str, Any]]:
    """Return the objects of an intact cache. Raises SnapshotError, naming the file and the fault."""
    return list(open_cache(path).objects())


def open_cache(path: str) -> CacheFile:
    """Return an intact cache, not decompressed yet. Raises SnapshotError as :func:`read_cache` does."""
    with os_errors(SnapshotError, f"{path}: no cached cluster state"):
        first, _newline, payload = read_regular(path, MOST_BYTES).partition(b"\n")
    try:
        header = parse_json(first)
        known, version = header["format"], header["version"]
        digest, written = header["sha256"], float(header["written"])
        kinds, boot = frozenset(map(str, header["kinds"])), str(header.get("boot", ""))
        if not math.isfinite(written):
            raise ValueError("the time of writing is not finite")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise SnapshotError(f"{path}: the cached cluster state has no valid header") from error
    if known != FORMAT or version != VERSION:
        raise SnapshotError(
            f"{path}: the cached state has format {known!r} version {version!r}, not {FORMAT} {VERSION}"
        )
    if hashlib.sha256(payload).hexdigest() != digest:
        raise SnapshotError(f"{path}: the cached cluster state is damaged: its SHA-256 does not match")
    return CacheFile(path, payload, written, kinds, boot)
