# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run Kubernetes' own end-to-end suite on a separate cluster: ``python -m tests.e2e --binaries DIRECTORY``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Sequence, Union

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules.modules import present_modules
from tests.lab.namespaces import ROOT
from tests.lab.system import LabError

from .binaries import find_binaries
from .cluster import Cluster
from .control_plane import ControlPlane
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
RUNS: Dict[str, Run] = {
    **{mode: Run(Project, mode) for mode in _MODES},
    **{f"kube-proxy-{mode}": Run(KubeProxy, mode) for mode in _MODES},
    "network-policy": Run(partial(Project, network_policy=True), "nftables", NETWORK_POLICIES),
}
_DEFAULT = (*_MODES, "network-policy", "kube-proxy-nftables")


def chosen_runs(names: Sequence[str], ipvs: bool) -> List[str]:
    """Return these runs; by default, each mode of this project that the kernel has, and kube-proxy as the control.

    ``ipvs``: whether the kernel has IPVS. Raises LabError if a run by name needs a missing feature.
    """
    if not ipvs and any(RUNS[name].mode == "ipvs" for name in names):
        raise LabError("ipvs: this kernel has no module ip_vs, and the nodes have this machine's kernel")
    return list(names) or [name for name in _DEFAULT if ipvs or RUNS[name].mode != "ipvs"]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e", description="Runs Kubernetes' end-to-end suite.")
    parser.add_argument("--binaries", default="", metavar="DIRECTORY", help="has Kubernetes' programs")
    parser.add_argument("--run", action="append", default=[], choices=RUNS, help="default: all that the kernel can do")
    parser.add_argument("--focus", metavar="REGEX", help="run the specs of these names, and no others")
    parser.add_argument("--processes", type=int, default=_PROCESSES, help="specs at a time; default: %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache/e2e/results", metavar="DIRECTORY")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Dict[str, Results]:
    """Run the suite as often as chosen, on one cluster. Raises LabError or AssertionError."""
    binaries = find_binaries(options.binaries)
    names = chosen_runs(options.run, bool(present_modules(["ip_vs"], os.uname().release)))
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    found: Dict[str, Results] = {}
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as scratch, Cluster(binaries, Path(scratch), logs) as cluster:
        versions = ", ".join(f"{name} {version}" for name, version in binaries.versions().items())
        print(f"== the cluster is ready: {versions}, Linux {os.uname().release}", flush=True)
        for name in names:
            place = options.output / name
            place.mkdir(exist_ok=True)
            chosen = RUNS[name]
            proxy = chosen.program(cluster.control, cluster.nodes)
            proxy.start(chosen.mode)
            print(f"== {name} serves; {place / 'suite.log'} has what the suite prints", flush=True)
            started = time.monotonic()
            selection = on_this_kernel(chosen.selection)
            if options.focus:
                selection = selection._replace(focus=options.focus)
            report = run_suite(binaries, cluster.control, place, selection, options.processes)
            found[name] = read_report(report)
            print(f"== {name} took {time.monotonic() - started:.0f} s", flush=True)
            proxy.stop()
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the suite and print the results; the status is 1 if a spec has failed, 2 if the cluster cannot be made."""
    options = _parse(arguments)
    try:
        found = run(options)
    except (LabError, AssertionError, RuntimeError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    table = options.output / "results.md"
    table.write_text("\n".join([*summary(found), "", *details(found), ""]), encoding="utf-8")
    bad = failures(found)
    print("\n".join([*summary(found), *(f"failed: {line}" for line in bad), f"== all specs: {table}"]))
    for name in found:
        for pattern, reason in on_this_kernel(RUNS[name].selection).skip.items():
            print(f"== {name}, omitted: {pattern}: {reason}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
