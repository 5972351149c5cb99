# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The last good cluster state, kept on disk, so that a node boots with its Services before the API server answers.

The file is one header line of JSON (format, version, SHA-256 of what follows, time written) and then the
gzip-compressed objects, as a List that ``cluster.snapshot`` reads. It is written to a temporary file, synced and
renamed, so it is whole or absent.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from typing import Any, Dict, Iterable, List, NamedTuple

from ..errors import SnapshotError
from ..whole_files import write_whole

FORMAT = "kubenode-proxy-cluster-state"
VERSION = 1


class CachedState(NamedTuple):
    """Objects as the API server gave them, and when they were written (seconds since the epoch)."""

    objects: List[Dict[str, Any]]
    written: float


def write_cache(path: str, objects: Iterable[Dict[str, Any]]) -> None:
    """Write the objects, replacing an older cache atomically. Raises SnapshotError, naming the file."""
    write_encoded(path, [json.dumps(item, separators=(",", ":")).encode() for item in objects])


def write_encoded(path: str, objects: Iterable[bytes]) -> None:
    """The same for objects that are JSON text already."""
    document = b'{"apiVersion":"v1","kind":"List","items":[' + b",".join(objects) + b"]}"
    payload = gzip.compress(document, compresslevel=1, mtime=0)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "written": time.time(),
    }
    try:
        os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)
        write_whole(path, json.dumps(header).encode() + b"\n" + payload)
    except OSError as error:
        raise SnapshotError(f"{path}: the cluster state cannot be kept: {error.strerror}") from error


def read_cache(path: str) -> CachedState:
    """The objects of an intact cache. Raises SnapshotError, naming the file and what is wrong with it."""
    try:
        with open(path, "rb") as file:
            first, payload = file.readline(), file.read()
    except OSError as error:
        raise SnapshotError(f"{path}: no kept cluster state: {error.strerror}") from error
    try:
        header = json.loads(first)
        known, version = header["format"], header["version"]
        digest, written = header["sha256"], float(header["written"])
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{path}: the kept cluster state has no valid header") from error
    if known != FORMAT or version != VERSION:
        raise SnapshotError(f"{path}: the kept state has format {known!r} version {version!r}, not {FORMAT} {VERSION}")
    if hashlib.sha256(payload).hexdigest() != digest:
        raise SnapshotError(f"{path}: the kept cluster state is damaged: its SHA-256 does not match")
    try:
        items = json.loads(gzip.decompress(payload))["items"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{path}: the kept cluster state cannot be read: {error}") from error
    return CachedState(list(items), written)
