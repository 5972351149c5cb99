# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Say how a kube-proxy differs from the recordings and from this project.

``python -m tests.parity --kube-proxy FILE``

Runs the wire lab's cases with that program and with this project's agent, in each mode, and compares both with the
recordings; then its gates, flags, fields and metrics with the table, and its tables with those that takeovers are
tested with. Ends with 1 if anything differs that was not expected, and with 2 if it cannot run. Needs what the wire lab
needs (tests/conformance/README.md). What was observed is kept in a folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from tests.conformance.wirelab.arguments import CASES, HOME
from tests.conformance.wirelab.cases import Case, find_cases
from tests.conformance.wirelab.twins import twins

from .report import SettingReport, compare
from .runs import OURS, SETTINGS, THEIRS, Observed, Setting
from .sources import of_binary, of_tree
from .surface import differences

OUTPUT = Path(".cache/parity")


def cases_of(setting: Setting, full: bool, patterns: Sequence[str]) -> list[Case]:
    """Return the cases that any proxy can run, with the twins that belong to the setting."""
    found = find_cases([str(HOME / name) for name in CASES], patterns or ["*"])
    found = [case for case in found if not case.needs_own_features]
    if full or setting.families == "all":
        found = [*found, *twins(found, "ipv6"), *twins(found, "dual")]
    return [case for case in found if setting.mode in case.modes]


def measure(setting: Setting, given: argparse.Namespace, release: str) -> SettingReport:
    """Run one setting with both sides, or read what an earlier run kept. What differs is repeated alone, once."""
    sides = Observed(setting, THEIRS, given.output), Observed(setting, OURS, given.output)
    cases = cases_of(setting, given.full, given.cases)
    if not given.saved:
        for side in sides:
            side.run(given.kube_proxy, given.full, given.cases)
    report = compare(cases, *sides, release)
    if report.omitted or given.saved or not report.unsettled:
        return report
    repeated = report.unsettled
    for side in sides:
        side.run(given.kube_proxy, given.full, sorted({name.partition(".")[0] for name in repeated}), alone=True)
    report = compare(cases, *sides, release)
    report.repeated = repeated
    return report


def surface_lines(program: Path, source: Optional[Path]) -> list[str]:
    """Return what differs from the table of gates, flags, fields and metrics."""
    lines = differences(of_binary(program), program)
    return lines + (differences(of_tree(source)) if source else [])


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Print the report; return the exit status."""
    names = [setting.name for setting in SETTINGS]
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--kube-proxy", type=Path, required=True, metavar="FILE", help="the program")
    parser.add_argument(
        "--source", type=Path, metavar="TREE", help="its source tree, which shows more than the program"
    )
    parser.add_argument("--setting", action="append", choices=names, help="only this one (repeatable)")
    parser.add_argument("--cases", action="append", default=[], metavar="GLOB", help="only these cases (repeatable)")
    parser.add_argument(
        "--full", action="store_true", help="the twins of other families in all settings, ipvs included"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help=f"default: {OUTPUT}")
    parser.add_argument("--saved", action="store_true", help="compare what an earlier run kept there, and run nothing")
    given = parser.parse_args(arguments)
    given.kube_proxy, given.output = given.kube_proxy.resolve(), given.output.resolve()
    start = time.monotonic()
    try:
        version = subprocess.run([given.kube_proxy, "--version"], check=True, capture_output=True, text=True).stdout
        release = of_binary(given.kube_proxy).release
        changed = surface_lines(given.kube_proxy, given.source)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    print(f"{version.strip()}, beside the recordings and this project", flush=True)
    print(
        "== gates, flags, fields and metrics", *(changed or ["nothing differs from the table"]), sep="\n   ", flush=True
    )
    passed = not changed
    for setting in SETTINGS:
        if setting.name not in (given.setting or names):
            print(f"== {setting.name}: not run, as requested", flush=True)
            continue
        report = measure(setting, given, release)
        print(*report.lines(), sep="\n", flush=True)
        if setting.families != "all" and not given.full:
            print("   not run: the twins of other IP families (--full)", flush=True)
        passed = passed and report.passed
    result = "nothing differs that was not expected" if passed else "there are differences that were not expected"
    print(f"== {result}; {(time.monotonic() - start) / 60:.0f} minutes, kept in {given.output}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
