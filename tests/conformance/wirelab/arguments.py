# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line's arguments."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.lab.stock_kernel import SUITES

from .cases import COMPARED_WITH, MODES
from .corrections import chosen_behaviour
from .options import RunnerOptions, RunOptions

HOME = Path(__file__).resolve().parent.parent
LAUNCHER = HOME / "lab"
CASES = ("cases", "cases-extra")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; ``command`` names the subcommand."""
    parser = argparse.ArgumentParser(prog="lab", description="Wire-level conformance lab for service proxies.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a proxy through the cases and compare with the recordings")
    _add_selection(run)
    _add_running(run)
    _add_comparing(run)
    _add_run(run)
    record = commands.add_parser("record", help="record what a proxy does")
    _add_selection(record)
    _add_running(record)
    _add_record(record)
    modes = commands.add_parser("modes", help="show where the recordings of the modes differ")
    _add_selection(modes)
    _add_comparing(modes)
    _add_selection(commands.add_parser("list", help="list the cases"))
    _add_guests(commands.add_parser("uml", help="run the lab inside user-mode Linux: lab uml -- run ..."))
    qemu = commands.add_parser("qemu", help="run the lab on Debian's kernel, emulated by QEMU: lab qemu -- run ...")
    qemu.add_argument("--debian", choices=SUITES, help="release of kernel and programs (default: this machine's files)")
    _add_guests(qemu)
    return parser


def _add_guests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="guests at once, each with one processor")
    parser.add_argument("--memory", default="1G", help="memory of a guest (default: 1G)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds until a guest is ended (default: 3600)")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the lab in the guest")


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases-dir",
        action="append",
        metavar="DIR",
        help="folder with cases (repeatable; default: cases and cases-extra of the lab)",
    )
    parser.add_argument("--cases", action="append", metavar="GLOB", help="names of cases (repeatable; default: all)")
    parser.add_argument(
        "--any-proxy", action="store_true", help="only cases that need no feature which kube-proxy does not have"
    )
    parser.add_argument("--suite", metavar="NAME", help="only the cases that list this suite")
    parser.add_argument(
        "--families",
        choices=("recorded", "ipv6", "dual", "all"),
        default="recorded",
        help="the cases as they are, the IPv6 or dual stack twins of those for IPv4 alone, or all of these",
    )
    parser.add_argument("--shard", metavar="K/N", help="only the K-th of N parts of the cases")


def _add_comparing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="compare exact source addresses as well")
    parser.add_argument("--loose", action="store_true", help="do not compare the kind of a rejection")
    parser.add_argument(
        "--any-source", action="store_true", help="do not compare the source address that an endpoint saw"
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mode", choices=(*MODES, *COMPARED_WITH), required=True)
    add(
        "--runner",
        default=os.environ.get("LAB_RUNNER"),
        metavar="CMD",
        help="command that starts the proxy; {config} {kubeconfig} {snapshot} {node} {mode} {dir} {case} are replaced"
        " (default: this project's, which converges once per step)",
    )
    add("--agent", action="store_true", help="run this project's agent instead of converging once per step")
    add(
        "--runner-cleanup",
        default=os.environ.get("LAB_RUNNER_CLEANUP"),
        metavar="CMD",
        help="command that removes everything the proxy programmed (default: this project's, for its own runners)",
    )
    add("--oneshot", action="store_true", help="the runner converges once per step and exits (instead of a daemon)")
    add("--iptables", choices=("system", "nft", "legacy"), default="system", help="the iptables variant on PATH")
    add(
        "--single-stack",
        action="store_true",
        help="hide ip6tables in cases of IPv4 alone: kube-proxy then programs that family only, which is faster",
    )
    add("--time-scale", type=float, default=1.0, metavar="X", help="multiplies every wait (slow machines)")
    add("--settle", type=float, default=0.2, metavar="S", help="seconds between a daemon's convergence and traffic")
    add(
        "--sync-metrics",
        metavar="URL",
        default=os.environ.get("LAB_SYNC_METRICS"),
        help="detect the end of a pass by the proxy's metrics at this URL (in the node's namespace)",
    )
    add("--instance", default="0", help="name of this lab, to run several at once")
    add("--keep-logs", metavar="DIR", help="keep the proxy's logs")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--against-mode", choices=MODES, help="recording to compare with (default: that of --mode, or ipvs)")
    add("--jobs", type=int, default=1, metavar="N", help="cases at once (most of a case's time is waiting)")
    add("--json", action="store_true", help="print the report as JSON, with every difference")
    add("--save", metavar="DIR", help="keep observations and programmed state")
    add(
        "--no-http",
        action="store_true",
        help="skip health checks and metrics (always skipped with a runner that converges once)",
    )
    add("-v", "--verbose", action="store_true", help="print every difference")
    add("--board", metavar="DIR", help=argparse.SUPPRESS)  # of a worker: where cases are shared out


def _add_record(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--kube-apiserver",
        default=os.environ.get("LAB_KUBE_APISERVER"),
        metavar="PATH",
        help="serve the objects from a real control plane and write snapshots.json",
    )
    add("--etcd", default=os.environ.get("LAB_ETCD"), metavar="PATH", help="its etcd")
    add("--snapshots-only", action="store_true", help="only pass the objects through the control plane")
    add("--label", default="kube-proxy", help="what is being recorded")


def runner_options(arguments: argparse.Namespace) -> RunnerOptions:
    """Return the chosen runner: the user's own, this project's agent, or this project's single convergence."""
    command, cleanup, oneshot = arguments.runner, arguments.runner_cleanup, arguments.oneshot
    if command is None:
        command = str(HOME / "runners" / ("agent" if arguments.agent else "oneshot"))
        cleanup = cleanup or str(HOME / "runners" / "cleanup")
        oneshot = not arguments.agent
    return RunnerOptions(
        mode=arguments.mode,
        command=command,
        cleanup=cleanup,
        oneshot=oneshot,
        iptables=arguments.iptables,
        single_stack=arguments.single_stack,
        behaviour=chosen_behaviour(),
        ipvs_filter_backend=os.environ.get("LAB_IPVS_FILTER_BACKEND", ""),
    )


def compared_mode(arguments: argparse.Namespace) -> str:
    """Return the mode with whose recordings a run is compared."""
    return str(arguments.against_mode or COMPARED_WITH.get(arguments.mode, arguments.mode))


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """Return how the cases are run."""
    runner = runner_options(arguments)
    without_http = arguments.command == "run" and (arguments.no_http or runner.oneshot)
    return RunOptions(
        runner=runner,
        instance=arguments.instance,
        time_scale=arguments.time_scale,
        settle=arguments.settle,
        sync_metrics=arguments.sync_metrics,
        keep_logs=arguments.keep_logs,
        want_state=arguments.command == "record" or bool(arguments.save),
        skipped_kinds=("http", "metrics") if without_http else (),
        flows_of=arguments.mode if arguments.command != "run" else compared_mode(arguments),
    )
