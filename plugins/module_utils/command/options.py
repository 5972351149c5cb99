# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of commands: those that several commands have, and the options of each command."""

from __future__ import annotations

import argparse
import os
from typing import Any, Callable, Tuple, Type, Union

from ..base.installed import CONFIGURATION_FILE
from ..base.mode_names import AUTO, IPTABLES, MODES
from ..base.ranges import unacceptable
from ..convergence.defaults import DEFAULT_KEEP, DEFAULT_LOCK_SECONDS, DEFAULT_UNSERVED_PERCENT
from ..convergence.drain.record import DEFAULT_FILE
from ..convergence.runtime.state_directory import DEFAULT_CACHE, DEFAULT_CONTROL, DEFAULT_TOKEN
from ..convergence.runtime.state_directory import DEFAULT_DIRECTORY as DEFAULT_STATE
from ..rollback.places import DEFAULT_DIRECTORY as DEFAULT_HISTORY

#: A function that adds an option, and those that add the options of one command.
AddOption = Callable[[argparse.ArgumentParser], None]
Options = Tuple[AddOption, ...]

_VARIABLES = "KUBENODE_PROXY_"


def number(name: str, kind: Union[Type[int], Type[float]]) -> Callable[[str], float]:
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


def numeric(name: str, kind: Union[Type[int], Type[float]], default: Any, metavar: str, text: str) -> AddOption:
    """Return what adds an option that is a number of this kind."""
    parse = number(name.strip("-").replace("-", "_"), kind)
    return option(name, type=parse, default=default, metavar=metavar, help=text)


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    installed = CONFIGURATION_FILE if os.path.exists(CONFIGURATION_FILE) else ""
    default = os.environ.get(_VARIABLES + "CONFIG", "") or installed
    parser.add_argument("--config", default=default, metavar="FILE", help="a KubeProxyConfiguration")


add_output = option("--output", "-o", default="text", choices=["text", "json"], help="output format")
#: A short form of that.
add_json = option("--json", dest="output", action="store_const", const="json", help="the same as --output json")
add_control = option("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket of the agent")
_DRAIN_TEXT = "the file by which root keeps the node drained"
add_drain_file = option("--drain-file", default=DEFAULT_FILE, metavar="FILE", help=_DRAIN_TEXT)
_add_ignored = option("--ignore", action="append", default=[], metavar="FINDING", help="ignore a preflight finding")
_LOCK_TEXT = "how long to wait for another convergence"
_add_lock = numeric("--lock-timeout", float, DEFAULT_LOCK_SECONDS, "SECONDS", _LOCK_TEXT)
_add_token = option("--token", default=DEFAULT_TOKEN, metavar="FILE", help="a token, renewed at half its lifetime")
_add_history = option("--history", default=DEFAULT_HISTORY, metavar="DIR", help="directory of saved states")
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
    option("--state-directory", default=DEFAULT_STATE, metavar="DIR", help="lock and ledger, deleted by a reboot"),
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
_SNAPSHOT_TEXT = "read the cluster from a snapshot (kubectl get -o json|yaml)"
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
    add_drain_file,
    option("--log-format", default="", choices=["", "text", "json"], metavar="FORMAT", help="text or json"),
    option("--verbose", "-v", action="store_true", help="log more"),
    _loss("report a greater loss"),
    numeric("--hold-loss", float, 0.0, "SECONDS", "keep serving these Services for this time"),
)
DIFF: Options = (*_NODE, *_SOURCE, add_output)
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
STATUS: Options = (*_NODE, *_SOURCE, add_control, add_output)
CLEANUP: Options = (_check("anything is left"), *_CONFIGURATION, _add_lock, add_output)
CONFIRM: Options = (
    numeric("--state", int, None, "N", "only the change after this saved state"),
    option("--probe", action="append", default=[], metavar="URL", help="must succeed first"),
    numeric("--probe-timeout", float, 15.0, "SECONDS", "for all probes"),
    _add_history,
    add_output,
)
_add_store = option("--store", action="store_true", help="first store a token from standard input")
TOKEN: Options = (
    _add_token,
    _add_store,
    option("--kubeconfig", default="", metavar="FILE", help=_TRY_TEXT),
    add_output,
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
    option("--state-directory", default=DEFAULT_STATE, metavar="DIR", help="directory of the lock"),
    _add_lock,
    add_output,
)
CHECK_CONFIGURATION: Options = (option("file", metavar="FILE", help="a KubeProxyConfiguration"), add_output)
PREFLIGHT: Options = (*_FINDINGS, add_output)
RELOAD: Options = (add_control, add_output)
COMPLETION: Options = (option("shell", choices=["bash", "zsh"]),)
