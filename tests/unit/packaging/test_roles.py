# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The roles that install the engine: documented defaults match, and the requested libraries are those imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import agent_state
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging import identity
from tests.pins import REQUIREMENTS

ROLES = Path(__file__).resolve().parents[3] / "roles"


@pytest.mark.parametrize("name", ["agent", "schedule"])
def test_specification_agrees_with_defaults(name):
    role = ROLES / name
    options = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    assert {name: option["default"] for name, option in options.items()} == defaults
    readme = (role / "README.md").read_text()
    assert [name for name in options if f"| `{name}` |" not in readme] == []


def test_role_and_engine_agree():
    defaults = yaml.safe_load((ROLES / "agent/defaults/main.yml").read_text())
    variables = yaml.safe_load((ROLES / "agent/vars/main.yml").read_text())
    assert defaults["agent_requirements"] == []
    pinned = re.findall(r"^(\S+)==\S+ ", (ROLES / "agent/files/libraries.txt").read_text(), re.MULTILINE)
    assert sorted(pinned) == sorted(REQUIREMENTS)
    assert variables["__agent_directory"] + "/VERSION" == identity.INSTALLED_VERSION


def test_modules_look_for_the_unit_and_the_account_of_the_role():
    # The environments of the oldest and newest Python do not have ansible.
    node_programs = pytest.importorskip("ansible_collections.kubenode.proxy.plugins.modules.node_programs")
    variables = yaml.safe_load((ROLES / "agent/vars/main.yml").read_text())
    assert variables["__agent_unit"] == agent_state._UNIT
    assert (variables["__agent_comment"], variables["__agent_state_directory"]) == node_programs._OWN


def test_both_roles_refer_to_each_other_by_the_right_name():
    agent = yaml.safe_load((ROLES / "agent/vars/main.yml").read_text())
    schedule = yaml.safe_load((ROLES / "schedule/vars/main.yml").read_text())
    assert agent["__agent_other_unit"] == schedule["__schedule_timer"]
    assert agent["__agent_unit"] in (ROLES / "schedule/tasks/absent.yml").read_text()
