# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results of runs of the suite as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

#: States of a spec in ginkgo's report that count as a failure; the others are passed, skipped and pending.
_FAILED = {"failed", "panicked", "aborted", "timedout", "interrupted"}
#: What ginkgo says of specs that were not chosen.
_NOT_CHOSEN = {"", "Skipped by --focus or --skip"}


class Result(NamedTuple):
    """How a spec has ended: passed, failed or skipped, and ``why`` it was not passed."""

    state: str
    seconds: float
    why: str


#: Results of one run by the names of the specs.
Results = Mapping[str, Result]


def read_report(path: Path) -> dict[str, Result]:
    """Return the results in a JSON report of ginkgo, without specs that were not chosen."""
    found: dict[str, Result] = {}
    for suite in json.loads(path.read_text(encoding="utf-8")):
        for spec in suite["SpecReports"] or ():
            if spec["LeafNodeType"] != "It":
                continue
            state, why = spec["State"], spec.get("Failure", {}).get("Message", "").strip()
            if state == "pending" or (state == "skipped" and why in _NOT_CHOSEN):
                continue
            name = " ".join([*(spec["ContainerHierarchyTexts"] or ()), spec["LeafNodeText"]])
            shown = "failed" if state in _FAILED else state
            found[name] = Result(shown, spec["RunTime"] / 1e9, why.splitlines()[0] if why else "")
    return found


def _count(results: Results, state: str) -> int:
    return sum(result.state == state for result in results.values())


def summary(runs: Mapping[str, Results]) -> list[str]:
    """Return the lines of a table with one row for each run."""
    lines = ["| on the nodes | passed | failed | skipped by the suite |", "|---|---|---|---|"]
    for name, results in runs.items():
        lines.append(
            f"| {name} | " + " | ".join(str(_count(results, s)) for s in ("passed", "failed", "skipped")) + " |"
        )
    return lines


def failures(runs: Mapping[str, Results]) -> list[str]:
    """Return a line for each spec that has failed in a run."""
    return [
        f"{name}: {spec}: {result.why}"
        for name, results in runs.items()
        for spec, result in sorted(results.items())
        if result.state == "failed"
    ]


def details(runs: Mapping[str, Results]) -> list[str]:
    """Return the lines of a table with one row for each spec and one column for each run."""
    lines = [f"| spec | {' | '.join(runs)} |", "|---" * (len(runs) + 1) + "|"]
    for spec in sorted({spec for results in runs.values() for spec in results}):
        lines.append(f"| {spec} | {' | '.join(_cells(runs, spec))} |")
    return lines


def _cells(runs: Mapping[str, Results], spec: str) -> Sequence[str]:
    found = [results.get(spec) for results in runs.values()]
    return [f"{item.state} {item.seconds:.0f} s" if item else "-" for item in found]
