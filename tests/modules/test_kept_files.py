# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Root changes the owner of files below a directory of the agent's user, and follows no link that is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.base.whole_files import MANAGED_LINE
from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.namespaces import ROOT

NOBODY = 65534
TASK = "Make the files that are kept accessible to root only"


@pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")
def test_a_link_of_the_agents_user_is_not_followed(tmp_path):
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    for path in (state / "own", elsewhere / "deep"):
        path.mkdir(parents=True)
        (path / "file").touch()
    (state / "own" / "link").symlink_to(elsewhere)
    (state / "own" / "deep").symlink_to(elsewhere / "deep" / "file")
    for path in (*state.rglob("*"), *elsewhere.rglob("*"), elsewhere):
        os.lchown(path, NOBODY, NOBODY)
    (task,) = (
        task for task in yaml.safe_load((ROOT / "roles/agent/tasks/uninstall.yml").read_text()) if task["name"] == TASK
    )
    variables = {
        "ansible_python_interpreter": "/usr/bin/python3",
        "__agent_state_directory": str(state),
        "__agent_runtime_directory": str(state / "own"),
    }
    play = {"hosts": "localhost", "gather_facts": False, "vars": {**variables, "__agent_kubelet_served": True}}
    playbook = tmp_path / "play.yml"
    playbook.write_text(yaml.safe_dump([{**play, "tasks": [task]}]))
    subprocess.run([*ansible_playbook(), "-i", "localhost,", "-c", "local", str(playbook)], check=True)
    assert {os.lstat(path).st_uid for path in (state, *state.rglob("*"))} == {0}
    assert {os.lstat(path).st_uid for path in (elsewhere, *elsewhere.rglob("*"))} == {NOBODY}


OWN = "# of the administrator\nkernel.panic = 5\n"


@pytest.mark.parametrize(
    ("module", "options", "path"),
    (
        ("sysctls", {"values": {"net.ipv4.ip_forward": 0}}, "/etc/sysctl.d/10-own.conf"),
        ("kernel_modules", {"modules": ["dummy"]}, "/etc/modules-load.d/own.conf"),
    ),
)
def test_a_file_that_others_have_written_is_kept_and_named_in_a_warning(node, module, options, path):
    node.run("sh", "-c", f"cat > {path}", text=OWN)
    task = {**options, "state": "absent", "persistent_file": path}
    runs = json.dumps([(module, task, True), (module, task, False)])
    for result in json.loads(node.run(sys.executable, "-m", "tests.modules.many_runs", text=runs).stdout):
        assert not result["changed"] and not result.get("failed")
        (warning,) = result["warnings"]
        assert f"{path}: is kept" in str(warning)
    assert node.run("cat", path).stdout == OWN


def test_what_is_beside_an_edited_file_is_removed(node):
    present = {"modules": ["nf-conntrack"], "parameters": {"nf_conntrack.hashsize": 16384}, "unchangeable": "warn"}
    files = {"persistent_file": "/etc/modules-load.d/own.conf", "parameters_file": "/etc/modprobe.d/own.conf"}
    for path in files.values():
        node.run("sh", "-c", f"cat > {path}", text=f"{MANAGED_LINE}\n")
    node.run("sh", "-c", f"cat > {files['persistent_file']}", text=OWN)
    runs = json.dumps([("kernel_modules", {**present, **files, "state": "absent"}, False)])
    (result,) = json.loads(node.run(sys.executable, "-m", "tests.modules.many_runs", text=runs).stdout)
    assert result["changed"] and len(result["warnings"]) == 1
    assert node.run("cat", files["persistent_file"]).stdout == OWN
    assert node.run("test", "!", "-e", files["parameters_file"]).returncode == 0


def role_task(role: str, file: str, name: str) -> dict[str, Any]:
    """Return a task of a role, which has one of this name."""
    (found,) = (
        task for task in yaml.safe_load((ROOT / "roles" / role / "tasks" / file).read_text()) if task["name"] == name
    )
    return dict(found)


@pytest.mark.parametrize("others", [(), ("notes.txt", "state-000001.json.gz.old")])
def test_of_the_directory_of_saved_states_only_these_are_removed(node, others):
    directory = node.scratch / "states"
    directory.mkdir()
    own = ("state-000001.json.gz", ".state-000002.json.gz.x7", "outcomes.json", ".outcomes.json.x7")
    for name in (*own, *others):
        (directory / name).touch()
    names = ("Remove the saved states", "Remove the directory of the saved states if it is empty")
    first, second = (role_task("service_proxy", "absent.yml", name) for name in names)

    def removal(number: int, checks: bool = False) -> dict[str, Any]:
        # The harness keeps results by these names, and runs playbooks without --check.
        text = json.dumps(first).replace(first["register"], f"result_{number}")
        return dict(json.loads(text.replace("ansible_check_mode", str(checks).lower())))

    variables = {"service_proxy_history_directory": str(directory)}
    (preview,) = node.play(removal(0, checks=True), variables=variables)
    assert preview["changed"] and len(list(directory.iterdir())) == len(own) + len(others)
    found = node.play(removal(0), second, removal(2), second, variables=variables)
    assert [result["changed"] for result in found] == [True, False, False, False]
    assert sorted(path.name for path in directory.glob("*")) == sorted(others) and directory.exists() is bool(others)


def test_an_account_of_others_is_refused(node):
    names = ("nobody", "root", "no-such-account")
    asked = [{"kubenode.proxy.node_programs": {"names": [], "accounts": {name: "agent_user"}}} for name in names]
    found = node.play(*asked)
    problem = "agent_user: the account nobody exists, and is not the agent's own: name another one, or root"
    assert [result.get("msg", "") for result in found] == [problem, "", ""]
