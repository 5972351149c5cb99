# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pages /statusz, /flagz and /version in the formats of kube-proxy 1.36 (KEP-4827 and KEP-4828).

The pages are plain text, or JSON for clients that request it with
``Accept: application/json;v=v1beta1;g=config.k8s.io;as=Statusz`` (or ``as=Flagz``).
"""

from __future__ import annotations

import json
import platform
import time
from typing import Any, Mapping, Optional, Sequence

from ...base.timestamps import timestamp
from ...configuration.behaviour import KUBE_PROXY_RELEASE
from ...packaging.identity import Identity
from ..http.message import Response, text_response

COMPONENT = "kube-proxy"
STATUSZ, FLAGZ = "Statusz", "Flagz"

_GROUP = "config.k8s.io"
_VERSIONS = ("v1beta1", "v1alpha1")
_DEPRECATED = ("v1alpha1",)
_TEXT = (("Content-Type", "text/plain; charset=utf-8"),)
_JSON = (("Content-Type", "application/json"),)
_WARNING = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is "
    "for debugging purposes only."
)


def statusz(accept: str, identity: Identity, started: float, paths: Sequence[str], now: float) -> Response:
    """Return the answer of /statusz. ``started`` and ``now`` are in seconds since the epoch."""
    uptime = max(0, int(now - started))
    begun = time.gmtime(started)
    # The format has a field for Go's version only.
    language = f"none (Python {platform.python_version()})"
    listed = sorted({"/" + path.split("/")[1] for path in paths})
    document = {
        "startTime": timestamp(started),
        "uptimeSeconds": uptime,
        "goVersion": language,
        "binaryVersion": identity.text,
        "emulationVersion": KUBE_PROXY_RELEASE,
        "paths": listed,
    }
    # The day of the month is padded with a blank, as in Go's UnixDate.
    moment = time.strftime("%a %b ", begun) + f"{begun.tm_mday:2d}" + time.strftime(" %H:%M:%S UTC %Y", begun)
    lines = [
        f"Started: {moment}",
        f"Up: {uptime // 3600} hr {uptime // 60 % 60:02d} min {uptime % 60:02d} sec",
        f"Go version: {language}",
        f"Binary version: {identity.text}",
        f"Emulation version: {KUBE_PROXY_RELEASE}",
        f"Paths: {' '.join(listed)}",
    ]
    return _answer(accept, STATUSZ, document, lines)


def flagz(accept: str, flags: Mapping[str, str]) -> Response:
    """Return the answer of /flagz: the options of the command line, sorted by name."""
    found = dict(sorted(flags.items()))
    return _answer(accept, FLAGZ, {"flags": found}, [f"{name}={value}" for name, value in found.items()])


def version_response(identity: Identity) -> Response:
    """Return the answer of /version, in the shape of version.Info of k8s.io/apimachinery."""
    major, _dot, rest = identity.version.partition(".")
    document = {
        "major": major,
        "minor": rest.partition(".")[0],
        "emulationMajor": KUBE_PROXY_RELEASE.partition(".")[0],
        "emulationMinor": KUBE_PROXY_RELEASE.partition(".")[2],
        "gitVersion": f"v{identity.text}",
        "gitCommit": identity.engine,
        "gitTreeState": "",
        "buildDate": "",
        "goVersion": "",
        "compiler": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"linux/{platform.machine()}",
    }
    return Response(200, _JSON, json.dumps(document, indent=2).encode())


def negotiated(accept: str, kind: str) -> Optional[str]:
    """Return the requested version of the JSON form, ``""`` for plain text, None for an unsupported type.

    JSON needs all of v, g and as: the form without them is not acceptable, as upstream.
    """
    if not accept.strip():
        return ""
    for part in accept.split(","):
        media, *parameters = (word.strip() for word in part.split(";"))
        if media in ("text/plain", "text/*", "*/*"):
            return ""
        given = dict(item.partition("=")[::2] for item in parameters)
        wanted = (media, given.get("g"), given.get("as"))
        if wanted == ("application/json", _GROUP, kind) and given.get("v") in _VERSIONS:
            return given["v"]
    return None


def _answer(accept: str, kind: str, document: Mapping[str, Any], lines: Sequence[str]) -> Response:
    """Return a page in the form that the client requests: the document as JSON, or the lines as plain text."""
    version = negotiated(accept, kind)
    if version is None:
        form = f"application/json;v={_VERSIONS[0]};g={_GROUP};as={kind}"
        return text_response(406, f"media type not acceptable, must be one of: text/plain, {form}")
    if version:
        return _structured(kind, version, document)
    text = "\n".join(["", f"{COMPONENT} {kind.lower()}", _WARNING, "", *lines, ""])
    return Response(200, _TEXT, text.encode())


def _structured(kind: str, version: str, document: Mapping[str, Any]) -> Response:
    whole: dict[str, Any] = {
        "kind": kind,
        "apiVersion": f"{_GROUP}/{version}",
        "metadata": {"name": COMPONENT},
        **document,
    }
    headers: tuple[tuple[str, str], ...] = _JSON
    if version in _DEPRECATED:
        warning = f'299 - "This version of the {kind.lower()} endpoint is deprecated. Please use a newer version."'
        headers = (*_JSON, ("Warning", warning))
    return Response(200, headers, json.dumps(whole).encode())
