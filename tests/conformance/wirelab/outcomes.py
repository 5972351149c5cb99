# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The meaning of a result, and the comparison of two runs of a case by it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from .flows import Flow, parse_flow
from .results import FlowResult, StepResult


class Difference(NamedTuple):
    """One flow that did not do what was recorded."""

    step: str
    flow: str
    recorded: Any
    observed: Any


class Comparison(NamedTuple):
    """Flows that are equal, flows compared, and the differences."""

    equal: int
    total: int
    differences: list[Difference]


class Rules(NamedTuple):
    """How exactly results are compared.

    *strict*: the exact source address that the endpoint saw, instead of whether it was masqueraded.
    *loose*: one way of refusing is as good as another.
    *any_source*: the source address that the endpoint saw does not matter.
    *skipped_kinds*: kinds of flows that are not compared.
    """

    strict: bool = False
    loose: bool = False
    any_source: bool = False
    skipped_kinds: Collection[str] = ()


EXACT = Rules()


def answering_endpoint(outcome: str) -> str:
    """Return ``10.244.1.11:8080`` of ``10.244.1.11:8080 from ADDRESS``, and anything else unchanged."""
    return outcome.rsplit(" from ", 1)[0]


def meaning(result: FlowResult, rules: Rules = EXACT) -> Any:
    """Return the part of a result that is compared: equal meanings are equal results.

    For traffic: the set of answering endpoints, each with "same source" or "masqueraded", and the kinds of refusal.
    Counts are chance and do not matter. For ``sticky`` and ``many`` flows the endpoints themselves are chance as
    well, and their number is compared. Metrics are recorded but never compared (None).
    """
    if "http" in result:
        return result["http"]
    if "cmd" in result:
        return result["cmd"]
    if "metrics" in result:
        return None
    flow = parse_flow(result["flow"])
    seen = {_seen(outcome, flow, set(result.get("sent") or ()), rules) for outcome in result["outcomes"]}
    if not flow.by_chance:
        return sorted(map(list, seen))
    distinct: int | str = len({entry[0] for entry in seen if len(entry) == 2})
    if "sticky" not in flow.options and isinstance(distinct, int) and distinct >= int(flow.options["many"]):
        distinct = "many"
    kinds = {entry[1:] if len(entry) == 2 else entry for entry in seen}
    return {"distinct": distinct, "kinds": sorted(map(list, kinds))}


def _seen(outcome: str, flow: Flow, sent: set[str], rules: Rules) -> tuple[str, ...]:
    if " from " not in outcome:
        return (outcome.split(" ")[0] if rules.loose else outcome,)
    endpoint, source = outcome.rsplit(" from ", 1)
    # For these the endpoint, and so the source that it sees, is random.
    if rules.strict and not rules.any_source and not flow.by_chance:
        return endpoint, source
    if rules.any_source or (flow.by_chance and flow.host == "node"):
        # Traffic masqueraded towards another node has the address of the node.
        return endpoint, "answered"
    return endpoint, "same source" if source in sent else "masqueraded"


def compare(recorded: Sequence[StepResult], observed: Sequence[StepResult], rules: Rules = EXACT) -> Comparison:
    """Compare results flow by flow and step by step.

    A recorded flow that was not run is a difference; an observed one that was not recorded is ignored.
    """
    equal, total = 0, 0
    differences: list[Difference] = []
    for number, step in enumerate(recorded):
        unmatched: dict[str, list[FlowResult]] = {}
        for result in observed[number]["flows"] if number < len(observed) else ():
            unmatched.setdefault(result["flow"], []).append(result)
        for expected in step["flows"]:
            if expected["flow"].split(" ")[0] in rules.skipped_kinds:
                continue
            total += 1
            same_text = unmatched.get(expected["flow"])
            got = same_text.pop(0) if same_text else None
            if got is not None and meaning(expected, rules) == meaning(got, rules):
                equal += 1
            else:
                differences.append(Difference(step["step"], expected["flow"], _content(expected), _content(got)))
    return Comparison(equal, total, differences)


def _content(result: FlowResult | None) -> Any:
    if result is None:
        return None
    return result.get("outcomes") or result.get("http") or result.get("cmd") or result.get("metrics")
