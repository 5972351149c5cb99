# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The comparison of a kube-proxy with the recordings and with this project: each kind of difference is reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.wirelab.arguments import CASES, HOME, make_parser
from tests.conformance.wirelab.cases import Case, find_cases
from tests.conformance.wirelab.corrections import EQUALS, RECORDED
from tests.parity.__main__ import cases_of
from tests.parity.report import SettingReport, compare
from tests.parity.runs import ERRORS, OURS, RUNNER, SETTINGS, THEIRS, Observed
from tests.parity.tables import differences
from tests.parity.verdicts import Verdict, verdict

MODE = "nftables"
NFTABLES = next(setting for setting in SETTINGS if setting.name == MODE)
NAMES = ("clusterip-basic", "health-and-metrics", "udp-endpoint-replaced")
FOUND = find_cases([str(HOME / "cases")], NAMES)
LATER_FLOW = "udp pod3 -> 10.96.3.1:53 sport=41000"


class Seeded:
    """What both sides did, as files: kube-proxy what was recorded, and this project what is expected."""

    def __init__(self, output: Path) -> None:
        self.sides = {side: Observed(NFTABLES, side, output) for side in (THEIRS, OURS)}
        for case in FOUND:
            for side, behaviour in ((THEIRS, RECORDED), (OURS, "kube-proxy")):
                self.write(side, case, case.expected(MODE, behaviour))
            shutil.copy(case.file(f"state-{MODE}.txt"), self.sides[THEIRS].state(case.name))

    def path(self, side: str, case: str) -> Path:
        return self.sides[side].folder / case / f"observed-{MODE}.json"

    def write(self, side: str, case: Case, steps: object) -> None:
        path = self.path(side, case.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"steps": steps}), encoding="utf-8")

    def change(self, side: str, case: str, flow: str, **result: object) -> None:
        path = self.path(side, case)
        content = json.loads(path.read_text(encoding="utf-8"))
        *_, place = (found for step in content["steps"] for found in step["flows"] if found["flow"] == flow)
        place.update(result)
        path.write_text(json.dumps(content), encoding="utf-8")

    def report(self, release: str = "1.36") -> SettingReport:
        return compare(FOUND, self.sides[THEIRS], self.sides[OURS], release)


@pytest.fixture
def seeded(tmp_path: Path) -> Seeded:
    return Seeded(tmp_path)


def verdicts(report: SettingReport) -> list[tuple[str, str, Verdict]]:
    return [(found.case, found.flow, found.verdict) for found in report.findings if found.verdict is not Verdict.EQUAL]


@pytest.mark.parametrize(
    ("recorded", "expected", "theirs", "ours", "reached", "wanted"),
    [
        ("a", "a", "a", "a", False, Verdict.EQUAL),
        ("a", "b", "a", "b", False, Verdict.LATER),
        ("a", "b", "a", "b", True, Verdict.OURS),
        ("a", "b", "b", "b", True, Verdict.CONFIRMED),
        ("a", "b", "b", "a", True, Verdict.OURS),
        ("a", "a", "c", "a", False, Verdict.CHANGED),
        ("a", "a", "c", "c", False, Verdict.CHANGED),
        ("a", "a", None, "a", False, Verdict.CHANGED),
        ("a", "a", "a", None, False, Verdict.OURS),
    ],
)
def test_each_relation_of_the_results_has_a_verdict(recorded, expected, theirs, ours, reached, wanted):
    assert verdict(recorded, expected, theirs, ours, reached=reached) is wanted


def test_the_recorded_kube_proxy_differs_only_in_what_later_ones_change(seeded):
    report = seeded.report()
    assert verdicts(report) == [("udp-endpoint-replaced", LATER_FLOW, Verdict.LATER)]
    assert report.passed and report.tables_compared == len(FOUND) and not report.unsettled


def test_what_was_only_read_must_be_so_once_the_release_is_there(seeded):
    report = seeded.report(EQUALS)
    assert verdicts(report) == [("udp-endpoint-replaced", LATER_FLOW, Verdict.OURS)] and not report.passed
    seeded.change(THEIRS, "udp-endpoint-replaced", LATER_FLOW, outcomes={"reject icmp 3/3": 1})
    confirmed = seeded.report(EQUALS)
    assert verdicts(confirmed) == [("udp-endpoint-replaced", LATER_FLOW, Verdict.CONFIRMED)] and confirmed.passed


@pytest.mark.parametrize(("side", "wanted"), [(THEIRS, Verdict.CHANGED), (OURS, Verdict.OURS)])
def test_another_result_is_reported_with_all_three(seeded, side, wanted):
    flow = "tcp pod2 -> 10.96.1.1:80"
    seeded.change(side, "clusterip-basic", flow, outcomes={"reject rst": 20})
    report = seeded.report()
    assert ("clusterip-basic", flow, wanted) in verdicts(report)
    assert report.unsettled == ["clusterip-basic"] and not report.passed
    text = "\n".join(report.lines())
    assert f"{wanted.value}: clusterip-basic [start] {flow}" in text and '{"reject rst": 20}' in text


def test_a_metric_that_is_in_no_table_is_reported(seeded):
    flow = "metrics node -> http://127.0.0.1:10249/metrics"
    seeded.change(THEIRS, "health-and-metrics", flow, metrics={"kubeproxy_new_total": {"type": "counter"}})
    assert ("health-and-metrics", flow, Verdict.CHANGED) in verdicts(seeded.report())


def test_other_tables_are_reported_and_another_order_is_not(seeded):
    (case,) = (case for case in FOUND if case.name == "clusterip-basic")
    recorded, found = Path(case.file(f"state-{MODE}.txt")), seeded.sides[THEIRS].state(case.name)
    text = recorded.read_text(encoding="utf-8")
    assert "numgen random mod 2" in text
    found.write_text(text.replace("numgen random mod 2", "jhash ip saddr mod 2"), encoding="utf-8")
    report = seeded.report()
    assert list(report.tables) == ["clusterip-basic"] and not report.passed
    assert {line[0] for line in report.tables["clusterip-basic"]} == {"-", "+"}
    head, first, second, rest = text.split("\n\n\tchain ", 3)
    found.write_text("\n\n\tchain ".join([head, second, first, rest]), encoding="utf-8")
    assert seeded.report().tables == {}


def test_the_order_of_rules_of_iptables_is_not_compared(tmp_path):
    (case,) = (case for case in FOUND if case.name == "clusterip-basic")
    recorded, found = Path(case.file("state-iptables.txt")), tmp_path / "state"
    lines = recorded.read_text(encoding="utf-8").splitlines(keepends=True)
    first, last = (number for number, line in enumerate(lines) if line.startswith("-A KUBE-SERVICES -d 10.96.1.1/32"))
    lines[first], lines[last] = lines[last], lines[first]
    found.write_text("".join(lines), encoding="utf-8")
    assert differences(recorded, found, (4, 6)) == []
    found.write_text("".join(lines[:first] + lines[first + 1 :]), encoding="utf-8")
    assert [line[0] for line in differences(recorded, found, (4, 6))] == ["-"]
    assert differences(recorded, found, (6,)) == []


def test_connections_of_real_servers_and_drained_ones_are_not_compared(tmp_path):
    (case,) = find_cases([str(HOME / "cases")], ["many-endpoints"])
    recorded, found = Path(case.file("state-ipvs.txt")), tmp_path / "state"
    text = recorded.read_text(encoding="utf-8")
    drained = "  -> 10.244.2.1:8080              Masq    0      0          1         \n"
    assert drained in text
    other = text.replace(drained, "").replace("1      0          0 ", "1      2          17")
    assert other != text.replace(drained, "")
    found.write_text(other, encoding="utf-8")
    assert differences(recorded, found, (4, 6)) == []
    found.write_text(text.replace("Masq    1 ", "Masq    2 ", 1), encoding="utf-8")
    assert [line[0] for line in differences(recorded, found, (4, 6))] == ["-", "+"]


def test_a_case_that_could_not_be_recorded_is_named_with_the_reason(seeded):
    theirs = seeded.sides[THEIRS]
    seeded.path(THEIRS, "clusterip-basic").unlink()
    (theirs.folder / ERRORS).write_text(json.dumps({"clusterip-basic": "the proxy exited with 1"}), encoding="utf-8")
    (theirs.folder / "logs").mkdir()
    (theirs.folder / "logs" / f"clusterip-basic-{MODE}.log").write_text("one\nunknown field\n", encoding="utf-8")
    report = seeded.report()
    assert report.unrecorded == {"clusterip-basic": "kube-proxy: the proxy exited with 1: unknown field"}
    assert not report.passed and "not recorded: clusterip-basic" in "\n".join(report.lines())


def test_a_setting_that_cannot_run_is_named_with_the_reason(seeded):
    seeded.sides[THEIRS].failure = "lab: no user-mode Linux"
    report = seeded.report()
    assert not report.passed and "   not recorded: lab: no user-mode Linux" in report.lines()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_chooses_the_cases_that_are_compared(setting, tmp_path):
    words = setting.command(THEIRS, tmp_path, False)
    parsed = make_parser().parse_args(words[1:])
    inner = make_parser().parse_args(parsed.rest[1:]) if setting.guest else parsed
    assert (inner.mode, inner.any_proxy, inner.save) == (setting.mode, True, str(tmp_path))
    names = {case.name for case in cases_of(setting, False, [])}
    assert any(name.endswith(".dual") for name in names) == (inner.families == "all")
    assert "nodeport-local" in names and "weights-of-nodes" not in names and "external-ranges" not in names


def test_cases_of_features_of_this_project_are_those_that_its_documentation_specifies():
    for case in find_cases([str(HOME / name) for name in CASES], ["*"]):
        if case.name.startswith(("allowed-", "hashing-", "node-local-", "weights-")):
            assert case.needs_own_features, case.name
        if Path(case.path).parent.name == "cases":
            assert not case.needs_own_features, case.name


def test_the_example_runner_starts_the_program_and_its_clean_up(tmp_path):
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nprintf "%s\n" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environment = {**os.environ, "LAB_KUBE_PROXY": str(program), "LAB_CONFIG": "/scratch/config.yaml"}
    for more in ([], ["--cleanup"]):
        done = subprocess.run([RUNNER, *more], env=environment, check=True, capture_output=True, text=True)
        assert done.stdout.split() == ["--config", "/scratch/config.yaml", *more]
