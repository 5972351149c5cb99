# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks with --tags, as AWX runs them: every task is skipped, but roles still validate their variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.modules.harness import ROOT

PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))


def run(playbook: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", "-c", "local", playbook]
    command += ["-e", "proxy_hosts=all", "-e", "ansible_become=false", "--tags", "anything", *options]
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_HOME": str(ROOT / ".cache" / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
    }
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_tags_that_no_task_has_skip_everything_without_an_error(name):
    done = run(f"kubenode.proxy.{name}")
    assert done.returncode == 0 and "changed=1" not in done.stdout, done.stdout + done.stderr


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
        done = run(str(play))
        assert done.returncode == 0 and "changed=1" not in done.stdout, done.stdout + done.stderr
