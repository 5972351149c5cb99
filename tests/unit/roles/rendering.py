# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What expressions give with the variables of roles, without a host."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional, Sequence

ROLES = Path(__file__).resolve().parents[3] / "roles"


def variables_of(role: str) -> list[str]:
    """Return the files of a role's defaults and variables."""
    return [str(path) for place in ("defaults", "vars") for path in sorted((ROLES / role / place).glob("*.yml"))]


def play_on(host: str, roles: Sequence[str], tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a play that has the variables of roles; those of its tasks win."""
    return {
        "hosts": host,
        "gather_facts": False,
        "vars_files": [path for role in roles for path in variables_of(role)],
        "vars": {"role_path": str(ROLES / roles[0]), "ansible_python_interpreter": sys.executable},
        "tasks": tasks,
    }


def play_once(
    scratch: Path, play: dict[str, Any], inventory: dict[str, Any], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a play and return how it ended."""
    (scratch / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    (scratch / "inventory.json").write_text(json.dumps(inventory), encoding="utf-8")
    environment = {
        **os.environ,
        "ANSIBLE_HOME": str(scratch / "home"),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_NOCOLOR": "1",
    }
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "inventory.json", *arguments, "play.yml"]
    return subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, check=False)


def local_hosts(hosts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return an inventory of hosts that are this machine, with their variables."""
    local = {"ansible_connection": "local"}
    return {"all": {"hosts": {name: {**local, **variables} for name, variables in hosts.items()}}}


def played(
    scratch: Path, play: dict[str, Any], inventory: dict[str, Any], *arguments: str, errors: bool = False
) -> str:
    """Return the output of a play that succeeds; with ``errors`` also what it has written as an error."""
    done = play_once(scratch, play, inventory, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr if errors else done.stdout


def rendered(
    scratch: Path,
    roles: Sequence[str],
    expression: str,
    cases: Sequence[dict[str, Any]],
    *arguments: str,
    hosts: Optional[dict[str, dict[str, Any]]] = None,
) -> list[Any]:
    """Return what an expression gives for each set of variables, in one run, on the first of these hosts."""
    message = "{{ [" + expression + "] | to_json | b64encode }}"
    tasks = [
        {"name": f"Case {number}", "ansible.builtin.debug": {"msg": message}, "vars": variables}
        for number, variables in enumerate(cases)
    ]
    hosts = hosts or {"node": {}}
    play = play_on("all", roles, [{**task, "run_once": True} for task in tasks])
    output = played(scratch, play, local_hosts(hosts), *arguments)
    texts = [line.split('"')[3] for line in output.splitlines() if '"msg":' in line]
    return [json.loads(base64.b64decode(text))[0] for text in texts]
