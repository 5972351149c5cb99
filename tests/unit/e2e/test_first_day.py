# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The steps of an operator's first day are commands of the documentation, and what they do is judged."""

from __future__ import annotations

import pytest

from tests.e2e.first_day import README, ROLLBACK, STEPS, Row, Step, command_of, judge, table, typed_in
from tests.lab.system import LabError

VERIFY = Step("verify", README, "# any drift?")


def test_each_step_is_a_command_that_a_page_prints_once() -> None:
    commands = [line for step in STEPS for line in typed_in(step, "n1").splitlines() if not line.startswith("sleep ")]
    assert all(line.startswith(("ansible-playbook ", "export ", "kubectl ", "systemctl ")) for line in commands)
    with pytest.raises(LabError, match=r"README\.md: 0 commands with 'no such words'"):
        command_of(README, "no such words")


@pytest.mark.parametrize(
    ("step", "status", "printed", "lost", "problem"),
    [
        (VERIFY, 0, "done", [], ""),
        (VERIFY, 2, "n1 has\ndrifted", [], "status 2: n1 has drifted"),
        (VERIFY, 0, "done", ["no answer"], "lost 1: no answer"),
        (VERIFY._replace(lossless=False), 0, "done", ["no answer"], ""),
        (VERIFY._replace(fails=True, says="none"), 2, "the host\nnone", [], ""),
        (VERIFY._replace(fails=True), 0, "done", [], "status 0: done"),
        (VERIFY._replace(says="differs"), 0, "done", [], "does not say 'differs'"),
    ],
)
def test_a_step_fails_by_its_status_its_words_or_lost_requests(
    step: Step, status: int, printed: str, lost: list[str], problem: str
) -> None:
    assert judge(step, status, printed, lost) == problem


def test_a_lost_connection_that_was_kept_fails_every_step() -> None:
    problem = judge(VERIFY._replace(lossless=False), 0, "done", ["no answer"], ["closed"])
    assert problem == "lost 1 of connections that were kept: closed"


def test_a_step_may_add_to_a_command_and_wait_before_the_last_one() -> None:
    words = "# to the state before the last convergence"
    step = Step("", ROLLBACK, words, adds=" -e a=b", waits=7, then="systemctl start")
    first, second, third = typed_in(step, "n1").splitlines()
    assert first.endswith(" --limit n1  -e a=b") and second == "sleep 7" and third.startswith("systemctl start ")
    assert typed_in(VERIFY._replace(waits=5), "n1").splitlines()[0] == "sleep 5"


def test_the_table_has_a_row_for_each_step() -> None:
    assert table([Row("verify", "", 5.4, 537, 0)])[-1] == "| verify | 5 | 537 | 0 |"
