# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node cannot choose what the controller does by facts with the names of variables, which Ansible prefers."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("ansible")
import yaml

from tests.conftest import ROOT
from tests.unit.roles.rendering import local_hosts, play_once

#: A program in place of Python on a node: whichever module Ansible sends, the answer is this.
ANSWERING = """\
#!/bin/sh
cat >/dev/null
echo '{"changed": false, "rc": 0, "stdout": "{}", "ping": "pong", "ansible_facts": FACTS}'
"""
#: Modules that read nothing of the controller, wherever they run.
HARMLESS = ("ansible.builtin.debug", "ansible.builtin.set_fact", "kubenode.proxy.host_summary")
GUARD = r"lookup\('kubenode\.proxy\.controller'|\b__(agent|service_proxy)_controller\b"


def tasks(value):
    """Yield the tasks of a play or a file, with those of blocks."""
    for item in value:
        yield item
        for key in ("tasks", "block", "rescue", "always"):
            yield from tasks(item.get(key) or ())


def unguarded(task):
    """Return what a task lets the controller do with variables that an answer of its host may have set."""
    modules = {name: given for name, given in task.items() if "." in name and isinstance(given, (dict, str))}
    chosen = [task["delegate_to"]] if "delegate_to" in task and not set(HARMLESS) & set(modules) else []
    for name, given in modules.items():
        path = given.get("src" if name.endswith(".copy") else "file") if isinstance(given, dict) else given
        if name.rpartition(".")[2] in ("copy", "include_tasks", "include_vars", "script"):
            # Results of tasks win over facts; names of roles' own constants have two underscores.
            chosen += [path] if re.search(r"\{\{(?! __agent_packed| role_path)", path or "") else []
    return [text for text in chosen if not re.search(GUARD, text)]


def test_the_controller_does_nothing_with_variables_that_a_host_may_have_set() -> None:
    found = {}
    paths = [*(ROOT / "roles").glob("*/*/*.yml"), *(ROOT / "playbooks").rglob("*.yml")]
    for path in paths:
        if path.parent.name in ("tasks", "handlers", "playbooks", "migration"):
            for task in tasks(yaml.safe_load(path.read_text(encoding="utf-8"))):
                if unguarded(task):
                    found[f"{path.relative_to(ROOT)}: {task.get('name')}"] = unguarded(task)
    # Its choices are validated right before, with no answer of the host between.
    state = re.compile(r"roles/(\w+)/tasks/main\.yml: .* {{ \1_state }}\.yml")
    assert [place for place, given in found.items() if not state.fullmatch(" ".join([place, *given]))] == []


def test_a_node_that_sets_variables_by_its_answers_is_refused(tmp_path) -> None:
    secret = tmp_path / "secret.yml"
    secret.write_text("known: only-to-the-controller", encoding="utf-8")
    answers = {
        "hostile": {"agent_access_namespace": "kube-system", "agent_configuration_file": str(secret)},
        "honest": {"ansible_kernel_version": "6.1", "agent": "other software"},
    }
    interpreters = {name: tmp_path / name for name in answers}
    for name, facts in answers.items():
        interpreters[name].write_text(ANSWERING.replace("FACTS", json.dumps(facts)), encoding="utf-8")
        interpreters[name].chmod(0o755)
    role = {"name": "kubenode.proxy.agent", "tasks_from": "token", "public": True}
    requested = {
        "block": [{"ansible.builtin.include_role": role, "vars": {"__agent_access": {}}}],
        "rescue": [{"ansible.builtin.debug": {"msg": "{{ inventory_hostname }}: {{ ansible_failed_result.msg }}"}}],
    }
    shown = {"ansible.builtin.debug": {"msg": "{{ __agent_documents }}"}, "ignore_errors": True}
    place = {"role_path": str(ROOT / "roles" / "agent")}
    steps = [{"ansible.builtin.ping": {}}, requested, shown]
    play = {"hosts": "all", "gather_facts": False, "vars": place, "tasks": steps}
    # A variable of other software, whose name is that of a fact of every host without the prefix of facts.
    own = {"kernel_version": "6.1"}
    hosts = local_hosts({name: {"ansible_python_interpreter": str(path), **own} for name, path in interpreters.items()})
    output = play_once(tmp_path, play, hosts).stdout
    assert "only-to-the-controller" not in output
    assert re.search(r"hostile: .*agent_access_namespace, agent_configuration_file: a fact of the host", output), output
    assert "honest: no API server" in output
