# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of ``drain``."""

from __future__ import annotations

import argparse

from ...base.durations import parse_duration
from ...convergence.drain.record import DEFAULT_SECONDS, MOST_SECONDS
from ..options import AddOption, Options, add_control, add_drain_file, add_json, add_output, option
from ..result import UsageError

DEADLINE_SECONDS, QUIET_SECONDS = 300.0, 30.0


def _duration(text: str) -> float:
    seconds = float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else parse_duration(text)
    if seconds is None or seconds < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 5m or 2h")
    return seconds


def _text(seconds: float) -> str:
    """Return a whole number of the largest unit that fits."""
    size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "m"), (1, "s")) if not seconds % size)
    return f"{seconds / size:g}{unit}"


def _limit(name: str, text: str, default: float, dest: str = "") -> AddOption:
    text = f"{text} (default: {_text(default)})"
    return option(name, dest=dest or name.strip("-"), type=_duration, default=None, metavar="DURATION", help=text)


DRAIN: Options = (
    option("action", choices=["start", "status", "stop"], metavar="start|status|stop", help="what to do"),
    _limit("--for", "when the drain ends by itself", DEFAULT_SECONDS, dest="seconds"),
    option("--wait", action="store_true", help="wait until no external connection is left"),
    _limit("--deadline", "how long to wait; then exit with 5", DEADLINE_SECONDS),
    _limit("--quiet", "how long no new connection must begin", QUIET_SECONDS),
    add_control,
    add_drain_file,
    add_output,
    add_json,
)


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options that do not fit the action or each other, and fill in the defaults."""
    if arguments.action != "start":
        for name, value in (("--for", arguments.seconds), ("--wait", arguments.wait or None)):
            if value is not None:
                raise UsageError(f"drain {arguments.action}: {name} belongs to drain start")
    if not arguments.wait and (arguments.deadline, arguments.quiet) != (None, None):
        raise UsageError("drain: --deadline and --quiet need drain start --wait")
    arguments.seconds = DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds
    arguments.deadline = DEADLINE_SECONDS if arguments.deadline is None else arguments.deadline
    arguments.quiet = QUIET_SECONDS if arguments.quiet is None else arguments.quiet
    if not 1 <= arguments.seconds <= MOST_SECONDS:
        raise UsageError(f"drain: --for is between 1s and {_text(MOST_SECONDS)}")
    if arguments.wait and arguments.deadline > arguments.seconds:
        raise UsageError("drain: --deadline is longer than --for, so the drain would end first")
    if arguments.wait and arguments.quiet > arguments.deadline:
        raise UsageError("drain: --quiet is longer than --deadline, so the wait could not succeed")
