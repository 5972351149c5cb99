# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``top``: the traffic of Services and endpoints, once or again and again."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any, Dict, Optional, TextIO

from ...convergence.runtime.agent_client import NoAgent
from ..result import NOT_RUNNING, OK, CommandResult, Refused, ask_newer, valid
from .lines import busiest, rated, traffic_lines

_CLEAR = "\x1b[H\x1b[2J"


def show_traffic(arguments: argparse.Namespace) -> CommandResult:
    """Show the totals counted so far (``top``)."""
    document = _read(arguments)
    found = valid(lambda: busiest(document, arguments.limit))
    return CommandResult(OK, valid(lambda: traffic_lines(found, False, arguments.endpoints)), found)


def watch_traffic(arguments: argparse.Namespace, output: TextIO) -> int:
    """Show the traffic until the user interrupts it (``top --watch``)."""
    before: Optional[Dict[str, Any]] = None
    shown: Dict[str, Any] = {}
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


def _compared(before: Dict[str, Any], limit: int, document: Dict[str, Any]) -> Dict[str, Any]:
    return busiest(rated(document, before), limit)


def _write(arguments: argparse.Namespace, output: TextIO, document: Dict[str, Any]) -> None:
    if arguments.output == "json":
        output.write(json.dumps(document) + "\n")
    else:
        lines = valid(lambda: traffic_lines(document, True, arguments.endpoints))
        output.write((_CLEAR if output.isatty() else "") + "".join(f"{line}\n" for line in lines))
        if not output.isatty():
            output.write("\n")
    output.flush()


def _read(arguments: argparse.Namespace, before: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
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
