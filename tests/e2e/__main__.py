# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run Kubernetes' own suite, a new node and an operator's first day: ``python -m tests.e2e --binaries DIRECTORY``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple, Sequence, Union

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules.modules import present_modules
from tests.lab.namespaces import ROOT
from tests.lab.system import LabError

from .binaries import find_binaries
from .cluster import Cluster
from .control_plane import ControlPlane
from .first_day import Row, run_first_day, table
from .new_node import run_new_node
from .nodes import KubernetesNode
from .proxies import KubeProxy, Project
from .results import Results, details, failures, read_report, summary
from .suite import NETWORK_POLICIES, SERVICES, Selection, on_this_kernel, run_suite

_PROCESSES = 8


class Run(NamedTuple):
    """A run of the suite: which program serves Services in which mode, and which specs are run."""

    program: Callable[[ControlPlane, Sequence[KubernetesNode]], Union[Project, KubeProxy]]
    mode: str
    selection: Selection = SERVICES


_MODES = ("nftables", "iptables", "ipvs")
RUNS: dict[str, Run] = {
    **{mode: Run(Project, mode) for mode in _MODES},
    **{f"kube-proxy-{mode}": Run(KubeProxy, mode) for mode in _MODES},
    "network-policy": Run(partial(Project, network_policy=True), "nftables", NETWORK_POLICIES),
}
#: The run without the suite, the last one of a cluster: if a step fails, the nodes stay as they are then.
FIRST_DAY = "first-day"
#: The run in which a node joins the cluster.
NEW_NODE = "new-node"
_WITHOUT_SUITE = frozenset((FIRST_DAY, NEW_NODE))
_DEFAULT = (*_MODES, "network-policy", NEW_NODE, "kube-proxy-nftables", FIRST_DAY)


class Outcome(NamedTuple):
    """The results of the runs of the suite by their names, and the steps of the first day."""

    suite: dict[str, Results]
    day: list[Row]


def chosen_runs(names: Sequence[str], ipvs: bool) -> list[str]:
    """Return these runs; by default each mode that the kernel has, kube-proxy as the control, and the first day.

    ``ipvs``: whether the kernel has IPVS. Raises LabError if a run by name needs a missing feature.
    """
    of_ipvs = {name for name, item in RUNS.items() if item.mode == "ipvs"}
    if not ipvs and of_ipvs.intersection(names):
        raise LabError("ipvs: this kernel has no module ip_vs, and the nodes have this machine's kernel")
    return sorted(names, key=FIRST_DAY.__eq__) or [name for name in _DEFAULT if ipvs or name not in of_ipvs]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e", description="Runs Kubernetes' end-to-end suite.")
    parser.add_argument("--binaries", default="", metavar="DIRECTORY", help="has Kubernetes' programs")
    names = [FIRST_DAY, NEW_NODE, *RUNS]
    parser.add_argument("--run", action="append", default=[], choices=names, help="default: all that the kernel can do")
    parser.add_argument("--focus", metavar="REGEX", help="run the specs of these names, and no others")
    parser.add_argument("--processes", type=int, default=_PROCESSES, help="specs at a time; default: %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache/e2e/results", metavar="DIRECTORY")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Outcome:
    """Carry out the chosen runs, on one cluster. Raises LabError or AssertionError."""
    names = chosen_runs(options.run, bool(present_modules(["ip_vs"], os.uname().release)))
    binaries = find_binaries(options.binaries, suite=not _WITHOUT_SUITE.issuperset(names))
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    found = Outcome({}, [])
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as scratch, Cluster(binaries, Path(scratch), logs) as cluster:
        versions = ", ".join(f"{name} {version}" for name, version in binaries.versions().items())
        print(f"== the cluster is ready: {versions}, Linux {os.uname().release}", flush=True)
        for name in names:
            place = options.output / name
            place.mkdir(exist_ok=True)
            started = time.monotonic()
            if name == FIRST_DAY:
                found.day.extend(run_first_day(cluster, place))
            elif name == NEW_NODE:
                print(f"== {run_new_node(cluster)}", flush=True)
            else:
                found.suite[name] = _run_suite(cluster, name, place, options)
            print(f"== {name} took {time.monotonic() - started:.0f} s", flush=True)
    return found


def _run_suite(cluster: Cluster, name: str, place: Path, options: argparse.Namespace) -> Results:
    chosen = RUNS[name]
    proxy = chosen.program(cluster.control, cluster.nodes)
    proxy.start(chosen.mode)
    print(f"== {name} serves; {place / 'suite.log'} has what the suite prints", flush=True)
    selection = on_this_kernel(chosen.selection)
    if options.focus:
        selection = selection._replace(focus=options.focus)
    report = run_suite(cluster.binaries, cluster.control, place, selection, options.processes)
    proxy.stop()
    return read_report(report)


def main(arguments: Sequence[str]) -> int:
    """Carry out the runs and print the results.

    The status is 1 if a step or a spec has failed, 2 if the cluster cannot be made.
    """
    options = _parse(arguments)
    try:
        found = run(options)
    except (LabError, AssertionError, RuntimeError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    bad = [*failures(found.suite), *(f"{row.name}: {row.problem}" for row in found.day if row.problem)]
    if found.day:
        print("\n".join(table(found.day)))
    if found.suite:
        path = options.output / "results.md"
        path.write_text("\n".join([*summary(found.suite), "", *details(found.suite), ""]), encoding="utf-8")
        print("\n".join([*summary(found.suite), f"== all specs: {path}"]))
    for line in bad:
        print(f"failed: {line}")
    for name in found.suite:
        for pattern, reason in on_this_kernel(RUNS[name].selection).skip.items():
            print(f"== {name}, omitted: {pattern}: {reason}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
