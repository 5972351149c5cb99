# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cache file of the last good cluster state, with which a node boots before it can reach the API server.

The file is one header line of JSON (format, version, SHA-256 of the payload, time written) followed by the
gzip-compressed objects, one a line, as a List that ``cluster.snapshot`` reads. It is written to a temporary file,
synced and renamed, so it is either complete or absent.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import time
from typing import Any, Dict, Iterable, List, NamedTuple

from ..errors import SnapshotError
from ..regular_files import gunzip, parse_json, read_regular
from ..whole_files import write_whole

FORMAT = "kubenode-proxy-cluster-state"
VERSION = 1
#: Limits in bytes of a file, and of the objects in it: 10,000 Services with 50,000 endpoints take about 40 MB.
MOST_BYTES, _MOST_TEXT = 256 << 20, 1 << 30

_BEGIN, _BETWEEN, _END = b'{"apiVersion":"v1","kind":"List","items":[\n', b",\n", b"\n]}"


class CachedState(NamedTuple):
    """Objects as the API server sent them, and when they were written (seconds since the epoch)."""

    objects: List[Dict[str, Any]]
    written: float


class _File(NamedTuple):
    """An intact file. ``has_lines``: each object is on a line of its own, as in all but those of older versions."""

    payload: bytes
    written: float
    has_lines: bool


def write_cache(path: str, objects: Iterable[bytes]) -> None:
    """Write objects, each encoded as JSON, replacing an older cache atomically. Raises SnapshotError."""
    payload = _compressed(objects)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "lines": True,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "written": time.time(),
    }
    try:
        os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)
        write_whole(path, json.dumps(header).encode() + b"\n" + payload)
    except OSError as error:
        raise SnapshotError(f"{path}: the cluster state cannot be written: {error.strerror}") from error


def _compressed(objects: Iterable[bytes]) -> bytes:
    """Return the List of the objects, compressed as it is put together: it is ten times as large."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as stream:
        before = _BEGIN
        for item in objects:
            stream.write(before + item)
            before = _BETWEEN
        stream.write((b"" if before == _BETWEEN else before) + _END)
    return packed.getvalue()


def read_cache(path: str) -> CachedState:
    """Return the objects of an intact cache. Raises SnapshotError, naming the file and the fault."""
    found = _read(path)
    items = _items(path, _text(path, found))
    return CachedState(items, found.written)


def cache_written(path: str) -> float:
    """Return when an intact cache was written, without decompressing it. Raises SnapshotError as :func:`read_cache`."""
    return _read(path).written


def cached_texts(path: str) -> List[bytes]:
    """Return each object of an intact cache as it was written. Raises SnapshotError as :func:`read_cache` does."""
    found = _read(path)
    text = _text(path, found)
    if not found.has_lines:
        return [json.dumps(item).encode() for item in _items(path, text)]
    if not (text.startswith(_BEGIN) and text.endswith(_END)):
        raise SnapshotError(f"{path}: the cached cluster state is not a list of objects")
    # JSON as it is written here has no line ends of its own.
    lines = text.split(_BETWEEN)
    lines[0] = lines[0][len(_BEGIN) :]
    lines[-1] = lines[-1][: -len(_END)]
    return lines if lines[0] else []


def _read(path: str) -> _File:
    try:
        first, _newline, payload = read_regular(path, MOST_BYTES).partition(b"\n")
    except OSError as error:
        raise SnapshotError(f"{path}: no cached cluster state: {error.strerror}") from error
    try:
        header = parse_json(first)
        known, version = header["format"], header["version"]
        digest, written = header["sha256"], float(header["written"])
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
    return _File(payload, written, header.get("lines") is True)


def _text(path: str, file: _File) -> bytes:
    try:
        return gunzip(file.payload, _MOST_TEXT)
    except ValueError as error:
        raise SnapshotError(f"{path}: the cached cluster state cannot be read: {error}") from error


def _items(path: str, text: bytes) -> List[Dict[str, Any]]:
    try:
        items = parse_json(text)["items"]
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{path}: the cached cluster state cannot be read: {error}") from error
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise SnapshotError(f"{path}: the cached cluster state is not a list of objects")
    return items
