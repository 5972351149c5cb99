# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rule for every task that a general module accepts, and the tasks to try: values of all options, and pairs.

A check says what the run does, a second run changes nothing, and what is refused is refused in one line by both.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from typing import Any, Iterator, Mapping, Sequence

from tests.modules.harness import Node
from tests.modules.many_runs import COLLECTION

Options = dict[str, Any]
Values = Mapping[str, Sequence[Any]]


def in_pairs(base: Options, values: Values, limit: int = 2) -> Iterator[Options]:
    """Yield the base, with each value of each option, and with each pair of values; ``limit`` 1 for no pairs."""
    yield base
    for count in range(1, limit + 1):
        for names in itertools.combinations(values, count):
            for chosen in itertools.product(*(values[name] for name in names)):
                yield {**base, **dict(zip(names, chosen))}


def declared(module: str, name: str = "_OPTIONS") -> set[str]:
    """Return the options in an argument specification of a module."""
    found: set[str] = set(getattr(importlib.import_module(f"{COLLECTION}.{module}"), name))
    return found


def faults(node: Node, module: str, tasks: Sequence[Options], reset: Sequence[Options] = ()) -> list[str]:
    """Return what breaks the rule, one text for each task; ``reset`` are tasks that run before each of them.

    At least a third of the tasks must be accepted, so that the rule is tried.
    """
    runs: list[Any] = []
    for task in tasks:
        runs += [(module, each, False) for each in reset]
        runs += [(module, task, check) for check in (True, False, False)]
    done = node.run(sys.executable, "-m", "tests.modules.many_runs", text=json.dumps(runs))
    results = json.loads(done.stdout)
    found, accepted, size = [], 0, len(reset) + 3
    for number, task in enumerate(tasks):
        three = results[number * size + len(reset) : (number + 1) * size]
        fault = fault_of(*three) if all(isinstance(each, dict) for each in three) else f"no result: {three}"
        accepted += not fault and not three[1].get("failed")
        if fault:
            found.append(f"{json.dumps(task)}: {fault}")
    assert found or accepted * 3 >= len(tasks), f"{accepted} of {len(tasks)} tasks were accepted: {results[:4]}"
    return found


def fault_of(check: Options, first: Options, second: Options) -> str:
    """Return how a check and two runs of a task break the rule, empty if they do not."""
    if first.get("failed"):
        if "the kernel made it" in first["msg"] or "the kernel refused it" in first["msg"]:
            # A check cannot know what the kernel does with a value that has the right form.
            return "" if second.get("msg") == first["msg"] and "\n" not in first["msg"] else f"{first} {second}"
        if not check.get("failed") or check["msg"] != first["msg"]:
            return f"refused, but the check says {check.get('msg', check['changed'])!r}: {first['msg']!r}"
        if "\n" in first["msg"] or "Traceback" in first["msg"]:
            return f"not refused in one line: {first['msg']}"
        return "" if second.get("msg") == first["msg"] else f"refused otherwise then: {second.get('msg')!r}"
    if check.get("failed"):
        return f"the check fails: {check['msg']}"
    if (check["changed"], check.get("diff")) != (first["changed"], first.get("diff")):
        return f"the check says {check['changed']} {check.get('diff')}, the run {first['changed']} {first.get('diff')}"
    if second.get("failed"):
        return f"the second run fails: {second['msg']}"
    return f"the second run changes: {second.get('diff')}" if second["changed"] or second.get("diff") else ""
