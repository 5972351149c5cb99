# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``top``: the traffic of Services and endpoints in 80 columns, and the rates between two readings."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from functools import partial
from typing import Any, Optional, Sequence, TextIO

from ..base.timestamps import timestamp
from ..convergence.runtime.agent_client import NoAgent
from .result import NOT_RUNNING, OK, CommandResult, Refused, ask_newer, valid

WIDTH = 80
_UNITS = "kMGTPE"
_COUNTERS = ("connections", "packetsIn", "packetsOut", "bytesIn", "bytesOut")
_RESET = (
    "* a counter in the kernel was created again or removed, last at {}; what it had counted since the reading "
    "before is missing"
)


def rated(document: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return a reading with ``perSecond`` in each row: what each counter has counted since an earlier reading.

    A row has none if it was not in the earlier reading, or if both are the same reading. Nor has a counter that begins
    again: that of a Service or endpoint which was removed and created again, and all counters after a restart of the
    agent or a change of the mode.
    """
    seconds = float(document["monotonic"]) - float(before["monotonic"])
    known = _by_place(before) if document["since"] == before["since"] else {}
    found = dict(document, seconds=round(seconds, 3))
    found["ports"] = [
        {
            **_with_rates(port, known.get((*_identity(port), "")), seconds),
            "endpoints": [
                _with_rates(item, known.get((*_identity(port), item["endpoint"])), seconds)
                for item in port["endpoints"]
            ],
        }
        for port in document["ports"]
    ]
    return found


def _identity(port: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(port[name] for name in ("family", "namespace", "name", "port", "protocol"))


def _by_place(document: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {}
    for port in document["ports"]:
        found[(*_identity(port), "")] = port
        for item in port["endpoints"]:
            found[(*_identity(port), item["endpoint"])] = item
    return found


def _with_rates(row: dict[str, Any], before: Optional[dict[str, Any]], seconds: float) -> dict[str, Any]:
    rates: dict[str, Optional[float]] = {}
    for name in _COUNTERS:
        now, then = row[name], before[name] if before is not None else None
        comparable = seconds > 0 and None not in (now, then) and now >= then
        rates[name] = round((now - then) / seconds, 1) if comparable else None
    return {**row, "perSecond": rates}


def busiest(document: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return a reading with at most ``limit`` rows, those with the most connections first.

    With rates, those with the most new connections per second are first. ``limit`` 0: all of them.
    """

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        rate = row.get("perSecond", {}).get("connections")
        name = (row.get("namespace", ""), row.get("name", ""), row.get("port", ""), row.get("endpoint", ""))
        return (-(rate or 0), -(row["connections"] or 0), *name)

    rows = sorted(document["ports"], key=order)
    shown = rows[:limit] if limit else rows
    shown = [{**row, "endpoints": sorted(row["endpoints"], key=order)} for row in shown]
    return {**document, "ports": shown, "notShown": len(rows) - len(shown)}


def short(value: Optional[float]) -> str:
    """Return a number in at most six characters, ``-`` for None."""
    if value is None:
        return "-"
    if value < 99_999.5:
        return f"{value:.1f}" if isinstance(value, float) and value < 99.95 else f"{value:.0f}"
    power = 1
    while value / 1000**power >= 999.95 and power < len(_UNITS):
        power += 1
    return f"{value / 1000**power:.1f}{_UNITS[power - 1]}"


def _sum(row: dict[str, Any], names: Sequence[str]) -> Optional[float]:
    values = [row[name] for name in names if row.get(name) is not None]
    return sum(values) if values else None


def _cells(row: dict[str, Any], watching: bool) -> list[str]:
    amounts = row.get("perSecond", {}) if watching else row
    cells = [short(amounts.get("connections"))] if watching else []
    cells += [short(row["connections"]), short(row["active"]), short(row["inactive"])]
    return [*cells, short(_sum(amounts, _COUNTERS[1:3])), short(_sum(amounts, _COUNTERS[3:]))]


_HEADS = ("CONNS", "ACTIVE", "INACT", "PACKETS", "BYTES")
_WATCHING_HEADS = ("CONN/S", "CONNS", "ACTIVE", "INACT", "PKT/S", "BYTE/S")
_CELL = 8


def _line(name: str, cells: Sequence[str]) -> str:
    room = WIDTH - _CELL * len(cells)
    shown = name if len(name) <= room else f"{name[: room // 2 - 1]}..{name[len(name) - (room - room // 2 - 1) :]}"
    return (shown.ljust(room) + "".join(cell.rjust(_CELL) for cell in cells)).rstrip()


_OTHER_PROTOCOLS = frozenset(("udp", "sctp"))


def _port_name(row: dict[str, Any], both_families: bool) -> str:
    port = f":{row['port']}" if row["port"] else ""
    protocol = row["protocol"].lower()
    # A port named udp says it already.
    named = protocol in ("tcp", row["port"]) and row["port"] not in _OTHER_PROTOCOLS.difference((protocol,))
    family = f" {row['family']}" if both_families else ""
    return f"{row['namespace']}/{row['name']}{port}{'' if named else '/' + protocol}{family}"


def traffic_lines(document: dict[str, Any], watching: bool, endpoints: bool) -> list[str]:
    """Return a reading as lines for a terminal."""
    both = len({row["family"] for row in document["ports"]}) > 1
    lines = textwrap.wrap(f"{document['node']}, mode {document['mode']}, {timestamp(document['at'])}", WIDTH)
    counted = (row[name] is not None for row in document["ports"] for name in (*_COUNTERS, "active", "inactive"))
    if document["uncounted"] and document["ports"] and not any(counted):
        return lines + textwrap.wrap(f"no Service is counted: {document['uncounted']}", WIDTH)
    lines.append(_line("SERVICE", _WATCHING_HEADS if watching else _HEADS))
    reset = 0.0
    for row in document["ports"]:
        reset = max(reset, row["resetAt"])
        lines.append(_line(_port_name(row, both) + ("*" if row["resetAt"] else ""), _cells(row, watching)))
        for item in row["endpoints"] if endpoints else ():
            reset = max(reset, item["resetAt"])
            lines.append(_line(f"  {item['endpoint']}" + ("*" if item["resetAt"] else ""), _cells(item, watching)))
    if not document["ports"]:
        lines.append("no Service")
    if document["notShown"]:
        lines.append(f"and {document['notShown']} more")
    if reset:
        lines += textwrap.wrap(_RESET.format(timestamp(reset)), WIDTH)
    if document["uncounted"]:
        lines += textwrap.wrap(f"- is not counted: {document['uncounted']}", WIDTH)
    return lines


_CLEAR = "\x1b[H\x1b[2J"


def show_traffic(arguments: argparse.Namespace) -> CommandResult:
    """Show the totals counted so far (``top``)."""
    document = _read(arguments)
    found = valid(lambda: busiest(document, arguments.limit))
    return CommandResult(OK, valid(lambda: traffic_lines(found, False, arguments.endpoints)), found)


def watch_traffic(arguments: argparse.Namespace, output: TextIO) -> int:
    """Show the traffic until the user interrupts it (``top --watch``)."""
    before: Optional[dict[str, Any]] = None
    shown: dict[str, Any] = {}
    try:
        while True:
            document = _read(arguments, before)
            if before is None or document.get("at") != before.get("at"):
                shown = valid(partial(_compared, before or document, arguments.limit, document))
                before = document
            _write(arguments, output, shown)
            time.sleep(arguments.watch)
    except KeyboardInterrupt:
        return OK


def _compared(before: dict[str, Any], limit: int, document: dict[str, Any]) -> dict[str, Any]:
    return busiest(rated(document, before), limit)


def _write(arguments: argparse.Namespace, output: TextIO, document: dict[str, Any]) -> None:
    if arguments.output == "json":
        output.write(json.dumps(document) + "\n")
    else:
        lines = valid(lambda: traffic_lines(document, True, arguments.endpoints))
        output.write((_CLEAR if output.isatty() else "") + "".join(f"{line}\n" for line in lines))
        if not output.isatty():
            output.write("\n")
    output.flush()


def _read(arguments: argparse.Namespace, before: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Return the agent's answer, which contains only a time if there is no newer reading."""
    question = {
        "command": "traffic",
        "namespace": arguments.namespace,
        "endpoints": arguments.endpoints or arguments.output == "json",
        "known": before.get("at") if before is not None else None,
    }
    try:
        return ask_newer(arguments.control, "report traffic", question)
    except NoAgent as error:
        raise Refused(NOT_RUNNING, f"only a running agent knows the traffic of Services ({error})") from error
