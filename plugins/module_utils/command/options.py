# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of the commands that need no file of their own for them."""

from __future__ import annotations

import argparse

from ..base.mode_names import MODES
from ..convergence.defaults import DEFAULT_KEEP, DEFAULT_UNSERVED_PERCENT
from ..convergence.runtime.state_directory import DEFAULT_CACHE, DEFAULT_CONTROL
from ..convergence.runtime.state_directory import DEFAULT_DIRECTORY as DEFAULT_STATE
from .drain.options import add_file
from .shared_options import (
    add_configuration,
    add_control,
    add_findings,
    add_history,
    add_ignored,
    add_lock,
    add_node,
    add_output,
    add_source,
    add_token,
)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    add = parser.add_argument
    add_node(parser)
    add("--cache", default=DEFAULT_CACHE, metavar="FILE", help="cache file of the cluster state")
    add("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket for the node command")
    add_token(parser)
    add_file(parser)
    add("--log-format", default="", choices=["", "text", "json"], metavar="FORMAT", help="text or json")
    add("--verbose", "-v", action="store_true", help="log more")
    _add_loss(parser, "report a greater loss")
    add("--hold-loss", type=float, default=0.0, metavar="SECONDS", help="keep serving these Services for this time")


def add_converge(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``converge``."""
    add = parser.add_argument
    add("--check", action="store_true", help="change nothing; exit with 3 if something differs")
    add("--diff", action="store_true", help="show every entry that changes")
    add_history(parser)
    add_token(parser)
    text = f"how many saved states to keep ({DEFAULT_KEEP}, 0 if not root)"
    add("--keep-states", type=int, default=None, metavar="N", help=text)
    text = "roll back unless confirmed in this time"
    add("--confirm-timeout", type=float, default=0.0, metavar="SECONDS", help=text)
    _add_loss(parser, "refuse a greater loss")
    add("--unattended", action="store_true", help="refuse a loss once, and apply it at the next run")
    add_lock(parser)
    add_diff(parser)


def _add_loss(parser: argparse.ArgumentParser, effect: str) -> None:
    text = f"{effect} of the Services that have endpoints now"
    parser.add_argument(
        "--max-unserved-percent", type=float, default=DEFAULT_UNSERVED_PERCENT, metavar="PERCENT", help=text
    )


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``diff``."""
    add_node(parser)
    add_source(parser)
    add_output(parser)


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``status``."""
    add_node(parser)
    add_source(parser)
    add_control(parser)
    add_output(parser)


def add_cleanup(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cleanup``."""
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 3 if anything is left")
    add_configuration(parser)
    add_lock(parser)
    add_output(parser)


def add_confirm(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``confirm``."""
    add = parser.add_argument
    add("--state", type=int, default=None, metavar="N", help="only the change after this saved state")
    add("--probe", action="append", default=[], metavar="URL", help="must succeed first")
    add("--probe-timeout", type=float, default=15.0, metavar="SECONDS", help="for all probes")
    add_history(parser)
    add_output(parser)


def add_token_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``token``."""
    add_token(parser)
    parser.add_argument("--store", action="store_true", help="first store a token from standard input")
    add_output(parser)


def add_rollback(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rollback``."""
    add = parser.add_argument
    add("--to", type=int, default=None, metavar="N", help="number of the state (default: the newest)")
    add("--list", action="store_true", help="only list the saved states")
    text = "only save what is programmed, if that is not of this mode, so that it can be restored"
    add("--save-before", default="", choices=["", *MODES], metavar="MODE", help=text)
    text = "even if nothing was programmed, or most endpoints of the state do not exist any more"
    add("--accept-loss", action="store_true", help=text)
    add_ignored(parser)
    add("--check", action="store_true", help="change nothing; exit with 3 if something differs")
    add("--diff", action="store_true", help="show every entry that changes")
    add_history(parser)
    add("--keep-states", type=int, default=None, metavar="N", help="how many saved states to keep (all)")
    add("--state-directory", default=DEFAULT_STATE, metavar="DIR", help="directory of the lock")
    add_lock(parser)
    add_output(parser)


def add_check_configuration(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check-configuration``."""
    parser.add_argument("file", metavar="FILE", help="a KubeProxyConfiguration")
    add_output(parser)


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``preflight``."""
    add_findings(parser)
    add_output(parser)


def add_reload(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``reload``."""
    add_control(parser)
    add_output(parser)


def add_nothing(_parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", choices=["bash", "zsh"])
