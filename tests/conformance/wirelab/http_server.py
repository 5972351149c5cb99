# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""As much of an HTTP/1.1 server as the API of the lab needs."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

REASONS = {200: "OK", 201: "Created", 404: "Not Found", 405: "Method Not Allowed", 415: "Unsupported Media Type"}


class Request(NamedTuple):
    """A request; *query* has the first value of every parameter."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request of a connection. IncompleteReadError at its end, ValueError for what is no HTTP."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    method, target, _version = lines[0].split(" ")
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    return Request(method, url.path, {name: values[0] for name, values in parse_qs(url.query).items()}, body)


def write_json(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    """A whole JSON response."""
    write_body(writer, status, json.dumps(content).encode(), "application/json")


def write_body(writer: asyncio.StreamWriter, status: int, body: bytes, content_type: str) -> None:
    """A whole response."""
    writer.write(
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def start_chunked_json(writer: asyncio.StreamWriter) -> None:
    """The head of a response whose body follows in chunks."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One chunk; an empty one ends the body."""
    writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
