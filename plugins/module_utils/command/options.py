# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of commands: those that several commands have, and the options of each command, with their checks."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any, Callable, Union

from ..base.durations import parse_duration
from ..base.errors import ConfigurationError
from ..base.installed import CONFIGURATION_FILE, HISTORY_DIRECTORY, STATE_DIRECTORY
from ..base.mode_names import AUTO, IPTABLES, MODES
from ..base.ranges import unacceptable
from ..convergence.defaults import DEFAULT_KEEP, DEFAULT_LOCK_SECONDS, DEFAULT_UNSERVED_PERCENT
from ..convergence.drain.record import DEFAULT_FILE, DEFAULT_SECONDS, MOST_SECONDS
from ..convergence.runtime.state_directory import DEFAULT_CACHE, DEFAULT_CONTROL, DEFAULT_TOKEN
from ..explain.target import parse_end, parse_target
from .result import UsageError

#: A function that adds an option, and those that add the options of one command.
AddOption = Callable[[argparse.ArgumentParser], None]
Options = tuple[AddOption, ...]

_VARIABLES = "KUBENODE_PROXY_"
#: For how many seconds ``explain --live`` follows packets at most.
_LONGEST_LIVE = 600
#: What ``drain start --wait`` waits for at most, and how long no connection must begin.
DEADLINE_SECONDS, QUIET_SECONDS = 300.0, 30.0
#: Rows of ``top`` that fit a terminal of 24 lines, and the longest time between two of its readings.
DEFAULT_LIMIT = 20
_LONGEST_INTERVAL = 3600.0


def number(name: str, kind: Union[type[int], type[float]]) -> Callable[[str], float]:
    """Return what parses an option that is a number of this kind, in the range of that name."""

    def parse(text: str) -> float:
        value = kind(text)
        reason = unacceptable(name, value)
        if reason:
            raise argparse.ArgumentTypeError(reason)
        return value

    parse.__name__ = kind.__name__
    return parse


def option(*names: str, **attributes: Any) -> AddOption:
    """Return what adds an option, or another argument, with these attributes of argparse."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(*names, **attributes)

    return add


def numeric(name: str, kind: Union[type[int], type[float]], default: Any, metavar: str, text: str) -> AddOption:
    """Return what adds an option that is a number of this kind."""
    parse = number(name.strip("-").replace("-", "_"), kind)
    return option(name, type=parse, default=default, metavar=metavar, help=text)


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    installed = CONFIGURATION_FILE if os.path.exists(CONFIGURATION_FILE) else ""
    default = os.environ.get(_VARIABLES + "CONFIG", "") or installed
    parser.add_argument("--config", default=default, metavar="FILE", help="a KubeProxyConfiguration")


_add_output = option("--output", "-o", default="text", choices=["text", "json"], help="output format")
#: A short form of that.
_add_json = option("--json", dest="output", action="store_const", const="json", help="the same as --output json")
_add_control = option("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket of the agent")
_DRAIN_TEXT = "the file by which root keeps the node drained"
_add_drain_file = option("--drain-file", default=DEFAULT_FILE, metavar="FILE", help=_DRAIN_TEXT)
_add_ignored = option("--ignore", action="append", default=[], metavar="FINDING", help="ignore a preflight finding")
_LOCK_TEXT = "how long to wait for another convergence"
_add_lock = numeric("--lock-timeout", float, DEFAULT_LOCK_SECONDS, "SECONDS", _LOCK_TEXT)
_add_token = option("--token", default=DEFAULT_TOKEN, metavar="FILE", help="a token, renewed at half its lifetime")
_add_history = option("--history", default=HISTORY_DIRECTORY, metavar="DIR", help="directory of saved states")
_add_diff = option("--diff", action="store_true", help="show every entry that changes")


def _loss(effect: str) -> AddOption:
    text = f"{effect} of the Services that have endpoints now"
    return numeric("--max-unserved-percent", float, DEFAULT_UNSERVED_PERCENT, "PERCENT", text)


def _check(when: str) -> AddOption:
    return option("--check", action="store_true", help=f"change nothing; exit with 3 if {when}")


def _keep(default: str) -> AddOption:
    return numeric("--keep-states", int, None, "N", f"how many saved states to keep ({default})")


_FINDINGS = (_add_configuration, _add_ignored)
#: What a command needs even if it serves nothing.
_CONFIGURATION = (
    *_FINDINGS,
    option("--state-directory", default=STATE_DIRECTORY, metavar="DIR", help="lock and ledger, deleted by a reboot"),
)
_API_TEXT = "how to reach the API server (default: the configuration's)"
_TRY_TEXT = "kubeconfig with the token: one that the API server rejects is to be renewed as well"
_NAME_TEXT = "this node's name (default: hostnameOverride, or the host's)"
#: The node and its configuration. Empty values are defaults and are not shown as choices.
_NODE = (
    *_CONFIGURATION,
    option("--kubeconfig", default="", metavar="FILE", help=_API_TEXT),
    option("--node-name", default="", metavar="NAME", help=_NAME_TEXT),
    option("--mode", default="", choices=["", *MODES, AUTO], metavar="MODE", help=f"{', '.join(MODES)} or {AUTO}"),
    option("--fallback", default="", choices=["", IPTABLES], metavar="MODE", help="iptables, if ipvs is impossible"),
)
#: The source of the cluster's state.
_SOURCE = (
    option(
        "--snapshot", default="", metavar="FILE", help="read the cluster from a snapshot (kubectl get -o json|yaml)"
    ),
    option("--cache", default=DEFAULT_CACHE, metavar="FILE", help="the agent's cache of the cluster state"),
    option("--outside-host", action="store_true", help="this host is outside the cluster and has no Node"),
    option("--from-cache", action="store_true", help="read the cluster from the cache instead of the API server"),
)
_CHANGES = "something differs"
_SAVE_TEXT = "only save what is programmed, if that is not of this mode, so that it can be restored"
_LOSS_TEXT = "even if nothing was programmed, or most endpoints of the state do not exist any more"

RUN: Options = (
    *_NODE,
    option("--cache", default=DEFAULT_CACHE, metavar="FILE", help="cache file of the cluster state"),
    option("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket for the node command"),
    _add_token,
    _add_drain_file,
    option("--log-format", default="", choices=["", "text", "json"], metavar="FORMAT", help="text or json"),
    option("--verbose", "-v", action="store_true", help="log more"),
    _loss("report a greater loss"),
    numeric("--hold-loss", float, 0.0, "SECONDS", "keep serving these Services for this time"),
)
DIFF: Options = (*_NODE, *_SOURCE, _add_output)
CONVERGE: Options = (
    _check(_CHANGES),
    _add_diff,
    _add_history,
    _add_token,
    _keep(f"{DEFAULT_KEEP}, 0 if not root"),
    numeric("--confirm-timeout", float, 0.0, "SECONDS", "roll back unless confirmed in this time"),
    _loss("refuse a greater loss"),
    option("--unattended", action="store_true", help="refuse a loss once, and apply it at the next run"),
    _add_lock,
    *DIFF,
)
STATUS: Options = (*_NODE, *_SOURCE, _add_control, _add_output)
CLEANUP: Options = (_check("anything is left"), *_CONFIGURATION, _add_lock, _add_output)
CONFIRM: Options = (
    numeric("--state", int, None, "N", "only the change after this saved state"),
    option("--probe", action="append", default=[], metavar="URL", help="must succeed first"),
    numeric("--probe-timeout", float, 15.0, "SECONDS", "for all probes"),
    _add_history,
    _add_output,
)
_add_store = option("--store", action="store_true", help="first store a token from standard input")
TOKEN: Options = (
    _add_token,
    _add_store,
    option("--kubeconfig", default="", metavar="FILE", help=_TRY_TEXT),
    _add_output,
)
ROLLBACK: Options = (
    numeric("--to", int, None, "N", "number of the state (default: the newest)"),
    option("--list", action="store_true", help="only list the saved states"),
    option("--save-before", default="", choices=["", *MODES], metavar="MODE", help=_SAVE_TEXT),
    option("--accept-loss", action="store_true", help=_LOSS_TEXT),
    _add_ignored,
    _check(_CHANGES),
    _add_diff,
    _add_history,
    _keep("all"),
    option("--state-directory", default=STATE_DIRECTORY, metavar="DIR", help="directory of the lock"),
    _add_lock,
    _add_output,
)
CHECK_CONFIGURATION: Options = (option("file", metavar="FILE", help="a KubeProxyConfiguration"), _add_output)
PREFLIGHT: Options = (*_FINDINGS, _add_output)
RELOAD: Options = (_add_control, _add_output)
COMPLETION: Options = (option("shell", choices=["bash", "zsh"]),)


def _argument(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_TARGET_FORM = "ADDRESS:PORT[/PROTOCOL]|SERVICE"
_TARGET_TEXT = "10.96.0.10:53/udp, or a Service: shop/web, shop/web:http, web.shop:80"
_FROM_TEXT = "a pod (shop/web) or an address, with :PORT for one flow; with a Service, the address of a client"
_LIVE_TEXT = "with --from and --to: follow packets, as root, for this time (10)"
_FROM = partial(_argument, partial(parse_end, destination=False))
_TO = partial(_argument, partial(parse_end, destination=True))

EXPLAIN: Options = (
    option("target", nargs="?", type=partial(_argument, parse_target), metavar=_TARGET_FORM, help=_TARGET_TEXT),
    option("--from", dest="source", type=_FROM, metavar="END", help=_FROM_TEXT),
    option("--to", dest="destination", type=_TO, metavar="END:PORT", help="shop/db:5432/tcp, 10.0.0.1:80"),
    option("--why-not", action="store_true", help="show why each rule does not allow it"),
    option("--no-kernel", action="store_true", help="show only what is desired"),
    option("--live", type=float, nargs="?", const=10.0, metavar="SECONDS", help=_LIVE_TEXT),
    *STATUS,
)


def check_explain(arguments: argparse.Namespace) -> None:
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


def _duration(text: str) -> float:
    seconds = float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else parse_duration(text)
    if seconds is None or seconds < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 5m or 2h")
    return seconds


def _duration_text(seconds: float) -> str:
    """Return a whole number of the largest unit that fits."""
    size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "m"), (1, "s")) if not seconds % size)
    return f"{seconds / size:g}{unit}"


def _time_limit(name: str, text: str, default: float, dest: str = "") -> AddOption:
    text = f"{text} (default: {_duration_text(default)})"
    return option(name, dest=dest or name.strip("-"), type=_duration, default=None, metavar="DURATION", help=text)


DRAIN: Options = (
    option("action", choices=["start", "status", "stop"], metavar="start|status|stop", help="what to do"),
    _time_limit("--for", "when the drain ends by itself", DEFAULT_SECONDS, dest="seconds"),
    option("--wait", action="store_true", help="wait until no external connection is left"),
    _time_limit("--deadline", "how long to wait; then exit with 5", DEADLINE_SECONDS),
    _time_limit("--quiet", "how long no new connection must begin", QUIET_SECONDS),
    _add_control,
    _add_drain_file,
    _add_output,
    _add_json,
)


def check_drain(arguments: argparse.Namespace) -> None:
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
        raise UsageError(f"drain: --for is between 1s and {_duration_text(MOST_SECONDS)}")
    if arguments.wait and arguments.deadline > arguments.seconds:
        raise UsageError("drain: --deadline is longer than --for, so the drain would end first")
    if arguments.wait and arguments.quiet > arguments.deadline:
        raise UsageError("drain: --quiet is longer than --deadline, so the wait could not succeed")


_WATCH_TEXT = "repeat, and show new connections, packets and bytes per second (every 1)"
_LIMIT_TEXT = f"the most ports of Services to show, 0 for all (default: {DEFAULT_LIMIT}, with JSON all)"

TOP: Options = (
    option("--watch", "-w", type=float, nargs="?", const=1.0, metavar="SECONDS", help=_WATCH_TEXT),
    option("--namespace", "-n", default="", metavar="NAME", help="only the Services of this namespace"),
    numeric("--limit", int, None, "N", _LIMIT_TEXT),
    option("--endpoints", action="store_true", help="show the endpoints of each port as well"),
    _add_control,
    _add_output,
    _add_json,
)


def check_top(arguments: argparse.Namespace) -> None:
    """Raise UsageError for values that are not possible, and fill in the default of the limit."""
    if arguments.watch is not None and not 0.1 <= arguments.watch <= _LONGEST_INTERVAL:
        raise UsageError(f"top: --watch is between 0.1 and {_LONGEST_INTERVAL:g} seconds")
    if arguments.limit is None:
        arguments.limit = 0 if arguments.output == "json" else DEFAULT_LIMIT
    if arguments.limit < 0:
        raise UsageError("top: --limit is not negative")
