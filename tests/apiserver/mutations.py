# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Answers of an API server with random faults in their JSON, HTTP or connection, repeatable by seed."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any, Callable

from .store import KINDS, Compacted, Store
from .wire import Answer, broken, chunked, failure, head, response, silent

#: Values that replace others, as JSON text: some are texts that Python's encoder never writes.
_TEXTS = (
    *("null", "true", "false", "0", "-1", "1.5", '""', "[]", "{}", "[[]]", '[{"name":5}]', "NaN", "-Infinity", "1e999"),
    *('"text"', '"\\ud800"', '"\\u0000\\u001b[31m"', '"%s"' % ("x" * 5000), '"10.96.0.0"', '"999999999999999999999"'),
    *("9" * 4000, "9" * 5000, "-0", '"-5"', '"0"', "[" * 900 + "]" * 900, "[" * 50000 + "]" * 50000, '"\\u0661"'),
    *('{"a":' * 300 + "1" + "}" * 300, '"410"', "410", '"ERROR"', '"Service"', '"v1"', '"2027-01-01T00:00:00.1e999Z"'),
)
_CODES = (
    *range(100, 104),
    200,
    204,
    206,
    301,
    302,
    304,
    400,
    401,
    403,
    404,
    405,
    409,
    410,
    422,
    429,
    500,
    503,
    504,
    599,
)
_HEADERS: tuple[tuple[str, str], ...] = (
    *(("Content-Length", value) for value in ("-1", "x", "99999999", "0", "1", "9" * 5000, "5, 5")),
    *(("Transfer-Encoding", value) for value in ("chunked", "gzip", "chunked, chunked", "")),
    *(("Content-Encoding", value) for value in ("gzip", "br", "identity", "deflate", "x" * 100)),
    *(("Retry-After", value) for value in ("0", "-1", "9" * 5000, "Wed, 21 Oct 2026 07:28:00 GMT", "\u00b2")),
    *(("Connection", value) for value in ("close", "keep-alive", "upgrade")),
    ("X-Long", "x" * 70000),
    ("Location", "https://elsewhere.example/"),
    ("Content-Type", "application/vnd.kubernetes.protobuf"),
)

Path = list[Any]


def _paths(value: Any, path: Path, found: list[Path]) -> list[Path]:
    found.append(path)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        _paths(below, [*path, key], found)
    return found


def mutated_json(document: Any, rng: random.Random) -> bytes:
    """Return a document with one to three values replaced, removed, doubled or renamed, as JSON text or nearly so."""
    document = json.loads(json.dumps(document))
    holes: dict[str, str] = {}
    for number in range(rng.randint(1, 3)):
        path = rng.choice(_paths(document, [], []))
        if not path:
            return rng.choice(_TEXTS).encode() if rng.random() < 0.3 else json.dumps(document).encode()
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        kind = rng.random()
        if kind < 0.7:
            hole = f"<<hole {number}>>"
            holes[json.dumps(hole)] = rng.choice(_TEXTS)
            parent[path[-1]] = hole
        elif kind < 0.85:
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[rng.choice(["", "metadata", "name", "x" * 300, "\u0000", "kind"])] = parent.pop(path[-1])
        else:
            parent.extend(parent[:3])
    text = json.dumps(document, separators=(",", ":"))
    for hole, replacement in holes.items():
        text = text.replace(hole, replacement)
    return text.encode("utf-8", "surrogatepass")


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes of which some are flipped, cut, doubled or inserted."""
    buffer = bytearray(content)
    for _turn in range(rng.randint(1, 4)):
        at = rng.randrange(len(buffer) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(buffer):
            buffer[at] = rng.randrange(256)
        elif kind == 1:
            del buffer[at:]
        elif kind == 2:
            buffer[at:at] = bytes(rng.randrange(256) for _byte in range(rng.randint(1, 20)))
        elif kind == 3:
            buffer[at:at] = buffer[at : at + 50]
        else:
            del buffer[at : at + rng.randint(1, 30)]
    return bytes(buffer)


def _events_changed(events: list[Any], rng: random.Random) -> list[bytes]:
    lines = [json.dumps(event, separators=(",", ":")).encode() for event in events]
    for _turn in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines) + 1)
        kind = rng.randrange(8)
        if kind == 0 or at == len(lines):
            code = rng.choice(_TEXTS).encode() if rng.random() < 0.5 else b"%d" % rng.choice(_CODES)
            message = rng.choice(_TEXTS).encode()
            lines.insert(at, b'{"type":"ERROR","object":{"kind":"Status","code":%s,"message":%s}}' % (code, message))
        elif kind == 1:
            lines.insert(at, lines[at])
        elif kind == 2:
            lines.insert(
                at, rng.choice([b"", b" ", b"\r", b"{", b"[]", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b"null"])
            )
        elif kind == 3:
            lines[at] = lines[at].replace(b'"type"', rng.choice([b'"Type"', b'"type":5,"x"', b'"object"']))
        elif kind == 4:
            rng.shuffle(lines)
        elif kind == 5:
            lines[at] = mutated_bytes(lines[at], rng)
        elif kind == 6 and events:
            lines[at] = mutated_json(rng.choice(events), rng)
        else:
            lines[at] = lines[at].replace(b"ADDED", b"NOVEL").replace(b"MODIFIED", b"DELETED")
    return lines


def _broken_off(parts: list[Any], rng: random.Random) -> list[Any]:
    whole = b"".join(part for part in parts if isinstance(part, bytes))
    end: Callable[[], Any] = rng.choice([broken, silent, lambda: b""])
    return [whole[: rng.randrange(len(whole) + 1)], end()]


def _with_odd_head(body: bytes, rng: random.Random) -> bytes:
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    for _turn in range(rng.randint(1, 2)):
        name, value = rng.choice(_HEADERS)
        headers[name] = value
    if rng.random() < 0.05:
        headers.update({f"X-{number}": "x" for number in range(150)})
    status = f"{rng.choice(_CODES)} Odd" if rng.random() < 0.4 else "200 OK"
    return head(status, headers) + body


def page_of(store: Store, path: str) -> dict[str, Any]:
    """Return a whole collection as a server without faults lists it."""
    kind = KINDS[path]
    items, version = store.list(path)
    bare = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in items]
    metadata = {"resourceVersion": str(version)}
    return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": bare}


def events_of(store: Store, path: str, after: str) -> list[dict[str, Any]]:
    """Return the last events that a server without faults sends after a resourceVersion, and a bookmark."""
    try:
        found = store.events(path, int(after or 0))
    except (Compacted, ValueError):
        found = store.events(path, store.resource_version)
    bookmark = {"kind": KINDS[path].kind, "metadata": {"resourceVersion": str(store.resource_version)}}
    events = [
        {"type": "ADDED" if event.before is None else "MODIFIED", "object": event.after}
        if event.after is not None
        else {"type": "DELETED", "object": event.before}
        for event in found[-5:]
    ]
    return [*events, {"type": "BOOKMARK", "object": bookmark}]


def mutated(document: Any, events: list[Any], watch: bool, rng: random.Random) -> Answer:
    """Return an answer to a list (``document``) or a watch (``events``) that is wrong somewhere."""
    kind = rng.random()
    body = json.dumps(document, separators=(",", ":")).encode()
    if watch:
        lines = [json.dumps(event, separators=(",", ":")).encode() for event in events]
        if kind < 0.6:
            return Answer(*chunked(line + b"\n" for line in _events_changed(events, rng)))
        parts: list[Any] = chunked(line + b"\n" for line in lines)
        if kind < 0.7:
            return Answer(*_broken_off(parts, rng))
        if kind < 0.8:
            return Answer(mutated_bytes(b"".join(parts), rng))
        body = b"\n".join(lines) + b"\n"
    elif kind < 0.6:
        return Answer(response(mutated_json(document, rng)))
    elif kind < 0.7:
        return Answer(*_broken_off([response(body)], rng))
    elif kind < 0.8:
        return Answer(mutated_bytes(response(body), rng))
    if kind < 0.9:
        return Answer(_with_odd_head(body, rng))
    if kind < 0.94:
        packed = gzip.compress(body, 1)
        return Answer(response(mutated_bytes(packed, rng), headers={"Content-Encoding": "gzip"}))
    if kind < 0.97:
        return Answer(failure(rng.choice(_CODES), rng.choice(["Expired", "", "x" * 3000])))
    last: list[Any] = [broken(), silent(), b"", b"\x00" * 100, b"HTTP/9.9 200 OK\r\n\r\n", b"\r\n" * 2000]
    return Answer(rng.choice(last))
