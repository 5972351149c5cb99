# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line: run, record, modes, list, uml, qemu."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.lab.guest_command import DATAPLANE_MODULES, Guest
from tests.lab.qemu import run_in_qemu, system_of
from tests.lab.system import LabError
from tests.lab.uml import run_in_uml

from .arguments import CASES, HOME, LAUNCHER, compared_mode, make_parser, run_options, runner_options
from .cases import MODES, Case, find_cases
from .controlplane import ControlPlane
from .outcomes import Rules, compare
from .parallel import Board, run_workers
from .recording import record
from .report import Report, Row
from .running import run_cases
from .twins import twins

#: The report in the folder of saved observations.
REPORT = "report.json"
# The lab speaks SCTP itself; a kernel that speaks it, too, would answer every INIT with an ABORT.
GUEST_MODULES = tuple(module for module in DATAPLANE_MODULES if module != "sctp")
# Debian's kernel for user-mode Linux has no NF_TABLES_IPV4; programs in QEMU have about a tenth of their speed.
GUEST_DEFAULTS = {
    "uml": {"--iptables": "legacy", "--time-scale": "3"},
    "qemu": {"--iptables": "nft", "--time-scale": "6"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lab and return the exit status: 0 equal, 1 different, 2 if it cannot run."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = make_parser().parse_args(words)
    commands: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
        "run": _run,
        "record": _record,
        "modes": _modes,
        "list": _list,
        "uml": _in_guests,
        "qemu": _in_guests,
    }
    try:
        return commands[arguments.command](arguments, words)
    except (LabError, OSError, ValueError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2


def _selected(arguments: argparse.Namespace, mode: str | None = None) -> list[Case]:
    directories = arguments.cases_dir or [str(HOME / name) for name in CASES]
    found = find_cases(directories, arguments.cases or ["*"])
    if arguments.suite:
        found = [case for case in found if arguments.suite in case.suites]
    if arguments.any_proxy:
        found = [case for case in found if not case.needs_own_features]
    if arguments.command == "run" and runner_options(arguments).oneshot:
        found = [case for case in found if not case.needs_agent]
    if not found:
        raise ValueError("no case has this name and suite")
    cases = found if arguments.families in ("recorded", "all") else []
    for families in ("ipv6", "dual"):
        if arguments.families in (families, "all"):
            cases = [*cases, *twins(found, families)]
    if arguments.shard:
        part, parts = (int(number) for number in arguments.shard.split("/"))
        cases = cases[part - 1 :: parts]
    return [case for case in cases if mode is None or mode in case.modes]


def _rules(arguments: argparse.Namespace, skipped_kinds: Sequence[str] = ()) -> Rules:
    return Rules(
        strict=arguments.strict, loose=arguments.loose, any_source=arguments.any_source, skipped_kinds=skipped_kinds
    )


def _run(arguments: argparse.Namespace, words: list[str]) -> int:
    if arguments.jobs == 1 and not arguments.board:
        return _run_here(arguments)
    if arguments.jobs == 1:
        return _run_as_worker(arguments)

    def worker(number: int, board: str) -> Callable[[], int]:
        command = _worker_command(words, board, f"{arguments.instance}w{number}")
        return lambda: subprocess.run(command, check=False).returncode

    return _run_shared(arguments, worker, arguments.jobs)


def _run_here(arguments: argparse.Namespace) -> int:
    options = run_options(arguments)
    against = compared_mode(arguments)
    start = time.monotonic()
    rows = run_cases(
        _selected(arguments, against),
        options,
        _rules(arguments, tuple(options.skipped_kinds)),
        against,
        arguments.save,
        _printer(arguments),
    )
    return _finish(arguments, rows, start)


def _run_as_worker(arguments: argparse.Namespace) -> int:
    options = run_options(arguments)
    against = compared_mode(arguments)
    board = Board(arguments.board, arguments.instance)
    for case in board.take(_longest_first(_selected(arguments, against), against)):
        run_cases([case], options, _rules(arguments, tuple(options.skipped_kinds)), against, arguments.save, board.done)
    return 0


def _run_shared(
    arguments: argparse.Namespace, make_worker: Callable[[int, str], Callable[[], int]], workers: int
) -> int:
    """Share the cases out among workers and report the rows.

    With a board in the arguments, share that one's cases and leave the report to the process that created it.
    """
    start = time.monotonic()
    cases = _selected(arguments, compared_mode(arguments))
    board = arguments.board or tempfile.mkdtemp(prefix="kplab-board-")
    try:
        # Start no more workers than there are cases; how many a shared board has left is unknown.
        makers = [make_worker(number, board) for number in range(1, min(workers, max(1, len(cases))) + 1)]
        if arguments.board:
            run_workers(makers, board, [], arguments.mode, lambda row: None)
            return 0
        return _finish(arguments, run_workers(makers, board, cases, arguments.mode, _printer(arguments)), start)
    finally:
        if not arguments.board:
            shutil.rmtree(board, ignore_errors=True)


def _worker_command(words: Sequence[str], board: str, instance: str) -> list[str]:
    return [sys.executable, str(LAUNCHER), *words, "--jobs", "1", "--board", board, "--instance", instance]


def _longest_first(cases: Sequence[Case], mode: str) -> list[Case]:
    def seconds(case: Case) -> float:
        try:
            return case.expected_seconds(mode)
        except FileNotFoundError:
            return 0.0

    return sorted(cases, key=seconds, reverse=True)


def _printer(arguments: argparse.Namespace) -> Callable[[Row], None]:
    def show(row: Row) -> None:
        if not arguments.json:
            print("\n".join(row.lines(arguments.verbose)), flush=True)

    return show


def _finish(arguments: argparse.Namespace, rows: Sequence[Row], start: float) -> int:
    report = Report(arguments.mode, rows, time.monotonic() - start)
    print(report.to_json() if arguments.json else report.summary(), flush=True)
    if arguments.save:
        os.makedirs(arguments.save, exist_ok=True)
        Path(arguments.save, REPORT).write_text(report.to_json(), encoding="utf-8")
    return 0 if report.passed else 1


def _in_guests(arguments: argparse.Namespace, words: list[str]) -> int:
    """Run the lab inside guests with their own kernels, among which a run is divided."""
    inner = arguments.rest[1:] if arguments.rest[:1] == ["--"] else list(arguments.rest)
    if not inner:
        raise ValueError(
            f"{arguments.command}: the arguments of the lab are missing: lab {arguments.command} -- run ..."
        )
    for option, value in GUEST_DEFAULTS[arguments.command].items():
        if inner[0] in ("run", "record") and not any(word.split("=")[0] == option for word in inner):
            inner += [option, value]
    inside = make_parser().parse_args(inner)
    if inner[0] == "run" and inside.mode == "ipvs" and not inside.single_stack:
        inner.append("--single-stack")
    launch = _guest_launcher(arguments)

    def guest(command: list[str], writable: Sequence[str | None]) -> int:
        for directory in filter(None, writable):
            os.makedirs(directory, exist_ok=True)
        return launch(command, list(filter(None, writable)))

    if inner[0] != "run":
        folders = [*(inside.cases_dir or [str(HOME / name) for name in CASES])] if inner[0] == "record" else []
        return guest([str(LAUNCHER), *inner], folders)

    def worker(number: int, board: str) -> Callable[[], int]:
        command = [str(LAUNCHER), *inner, "--board", board, "--instance", f"g{number}"]
        return lambda: guest(command, [board, inside.save, inside.keep_logs])

    return _run_shared(inside, worker, arguments.jobs)


def _guest_launcher(arguments: argparse.Namespace) -> Callable[[list[str], list[str]], int]:
    """Return a function that runs a Python program, with its writable directories, in a guest of the requested kind.

    Bytecode is written to the guest's memory, or every convergence of a runner would compile the engine again.
    """
    environment = {"PYTHONDONTWRITEBYTECODE": ""}
    environment.update((name, value) for name, value in os.environ.items() if name.startswith("LAB_"))
    guest = Guest(memory=arguments.memory, environment=environment, modules=GUEST_MODULES, timeout=arguments.timeout)
    python = sys.executable
    run: Callable[[list[str], Guest], int] = run_in_uml
    if arguments.command == "qemu":
        system = system_of(arguments.debian)
        python, run = system.python, functools.partial(run_in_qemu, system=system)
    return lambda command, writable: run([python, *command], guest._replace(writable=writable))


def _record(arguments: argparse.Namespace, words: list[str]) -> int:
    if arguments.snapshots_only and not arguments.kube_apiserver:
        raise ValueError("record: --snapshots-only needs --kube-apiserver")
    control_plane = None
    if arguments.kube_apiserver:
        if not arguments.etcd:
            raise ValueError("record: --kube-apiserver needs --etcd")
        control_plane = ControlPlane(arguments.instance, arguments.etcd, arguments.kube_apiserver)
    cases = _selected(arguments, arguments.mode)
    failures = record(cases, run_options(arguments), arguments.label, control_plane, arguments.snapshots_only)
    return 1 if failures else 0


def _modes(arguments: argparse.Namespace, words: list[str]) -> int:
    """Print where the recordings of the other modes differ from that of mode iptables."""
    base = MODES[0]
    for case in _selected(arguments, base):
        for mode in MODES[1:]:
            try:
                comparison = compare(case.expected(base), case.expected(mode), _rules(arguments))
            except FileNotFoundError:
                continue  # not recorded in one of the two
            for difference in comparison.differences:
                if difference.observed is not None:
                    print(
                        f"{case.name} [{difference.step}] {difference.flow}\n"
                        f"    {base:<9} {json.dumps(difference.recorded)}\n"
                        f"    {mode:<9} {json.dumps(difference.observed)}"
                    )
    return 0


def _list(arguments: argparse.Namespace, words: list[str]) -> int:
    for case in _selected(arguments):
        flows = sum(len(step.flows) for step in case.steps)
        modes = "+".join(mode[:4] for mode in case.modes)
        print(
            f"{case.name:<44} {flows:>3} flows {len(case.steps):>2} steps {modes:<24}"
            f" {case.description.splitlines()[0][:90] if case.description else ''}"
        )
    return 0
