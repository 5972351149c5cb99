# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of responses of an API server: whole documents and lines of a watch, both of bounded size, and events."""

from __future__ import annotations

import json
from typing import Any, Iterable, Iterator, NamedTuple

from ...base.errors import ApiError
from ..files.snapshot import with_kind

#: Limit of one page of a list, decompressed. 500 objects of the largest size that etcd accepts by default would be
#: 750 MiB, but a page of real Services or EndpointSlices is 1 to 5 MiB.
PAGE_BYTES = 64 << 20
#: Limit of one event of a watch. etcd accepts objects of up to 1.5 MiB by default.
LINE_BYTES = 8 << 20
#: Limit of the answer to a failed request, of which only the beginning is shown.
FAILURE_BYTES = 1 << 16
_SHOWN_CHARACTERS = 500
_VERSION_CHARACTERS = 128


class InvalidAnswer(ApiError):
    """The API server's response does not conform to the API, or exceeds a size limit."""


class WatchEvent(NamedTuple):
    """``type`` is ADDED, MODIFIED, DELETED, BOOKMARK or ERROR; ``object`` is raw (a bookmark's holds metadata only)."""

    type: str
    object: dict[str, Any]

    @property
    def resource_version(self) -> str:
        """The version at which a watch resumes after this event; empty if the object has none."""
        return version_of(self.object)


def version_of(raw: dict[str, Any]) -> str:
    """Return the resourceVersion of an object or a list, empty if it has none that may be sent to the server."""
    metadata = raw.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(version, str) or len(version) > _VERSION_CHARACTERS:
        return ""
    return version if version.isascii() and version.isprintable() else ""


def whole(pieces: Iterable[bytes], most: int, what: str) -> bytes:
    """Return the pieces joined. Raises InvalidAnswer, naming the limit, if they are more than ``most`` bytes."""
    content = bytearray()
    for piece in pieces:
        content += piece
        if len(content) > most:
            raise InvalidAnswer(f"{what} is larger than {most >> 20} MiB")
    return bytes(content)


def beginning(pieces: Iterable[bytes], most: int) -> bytes:
    """Read about ``most`` bytes of the pieces at most, and return them joined."""
    content = bytearray()
    for piece in pieces:
        content += piece
        if len(content) >= most:
            break
    return bytes(content)


def lines(pieces: Iterable[bytes], most: int, what: str) -> Iterator[bytes]:
    """Yield each line that is not blank.

    Raises InvalidAnswer for a line of more than ``most`` bytes, ApiError if the last one is truncated.
    """
    held = bytearray()
    for piece in pieces:
        start = 0
        while True:
            end = piece.find(b"\n", start)
            held += piece[start:] if end < 0 else piece[start:end]
            if len(held) > most:
                raise InvalidAnswer(f"{what}: an event is larger than {most >> 20} MiB")
            if end < 0:
                break
            if held.strip():
                yield bytes(held)
            held.clear()
            start = end + 1
    if held.strip():
        raise ApiError(f"{what}: the connection broke in the middle of an event")


def document(content: bytes, what: str) -> dict[str, Any]:
    """Return the content parsed as one JSON object. Raises InvalidAnswer."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        # RecursionError: the JSON is nested thousands of levels deep.
        raise InvalidAnswer(f"{what}: the answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidAnswer(f"{what}: the answer is not an object")
    return value


def event(line: bytes, kind: str, what: str) -> WatchEvent:
    """Return the event in a line, with kind and apiVersion of its object filled in. Raises InvalidAnswer."""
    try:
        value = json.loads(line)
        name, item = value["type"], value["object"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidAnswer(f"{what}: an event is not valid: {type(error).__name__}: {error}") from error
    if not isinstance(item, dict):
        raise InvalidAnswer(f"{what}: an event has no object")
    if name != "ERROR":
        with_kind([item], f"{kind}List", item.get("apiVersion"))
    return WatchEvent(name if isinstance(name, str) else "", item)


def status_code(status: dict[str, Any]) -> int:
    """Return the HTTP status in a Status object, 500 if it has none."""
    code = status.get("code")
    return code if isinstance(code, int) and 100 <= code <= 599 else 500


def status_text(status: dict[str, Any]) -> str:
    """Return the message or reason of a Status object, truncated to a reasonable length."""
    for name in ("message", "reason"):
        text = status.get(name)
        if isinstance(text, str) and text:
            return text[:_SHOWN_CHARACTERS]
    return "no reason given"


def status_reason(status: dict[str, Any]) -> str:
    """Return the reason in a Status object, empty if it has none or the object is not a Status."""
    reason = status.get("reason")
    return reason if status.get("kind") == "Status" and isinstance(reason, str) else ""


def status_of(content: bytes) -> dict[str, Any]:
    """Return the Status object of a failed request; other content becomes the message of one."""
    try:
        status = json.loads(content)
    except (ValueError, RecursionError):
        status = {"message": content[:200].decode("utf-8", "replace")}
    return status if isinstance(status, dict) else {}
