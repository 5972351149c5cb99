# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cases: they can be parsed, and have expectations for every flow of every mode."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conformance.wirelab.cases import Case, find_cases
from tests.conformance.wirelab.flows import parse_flow
from tests.conformance.wirelab.parallel import Board, Supervisor, run_workers
from tests.conformance.wirelab.report import Report, Row
from tests.conformance.wirelab.topology import Topology

CONFORMANCE = Path(__file__).resolve().parent.parent.parent / "conformance"
RECORDED = find_cases([str(CONFORMANCE / "cases")], ["*"])
EXTRA = find_cases([str(CONFORMANCE / "cases-extra")], ["*"])


@pytest.mark.parametrize("case", [*RECORDED, *EXTRA], ids=lambda case: case.name)
def test_every_flow_has_an_expectation_and_every_step_a_snapshot(case: Case):
    assert len(case.snapshots()) == len(case.steps)
    for mode in case.modes:
        expected = case.expected(mode)
        assert [step["step"] for step in expected] == [step.name for step in case.steps]
        for step, results in zip(case.steps, expected):
            wanted = [flow.text for flow in step.flows if flow.wanted(mode)]
            assert [result["flow"] for result in results["flows"]] == wanted


@pytest.mark.parametrize("case", EXTRA, ids=lambda case: case.name)
def test_expectations_that_were_not_recorded_say_so(case: Case):
    for mode in case.modes:
        content = json.loads(Path(case.file(f"expected-{mode}.json")).read_text(encoding="utf-8"))
        assert content["source"] == "specification"
        assert content["rows"]


def test_completed_snapshots_have_the_defaults_of_the_api():
    (case,) = (case for case in EXTRA if case.name == "internal-local-counts")
    first, last = case.snapshots()
    services = {item["metadata"]["name"]: item for item in first if item["kind"] == "Service"}
    assert services["a"]["spec"]["sessionAffinity"] == "None"
    assert services["sentinel"]["spec"]["internalTrafficPolicy"] == "Cluster"
    slices = [item["metadata"]["name"] for item in last if item["kind"] == "EndpointSlice"]
    assert slices == ["sentinel-v4"]


def test_flows_of_recordings_parse_to_themselves():
    for case in RECORDED:
        for step in case.expected(case.modes[0]):
            for result in step["flows"]:
                assert parse_flow(result["flow"]).text == result["flow"]


def test_a_case_is_claimed_once(tmp_path):
    first, second = Board(str(tmp_path), "1"), Board(str(tmp_path), "2")
    taken = iter(first.take(RECORDED[:3]))
    assert next(taken).name == RECORDED[0].name
    assert [case.name for case in second.take(RECORDED[:3])] == [case.name for case in RECORDED[1:3]]
    assert list(taken) == []


def test_rows_are_returned_once_and_complete(tmp_path):
    board, supervisor = Board(str(tmp_path), "1"), Supervisor(str(tmp_path))
    board.done(Row("a", "ipvs", equal=2, total=2))
    assert [row.case for row in supervisor.new_rows()] == ["a"]
    with open(tmp_path / "rows-1", "a", encoding="utf-8") as file:
        file.write('{"case": "b"')
    assert list(supervisor.new_rows()) == []


def test_a_case_that_no_worker_finished_is_an_error(tmp_path):
    def dies() -> int:
        raise RuntimeError("no guest")

    def reports() -> int:
        Board(str(tmp_path), "1").done(Row(RECORDED[0].name, "ipvs", equal=1, total=1))
        return 0

    shown: list[Row] = []
    rows = run_workers([dies, reports], str(tmp_path), RECORDED[:2], "ipvs", shown.append)
    assert [row.error for row in rows] == [None, "no worker finished it: no guest"]
    assert len(shown) == 2
    assert not Report("ipvs", rows, 1.0).passed


def test_an_empty_report_does_not_pass():
    assert not Report("ipvs", [], 0.0).passed
    assert Report("ipvs", [Row("a", "ipvs", equal=1, total=1)], 0.0).passed
    assert not Report("ipvs", [Row("a", "ipvs", equal=0, total=1)], 0.0).passed


def test_the_source_ports_of_all_cases_are_reserved_on_the_node() -> None:
    first, last = map(int, Topology("").node_sysctls()["net/ipv4/ip_local_reserved_ports"].split("-"))
    files = CONFORMANCE.glob("cases*/*/case.yaml")
    ports = [int(port) for file in files for port in re.findall(r"\bsport=(\d+)", file.read_text(encoding="utf-8"))]
    assert len(ports) > 10 and all(first <= port <= last for port in ports)
