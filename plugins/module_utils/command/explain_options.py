# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The arguments of ``explain``, and their check."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, Callable

from ..base.errors import ConfigurationError
from ..explain.target import parse_target
from .options import STATUS, Options, option
from .result import UsageError

#: For how many seconds ``explain --live`` follows packets at most.
_LONGEST_LIVE = 600


def _argument(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _end(text: str, destination: bool) -> Any:
    from ..explain.target import parse_end

    return parse_end(text, destination)


_TARGET_FORM = "ADDRESS:PORT[/PROTOCOL]|SERVICE"
_TARGET_TEXT = "10.96.0.10:53/udp, or a Service: shop/web, shop/web:http, web.shop:80"
_FROM_TEXT = "a pod (shop/web) or an address, with :PORT for one flow; with a Service, the address of a client"
_LIVE_TEXT = "with --from and --to: follow packets, as root, for this time (10)"
_FROM = partial(_argument, partial(_end, destination=False))
_TO = partial(_argument, partial(_end, destination=True))

EXPLAIN: Options = (
    option("target", nargs="?", type=partial(_argument, parse_target), metavar=_TARGET_FORM, help=_TARGET_TEXT),
    option("--from", dest="source", type=_FROM, metavar="END", help=_FROM_TEXT),
    option("--to", dest="destination", type=_TO, metavar="END:PORT", help="shop/db:5432/tcp, 10.0.0.1:80"),
    option("--why-not", action="store_true", help="show why each rule does not allow it"),
    option("--no-kernel", action="store_true", help="show only what is desired"),
    option("--live", type=float, nargs="?", const=10.0, metavar="SECONDS", help=_LIVE_TEXT),
    *STATUS,
)


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError unless the arguments name a Service, perhaps with a client, or both ends of a connection."""
    source, connection = arguments.source, arguments.destination is not None
    if connection == (arguments.target is not None) or (connection and source is None):
        raise UsageError("explain: give either a Service, or both --from and --to")
    if arguments.target is not None and source is not None and (source.port or not source.address):
        raise UsageError("explain: with a Service, --from is the address of a client")
    for name, given in (("--why-not", arguments.why_not), ("--live", arguments.live is not None)):
        if given and not connection:
            raise UsageError(f"explain: {name} needs --from and --to")
    if arguments.live is not None and not 0 < arguments.live <= _LONGEST_LIVE:
        raise UsageError(f"explain: --live lasts at most {_LONGEST_LIVE} seconds")
