# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Flows over HTTP: health checks (status, headers, body) and metrics (names, types, labels)."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any, NamedTuple

from .flows import Flow
from .results import FlowResult
from .senders import DROP, Senders, failure

SECONDS = 3
COMPARED_HEADERS = ("content-type", "x-load-balancing-endpoint-weight", "x-content-type-options")
_TIMES = re.compile(r'("(?:lastUpdated|currentTime)":\s*)"[^"]*"')
_TYPE_LINE = re.compile(r"^# TYPE (\S+) (\S+)")
_SAMPLE_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ")
_LABEL = re.compile(r'(\w+)="')
_DERIVED = re.compile(r"_(bucket|sum|count)$")


class Response(NamedTuple):
    """An HTTP response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: str


async def fetch(senders: Senders, flow: Flow, time_scale: float) -> Response | str:
    """GET the URL of the flow from its source; return the response, or a text of the failure, as in an outcome."""
    loop = asyncio.get_running_loop()
    connection = senders.make_socket(flow, socket.SOCK_STREAM)
    request = f"GET {flow.path} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n".encode()

    async def exchange() -> bytes:
        await loop.sock_connect(connection, (flow.destination, flow.port))
        await loop.sock_sendall(connection, request)
        parts = []
        while data := await loop.sock_recv(connection, 65536):
            parts.append(data)
        return b"".join(parts)

    try:
        return parse_response(await asyncio.wait_for(exchange(), SECONDS * time_scale))
    except asyncio.TimeoutError:
        return DROP
    except OSError as error:
        return failure(connection, error)
    finally:
        connection.close()


def parse_response(raw: bytes) -> Response:
    """Return the parts of a whole response, chunked or not."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode(errors="replace").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:])
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = unchunk(body)
    return Response(int(lines[0].split()[1]), headers, body.decode(errors="replace"))


def unchunk(body: bytes) -> bytes:
    """Return the content of a chunked body (RFC 9112, 7.1)."""
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            break
        content, body = content + body[:length], body[length + 2 :]
    return content


async def run_http(senders: Senders, flow: Flow, time_scale: float) -> FlowResult:
    """Run a flow of the kind http."""
    response = await fetch(senders, flow, time_scale)
    if isinstance(response, str):
        return {"flow": flow.text, "http": {"error": response}}
    text = _TIMES.sub(r'\1"<time>"', response.body)
    try:
        body: Any = json.loads(text)
    except ValueError:
        body = text
    headers = {name: value for name, value in response.headers.items() if name in COMPARED_HEADERS}
    return {"flow": flow.text, "http": {"status": response.status, "headers": headers, "body": body}}


async def run_metrics(senders: Senders, flow: Flow, time_scale: float) -> tuple[FlowResult, str]:
    """Run a flow of the kind metrics; return the result, and the whole text for the recording."""
    response = await fetch(senders, flow, time_scale)
    text = response if isinstance(response, str) else response.body
    return {"flow": flow.text, "metrics": {} if isinstance(response, str) else describe_metrics(text)}, text


def describe_metrics(text: str) -> dict[str, Any]:
    """Name -> type and labels, from the Prometheus text format."""
    described: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        declared = _TYPE_LINE.match(line)
        if declared:
            described.setdefault(declared.group(1), {"type": declared.group(2), "labels": []})
            continue
        sample = _SAMPLE_LINE.match(line)
        if line.startswith("#") or not sample:
            continue
        name = sample.group(1) if sample.group(1) in described else _DERIVED.sub("", sample.group(1))
        labels = described.setdefault(name, {"type": "untyped", "labels": []})["labels"]
        labels += [label for label in dict.fromkeys(_LABEL.findall(sample.group(2) or "")) if label not in labels]
    return {name: described[name] for name in sorted(described)}
