# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Snapshots of the cluster state: reading the output of kubectl, and writing small, deterministic files.

JSON is read with the standard library. PyYAML is imported only if the text is not JSON.

A large file in one of the two usual layouts, that of this project's own snapshots and that of ``kubectl -o json``, is
decoded piece by piece: its text and all its raw objects together take three times the memory of the parsed objects.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from itertools import islice
from typing import IO, Any, Iterable, Iterator, NamedTuple, Optional, Union, cast

from ...base.errors import SnapshotError, errors_as, os_errors
from ...base.whole_files import write_whole
from ..parsing.objects import is_supported, object_key
from ..parsing.prune import prune

_GZIP_MAGIC = b"\x1f\x8b"
_MAXIMUM_BYTES = 2 << 30
_PIECE_BYTES = 1 << 20
#: Text that is decoded at a time: its objects fit into the processor's cache.
_DECODED_BYTES = 64 << 10
#: The API server accepts no object of that size.
_MOST_ITEM_BYTES = 8 << 20
_MAXIMUM_NESTING = 8
_WORDS = {str: "plain text", int: "a number", float: "a number", bool: "a truth value"}


class WrittenSnapshot(NamedTuple):
    """A snapshot's SHA-256 of its canonical content (hexadecimal), objects by kind, and whether the file changed."""

    digest: str
    counts: dict[str, int]
    changed: bool


class _Layout(NamedTuple):
    """The layout of a List's text: what precedes its items, what separates them, and what follows them.

    ``between`` ends with a comma and a line feed; what precedes these belongs to the item.
    """

    head: bytes
    between: bytes
    end: bytes


_CANONICAL = _Layout(b'{"apiVersion":"v1","kind":"List","items":[\n', b"},\n", b"\n]")
_KUBECTL = _Layout(b'{\n    "apiVersion": "v1",\n    "items": [\n', b"\n        },\n", b"\n    ]")


class _OtherLayout(Exception):
    """The content is not as expected, so it must be read as a whole."""


def snapshot_objects(path: str) -> Iterator[Any]:
    """Yield the raw objects of a snapshot file; see :func:`parse_snapshot`. Raises SnapshotError, naming the file.

    Those of a List in a usual layout are decoded a few at a time, so use them only after all have been yielded: the
    file may turn out to be invalid, or to hold nothing that is read.
    """
    others: dict[str, None] = {}
    useful = False
    for item in _all_objects(path):
        useful = useful or is_supported(item)
        if not useful:
            others[_described(item)] = None
        yield item
    if others and not useful:
        raise SnapshotError(f"{path}: holds no Services or other objects that are read, but {', '.join(others)}")


def _described(item: dict[str, Any]) -> str:
    """Return the kind of an object that is not read, and what the API server or kubectl means by it."""
    kind = str(item.get("kind"))
    if kind == "Status":
        return f"the answer to a request that failed (kind Status): {item.get('message') or item.get('reason')}"
    return "a table for people (kind Table); request JSON without a table" if kind == "Table" else f"kind {kind}"


def _all_objects(path: str) -> Iterator[Any]:
    """Yield the raw objects of a file, those that are not read included."""
    done = 0
    with os_errors(SnapshotError, path), open(path, "rb") as opened:
        # A pipe can be read only once.
        stream: IO[bytes] = opened if opened.seekable() else io.BytesIO(opened.read())
        try:
            for item in _objects_in_pieces(stream, path):
                yield item
                done += 1
            return
        except _OtherLayout:
            stream.seek(0)
        content = stream.read()
    yield from islice(parse_snapshot(content, path), done, None)


def read_snapshot(path: str) -> list[Any]:
    """Return the raw objects of a snapshot file; see :func:`parse_snapshot`. Raises SnapshotError, naming the file."""
    return list(snapshot_objects(path))


def _objects_in_pieces(file: IO[bytes], source: str) -> Iterator[Any]:
    """Yield the objects of a List in one of the layouts, as :func:`parse_snapshot` would return them.

    Raises _OtherLayout where the text is anything else; the objects yielded before are the first ones of the whole.
    """
    packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(0)
    stream: Union[IO[bytes], gzip.GzipFile] = gzip.GzipFile(fileobj=file) if packed else file
    pieces = _pieces(stream)
    text = next(pieces, b"")
    layout = next((each for each in (_CANONICAL, _KUBECTL) if text.startswith(each.head)), None)
    if layout is None:
        raise _OtherLayout
    text = text[len(layout.head) :]
    while True:
        cut = text.rfind(layout.between)
        if cut >= 0:
            cut += len(layout.between)
            yield from _items(text[: cut - 2], source)
            text = text[cut:]
        elif len(text) > _MOST_ITEM_BYTES:
            raise _OtherLayout
        piece = next(pieces, b"")
        if not piece:
            break
        text += piece
    end = max(text.rfind(layout.end), 0)
    yield from _items(text[:end], source)
    frame = _list_without_items(layout.head + text[end:])
    if frame is None:
        raise _OtherLayout
    _check_whole(frame, source)


def _pieces(stream: Union[IO[bytes], gzip.GzipFile]) -> Iterator[bytes]:
    size = 0
    while size <= _MAXIMUM_BYTES:
        try:
            piece = stream.read(_DECODED_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise _OtherLayout from error
        if not piece:
            return
        size += len(piece)
        yield piece
    raise _OtherLayout


def _items(text: bytes, source: str) -> list[Any]:
    """Return the objects in a part of the items of a List. Raises _OtherLayout if their kind is that of the List."""
    try:
        items = json.loads(b"[%b]" % text)
    except (ValueError, RecursionError) as error:
        raise _OtherLayout from error
    objects: list[Any] = []
    for item in cast(list[Any], items):
        if not isinstance(item, dict) or not item.get("kind"):
            raise _OtherLayout
        _collect(item, objects, source, 1)
    return objects


def _list_without_items(text: bytes) -> Optional[dict[str, Any]]:
    """Return the List whose text this is, without its items, or None if it is anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if document.get("items") == [] and document.get("kind") == "List" else None


def _check_whole(listed: dict[str, Any], source: str) -> None:
    """Raise SnapshotError if a list is one page of a longer one, as ``kubectl get --raw`` with a limit writes it."""
    metadata = listed.get("metadata")
    if not isinstance(metadata, dict):
        return
    left = metadata.get("remainingItemCount")
    if metadata.get("continue") or left:
        kind, more = listed.get("kind"), f"{left} more objects" if left else "more objects"
        raise SnapshotError(f"{source}: holds a part of a {kind} only, the API server has {more} (metadata.continue)")


def parse_snapshot(content: bytes, source: str = "snapshot") -> list[Any]:
    """Return the raw objects in the bytes of a snapshot in their order, with Lists flattened.

    Accepted are plain or gzip data in JSON or YAML: a List (also ServiceList, EndpointSliceList ...), an array of Lists
    or objects, or several documents one after another. Items of a typed list get the kind that the list implies.
    ``source`` names the snapshot in errors. Raises SnapshotError with the position of the fault, and for a list that is
    one page of a longer one.
    """
    if content.startswith(_GZIP_MAGIC):
        content = _gunzip(content, source)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SnapshotError(f"{source}: not UTF-8 text at byte {error.start}") from error
    if not text.strip():
        raise SnapshotError(f"{source}: is empty")
    # JSON starts with a bracket. YAML in flow style may, too: it is parsed as YAML if it turns out not to be JSON.
    documents = _json_documents(text, source) if text.lstrip()[0] in "{[" else _yaml_documents(text, source)
    objects: list[Any] = []
    for document in documents:
        _collect(document, objects, source, 0)
    return objects


def _gunzip(content: bytes, source: str) -> bytes:
    try:
        # Read in pieces: a single read of up to the maximum would allocate that much memory first.
        pieces: list[bytes] = []
        size = 0
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            while size <= _MAXIMUM_BYTES:
                piece = stream.read(_PIECE_BYTES)
                if not piece:
                    return b"".join(pieces)
                pieces.append(piece)
                size += len(piece)
    except EOFError as error:
        raise SnapshotError(f"{source}: the gzip data is truncated after {len(content)} bytes") from error
    except (OSError, zlib.error) as error:
        raise SnapshotError(f"{source}: the gzip data is corrupt: {error}") from error
    raise SnapshotError(f"{source}: unpacks to more than {_MAXIMUM_BYTES} bytes")


def _json_documents(text: str, source: str) -> list[Any]:
    decoder = json.JSONDecoder()
    documents: list[Any] = []
    position, end = 0, len(text)
    while True:
        while position < end and text[position] in " \t\r\n":
            position += 1
        if position == end:
            return documents
        try:
            document, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            if not documents:
                return _flow_yaml_documents(text, source, error)
            raise SnapshotError(_json_fault(text, source, error)) from error
        except (ValueError, RecursionError) as error:
            raise SnapshotError(f"{source}: not a snapshot: {error}") from error
        documents.append(document)


def _json_fault(text: str, source: str, error: json.JSONDecodeError) -> str:
    position = f"line {error.lineno} column {error.colno} (character {error.pos})"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        return f"{source}: the JSON is truncated: {error.msg} at {position}"
    return f"{source}: the JSON is not valid: {error.msg} at {position}"


def _flow_yaml_documents(text: str, source: str, fault: json.JSONDecodeError) -> list[Any]:
    # Report the JSON error unless the text really is YAML. The slow parser is not tried on large texts.
    if len(text) < 1 << 20:
        try:
            return _yaml_documents(text, source)
        except SnapshotError:
            pass
    raise SnapshotError(_json_fault(text, source, fault)) from fault


def _yaml_documents(text: str, source: str) -> list[Any]:
    with errors_as(SnapshotError, f"{source}: is not JSON, and reading YAML needs PyYAML", ImportError):
        import yaml
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return [document for document in yaml.load_all(text, Loader=loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise SnapshotError(f"{source}: neither JSON nor valid YAML: {problem}{where}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{source}: neither JSON nor valid YAML: {error}") from error


def _collect(document: Any, objects: list[Any], source: str, depth: int) -> None:
    if depth > _MAXIMUM_NESTING:
        raise SnapshotError(f"{source}: lists are nested more than {_MAXIMUM_NESTING} deep")
    if isinstance(document, list):
        for item in document:
            _collect(item, objects, source, depth + 1)
        return
    if not isinstance(document, dict):
        if depth == 0:
            held = _WORDS.get(type(document), "a single value")
            raise SnapshotError(f"{source}: contains {held}, not Kubernetes objects")
        objects.append(document)
        return
    kind = document.get("kind")
    if isinstance(kind, str) and kind.endswith("List"):
        items = document.get("items")
        if items is not None and not isinstance(items, list):
            raise SnapshotError(f"{source}: the items of a {kind} are not a list")
        _check_whole(document, source)
        for item in with_kind(items or [], kind, document.get("apiVersion")):
            _collect(item, objects, source, depth + 1)
        return
    if depth == 0 and not kind:
        raise SnapshotError(f"{source}: contains an object without a kind, which is not a Kubernetes object")
    objects.append(document)


def with_kind(items: list[Any], list_kind: str, api_version: Any) -> list[Any]:
    """Fill in kind and apiVersion of a list's items, in which the API server omits them, and return the items.

    The items are modified in place. Those of a plain ``List`` are not changed.
    """
    item_kind = list_kind[: -len("List")]
    if item_kind:
        for item in items:
            if isinstance(item, dict) and not item.get("kind"):
                item["kind"] = item_kind
                item.setdefault("apiVersion", api_version)
    return items


def canonical_snapshot(objects: Iterable[Any]) -> tuple[bytes, dict[str, int]]:
    """Return the content of a snapshot, and the number of objects of each kind in it.

    The content is a JSON List, sorted by kind, namespace and name, with one object per line, reduced to the fields that
    the proxy reads. The bytes depend on these fields only, not on the order of the input. Values that are not objects
    are kept, so that the reader of the snapshot reports them.
    """
    chosen: dict[tuple[str, ...], str] = {}
    counts: dict[str, int] = {}
    read = [raw for raw in objects if is_supported(raw)]
    selects_nodes = any(object_key(raw).kind == "ClusterNetworkPolicy" for raw in read)
    for raw in read:
        key: tuple[str, ...] = object_key(raw)
        line = json.dumps(
            prune(raw, selects_nodes), sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str
        )
        if not all((key[0], key[2])):
            key = (*key, line)
        chosen[key] = line
    for key in chosen:
        counts[key[0]] = counts.get(key[0], 0) + 1
    lines = ",\n".join(chosen[key] for key in sorted(chosen))
    return f'{{"apiVersion":"v1","kind":"List","items":[\n{lines}\n]}}\n'.encode("ascii"), counts


def snapshot_digest(content: bytes) -> str:
    """Return the SHA-256 of uncompressed snapshot content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def compress(content: bytes) -> bytes:
    """Compress with gzip, without a time stamp, so that equal content gives equal bytes."""
    return gzip.compress(content, compresslevel=6, mtime=0)


def write_snapshot(path: str, objects: Iterable[Any], check_mode: bool = False) -> WrittenSnapshot:
    """Write a snapshot of raw objects, compressed if the name ends with ``.gz``, replacing the file atomically.

    A file with the same content is not written again; with ``check_mode`` it is only compared. A new file gets mode
    0600, although a snapshot never contains Secrets. Raises SnapshotError.
    """
    content, counts = canonical_snapshot(objects)
    digest = snapshot_digest(content)
    if _content_of(path) == content:
        return WrittenSnapshot(digest, counts, False)
    if not check_mode:
        _replace(path, compress(content) if path.endswith(".gz") else content)
    return WrittenSnapshot(digest, counts, True)


def _content_of(path: str) -> bytes:
    """Return the uncompressed content of an earlier snapshot, empty if there is none that can be read."""
    try:
        with open(path, "rb") as stream:
            content = stream.read()
        return _gunzip(content, path) if content.startswith(_GZIP_MAGIC) else content
    except (OSError, SnapshotError):
        return b""


def _replace(path: str, content: bytes) -> None:
    with os_errors(SnapshotError, f"{path}: cannot be written"):
        mode = os.stat(path).st_mode & 0o7777 if os.path.exists(path) else 0o600
        write_whole(path, content, mode)
