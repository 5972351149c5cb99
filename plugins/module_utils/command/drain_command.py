# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``drain``: make load balancers leave this node while it serves, and wait until no external connection is left.

Root writes the file that keeps the drain, and the agent, which answers the health checks, reads it. Without an agent
nothing answers health checks, so a drain is refused.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from typing import Any, Callable, Iterable, NamedTuple, Optional, Sequence

from ..base.errors import KernelError, ProxyError, some_of
from ..base.timestamps import timestamp
from ..convergence.drain.external import Serving, describe, external_connections, parse_serving
from ..convergence.drain.record import (
    MOST_SECONDS,
    DrainError,
    DrainRecord,
    drain_until,
    read_record,
    remove_record,
    write_record,
)
from ..convergence.runtime.agent_client import Answer, NoAgent
from .result import LEFT, NOT_RUNNING, OK, CommandResult, Refused, ask_newer, drain_line

#: The maximum number of remaining connections that the result names.
_NAMED = 20
#: How many of those who still begin connections a line names, and how often such a line is shown.
_CLIENTS = 3
_PROGRESS_SECONDS = 10.0
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 5.0
#: Reading large tables takes at most this part of the time.
_PAUSE_FACTOR = 10.0


Connection = tuple[str, bytes, bytes]


class Waited(NamedTuple):
    """The outcome of waiting: the connections in use, those that have begun recently, and the seconds it took."""

    used: set[Connection]
    arrived: tuple[Connection, ...]
    seconds: float

    @property
    def is_empty(self) -> bool:
        """Whether no connection is left, and no new one has appeared for long enough."""
        return not self.used and not self.arrived


def drain(arguments: argparse.Namespace, progress: Callable[[str], None] = lambda _line: None) -> CommandResult:
    """Start, show or stop the drain of this node (``drain``); ``progress`` is called with a line now and then."""
    if arguments.action == "start":
        return _start(arguments, progress)
    return {"status": _status, "stop": _stop}[arguments.action](arguments)


def _require_root(what: str) -> None:
    if os.geteuid():
        raise ProxyError(f"drain {what}: only root can do this")


def _ask(arguments: argparse.Namespace, **question: Any) -> Answer:
    """Ask the agent about its drain. Raises NoAgent, ProxyError."""
    answer = ask_newer(arguments.control, "support drains", {"command": "drain", **question})
    if not isinstance(answer.get("drained"), bool):
        raise ProxyError("the agent's answer about its drain is not valid")
    return answer


def _start(arguments: argparse.Namespace, progress: Callable[[str], None]) -> CommandResult:
    _require_root("start")
    try:
        before = _ask(arguments)
        if not before.get("serves"):
            raise Refused(NOT_RUNNING, "not drained: the agent serves no Services, so it answers no health checks")
        record, saved = _write(arguments)
        _activate(arguments, saved)
    except NoAgent as error:
        raise Refused(NOT_RUNNING, f"not drained: only a running agent answers health checks ({error})") from error
    until = timestamp(record.until)
    document = {"drained": True, "since": timestamp(record.since), "until": until, "outcome": "started"}
    first = f"drained until {until}: health checks fail, and connections are served"
    if not arguments.wait:
        return CommandResult(OK, [first], document)
    waited = _wait(arguments, progress)
    document.update(_waited_document(waited))
    return CommandResult(OK if waited.is_empty else LEFT, [first, *_waited_lines(waited)], document)


def _write(arguments: argparse.Namespace) -> tuple[DrainRecord, Optional[DrainRecord]]:
    """Write the file; return the new drain and the one it replaces. Raises DrainError."""
    now = time.time()
    saved: Optional[DrainRecord] = None
    try:
        saved = read_record(arguments.drain_file)
    except DrainError:
        # Anything that is not a drain of root's is replaced.
        remove_record(arguments.drain_file)
    until = now + arguments.seconds
    since = now
    # A drain that begins in the future was written before the clock was set back.
    if saved is not None and saved.since <= now and saved.remaining(now) and until - saved.since <= MOST_SECONDS:
        since = saved.since
    record = drain_until(since, now, arguments.seconds)
    write_record(arguments.drain_file, record)
    return record, saved


def _activate(arguments: argparse.Namespace, saved: Optional[DrainRecord]) -> None:
    """Have the agent read the file; restore the previous one if it does not. Raises NoAgent, ProxyError."""
    try:
        answer = _ask(arguments, read=True)
        if not answer["drained"]:
            problem = answer.get("problem") or f"it does not read {arguments.drain_file}"
            raise ProxyError(f"not drained: the agent does not see the drain: {problem}")
    except ProxyError:
        if saved is None:
            remove_record(arguments.drain_file)
        else:
            write_record(arguments.drain_file, saved)
        raise


def _wait(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Waited:
    """Wait until no connection is left and none has appeared for a while, or until the deadline. Raises ProxyError."""
    began = said = latest = time.monotonic()
    serving: Optional[Serving] = None
    known: Optional[set[Connection]] = None
    used: set[Connection] = set()
    arrived: dict[Connection, float] = {}
    while True:
        looked = time.monotonic()
        forwarded: Any = ()
        try:
            answer = _ask(arguments, connections=True)
            if not answer["drained"]:
                raise ProxyError("the drain has ended while its connections were waited for")
            if "serving" in answer:
                serving, forwarded = parse_serving(answer["serving"]), answer.get("forwarded", ())
        except NoAgent:
            # It is being restarted. Connections through the kernel continue.
            pass
        if serving is not None:
            found = external_connections(serving, forwarded)
            if known is not None and found.known - known:
                latest = looked
                arrived.update(dict.fromkeys(found.known - known, looked))
            known, used = found.known, found.used
        now = time.monotonic()
        arrived = {connection: seen for connection, seen in arrived.items() if looked - seen < arguments.quiet}
        waited = Waited(used, tuple(arrived), round(now - began, 1))
        if now - said >= _PROGRESS_SECONDS:
            said = now
            progress(f"waiting: {_count_text(used)} in use{_arriving_text(waited.arrived)}")
        if serving is not None and waited.is_empty and looked - latest >= arguments.quiet:
            return waited
        left = began + arguments.deadline - now
        if left <= 0:
            if serving is None:
                raise ProxyError("the connections cannot be counted: the agent does not know the cluster yet")
            return waited
        time.sleep(min(left, max(_PAUSE_SECONDS, min(_PAUSE_FACTOR * (now - looked), _LONGEST_PAUSE_SECONDS))))


def _waited_document(waited: Waited) -> dict[str, Any]:
    return {
        "outcome": "empty" if waited.is_empty else "deadline",
        "waitedSeconds": waited.seconds,
        "arriving": bool(waited.arrived),
        "arrivals": _arrivals(waited.arrived),
        **_count_document(waited.used),
    }


def _arrivals(arrived: Iterable[Connection]) -> list[dict[str, Any]]:
    """Return who still begins connections, by client and port, those with most first."""
    found = Counter(
        (item["client"].rpartition(":")[0], f":{item['destination'].rpartition(':')[2]}")
        for item in map(describe, arrived)
    )
    return [{"client": key[0], "port": key[1], "connections": count} for key, count in found.most_common(_NAMED)]


def _arriving_text(arrived: Sequence[Connection]) -> str:
    """Return a clause about those who still begin connections, empty if nobody does."""
    if not arrived:
        return ""
    names = [f"{item['client']} to {item['port']}" for item in _arrivals(arrived)]
    return f"; new connections still begin, from {some_of(names, _CLIENTS)}"


def _count_document(used: set[Connection]) -> dict[str, Any]:
    return {
        "connections": len(used),
        "byProtocol": dict(sorted(Counter(protocol for protocol, _source, _destination in used).items())),
        "left": [describe(connection) for connection in sorted(used)[:_NAMED]],
    }


def _count_text(used: set[Connection]) -> str:
    if not used:
        return "no external connection"
    document = _count_document(used)
    protocols = ", ".join(f"{count} {protocol}" for protocol, count in document["byProtocol"].items())
    return f"{len(used)} external connection{'s' if len(used) > 1 else ''} ({protocols})"


def _waited_lines(waited: Waited) -> list[str]:
    if waited.is_empty:
        return [f"no external connection is left after {waited.seconds:.0f} s"]
    lines = [f"the deadline has passed after {waited.seconds:.0f} s with {_count_text(waited.used)} in use"]
    if waited.used:
        lines[0] += ", which are cut if the node stops serving now"
    if waited.arrived:
        lines.append(f"{_arriving_text(waited.arrived)[2:]}; do these clients check healthz?")
    return [*lines, *_left_lines(waited.used)]


def _left_lines(used: set[Connection]) -> list[str]:
    named = [describe(connection) for connection in sorted(used)[:_NAMED]]
    lines = [f"  {item['protocol']} {item['client']} -> {item['destination']}" for item in named]
    return lines + ([f"  and {len(used) - _NAMED} more"] if len(used) > _NAMED else [])


def _stop(arguments: argparse.Namespace) -> CommandResult:
    _require_root("stop")
    removed = remove_record(arguments.drain_file)
    warnings: tuple[str, ...] = ()
    try:
        if _ask(arguments, read=True)["drained"]:
            raise ProxyError(f"still drained: the agent does not read {arguments.drain_file}")
    except NoAgent as error:
        warnings = (f"no health check is answered: {error}",)
    line = "the drain is stopped: health checks succeed again" if removed else "the node was not drained"
    if warnings and removed:
        line = "the drain is stopped"
    return CommandResult(OK, [line], {"drained": False, "stopped": removed}, warnings)


def _status(arguments: argparse.Namespace) -> CommandResult:
    try:
        answer = _ask(arguments, connections=True)
    except NoAgent as error:
        return _status_without_agent(arguments, str(error))
    document: dict[str, Any] = {"agent": "running", **_drain_document(answer)}
    lines = [drain_line(answer)]
    try:
        found = external_connections(parse_serving(answer["serving"]), answer.get("forwarded", ()))
    except (KernelError, LookupError):
        # Not root, or the cluster is not known yet.
        document["connections"] = None
    else:
        arrived: tuple[Connection, ...] = ()
        if answer["drained"]:
            time.sleep(_PAUSE_SECONDS)
            again = _ask(arguments, connections=True)
            later = external_connections(parse_serving(again["serving"]), again.get("forwarded", ()))
            arrived = tuple(later.known - found.known)
            document.update(arriving=bool(arrived), arrivals=_arrivals(arrived))
        document.update(_count_document(found.used))
        lines += [f"in use: {_count_text(found.used)}{_arriving_text(arrived)}", *_left_lines(found.used)]
    return CommandResult(OK, lines, document)


def _drain_document(answer: Answer) -> dict[str, Any]:
    times = {name: timestamp(float(answer[name])) if answer["drained"] else "" for name in ("since", "until")}
    seconds = answer["remainingSeconds"]
    return {"drained": answer["drained"], **times, "remainingSeconds": seconds, "problem": answer["problem"]}


def _status_without_agent(arguments: argparse.Namespace, error: str) -> CommandResult:
    """Return the drain that the next agent will start with."""
    record, problem = None, ""
    try:
        record = read_record(arguments.drain_file)
    except DrainError as reason:
        problem = str(reason)
    seconds = record.remaining(time.time()) if record is not None else 0.0
    lines = [f"no agent is running: {error}"]
    if record is not None and seconds:
        lines.append(f"the next agent starts drained, until {timestamp(record.until)}")
    if problem:
        lines.append(f"ignored: {problem}")
    times = record._asdict() if record is not None else {}
    answer = {"drained": bool(seconds), **times, "remainingSeconds": round(seconds, 1), "problem": problem}
    document = {"agent": "not running", **_drain_document(answer), "connections": None}
    return CommandResult(NOT_RUNNING, lines, document)
