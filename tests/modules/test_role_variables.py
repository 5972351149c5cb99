# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Misspelt role variables are reported by name; variables of other roles and programs are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.variable_names import (
    known_variables,
    unknown_variables,
)
from tests.modules.harness import ROOT

ROLES = ("agent", "kernel", "schedule", "service_proxy")


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_is_known_and_its_misspelling_is_not(role):
    known = known_variables(ROOT / "roles" / role)
    prefix = f"{role}_"
    assert unknown_variables(known, prefix, known) == []
    for name in (name for name in known if name.startswith(prefix) and len(name) > len(prefix) + 4):
        for wrong in (name[:-1], name.replace("_", "", 1) if role != "service_proxy" else name + "s", f"{name}x"):
            if wrong in known or not wrong.startswith(prefix):
                continue
            (found,) = unknown_variables([wrong], prefix, known)
            assert found.name == wrong and found.nearest in known and found.nearest


@pytest.mark.parametrize("role", ROLES)
def test_variables_of_the_other_roles_and_of_other_programs_are_not_misspelt(role):
    known = known_variables(ROOT / "roles" / role)
    other_roles = {name for other in ROLES if other != role for name in known_variables(ROOT / "roles" / other)}
    unrelated = {
        "agent_port",
        "kernel_version",
        "schedule_backup",
        "ansible_host",
        "agent",
        "proxy_hosts",
        "kernel_cmdline",
    }
    found = unknown_variables(other_roles | unrelated, f"{role}_", known)
    assert [item for item in found if item.nearest] == []


def run(tmp_path: Path, role: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run only the first task of a role, with its argument specification; it may read what the other roles hold."""
    copy = tmp_path / "roles" / role
    copy.mkdir(parents=True)
    for other in (ROOT / "roles").iterdir():
        if other.name != role:
            copy.with_name(other.name).symlink_to(other)
    for folder in ("meta", "defaults", "vars", "templates"):
        if (ROOT / "roles" / role / folder).exists():
            (copy / folder).symlink_to(ROOT / "roles" / role / folder)
    (copy / "tasks").mkdir()
    first = yaml.safe_load((ROOT / "roles" / role / "tasks" / "main.yml").read_text(encoding="utf-8"))[0]
    (copy / "tasks" / "main.yml").write_text(yaml.safe_dump([first]))
    play = [{"name": "Check", "hosts": "all", "gather_facts": False, "roles": [role]}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", "-c", "local"]
    command += ["play.yml", "-e", json.dumps(variables)]
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_HOME": str(ROOT / ".cache" / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
        "COLUMNS": "1000",
    }
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def test_a_misspelt_variable_of_service_proxy_is_refused_with_the_right_name(tmp_path):
    done = run(
        tmp_path, "service_proxy", {"service_proxy_mod": "ipvs", "kernel_mod": "x", "service_proxy_mode": "ipvs"}
    )
    assert done.returncode != 0
    assert (
        "service_proxy_mod is not a variable of the role; did you mean service_proxy_mode?" in done.stdout + done.stderr
    )


def test_an_own_variable_with_the_prefix_of_service_proxy_gives_a_warning(tmp_path):
    done = run(tmp_path, "service_proxy", {"service_proxy_canary_group": "a", "service_proxy_kernel": "x"})
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    assert "service_proxy_canary_group is not a variable of the role" in said and "service_proxy_kernel" not in said


@pytest.mark.parametrize(
    ("role", "misspelt", "meant"),
    [
        ("agent", "agent_kube_config", "agent_kubeconfig"),
        ("kernel", "kernel_sysctl", "kernel_sysctls"),
        ("schedule", "schedule_varient", "schedule_variant"),
    ],
)
def test_a_misspelt_variable_of_another_role_gives_a_warning(tmp_path, role, misspelt, meant):
    done = run(tmp_path, role, {misspelt: "x", f"{role}_somebody_elses": "x"})
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    assert f"{misspelt} is not a variable of the role; did you mean {meant}?" in said
    assert "somebody_elses" not in said


def test_the_value_of_a_template_is_judged(tmp_path):
    done = run(tmp_path, "schedule", {"schedule_interval": "{{ often }}", "often": "hourly"})
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "schedule_interval: 'hourly' is not" in said, said
