# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node command ``kubenode-proxy``: its arguments and its exit codes.

Exit codes: 0 success; 1 failure, with one line on standard error; 2 invalid command line; 3 the node differs from the
desired state (``diff``, ``converge --check``, ``cleanup --check``, ``rollback --check``), or no Service was found, or
a connection is denied, refused or dropped, or what the kernel holds for it differs (``explain``); 4 no agent is running
(``drain start``, ``drain status``, ``top``, ``status``, ``reload``), or it is not healthy, or its last sync or the
table of network policies has an error (``status``), or it serves no Services (``drain start``); 5 connections were left
at the deadline (``drain``).

Each command imports its modules when it runs, because importing the agent or the kernel interfaces takes longer than
most commands do.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from importlib import import_module
from typing import Any, Callable, NamedTuple, NoReturn, Optional, Sequence, TextIO, Union

from ..base.errors import ProxyError
from ..packaging.identity import identity
from . import completion, options
from .options import Options
from .result import FAILED, CommandResult, Refused, UsageError


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


def _run(arguments: argparse.Namespace, streams: Streams) -> int:
    from ..agent.threads.collector import begin_loading

    # The modules of the agent are part of what it loads.
    begin_loading()
    from .run_command import run_agent

    return run_agent(arguments, streams.errors)


def _drain(arguments: argparse.Namespace, streams: Streams) -> int:
    from .drain_command import drain

    def progress(line: str) -> None:
        streams.errors.write(f"kubenode-proxy: {line}\n")
        streams.errors.flush()

    return _show(drain(arguments, progress), arguments, streams)


def _top(arguments: argparse.Namespace, streams: Streams) -> int:
    from .top_command import show_traffic, watch_traffic

    if arguments.watch is not None:
        return watch_traffic(arguments, streams.output)
    return _show(show_traffic(arguments), arguments, streams)


def _version(_arguments: argparse.Namespace, streams: Streams) -> int:
    _write(f"kubenode-proxy {identity().text}\n", streams)
    return 0


def _completion(arguments: argparse.Namespace, streams: Streams) -> int:
    _write(completion.script(arguments.shell, _words(make_parser())), streams)
    return 0


def _write(text: str, streams: Streams) -> None:
    """Write to the output, whose reader may have ended. Raises ProxyError."""
    try:
        streams.output.write(text)
        streams.output.flush()
    except OSError as error:
        # What is buffered would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), streams.output.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ProxyError(f"the output cannot be written: {error.strerror}") from error


def _show(outcome: CommandResult, arguments: argparse.Namespace, streams: Streams) -> int:
    """Write the result of a command, and return its exit code."""
    document = arguments.output == "json"
    lines = [json.dumps(outcome.document, indent=2, default=str)] if document else outcome.lines
    _write("".join(f"{line}\n" for line in lines), streams)
    for warning in outcome.warnings:
        streams.errors.write(f"kubenode-proxy: warning: {warning}\n")
    return outcome.code


class Command(NamedTuple):
    """A command. ``text`` is its help.

    ``function`` runs it and returns the exit code; or it is ``MODULE.FUNCTION`` of what returns a CommandResult. The
    modules that the command needs are imported when it runs. ``check`` raises UsageError for arguments that do not fit
    each other, and may fill in defaults.
    """

    text: str
    options: Options
    function: Union[str, Callable[[argparse.Namespace, Streams], int]]
    check: Callable[[argparse.Namespace], None] = lambda _arguments: None


COMMANDS = {
    "run": Command("run the agent: keep this node in sync with the cluster until stopped", options.RUN, _run),
    "converge": Command("converge this node to the cluster once", options.CONVERGE, "commands.converge_once"),
    "diff": Command("show how this node differs from the cluster", options.DIFF, "commands.show_diff"),
    "status": Command(
        "show the agent's status, or the node's if no agent runs", options.STATUS, "agent_commands.show_status"
    ),
    "explain": Command(
        "explain how this node serves a Service, or where one connection goes and whether it is allowed",
        options.EXPLAIN,
        "agent_commands.show_explanation",
        options.check_explain,
    ),
    "drain": Command(
        "make load balancers leave this node, and wait until its connections end",
        options.DRAIN,
        _drain,
        options.check_drain,
    ),
    "top": Command(
        "show the connections, packets and bytes of each Service and endpoint", options.TOP, _top, options.check_top
    ),
    "cleanup": Command("remove everything that any mode programmed on this node", options.CLEANUP, "commands.clean_up"),
    "confirm": Command("confirm the pending change", options.CONFIRM, "confirm_command.confirm_change"),
    "token": Command(
        "show the claims of the node's token for the API server", options.TOKEN, "token_command.show_or_store_token"
    ),
    "rollback": Command(
        "restore a state that was saved before a change", options.ROLLBACK, "rollback_command.roll_back"
    ),
    "check-configuration": Command(
        "check that the agent accepts a configuration file",
        options.CHECK_CONFIGURATION,
        "configuration_command.check_configuration",
    ),
    "preflight": Command(
        "check that no other service proxy runs on this node", options.PREFLIGHT, "preflight_command.check_node"
    ),
    "reload": Command("make the agent read its configuration again", options.RELOAD, "agent_commands.reload_agent"),
    "version": Command("show the collection's version and the engine's hash, as --version does", (), _version),
    "completion": Command("print the completion script of a shell", options.COMPLETION, _completion),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(prog="kubenode-proxy", description="Serve Kubernetes Services on this node without kube-proxy.")
    parser.add_argument("--version", action="store_true", help="show the collection's version and the engine's hash")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        description = f"{command.text[0].upper()}{command.text[1:]}."
        subparser = subparsers.add_parser(name, help=command.text, description=description)
        for add in command.options:
            add(subparser)
    return parser


def main(argv: Optional[Sequence[str]] = None, streams: Optional[Streams] = None) -> int:
    """Run the command with ``argv`` (without the program's name) and return its exit code."""
    # Python has none for a descriptor that is closed.
    streams = streams or Streams(*(each or io.StringIO() for each in (sys.stdout, sys.stderr)))
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_order(parser, words)
        arguments = parser.parse_args(words)
        return _dispatch(arguments, streams)
    except _HelpAsked as asked:
        _write(str(asked), streams)
        return 0
    except (UsageError, ProxyError) as error:
        streams.errors.write(f"kubenode-proxy: {error}\n")
        return error.code if isinstance(error, (UsageError, Refused)) else FAILED
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def _check_order(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise UsageError for an option that precedes its command."""
    first = words[0].partition("=")[0] if words else ""
    if first.startswith("-") and first not in parser._option_string_actions:
        raise UsageError(f"{first}: options follow the command, as in kubenode-proxy COMMAND {first} ...")


def _dispatch(arguments: argparse.Namespace, streams: Streams) -> int:
    if arguments.version:
        return _version(arguments, streams)
    if not arguments.command:
        raise UsageError("a command is missing (see kubenode-proxy --help)")
    command = COMMANDS[arguments.command]
    command.check(arguments)
    if not isinstance(command.function, str):
        return command.function(arguments, streams)
    module, _dot, function = command.function.partition(".")
    found: CommandResult = getattr(import_module(f".{module}", __package__), function)(arguments)
    return _show(found, arguments, streams)


def _words(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
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
