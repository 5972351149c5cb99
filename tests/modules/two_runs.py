# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run two tasks of one module at the same time, many times, each in a child process.

Reads a Question from standard input and writes an Answer.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any, TypedDict

sys.path[:0] = os.environ["ANSIBLE_COLLECTIONS_PATH"].split(os.pathsep)

from tests.modules.many_runs import COLLECTION, begin, end


class Question(TypedDict):
    """The options of both tasks, what shows their effect, and by how many seconds the second one begins later."""

    module: str
    tasks: list[dict[str, Any]]
    look: str
    delays: list[float]


class Answer(TypedDict):
    """The effect of each task alone, that of both together, and the results of all of these."""

    alone: list[str]
    together: list[str]
    results: list[Any]


def main() -> None:
    """Run everything."""
    question: Question = json.load(sys.stdin)
    module, tasks = question["module"], question["tasks"]
    importlib.import_module(f"{COLLECTION}.{module}")
    answer: Answer = {"alone": [], "together": [], "results": []}

    def look() -> str:
        done = subprocess.run(["sh", "-c", question["look"]], capture_output=True, text=True, check=True)
        return done.stdout

    for task in tasks:
        answer["results"].append(end(*begin(module, task, False)))
        answer["alone"].append(look())
    for number, delay in enumerate(question["delays"]):
        # Alternately, since the second one has less to do if the node has the state that it declares.
        first, second = tasks if number % 2 else reversed(tasks)
        begun = [begin(module, first, False)]
        time.sleep(delay)
        begun.append(begin(module, second, False))
        answer["results"] += [end(*each) for each in begun]
        answer["together"].append(look())
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
