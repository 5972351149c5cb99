# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that the role service_proxy removes static Services from the directory that the configuration names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")
import yaml

from tests.unit.roles.rendering import ROLES, local_hosts, play_on, played


def would_change(name: str, scratch: Path, variables: dict) -> bool:
    """Return whether a task that removes files would change this machine."""
    tasks = yaml.safe_load((ROLES / "service_proxy" / "tasks" / "remove_files.yml").read_text(encoding="utf-8"))
    play = play_on("all", ["service_proxy"], [task for task in tasks if task["name"] == name])
    output = played(scratch, play, local_hosts({"node": {}}), "--check", "-e", json.dumps(variables))
    return "changed=1" in output


def test_the_file_is_removed_from_a_directory_of_its_own(tmp_path):
    directory = tmp_path / "services"
    directory.mkdir()
    variables = {"service_proxy_node_configuration": {"staticServices": {"directory": str(directory)}}}
    (directory / "own.yaml").touch()
    assert not would_change("Remove the static Services", tmp_path, variables)
    (directory / "ansible.json").touch()
    assert would_change("Remove the static Services", tmp_path, variables)
