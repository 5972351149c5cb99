# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The examples of the general modules: what a user would copy does what its check predicts, and then nothing."""

from __future__ import annotations

import importlib
from typing import Any

import yaml

from tests.documentation.commands import playbook_blocks
from tests.modules.harness import Node, Task
from tests.modules.many_runs import COLLECTION
from tests.modules.second_runs import fault_of

PAGE = "docs/general-modules.md"
MODULES = "kubenode.proxy.kernel_modules"
SYSCTLS = "kubenode.proxy.sysctls"
#: What the examples read of the inventory.
VARIABLES = {"ansible_default_ipv4": {"address": "10.0.0.7"}, "ansible_host": "10.0.0.21"}
LOADED = {MODULES: {"mode": "ipvs", "schedulers": ["wrr", "wlc", "sh"], "persistent": False}}


def tasks_of(source: str) -> list[Task]:
    """Return the tasks of a module's examples, or those of the page's playbooks, for this node only."""
    if source == PAGE:
        plays = [yaml.safe_load(block.text) for block in playbook_blocks() if block.place.startswith(f"{PAGE}:")]
        tasks = [task for play in plays for task in play[0]["tasks"]]
    else:
        tasks = yaml.safe_load(importlib.import_module(f"{COLLECTION}.{source}").EXAMPLES)
    return [_here(task) for task in tasks if "ansible.builtin.meta" not in task]


def _here(task: Task) -> Task:
    kept = {key: value for key, value in task.items() if key not in ("delegate_to", "loop")}
    if SYSCTLS in kept:
        # A network namespace lacks one of them, and may not change others.
        kept[SYSCTLS] = {**kept[SYSCTLS], "unchangeable": "warn"}
        kept[SYSCTLS].get("profile", {}).pop("netdev_max_backlog", None)
    return kept


def faults_of_examples(node: Node, source: str, *first: Task) -> list[str]:
    """Run the examples in check mode and twice, after other tasks; return what is wrong with them.

    A change that waits for its confirmation, and the confirmation of it, are not repeated.
    """
    tasks = tasks_of(source)
    assert tasks, source
    times = [1 if "register" in task or "confirmed" in str(task) else 3 for task in tasks]
    runs: list[Task] = [*first]
    for task, count in zip(tasks, times):
        runs += [task] if count == 1 else [{**task, "check_mode": True}, task, task]
    results: list[dict[str, Any]] = node.play(*runs, variables=VARIABLES)[len(first) :]
    faults = []
    for task, count in zip(tasks, times):
        found, results = results[:count], results[count:]
        failed = [result["msg"] for result in found if result.get("failed")]
        fault = failed[0] if failed else fault_of(*found) if count == 3 else ""
        if fault:
            faults.append(f"{task['name']}: {fault}")
    return faults
