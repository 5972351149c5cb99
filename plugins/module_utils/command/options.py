# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of commands: functions that add those that several commands have, and the functions of each command."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Callable, Tuple, Type, Union

from ..base.mode_names import AUTO, IPTABLES, MODES
from ..base.ranges import out_of_range
from ..convergence.defaults import DEFAULT_KEEP, DEFAULT_LOCK_SECONDS, DEFAULT_UNSERVED_PERCENT
from ..convergence.drain.record import DEFAULT_FILE
from ..convergence.runtime.state_directory import DEFAULT_CACHE, DEFAULT_CONTROL, DEFAULT_TOKEN
from ..convergence.runtime.state_directory import DEFAULT_DIRECTORY as DEFAULT_STATE
from ..rollback.places import DEFAULT_DIRECTORY as DEFAULT_HISTORY

#: Functions that add the options of one command.
Options = Tuple[Callable[[argparse.ArgumentParser], None], ...]

CONFIGURATION_PATHS = ("/etc/kubenode-proxy/config.yaml",)
_VARIABLES = "KUBENODE_PROXY_"


def number(name: str, kind: Union[Type[int], Type[float]]) -> Callable[[str], float]:
    """Return what parses an option that is a number of this kind, in the range of that name."""

    def parse(text: str) -> float:
        value = kind(text)
        reason = out_of_range(name, value)
        if reason:
            raise argparse.ArgumentTypeError(reason)
        return value

    parse.__name__ = kind.__name__
    return parse


def _default_configuration() -> str:
    named = os.environ.get(_VARIABLES + "CONFIG", "")
    return named or next((path for path in CONFIGURATION_PATHS if os.path.exists(path)), "")


def add_node(parser: argparse.ArgumentParser) -> None:
    """Add the options for the node and its configuration."""
    add = parser.add_argument
    add_configuration(parser)
    add("--kubeconfig", default="", metavar="FILE", help="how to reach the API server (default: the configuration's)")
    add("--node-name", default="", metavar="NAME", help="this node's name (default: hostnameOverride, or the host's)")
    # The empty value is the default and is not shown as a choice.
    add("--mode", default="", choices=["", *MODES, AUTO], metavar="MODE", help=f"{', '.join(MODES)} or {AUTO}")
    add("--fallback", default="", choices=["", IPTABLES], metavar="MODE", help="iptables, if ipvs is impossible")


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add the options that a command needs even if it serves nothing."""
    add_findings(parser)
    parser.add_argument(
        "--state-directory", default=DEFAULT_STATE, metavar="DIR", help="lock and ledger, deleted by a reboot"
    )


def add_findings(parser: argparse.ArgumentParser) -> None:
    """Add the options for the configuration and for what is ignored on the node."""
    add = parser.add_argument
    add("--config", default=_default_configuration(), metavar="FILE", help="a KubeProxyConfiguration")
    add_ignored(parser)


def add_ignored(parser: argparse.ArgumentParser) -> None:
    """Add the option for what is ignored on the node."""
    text = "ignore a preflight finding"
    parser.add_argument("--ignore", action="append", default=[], metavar="FINDING", help=text)


def add_lock(parser: argparse.ArgumentParser) -> None:
    """Add the option for how long to wait for the lock, which only a command that changes the node takes."""
    text = "how long to wait for another convergence"
    parser.add_argument(
        "--lock-timeout", type=number("lock_timeout", float), default=DEFAULT_LOCK_SECONDS, metavar="SECONDS", help=text
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options for the source of the cluster's state."""
    add = parser.add_argument
    add("--snapshot", default="", metavar="FILE", help="read the cluster from a snapshot (kubectl get -o json|yaml)")
    add("--cache", default=DEFAULT_CACHE, metavar="FILE", help="the agent's cache of the cluster state")
    add("--outside-host", action="store_true", help="this host is outside the cluster and has no Node")
    add("--from-cache", action="store_true", help="read the cluster from the cache instead of the API server")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option for the format of the result."""
    parser.add_argument("--output", "-o", default="text", choices=["text", "json"], help="output format")


def add_token(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file of the token."""
    parser.add_argument("--token", default=DEFAULT_TOKEN, metavar="FILE", help="a token, renewed at half its lifetime")


def add_history(parser: argparse.ArgumentParser) -> None:
    """Add the option for the directory of saved states."""
    parser.add_argument("--history", default=DEFAULT_HISTORY, metavar="DIR", help="directory of saved states")


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add the option for the socket of the agent."""
    parser.add_argument("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket of the agent")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add a short form of an option of :func:`add_output`."""
    parser.add_argument("--json", dest="output", action="store_const", const="json", help="the same as --output json")


def add_drain_file(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file of a drain."""
    text = "the file by which root keeps the node drained"
    parser.add_argument("--drain-file", default=DEFAULT_FILE, metavar="FILE", help=text)


def _add_loss(parser: argparse.ArgumentParser, effect: str) -> None:
    text = f"{effect} of the Services that have endpoints now"
    parser.add_argument(
        "--max-unserved-percent",
        type=number("max_unserved_percent", float),
        default=DEFAULT_UNSERVED_PERCENT,
        metavar="PERCENT",
        help=text,
    )


def _add_check(parser: argparse.ArgumentParser, when: str = "something differs") -> None:
    parser.add_argument("--check", action="store_true", help=f"change nothing; exit with 3 if {when}")


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--diff", action="store_true", help="show every entry that changes")


def _add_keep(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"how many saved states to keep ({default})"
    parser.add_argument("--keep-states", type=number("keep_states", int), default=None, metavar="N", help=text)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cache", default=DEFAULT_CACHE, metavar="FILE", help="cache file of the cluster state")
    add("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket for the node command")
    add_token(parser)
    add_drain_file(parser)
    add("--log-format", default="", choices=["", "text", "json"], metavar="FORMAT", help="text or json")
    add("--verbose", "-v", action="store_true", help="log more")
    _add_loss(parser, "report a greater loss")
    add(
        "--hold-loss",
        type=number("hold_loss", float),
        default=0.0,
        metavar="SECONDS",
        help="keep serving these Services for this time",
    )


def _add_converge(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_check(parser)
    _add_diff(parser)
    add_history(parser)
    add_token(parser)
    _add_keep(parser, f"{DEFAULT_KEEP}, 0 if not root")
    text = "roll back unless confirmed in this time"
    add("--confirm-timeout", type=number("confirm_timeout", float), default=0.0, metavar="SECONDS", help=text)
    _add_loss(parser, "refuse a greater loss")
    add("--unattended", action="store_true", help="refuse a loss once, and apply it at the next run")


def _add_confirm(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--state", type=number("state", int), default=None, metavar="N", help="only the change after this saved state")
    add("--probe", action="append", default=[], metavar="URL", help="must succeed first")
    add("--probe-timeout", type=number("probe_timeout", float), default=15.0, metavar="SECONDS", help="for all probes")


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", action="store_true", help="first store a token from standard input")


def _add_rollback(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--to", type=number("to", int), default=None, metavar="N", help="number of the state (default: the newest)")
    add("--list", action="store_true", help="only list the saved states")
    text = "only save what is programmed, if that is not of this mode, so that it can be restored"
    add("--save-before", default="", choices=["", *MODES], metavar="MODE", help=text)
    text = "even if nothing was programmed, or most endpoints of the state do not exist any more"
    add("--accept-loss", action="store_true", help=text)
    add_ignored(parser)
    _add_check(parser)
    _add_diff(parser)
    add_history(parser)
    _add_keep(parser, "all")
    add("--state-directory", default=DEFAULT_STATE, metavar="DIR", help="directory of the lock")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a KubeProxyConfiguration")


def _add_shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh"])


RUN: Options = (add_node, _add_run)
DIFF: Options = (add_node, add_source, add_output)
CONVERGE: Options = (_add_converge, add_lock, *DIFF)
STATUS: Options = (add_node, add_source, add_control, add_output)
CLEANUP: Options = (partial(_add_check, when="anything is left"), add_configuration, add_lock, add_output)
CONFIRM: Options = (_add_confirm, add_history, add_output)
TOKEN: Options = (add_token, _add_store, add_output)
ROLLBACK: Options = (_add_rollback, add_lock, add_output)
CHECK_CONFIGURATION: Options = (_add_file, add_output)
PREFLIGHT: Options = (add_findings, add_output)
RELOAD: Options = (add_control, add_output)
COMPLETION: Options = (_add_shell,)
