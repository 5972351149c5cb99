# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks and roles with --tags: what selects no task is an error, and what selects some runs those only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.modules.harness import ROOT

PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))


def run(playbook: str, tags: str = "anything", *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", "-c", "local", playbook]
    command += ["-e", "proxy_hosts=all", "-e", "ansible_become=false", "--tags", tags, *options]
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_HOME": str(ROOT / ".cache" / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
    }
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_tags_that_no_task_has_are_an_error(name):
    done = run(f"kubenode.proxy.{name}")
    assert done.returncode != 0 and "changed=0" in done.stdout, done.stdout + done.stderr
    assert "--tags anything: this selects no task, so nothing would be done" in done.stdout + done.stderr


def test_roles_that_are_not_selected_are_an_error_only_if_nothing_else_is_selected(tmp_path):
    for main in (ROOT / "roles").glob("*/tasks/main.yml"):
        first = yaml.safe_load(main.read_text())[0]
        assert "kubenode.proxy.role_variables" in first and first["tags"] == "always", main
    play = tmp_path / "play.yml"
    other = {"name": "Another task", "ansible.builtin.debug": {"msg": "ran"}, "tags": "other"}
    content = [{"name": "Play", "hosts": "all", "gather_facts": False, "roles": ["kubenode.proxy.kernel"]}]
    content.append({"name": "Later", "hosts": "all", "gather_facts": False, "tasks": [other]})
    play.write_text(yaml.safe_dump(content))
    done = run(str(play))
    assert done.returncode != 0 and "this selects no task" in done.stdout + done.stderr, done.stdout + done.stderr
    done = run(str(play), "other")
    assert done.returncode == 0 and "ran" in done.stdout and "changed=0" in done.stdout, done.stdout + done.stderr


def test_tags_that_an_included_role_does_not_get_are_an_error(tmp_path):
    """Other tasks are selected by the tag, and Ansible says nothing about those of the role."""
    play = tmp_path / "play.yml"
    other = {"name": "Another task", "ansible.builtin.debug": {"msg": "ran"}, "tags": "proxy"}
    nothing, later = "--tags proxy: this selects no task, so nothing would be done", "set agent_kubeconfig"
    for apply, expected in (({}, nothing), ({"apply": {"tags": "proxy"}}, later)):
        include = {"name": "kubenode.proxy.agent", **apply}
        role = {"name": "Role", "ansible.builtin.include_role": include, "tags": "proxy"}
        play.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [other, role]}]))
        done = run(str(play), "proxy", "--check")
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode and [text for text in (nothing, later) if text in said] == [expected], said


def test_no_role_runs_without_its_checks(tmp_path):
    for role in ("agent", "kernel", "schedule", "service_proxy"):
        play = tmp_path / f"{role}.yml"
        play.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "roles": [f"kubenode.proxy.{role}"]}]))
        for tag in ("always", "tagged"):
            done = run(str(play), "all", "--skip-tags", tag)
            said = done.stdout + done.stderr
            assert done.returncode and f"--skip-tags {tag}: this skips the checks" in said, said
            assert "changed=0" in said and "ok=0" in said, said


def test_the_tag_of_an_imported_playbook_selects_its_tasks(tmp_path):
    play = tmp_path / "play.yml"
    imported = {"name": "Explain", "import_playbook": "kubenode.proxy.explain", "tags": "anything"}
    play.write_text(yaml.safe_dump([imported]))
    done = run(str(play))
    # The task after the check of the names has run.
    assert "name the client and the destination" in done.stdout + done.stderr


def test_a_tagged_part_of_a_migration_finds_every_variable(tmp_path):
    """Include a part by its tag: it is loaded and its roles validate their variables, but their tasks are skipped."""
    for direction in ("forward", "back"):
        part = {
            "name": "One part",
            "ansible.builtin.include_tasks": str(ROOT / "playbooks" / "migration" / f"{direction}.yml"),
            "tags": "anything",
        }
        play = tmp_path / f"{direction}.yml"
        play.write_text(yaml.safe_dump([{"name": "Part", "hosts": "all", "gather_facts": False, "tasks": [part]}]))
        done = run(str(play), "anything")
        assert done.returncode == 0 and "changed=1" not in done.stdout, done.stdout + done.stderr
