# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options that several commands have."""

from __future__ import annotations

import argparse
import os

from ..base.mode_names import AUTO, IPTABLES, MODES
from ..convergence.defaults import DEFAULT_LOCK_SECONDS
from ..convergence.runtime.state_directory import DEFAULT_CACHE, DEFAULT_CONTROL, DEFAULT_TOKEN
from ..convergence.runtime.state_directory import DEFAULT_DIRECTORY as DEFAULT_STATE
from ..rollback.places import DEFAULT_DIRECTORY as DEFAULT_HISTORY

CONFIGURATION_PATHS = ("/etc/kubenode-proxy/config.yaml",)
_VARIABLES = "KUBENODE_PROXY_"


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
    parser.add_argument("--lock-timeout", type=float, default=DEFAULT_LOCK_SECONDS, metavar="SECONDS", help=text)


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
