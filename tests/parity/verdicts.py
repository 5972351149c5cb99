# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judge each flow of a case by three results: what was recorded, what a kube-proxy did, and what this project did."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from tests.conformance.wirelab.cases import Case
from tests.conformance.wirelab.corrections import RECORDED
from tests.conformance.wirelab.outcomes import meaning
from tests.conformance.wirelab.results import FlowResult, StepResult

from .sources import Surface

#: Step, flow, and which of the flows of the step with that text.
Place = tuple[str, str, int]
#: The metrics that are compared: of the proxy, not of the programming language.
METRICS_PREFIX = "kubeproxy_"


class Verdict(enum.Enum):
    """The relation of the three results."""

    EQUAL = "equal"
    #: The recording differs; what was expected of this release by reading is so.
    CONFIRMED = "read before, and confirmed"
    #: kube-proxy does what was recorded, and this project what a later release does.
    LATER = "changes in a later release"
    #: kube-proxy does neither what was recorded nor what this project does.
    CHANGED = "kube-proxy has changed"
    #: kube-proxy does what was recorded or expected, and this project does not.
    OURS = "this project differs"

    @property
    def expected(self) -> bool:
        """Is it as it should be?"""
        return self in (Verdict.EQUAL, Verdict.CONFIRMED, Verdict.LATER)


class Finding(NamedTuple):
    """A flow with its verdict, and what was seen; None where it was not run."""

    case: str
    step: str
    flow: str
    verdict: Verdict
    recorded: Any
    theirs: Any
    ours: Any


def verdict(recorded: object, expected: object, theirs: object, ours: object, *, reached: bool) -> Verdict:
    """Return the verdict on four meanings. ``reached``: kube-proxy is of the release that is expected, or later."""
    if ours == theirs:
        if theirs == expected:
            return Verdict.EQUAL if recorded == expected else Verdict.CONFIRMED
        return Verdict.CHANGED
    if theirs == recorded and ours == expected and not reached:
        return Verdict.LATER
    return Verdict.OURS if theirs in (recorded, expected) else Verdict.CHANGED


def judge(
    case: Case, mode: str, theirs: Sequence[StepResult], ours: Sequence[StepResult], table: Surface, *, reached: bool
) -> list[Finding]:
    """Return a finding for each flow of a case. ``table``: what a kube-proxy of this release shows."""
    expected, their_results, our_results = (_places(steps) for steps in (case.expected(mode), theirs, ours))
    found = []
    for place, recorded in _places(case.expected(mode, RECORDED)).items():
        seen = their_results.get(place), our_results.get(place)
        if "metrics" in recorded:
            relation = _metrics_verdict(table, *seen)
        else:
            now, here = (None if result is None else meaning(result) for result in seen)
            relation = verdict(meaning(recorded), meaning(expected[place]), now, here, reached=reached)
        found.append(Finding(case.name, place[0], place[1], relation, *map(_content, (recorded, *seen))))
    return found


def _places(steps: Sequence[StepResult]) -> dict[Place, FlowResult]:
    found: dict[Place, FlowResult] = {}
    for step in steps:
        for result in step["flows"]:
            number = sum(place[:2] == (step["step"], result["flow"]) for place in found)
            found[step["step"], result["flow"], number] = result
    return found


def _metrics_verdict(table: Surface, theirs: Optional[FlowResult], ours: Optional[FlowResult]) -> Verdict:
    """Compare names and types. Some metrics and labels are shown only after something has happened."""
    known = {name: metric.type for name, metric in (table.metrics or {}).items()}
    now, here = _types(theirs), _types(ours)
    if not now or any(known.get(name) != kind for name, kind in now.items()):
        return Verdict.CHANGED
    return Verdict.EQUAL if here and all(known[name] == here.get(name, known[name]) for name in now) else Verdict.OURS


def _types(result: Optional[FlowResult]) -> dict[str, str]:
    shown: Mapping[str, Any] = (result or {}).get("metrics", {})
    return {name: metric["type"] for name, metric in shown.items() if name.startswith(METRICS_PREFIX)}


def _content(result: Optional[FlowResult]) -> Any:
    if result is None:
        return None
    if "metrics" in result:
        return _types(result)
    return result.get("outcomes") or result.get("http") or result.get("cmd")
