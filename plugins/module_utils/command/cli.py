# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node command ``kubenode-proxy``: its arguments and its exit codes.

Exit codes: 0 success; 1 failure, with one line on standard error; 2 invalid command line; 3 the node differs from the
desired state (``diff``, ``converge --check``, ``rollback --check``) or no Service was found (``explain``); 4 no agent
is running (``drain``, ``top``), or it is not healthy (``status``); 5 connections were left at the deadline (``drain``).

Each command imports its modules when it runs, because importing the agent or the kernel interfaces takes longer than
most commands do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence, TextIO

from ..convergence.defaults import DEFAULT_KEEP, DEFAULT_LOCK_SECONDS, DEFAULT_LOSS_PERCENT
from ..convergence.explanation.target import Target, parse_target
from ..convergence.history.places import DEFAULT_DIRECTORY as DEFAULT_HISTORY
from ..convergence.runtime.state_directory import DEFAULT_CACHE, DEFAULT_CONTROL, DEFAULT_TOKEN
from ..convergence.runtime.state_directory import DEFAULT_DIRECTORY as DEFAULT_STATE
from ..errors import ConfigurationError, ProxyError
from ..mode_names import AUTO, IPTABLES, MODES
from ..packaging.identity import identity
from . import completion
from .drain import options as drain_options
from .result import FAILED, USAGE, CommandResult, Refused, UsageError
from .top import options as top_options

CONFIGURATION_PATHS = ("/etc/kubenode-proxy/config.yaml",)
_VARIABLES = "KUBENODE_PROXY_"
#: For how many seconds ``explain --live`` follows packets at most.
_LONGEST_LIVE = 600


class Streams(NamedTuple):
    """The streams to which the command writes: results, and errors and log messages."""

    output: TextIO
    errors: TextIO


class _HelpAsked(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    """Raises exceptions instead of exiting the process and printing to the standard streams."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def exit(self, status: int = 0, message: Optional[str] = None) -> NoReturn:
        raise _HelpAsked(message or "")

    def print_help(self, file: Any = None) -> None:
        raise _HelpAsked(self.format_help())


def _default_configuration() -> str:
    named = os.environ.get(_VARIABLES + "CONFIG", "")
    return named or next((path for path in CONFIGURATION_PATHS if os.path.exists(path)), "")


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", default=_default_configuration(), metavar="FILE", help="a KubeProxyConfiguration")
    add("--kubeconfig", default="", metavar="FILE", help="how to reach the API server (default: the configuration's)")
    add("--node-name", default="", metavar="NAME", help="this node's name (default: hostnameOverride, or the host's)")
    # The empty value is the default and is not shown as a choice.
    add("--mode", default="", choices=["", *MODES, AUTO], metavar="MODE", help=f"{', '.join(MODES)} or {AUTO}")
    add("--fallback", default="", choices=["", IPTABLES], metavar="MODE", help="iptables, if ipvs is impossible")
    add("--state-directory", default=DEFAULT_STATE, metavar="DIR", help="lock and ledger, deleted by a reboot")
    _add_lock_option(parser, "how long to wait for another convergence")
    add("--ignore", action="append", default=[], metavar="FINDING", help="ignore a preflight finding")


def _add_lock_option(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--lock-timeout", type=float, default=DEFAULT_LOCK_SECONDS, metavar="SECONDS", help=text)


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--snapshot", default="", metavar="FILE", help="read the cluster from a snapshot (kubectl get -o json|yaml)")
    add("--cache", default=DEFAULT_CACHE, metavar="FILE", help="the agent's cache of the cluster state")
    add("--outside-host", action="store_true", help="this host is outside the cluster and has no Node")
    add("--from-cache", action="store_true", help="read the cluster from the cache instead of the API server")


def _add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", "-o", default="text", choices=["text", "json"], help="output format")


def _add_token_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token", default=DEFAULT_TOKEN, metavar="FILE", help="a token, renewed at half its lifetime")


def _add_history_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--history", default=DEFAULT_HISTORY, metavar="DIR", help="directory of saved states")


def _target(text: str) -> Target:
    try:
        return parse_target(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _end_of(text: str, destination: bool) -> Any:
    from ..convergence.explanation.ends import parse_end

    try:
        return parse_end(text, destination)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _source(text: str) -> Any:
    return _end_of(text, destination=False)


def _policy_destination(text: str) -> Any:
    return _end_of(text, destination=True)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(prog="kubenode-proxy", description="Serve Kubernetes Services on this node without kube-proxy.")
    parser.add_argument("--version", action="store_true", help="show the collection's version and the engine's hash")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")

    run = command("run", "run the agent: keep this node in sync with the cluster until stopped")
    _add_node_options(run)
    run.add_argument("--cache", default=DEFAULT_CACHE, metavar="FILE", help="cache file of the cluster state")
    run.add_argument("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket for status and explain")
    _add_token_option(run)
    drain_options.add_file(run)
    run.add_argument("--log-format", default="", choices=["", "text", "json"], metavar="FORMAT", help="text or json")
    run.add_argument("--verbose", "-v", action="store_true", help="log more")
    converge = command("converge", "converge this node to the cluster once")
    converge.add_argument("--check", action="store_true", help="change nothing; exit with 3 if something differs")
    converge.add_argument("--diff", action="store_true", help="show every entry that changes")
    _add_history_option(converge)
    _add_token_option(converge)
    converge.add_argument(
        "--keep-states",
        type=int,
        default=None,
        metavar="N",
        help=f"how many saved states to keep ({DEFAULT_KEEP}, 0 if not root)",
    )
    converge.add_argument(
        "--confirm-timeout", type=float, default=0.0, metavar="SECONDS", help="roll back unless confirmed in this time"
    )
    for item, text in ((run, "report a greater loss"), (converge, "refuse a greater loss")):
        item.add_argument(
            "--max-loss-percent",
            type=float,
            default=DEFAULT_LOSS_PERCENT,
            metavar="PERCENT",
            help=f"{text} of the Services that have endpoints now",
        )
    run.add_argument(
        "--hold-loss", type=float, default=0.0, metavar="SECONDS", help="keep serving these Services for this time"
    )
    converge.add_argument("--unattended", action="store_true", help="refuse a loss once, and apply it at the next run")
    diff = command("diff", "show how this node differs from the cluster")
    for item in (converge, diff):
        _add_node_options(item)
        _add_source_options(item)
        _add_output_option(item)
    status = command("status", "show the status of the agent, or without one that of the node")
    _add_node_options(status)
    _add_source_options(status)
    status.add_argument("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket of the agent")
    _add_output_option(status)
    explain = command(
        "explain", "explain how this node serves a Service, or one connection: where it leads and whether it may"
    )
    explain.add_argument(
        "target",
        nargs="?",
        type=_target,
        metavar="ADDRESS:PORT[/PROTOCOL]|SERVICE",
        help="10.96.0.10:53/udp, or a Service: shop/web, shop/web:http, web.shop:80",
    )
    explain.add_argument(
        "--from",
        dest="source",
        type=_source,
        metavar="END",
        help="a pod (shop/web) or an address, with :PORT for one flow; with a Service, the address of a client",
    )
    explain.add_argument(
        "--to", dest="destination", type=_policy_destination, metavar="END:PORT", help="shop/db:5432/tcp, 10.0.0.1:80"
    )
    explain.add_argument("--why-not", action="store_true", help="show why each rule does not allow it")
    explain.add_argument("--no-kernel", action="store_true", help="with --from and --to: show only what is desired")
    explain.add_argument(
        "--live",
        type=float,
        nargs="?",
        const=10.0,
        metavar="SECONDS",
        help="with --from and --to: follow packets, as root, for this time (10)",
    )
    _add_node_options(explain)
    _add_source_options(explain)
    explain.add_argument("--control", default=DEFAULT_CONTROL, metavar="SOCKET", help="unix socket of the agent")
    _add_output_option(explain)
    drain_options.add(command("drain", "make load balancers leave this node, and wait until its connections end"))
    top_options.add(command("top", "show the connections, packets and bytes of each Service and endpoint"))
    cleanup = command("cleanup", "remove everything that any mode programmed on this node")
    cleanup.add_argument("--check", action="store_true", help="change nothing; exit with 3 if anything is left")
    _add_node_options(cleanup)
    _add_output_option(cleanup)
    confirm = command("confirm", "confirm the pending change")
    confirm.add_argument("--state", type=int, default=None, metavar="N", help="only the change after this saved state")
    confirm.add_argument("--probe", action="append", default=[], metavar="URL", help="must succeed first")
    confirm.add_argument("--probe-timeout", type=float, default=15.0, metavar="SECONDS", help="for all probes")
    _add_history_option(confirm)
    _add_output_option(confirm)
    token = command("token", "show the claims of the node's token for the API server")
    _add_token_option(token)
    token.add_argument("--store", action="store_true", help="first store a token from standard input")
    _add_output_option(token)
    rollback = command("rollback", "restore a state that was saved before a change")
    rollback.add_argument("--to", type=int, default=None, metavar="N", help="number of the state (default: the newest)")
    rollback.add_argument("--list", action="store_true", help="only list the saved states")
    rollback.add_argument("--check", action="store_true", help="change nothing; exit with 3 if something differs")
    rollback.add_argument("--diff", action="store_true", help="show every entry that changes")
    _add_history_option(rollback)
    rollback.add_argument(
        "--keep-states", type=int, default=DEFAULT_KEEP, metavar="N", help="how many saved states to keep"
    )
    rollback.add_argument("--state-directory", default=DEFAULT_STATE, metavar="DIR", help="directory of the lock")
    _add_lock_option(rollback, "how long to wait for it")
    _add_output_option(rollback)
    command("version", "show the collection's version and the engine's hash, as --version does")
    shells = command("completion", "print the completion script of a shell")
    shells.add_argument("shell", choices=["bash", "zsh"])
    return parser


def _command(name: str) -> Callable[[argparse.Namespace], CommandResult]:
    """Return the function of a command, importing only the modules that it needs."""
    if name in ("status", "explain"):
        from . import agent_commands

        return agent_commands.show_status if name == "status" else agent_commands.show_explanation
    if name == "confirm":
        from .confirm_command import confirm_change

        return confirm_change
    if name == "drain":
        from .drain.command import drain

        return drain
    if name == "top":
        from .top.command import show_traffic

        return show_traffic
    if name == "rollback":
        from .rollback_command import roll_back

        return roll_back
    if name == "token":
        from .token_command import show_or_store_token

        return show_or_store_token
    from . import commands

    return {"converge": commands.converge_once, "diff": commands.show_diff, "cleanup": commands.clean_up}[name]


def main(argv: Optional[Sequence[str]] = None, streams: Optional[Streams] = None) -> int:
    """Run the command with ``argv`` (without the program's name) and return its exit code."""
    streams = streams or Streams(sys.stdout, sys.stderr)
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_order(parser, words)
        arguments = parser.parse_args(words)
        return _dispatch(parser, arguments, streams)
    except _HelpAsked as asked:
        streams.output.write(str(asked))
        return 0
    except UsageError as error:
        streams.errors.write(f"kubenode-proxy: {error}\n")
        return USAGE
    except Refused as error:
        streams.errors.write(f"kubenode-proxy: {error}\n")
        return error.code
    except ProxyError as error:
        streams.errors.write(f"kubenode-proxy: {error}\n")
        return FAILED
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def _check_order(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise UsageError for an option of a command that stands before the command."""
    first = words[0].partition("=")[0] if words else ""
    if first.startswith("-") and first not in parser._option_string_actions:
        raise UsageError(f"{first}: options follow the command, as in kubenode-proxy COMMAND {first} ...")


def _dispatch(parser: argparse.ArgumentParser, arguments: argparse.Namespace, streams: Streams) -> int:
    if arguments.version or arguments.command == "version":
        streams.output.write(f"kubenode-proxy {identity().text}\n")
        return 0
    if not arguments.command:
        raise UsageError("a command is missing (see kubenode-proxy --help)")
    if arguments.command == "run":
        from ..agent.collector import begin_loading

        # The modules of the agent are part of what it loads.
        begin_loading()
        from .run_command import run_agent

        return run_agent(arguments, streams.errors)
    if arguments.command == "completion":
        streams.output.write(completion.script(arguments.shell, _words(parser)))
        return 0
    if arguments.command == "explain":
        _check_explain(arguments)
    if arguments.command == "drain":
        drain_options.check(arguments)
    if arguments.command == "top":
        top_options.check(arguments)
        if arguments.watch is not None:
            from .top.command import watch_traffic

            return watch_traffic(arguments, streams.output)
    outcome = _command(arguments.command)(arguments)
    if arguments.output == "json":
        streams.output.write(json.dumps(outcome.document, indent=2, default=str) + "\n")
    else:
        streams.output.write("".join(f"{line}\n" for line in outcome.lines))
    streams.output.flush()
    for warning in outcome.warnings:
        streams.errors.write(f"kubenode-proxy: warning: {warning}\n")
    return outcome.code


def _check_explain(arguments: argparse.Namespace) -> None:
    """Raise UsageError unless the arguments name a Service, perhaps with a client, or both ends of a connection."""
    source, connection = arguments.source, arguments.destination is not None
    if connection == (arguments.target is not None) or (connection and source is None):
        raise UsageError("explain: give either a Service, or both --from and --to")
    if arguments.target is not None and source is not None and (source.port or not source.address):
        raise UsageError("explain: with a Service, --from is the address of a client")
    for option, given in (
        ("--why-not", arguments.why_not),
        ("--no-kernel", arguments.no_kernel),
        ("--live", arguments.live is not None),
    ):
        if given and not connection:
            raise UsageError(f"explain: {option} needs --from and --to")
    if arguments.live is not None and not 0 < arguments.live <= _LONGEST_LIVE:
        raise UsageError(f"explain: --live lasts at most {_LONGEST_LIVE} seconds")


def _words(parser: argparse.ArgumentParser) -> Dict[str, List[str]]:
    """Return the commands and the options of each, for completion."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {
                name: sorted(option for item in sub._actions for option in item.option_strings if option[:2] == "--")
                for name, sub in action.choices.items()
            }
    return {}


if __name__ == "__main__":
    raise SystemExit(main())
