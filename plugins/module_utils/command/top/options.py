# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The arguments of ``top``, and their check."""

from __future__ import annotations

import argparse

from ..options import Options, add_control, add_json, add_output, numeric, option
from ..result import UsageError

#: Rows that fit a terminal of 24 lines.
DEFAULT_LIMIT = 20
_LONGEST_INTERVAL = 3600.0


_WATCH_TEXT = "repeat, and show new connections, packets and bytes per second (every 1)"
_LIMIT_TEXT = f"the most ports of Services to show, 0 for all (default: {DEFAULT_LIMIT}, with JSON all)"

TOP: Options = (
    option("--watch", "-w", type=float, nargs="?", const=1.0, metavar="SECONDS", help=_WATCH_TEXT),
    option("--namespace", "-n", default="", metavar="NAME", help="only the Services of this namespace"),
    numeric("--limit", int, None, "N", _LIMIT_TEXT),
    option("--endpoints", action="store_true", help="show the endpoints of each port as well"),
    add_control,
    add_output,
    add_json,
)


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for values that are not possible, and fill in the default of the limit."""
    if arguments.watch is not None and not 0.1 <= arguments.watch <= _LONGEST_INTERVAL:
        raise UsageError(f"top: --watch is between 0.1 and {_LONGEST_INTERVAL:g} seconds")
    if arguments.limit is None:
        arguments.limit = 0 if arguments.output == "json" else DEFAULT_LIMIT
    if arguments.limit < 0:
        raise UsageError("top: --limit is not negative")
