# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""HTTP/1.1 messages as the agent's server needs them: the head of a request, and an answer as bytes (RFC 9112).

Bodies of requests are irrelevant, and each connection serves one request.
"""

from __future__ import annotations

import email.utils
import http
import re
from typing import Callable, NamedTuple, Optional

MOST_HEAD_BYTES = 8192

_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_VERSION = re.compile(r"HTTP/(\d)\.\d\Z")
_PLAIN = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))


class Response(NamedTuple):
    """An HTTP answer: status code, headers, body."""

    code: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class HttpRequest(NamedTuple):
    """The parts of a request that a responder gets: method, path without its query, and Accept header or ``""``."""

    method: str
    path: str
    accept: str = ""


#: Returns the answer to a request; None for 404.
Responder = Callable[[HttpRequest], Optional[Response]]


class BadRequest(Exception):
    """A request that cannot be served; ``code`` is the status to answer with, the text says why."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def text_response(code: int, text: str) -> Response:
    """Return an answer of one line of plain text."""
    return Response(code, _PLAIN, f"{text}\n".encode())


def head_length(data: bytes) -> int:
    """Return the length of a complete head including its empty line, or 0 while the head is incomplete.

    Raises BadRequest if it is longer than MOST_HEAD_BYTES.
    """
    found = _END_OF_HEAD.search(data, 0, MOST_HEAD_BYTES)
    if found is not None:
        return found.end()
    if len(data) >= MOST_HEAD_BYTES:
        raise BadRequest(431, f"the head of the request is longer than {MOST_HEAD_BYTES} bytes")
    return 0


def parse_head(head: bytes) -> HttpRequest:
    """Parse a complete head and return the request. Raises BadRequest."""
    lines = head.decode("latin-1").split("\n")
    words = lines[0].rstrip("\r").split(" ")
    if len(words) != 3:
        raise BadRequest(400, "the request line is not valid")
    method, target, protocol = words
    version = _VERSION.match(protocol)
    if not _TOKEN.match(method) or version is None or not target.isprintable():
        raise BadRequest(400, "the request line is not valid")
    if version.group(1) != "1":
        raise BadRequest(505, "only HTTP/1.0 and HTTP/1.1 are served")
    path = target.partition("?")[0]
    if path.startswith("http://"):
        # The absolute form, which clients send to a proxy (RFC 9112, section 3.2.2).
        path = "/" + path[len("http://") :].partition("/")[2]
    if not path.startswith("/"):
        raise BadRequest(400, "the target of the request is not a path")
    return HttpRequest(method, path, _header(lines[1:], "accept"))


def _header(lines: list[str], name: str) -> str:
    found = []
    for line in lines:
        field, colon, value = line.partition(":")
        if colon and field.strip().lower() == name:
            found.append(value.strip())
    return ", ".join(found)


def encode(answer: Response, with_body: bool = True) -> bytes:
    """Encode an answer, the last one on its connection; without its body for HEAD."""
    try:
        phrase = http.HTTPStatus(answer.code).phrase
    except ValueError:
        phrase = ""
    lines = [f"HTTP/1.1 {answer.code} {phrase}"]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    lines += [
        f"Date: {email.utils.formatdate(usegmt=True)}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
    ]
    if answer.code == 405:
        lines.append("Allow: GET, HEAD")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + answer.body if with_body else head
