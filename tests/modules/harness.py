# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run modules as users do: with ansible-playbook, through their real payload, from the collection.

The node is a network namespace and a mount namespace in which the directories that the modules write to are empty and
in memory, so neither the host's rules nor its files are touched. One playbook run holds many tasks, since starting
Ansible costs more than a task.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from difflib import unified_diff
from pathlib import Path
from typing import Any, Sequence

from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.namespaces import ROOT, Namespaces, ansible_environment

Task = dict[str, Any]
Result = dict[str, Any]

# Keywords of a task that runs as an unprivileged user.
UNPRIVILEGED: Task = {
    "become": True,
    "become_user": "nobody",
    "become_method": "ansible.builtin.su",
    "become_flags": "-s /bin/sh",
    "vars": {"ansible_python_interpreter": "/usr/bin/python3"},
}


def unanswered_kubeconfig(path: Path) -> str:
    """Write a kubeconfig of an API server that does not answer, and return the file's path."""
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    content = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}]}
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "c", **content}))
    return str(path)


class Node(Namespaces):
    """A network and mount namespace that a process keeps alive and Ansible enters."""

    def __init__(self, scratch: Path) -> None:
        super().__init__()
        self.scratch = scratch

    def run(self, *command: str, text: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program on the node."""
        done = self.execute(command, ROOT, text, ansible_environment(self.scratch))
        if check and done.returncode:
            raise AssertionError(f"{command}: status {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done

    def play(self, *tasks: Task, variables: dict[str, Any] | None = None) -> list[Result]:
        """Run the tasks in one playbook and return the result of each; a failed task does not end the run.

        Diffs are always collected; a task requests check mode with ``check_mode: true``.
        """
        results = self.scratch / f"results-{time.monotonic_ns()}.json"
        steps: list[Task] = []
        for number, task in enumerate(tasks):
            steps.append({"register": f"result_{number}", "ignore_errors": True, "diff": True, **task})
        names = ", ".join(step["register"] for step in steps)
        content = "{{ [" + names + "] | to_json }}"
        steps.append({"ansible.builtin.copy": {"content": content, "dest": str(results)}, "diff": False})
        self._playbook({"tasks": steps}, variables or {})
        found: list[Result] = json.loads(results.read_text(encoding="utf-8"))
        return found

    def role(self, name: str, variables: dict[str, Any], *, check: bool = False) -> dict[str, int]:
        """Run a role, optionally in check mode, and return the recap's counters."""
        done = self._playbook({"roles": [name]}, variables, "--diff", *(["--check"] if check else []))
        recap = done.stdout.rsplit("PLAY RECAP", 1)[1].split(" : ", 1)[1]
        return {key: int(value) for key, value in (word.split("=") for word in recap.split())}

    def _playbook(
        self, content: dict[str, Any], variables: dict[str, Any], *options: str
    ) -> subprocess.CompletedProcess[str]:
        interpreter = {"ansible_python_interpreter": sys.executable}
        play = {"hosts": "all", "gather_facts": False, "vars": {**interpreter, **variables}, **content}
        playbook = self.scratch / "playbook.yml"
        playbook.write_text(json.dumps([play]), encoding="utf-8")
        return self.run(*ansible_playbook(), "-i", "node,", "-c", "local", *options, str(playbook))

    def four_runs(self, module: str, options: dict[str, Any], *, verify: Sequence[str]) -> FourRuns:
        """Run check, apply, check, apply; ``verify`` is a tool whose output proves which runs changed something."""
        look = {"ansible.builtin.command": {"argv": list(verify)}, "changed_when": False}
        run = {f"kubenode.proxy.{module}": options}
        found = self.play(look, {**run, "check_mode": True}, look, run, look, {**run, "check_mode": True}, run, look)
        for result in (found[1], found[3], found[5], found[6]):
            assert not result.get("failed"), result
        assert [found[number]["changed"] for number in (1, 3, 5, 6)] == [True, True, False, False], found
        assert found[2]["stdout"] == found[0]["stdout"], "check mode changed the node"
        assert found[7]["stdout"] == found[4]["stdout"], "a second run changed the node"
        predicted, applied = (json.dumps(found[number].get("diff"), indent=1).splitlines() for number in (1, 3))
        assert predicted == applied, list(unified_diff(predicted, applied))
        return FourRuns(found[3], found[6], found[0]["stdout"], found[4]["stdout"])


class FourRuns:
    """The results of four runs: the first and second applied one, and the tool's output before and after."""

    def __init__(self, first: Result, second: Result, before: str, after: str) -> None:
        self.first = first
        self.second = second
        self.before = before
        self.after = after
