# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Expectations that differ from the recordings, of later releases and corrected behaviour: what, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .results import FlowResult, StepResult

KUBE_PROXY, CORRECTED = "kube-proxy", "corrected"
#: What the recorded kube-proxy did, without what later ones do differently: for a run of that one.
RECORDED = "recorded"
#: The release of kube-proxy that is expected; recordings are of an earlier one.
EQUALS = "1.38"
BEHAVIOURS = (KUBE_PROXY, CORRECTED, RECORDED)
#: Chooses the behaviour of a run.
VARIABLE = "LAB_BEHAVIOUR"


def chosen_behaviour(environment: Mapping[str, str] = os.environ) -> str:
    """Return the behaviour that the environment chooses. Raises ValueError for an unknown one."""
    name = environment.get(VARIABLE) or KUBE_PROXY
    if name not in BEHAVIOURS:
        raise ValueError(f"{VARIABLE}: {name!r} is not one of {', '.join(BEHAVIOURS)}")
    return name


def read_corrections(path: str) -> list[dict[str, Any]]:
    """Return the corrections in a file, none if it does not exist.

    Each names a ``step`` and a ``flow`` of the expectation that it changes, has the ``outcomes`` (or ``http``, ``cmd``)
    that are expected instead, and a ``reason`` with its source.
    """
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        corrections: list[dict[str, Any]] = json.load(file)["corrections"]
    return corrections


def corrected(steps: Sequence[StepResult], corrections: Sequence[Mapping[str, Any]]) -> list[StepResult]:
    """Return the expectation with the corrections in their places. Raises ValueError for one without a place."""
    waiting = {(item["step"], item["flow"]): item for item in corrections}
    found: list[StepResult] = []
    used = set()
    for step in steps:
        flows: list[FlowResult] = []
        for flow in step["flows"]:
            place = (step["step"], flow["flow"])
            if place in waiting:
                used.add(place)
                changed = {key: value for key, value in waiting[place].items() if key not in ("step", "reason")}
                kept = {"sent": flow["sent"]} if "sent" in flow else {}
                flows.append({**kept, **changed})  # type: ignore[typeddict-item]
            else:
                flows.append(flow)
        found.append({"step": step["step"], "flows": flows})
    unused = [place for place in waiting if place not in used]
    if unused:
        raise ValueError(f"correction of a flow that is not expected: {unused[0]}")
    return found
