# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The steps of ``make test``: which of them run concurrently, and how failures are reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import steps

MAKE = """#!/bin/sh
echo "+ $2" >>"{log}"
sleep 0.1
echo "words of $2"
echo "1.50s setup    tests/a.py::test_of_$2"
echo "2.25s call     tests/a.py::test_of_$2"
echo "- $2" >>"{log}"
[ "$2" != "{failing}" ] || echo "FAILED tests/a.py::test_of_$2 - assert 1 == 2"
[ "$2" != "{failing}" ]
"""


def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *targets: str, failing: str = ""
) -> tuple[int, list[set[str]]]:
    """Return the exit status, and the set of running targets at each start or end of a target."""
    log, program = tmp_path / "log", tmp_path / "make"
    program.write_text(MAKE.format(log=log, failing=failing))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    status = steps.main(list(targets))
    moments: list[set[str]] = [set()]
    for line in log.read_text().splitlines():
        sign, target = line.split()
        moments.append(moments[-1] | {target} if sign == "+" else moments[-1] - {target})
    return status, moments


def test_steps_that_leave_processors_idle_run_concurrently(tmp_path, monkeypatch, capsys):
    targets = ("kernel", "systemd", "conformance", "debian", "molecule", "lint")
    status, moments = made(tmp_path, monkeypatch, *targets)
    assert status == 0
    others = [moment - steps.FILLERS for moment in moments]
    assert steps.has_room("uml", ["kernel"], targets) and not steps.has_room("uml", ["kernel", "systemd"], targets)
    assert not steps.has_room("debian", ["molecule"], targets)
    assert all(steps.busy(moment) <= steps.MOST_BUSY for moment in others)
    assert all(len(moment) == 1 for moment in others if "debian" in moment)
    assert set().union(*moments) == set(targets)
    said = capsys.readouterr().out
    assert "100 times fork and exec in" in said and "words of lint" in said and "== all" in said


def test_pure_computations_run_beside_every_other_step(tmp_path, monkeypatch):
    _status, moments = made(tmp_path, monkeypatch, "load", "kernel", "lint", "sanity", "systemd", "monitoring")
    fillers = {"lint", "sanity", "monitoring"}
    assert all(len(moment & fillers) <= 1 for moment in moments if moment & {"kernel", "systemd"})
    assert steps.has_room("lint", ["kernel"], ["lint", "systemd"])
    # Which of two steps that begin together writes first is left to chance.
    with_load = [moment for moment in moments if "load" in moment]
    assert with_load and all(moment - fillers == {"load"} for moment in with_load)
    assert steps.has_room("lint", ["load"], ["lint", "kernel"]) and not steps.has_room("kernel", ["load"], ["kernel"])


def test_remaining_computations_use_both_processors(tmp_path, monkeypatch):
    _status, moments = made(tmp_path, monkeypatch, "lint", "sanity", "monitoring")
    assert max(map(len, moments)) <= 2
    assert steps.has_room("sanity", ["lint"], ["sanity", "monitoring"])
    assert not steps.has_room("monitoring", ["lint", "sanity"], ["monitoring"])


def test_steps_that_need_the_built_collection_wait_for_it(tmp_path, monkeypatch):
    _status, moments = made(tmp_path, monkeypatch, "importer", "cores", "build", "lint")
    assert not any("build" in moment and moment & {"importer", "cores"} for moment in moments)


def test_the_slowest_tests_are_listed_with_the_time_of_their_fixtures(tmp_path, monkeypatch, capsys):
    made(tmp_path, monkeypatch, "kernel", "lint")
    lines = capsys.readouterr().out.split("slowest tests, in seconds\n")[1].splitlines()
    assert [line.split()[1:] for line in lines] == [
        ["3.8", "lint", "tests/a.py::test_of_lint"],
        ["3.8", "kernel", "tests/a.py::test_of_kernel"],
    ]


def test_a_step_that_fails_is_named_and_the_others_are_run(tmp_path, monkeypatch, capsys):
    status, moments = made(tmp_path, monkeypatch, "kernel", "lint", "systemd", failing="lint")
    assert status == 1 and set().union(*moments) == {"kernel", "lint", "systemd"}
    said = capsys.readouterr()
    assert "error: failed: lint" in said.err
    assert said.out.endswith("== lint: FAILED tests/a.py::test_of_lint - assert 1 == 2\n")
