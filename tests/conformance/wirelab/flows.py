# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Flows: each is a line of text about what is sent and how often.

tcp|udp|sctp SOURCE[/ADDRESS] -> DESTINATION:PORT [options]
held NAME
http|metrics SOURCE -> URL
cmd COMMAND [@options]
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

TRANSPORTS = ("tcp", "udp", "sctp")
# Kinds and options of flows that run alone and in their order, since they depend on earlier ones.
_ORDERED_KINDS = ("held", "http", "metrics", "cmd")
_ORDERED_OPTIONS = ("seq", "sport", "open", "sticky", "ordered")

_TARGET = re.compile(r"^(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):(\d+)$")
_URL = re.compile(r"^http://(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):(\d+)(/\S*)?$")
_COMMAND_OPTIONS = re.compile(r"\s@(\S+)$")

TRIES_ORDERED = 8
TRIES_DROPPED = 6
TRIES_ONE_ENDPOINT = 20
TRIES_AT_MOST = 600
MISS_PROBABILITY = 1e-6


@dataclass(frozen=True)
class Flow:
    """A parsed flow. Which of the fields are set depends on *kind*."""

    text: str
    kind: str
    options: dict[str, str] = field(default_factory=dict)
    host: str = ""
    source: str | None = None
    destination: str = ""
    port: int = 0
    path: str = ""
    name: str = ""
    command: str = ""

    @property
    def version(self) -> int:
        """The IP family: 4 or 6."""
        return 6 if ":" in self.destination else 4

    @property
    def ordered(self) -> bool:
        """Must it run alone, in its place among the ordered ones?"""
        return self.kind in _ORDERED_KINDS or any(option in self.options for option in _ORDERED_OPTIONS)

    @property
    def by_chance(self) -> bool:
        """Is the number of endpoints compared instead of the endpoints themselves?"""
        return "sticky" in self.options or "many" in self.options

    @property
    def source_port(self) -> int:
        """The constant source port, 0 for any."""
        return int(self.options.get("sport", 0))

    @property
    def fixed_tries(self) -> int | None:
        """The number of tries if it does not depend on what is seen."""
        if "tries" in self.options:
            return int(self.options["tries"])
        if self.ordered:
            return 1 if self.source_port or "open" in self.options else TRIES_ORDERED
        return None

    def wanted(self, mode: str) -> bool:
        """Report whether the flow belongs to this mode (option ``only``)."""
        only = self.options.get("only")
        return not only or mode in only.split("+")


def parse_flow(text: str) -> Flow:
    """Parse one line. ValueError names the text that is not a flow."""
    plain = " ".join(text.split())
    words = plain.split(" ")
    kind = words[0]
    if kind == "cmd":
        return _parse_command(plain, text)
    if kind == "held":
        if len(words) < 2:
            raise ValueError(f"flow {text!r}: held needs the name of an open connection")
        return Flow(plain, kind, _options(words[2:]), name=words[1])
    if kind not in (*TRANSPORTS, "http", "metrics"):
        raise ValueError(f"flow {text!r}: unknown kind {kind!r}")
    if len(words) < 4 or words[2] != "->":
        raise ValueError(f"flow {text!r}: expected KIND SOURCE -> TARGET")
    host, _, source = words[1].partition("/")
    match = (_TARGET if kind in TRANSPORTS else _URL).match(words[3])
    if not match:
        raise ValueError(f"flow {text!r}: bad target {words[3]!r}")
    path = "" if kind in TRANSPORTS else match.group(4) or "/"
    return Flow(
        plain,
        kind,
        _options(words[4:]),
        host,
        source or None,
        match.group(1) or match.group(2),
        int(match.group(3)),
        path,
    )


def _parse_command(plain: str, text: str) -> Flow:
    # The command keeps its blanks.
    command = text.strip()[len("cmd") :].strip()
    options: dict[str, str] = {}
    match = _COMMAND_OPTIONS.search(command)
    if match:
        options = _options(match.group(1).split(","))
        command = command[: match.start()]
    return Flow(plain, "cmd", options, command=command)


def _options(words: list[str]) -> dict[str, str]:
    """Return ``key=value`` words as a mapping; a word without ``=`` has an empty value."""
    pairs = (word.partition("=") for word in words)
    return {key: value for key, _, value in pairs}


def tries_for(seen: int) -> int:
    """Return how many tries miss one more equally likely endpoint less often than once in a million."""
    if seen <= 1:
        return TRIES_ONE_ENDPOINT
    return min(TRIES_AT_MOST, math.ceil(-math.log(MISS_PROBABILITY) / math.log((seen + 1) / seen)))
