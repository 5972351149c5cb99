# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run cases and compare them with what is expected."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from .cases import Case
from .execution import Execution, Observation
from .feeds import RecordedFeed
from .objects import write_json
from .options import RunOptions
from .outcomes import Rules, compare
from .report import Row


def run_cases(
    cases: Sequence[Case],
    options: RunOptions,
    rules: Rules,
    against: str,
    save: str | None,
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Run one case after the other; *on_row* is called as soon as a case is done."""
    rows = []
    for case in cases:
        row = run_case(case, options, rules, against, save)
        rows.append(row)
        on_row(row)
    return rows


def run_case(case: Case, options: RunOptions, rules: Rules, against: str, save: str | None = None) -> Row:
    """Run a case, compare it with what is expected in the mode *against*, and return the row of the report.

    Observations and programmed state are saved below the folder *save*. An error of the proxy or of the case is part of
    the row.
    """
    mode = options.runner.mode
    row = Row(case.name, mode)
    start = time.monotonic()
    try:
        expected = case.expected(against, options.runner.behaviour, options.runner.ipvs_filter_backend)
        row.total = sum(len(step["flows"]) for step in expected)
        observation = observe(case, options)
        comparison = compare(expected, observation.steps, rules)
        row.equal, row.total, row.differences = comparison
        if save:
            save_observation(os.path.join(save, case.name), case.name, mode, observation)
    except Exception as error:  # one case that cannot be run must not stop the others
        row.error = str(error) or repr(error)
    row.seconds = round(time.monotonic() - start, 1)
    return row


def observe(case: Case, options: RunOptions) -> Observation:
    """Run a case with its snapshots in a separate event loop."""

    async def execute() -> Observation:
        return await Execution(case, options, RecordedFeed(case.snapshots())).run()

    return asyncio.run(execute())


def save_observation(
    directory: str, name: str, mode: str, observation: Observation, *, label: str | None = None
) -> None:
    """Write the files of a recording: observed-MODE.json, state-MODE.txt and, if fetched, metrics-MODE.txt."""
    os.makedirs(directory, exist_ok=True)
    content: dict[str, object] = {"case": name, "mode": mode}
    if label:
        content["recordedFrom"] = label
    write_json(os.path.join(directory, f"observed-{mode}.json"), {**content, "steps": observation.steps})
    texts = {"state": "\n".join(observation.state), "metrics": observation.metrics_text}
    for kind, text in texts.items():
        if text:
            with open(os.path.join(directory, f"{kind}-{mode}.txt"), "w", encoding="utf-8") as file:
                file.write(text)
