# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that the role service_proxy removes static Services from the directory that the configuration names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")
import yaml

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles" / "service_proxy"


def would_change(name: str, scratch: Path, variables: dict) -> bool:
    """Return whether a task of the entry point absent would change this machine."""
    tasks = yaml.safe_load((ROLE / "tasks" / "absent.yml").read_text(encoding="utf-8"))
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROLE / "defaults" / "main.yml"), str(ROLE / "vars" / "main.yml")],
        "vars": {"ansible_python_interpreter": sys.executable, "role_path": str(ROLE)},
        "tasks": [task for task in tasks if task["name"] == name],
    }
    (scratch / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    command = [sys.executable, "-m", "ansible", "playbook", "--check", "-i", "localhost,"]
    command += ["-e", json.dumps(variables), str(scratch / "play.yml")]
    environment = {**os.environ, "ANSIBLE_HOME": str(scratch / "home"), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return "changed=1" in done.stdout


def test_the_file_is_removed_from_a_directory_of_its_own(tmp_path):
    directory = tmp_path / "services"
    directory.mkdir()
    variables = {"service_proxy_node_configuration": {"staticServices": {"directory": str(directory)}}}
    (directory / "own.yaml").touch()
    assert not would_change("Remove the static Services", tmp_path, variables)
    (directory / "ansible.json").touch()
    assert would_change("Remove the static Services", tmp_path, variables)
