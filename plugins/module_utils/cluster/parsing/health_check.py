# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The health check that the annotations of a Service request."""

from __future__ import annotations

import re
from typing import Any, Mapping, Optional

from ...base.durations import parse_duration
from ..fields import Invalid, is_dns_label, is_dns_subdomain, leniently, mapping, shown, text
from ..model import HealthCheck

CHECK = "kubenode.proxy/check"
PORT, PATH, STATUS, SERVER_NAME, CA = (f"{CHECK}-{name}" for name in ("port", "path", "status", "server-name", "ca"))
INTERVAL, FAST_INTERVAL, TIMEOUT, FALL, RISE = (
    f"{CHECK}-{name}" for name in ("interval", "fast-interval", "timeout", "fall", "rise")
)
ANNOTATIONS: tuple[str, ...] = (
    *(CHECK, PORT, PATH, STATUS, SERVER_NAME, CA),
    *(INTERVAL, FAST_INTERVAL, TIMEOUT, FALL, RISE),
)
SCHEMES = ("tcp", "http", "https")

_SHORTEST, _LONGEST = 0.1, 3600.0
_STATUSES = re.compile(r"([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?")
_PATH = re.compile(r"/[!-~]{0,1023}")


def parse_check(metadata: Mapping[str, Any], skipped: list[Invalid]) -> Optional[HealthCheck]:
    """Return the health check of a Service, None if it has none.

    A Service with an invalid annotation is served without a check; the annotation is appended to ``skipped``.
    """
    return leniently(_check, metadata.get("annotations"), "metadata.annotations", skipped, None)


def _check(value: object, field: str) -> Optional[HealthCheck]:
    annotations = mapping(value, field)
    given = {name: text(annotations[name], _field(name)) for name in ANNOTATIONS if name in annotations}
    if CHECK not in given:
        return None
    default = HealthCheck()
    scheme = given[CHECK]
    if scheme not in SCHEMES:
        raise Invalid(_field(CHECK), f"{shown(scheme)} is not one of {', '.join(SCHEMES)}")
    path = given.get(PATH, default.path)
    if _PATH.fullmatch(path) is None:
        raise Invalid(_field(PATH), f"{shown(path)} is not a path of printable ASCII that begins with /")
    server_name = given.get(SERVER_NAME, "")
    if server_name and not (is_dns_subdomain(server_name) and all(map(is_dns_label, server_name.split(".")))):
        raise Invalid(_field(SERVER_NAME), f"{shown(server_name)} is not a DNS name")
    ca = given.get(CA, "")
    if ca and not (ca.startswith("/") and ca.isprintable()):
        raise Invalid(_field(CA), f"{shown(ca)} is not an absolute path")
    return HealthCheck(
        scheme=scheme,
        port=_number(given, PORT, 1, 65535, 0),
        path=path,
        statuses=_statuses(given[STATUS]) if STATUS in given else default.statuses,
        server_name=server_name,
        ca=ca,
        interval=_seconds(given, INTERVAL, default.interval),
        timeout=_seconds(given, TIMEOUT, default.timeout),
        fall=_number(given, FALL, 1, 100, default.fall),
        rise=_number(given, RISE, 1, 100, default.rise),
        fast_interval=_seconds(given, FAST_INTERVAL, default.fast_interval),
    )


def _field(name: str) -> str:
    return f"metadata.annotations[{name}]"


def _number(given: Mapping[str, str], name: str, low: int, high: int, default: int) -> int:
    if name not in given:
        return default
    value = given[name]
    if not (value.isascii() and value.isdecimal() and len(value) <= 5 and low <= int(value) <= high):
        raise Invalid(_field(name), f"{shown(value)} is not a number between {low} and {high}")
    return int(value)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    if name not in given:
        return default
    seconds = parse_duration(given[name])
    if seconds is None or not _SHORTEST <= seconds <= _LONGEST:
        raise Invalid(_field(name), f"{shown(given[name])} is not a duration such as 500ms or 2s, from 100ms to 60m")
    return seconds


def _statuses(value: str) -> tuple[tuple[int, int], ...]:
    ranges = []
    for part in value.split(","):
        match = _STATUSES.fullmatch(part.strip())
        low, high = (match.group(1), match.group(2) or match.group(1)) if match is not None else ("1", "0")
        if low > high:
            raise Invalid(_field(STATUS), f"{shown(value)} is not a list of HTTP statuses such as 200-299,401")
        ranges.append((int(low), int(high)))
    return tuple(ranges)
