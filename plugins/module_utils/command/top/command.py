# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``top``: the traffic of Services and endpoints, once or again and again."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any, Callable, Dict, Optional, TextIO, TypeVar

from ...base.errors import ProxyError
from ...convergence.runtime.agent_client import NoAgent, ask_agent
from ..result import NOT_RUNNING, OK, CommandResult, Refused
from .lines import busiest, rated, traffic_lines

Result = TypeVar("Result")

_CLEAR = "\x1b[H\x1b[2J"


def show_traffic(arguments: argparse.Namespace) -> CommandResult:
    """Show the totals counted so far (``top``)."""

    def show(document: Dict[str, Any]) -> CommandResult:
        found = busiest(document, arguments.limit)
        return CommandResult(OK, traffic_lines(found, False, arguments.endpoints), found)

    return _valid(show, _read(arguments))


def watch_traffic(arguments: argparse.Namespace, output: TextIO) -> int:
    """Show the traffic until the user interrupts it (``top --watch``)."""
    before: Optional[Dict[str, Any]] = None
    shown: Dict[str, Any] = {}
    try:
        while True:
            document = _read(arguments, before)
            if before is None or document.get("at") != before.get("at"):
                shown = _valid(partial(_compared, before or document, arguments.limit), document)
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
        lines = _valid(lambda found: traffic_lines(found, True, arguments.endpoints), document)
        output.write((_CLEAR if output.isatty() else "") + "".join(f"{line}\n" for line in lines))
        if not output.isatty():
            output.write("\n")
    output.flush()


def _valid(use: Callable[[Dict[str, Any]], Result], document: Dict[str, Any]) -> Result:
    """Return what a function makes of the agent's answer. Raises ProxyError if the answer is not valid."""
    try:
        return use(document)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProxyError(f"the agent's answer is not valid: {type(error).__name__}: {error}") from error


def _read(arguments: argparse.Namespace, before: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """Return the agent's answer, which contains only a time if there is no newer reading."""
    question = {
        "command": "traffic",
        "namespace": arguments.namespace,
        "endpoints": arguments.endpoints or arguments.output == "json",
        "known": before.get("at") if before is not None else None,
    }
    try:
        return ask_agent(arguments.control, question)
    except NoAgent as error:
        raise Refused(NOT_RUNNING, f"only a running agent knows the traffic of Services ({error})") from error
    except ProxyError as error:
        if "unknown command" in str(error):
            raise ProxyError("the running agent is too old to report traffic: restart it") from error
        raise
