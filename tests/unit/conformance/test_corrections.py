# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's expectations beside the recordings: each differs from these and has a reason, and the modes agree."""

from __future__ import annotations

import pytest

from tests.conformance.wirelab.arguments import CASES, HOME
from tests.conformance.wirelab.cases import MODES, find_cases
from tests.conformance.wirelab.corrections import (
    CORRECTED,
    EQUALS,
    RECORDED,
    chosen_behaviour,
    corrected,
    read_corrections,
)
from tests.conformance.wirelab.outcomes import meaning

ALL = find_cases([str(HOME / name) for name in CASES], ["*"])
#: Cases in which modes treat packets that no longer match a Service differently: see docs/conformance.md.
MAY_DIFFER = ("service deleted",)


def corrections_of(case, mode):
    return read_corrections(case.file(f"corrected-{mode}.json"))


def expectations(case, mode, behaviour, filter_backend=""):
    steps = case.expected(mode, behaviour, filter_backend)
    return {(step["step"], flow["flow"]): meaning(flow) for step in steps for flow in step["flows"]}


@pytest.mark.parametrize("mode", MODES)
def test_every_correction_changes_an_expectation_and_has_a_reason(mode):
    found = 0
    for case in ALL:
        corrections = corrections_of(case, mode)
        if not corrections:
            continue
        before, after = expectations(case, mode, "kube-proxy"), expectations(case, mode, CORRECTED)
        changed = {place for place in before if before[place] != after[place]}
        assert changed == {(item["step"], item["flow"]) for item in corrections}, case.name
        assert all(item["reason"] for item in corrections), case.name
        found += len(corrections)
    assert found


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_what_a_later_release_does_differently_changes_a_recording_and_has_a_reason(mode):
    found = 0
    for case in ALL:
        later = read_corrections(case.file(f"kube-proxy-{EQUALS}-{mode}.json"))
        if not later:
            continue
        before, after = expectations(case, mode, RECORDED), expectations(case, mode, "kube-proxy")
        changed = {place for place in before if before[place] != after[place]}
        assert changed == {(item["step"], item["flow"]) for item in later}, case.name
        assert all(item["reason"] for item in later), case.name
        found += len(later)
    assert found


def test_what_differs_with_a_filter_backend_changes_an_expectation_of_ipvs_mode_in_both_behaviours():
    found = 0
    for case in ALL:
        differing = read_corrections(case.file("filter-backend-nftables.json"))
        places = {(item["step"], item["flow"]) for item in differing}
        assert all(item["reason"] for item in differing), case.name
        for behaviour in ("kube-proxy", CORRECTED) if "ipvs" in case.modes else ():
            before, after = (
                expectations(case, "ipvs", behaviour, filter_backend) for filter_backend in ("iptables", "nftables")
            )
            assert {place for place in before if before[place] != after[place]} == places, case.name
            found += len(places)
    assert found


def _seen(flow, seen):
    """Reduce flows from the node to the endpoints: its own address is also that of masquerading."""
    return sorted({entry[0] for entry in seen}) if flow.split()[1] == "node" else seen


def test_modes_agree_where_one_of_them_is_corrected():
    compared = 0
    for case in ALL:
        places = {
            (item["step"], item["flow"])
            for mode in case.modes
            for item in corrections_of(case, mode)
            if item["step"] not in MAY_DIFFER
        }
        if not places:
            continue
        by_mode = {mode: expectations(case, mode, CORRECTED) for mode in case.modes}
        for place in places:
            meanings = [_seen(place[1], found[place]) for found in by_mode.values() if place in found]
            assert all(item == meanings[0] for item in meanings), (case.name, place, meanings)
            compared += len(meanings) > 1
    assert compared > 20


def test_a_correction_of_an_unknown_flow_is_refused():
    steps = [{"step": "start", "flows": [{"flow": "tcp a -> b:1", "sent": ["a"], "outcomes": {"drop": 1}}]}]
    change = {"step": "start", "flow": "tcp a -> b:1", "outcomes": {"reject rst": 1}, "reason": "why"}
    assert corrected(steps, [change]) == [
        {"step": "start", "flows": [{"flow": "tcp a -> b:1", "sent": ["a"], "outcomes": {"reject rst": 1}}]}
    ]
    with pytest.raises(ValueError, match="not expected"):
        corrected(steps, [{**change, "step": "other"}])


def test_an_unknown_behaviour_is_refused():
    assert chosen_behaviour({}) == "kube-proxy" and chosen_behaviour({"LAB_BEHAVIOUR": CORRECTED}) == CORRECTED
    with pytest.raises(ValueError, match="LAB_BEHAVIOUR"):
        chosen_behaviour({"LAB_BEHAVIOUR": "other"})
