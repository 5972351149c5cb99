# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each case runs in all runs of the suites that it lists, and each suite has cases in each of its runs."""

from __future__ import annotations

import pytest

from tests.conformance.__main__ import RUNS, Run
from tests.conformance.wirelab.arguments import CASES, HOME, compared_mode, make_parser
from tests.conformance.wirelab.cases import Case, find_cases
from tests.conformance.wirelab.twins import twins

FOUND = find_cases([str(HOME / name) for name in CASES], ["*"])
CHOSEN = [run for runs in RUNS.values() for run in runs if not run.only_full]


def runnable(run: Run) -> set[str]:
    """Return the names of the cases that exist in the mode and the families of a run."""
    arguments = make_parser().parse_args(["run", *run.options.split()])

    def in_mode(case: Case) -> bool:
        return compared_mode(arguments) in case.modes

    if arguments.families == "recorded":
        return {case.name for case in FOUND if in_mode(case)}
    return {case.name.rpartition(".")[0] for case in twins(FOUND, arguments.families) if in_mode(case)}


@pytest.mark.parametrize("run", CHOSEN, ids=lambda run: f"{run.suite} {run.options}")
def test_every_chosen_case_is_run(run):
    members = {case.name for case in FOUND if run.suite in case.suites}
    assert members and members <= runnable(run)


def test_every_listed_suite_is_run():
    assert {suite for case in FOUND for suite in case.suites} == {run.suite for run in CHOSEN}
