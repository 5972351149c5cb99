# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An option of a wrong type is named by the modules that run on the controller, before they do anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.namespaces import ansible_environment

#: The module, its options, and the option that the error must name.
CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("kube_proxy_placement", {"wait_timeout": "2m"}, "wait_timeout: '2m' is not a number of seconds"),
    ("kube_proxy_placement", {"wait_timeout": "nan"}, "wait_timeout: 'nan' is not a number of seconds"),
    ("kube_proxy_placement", {"wait_timeout": [1]}, "wait_timeout: [1] is not a number of seconds"),
    ("kube_proxy_placement", {"wait_part": -1}, "wait_part: -1 is not a number of seconds"),
    ("kube_proxy_placement", {"wait_tmeout": 1, "kubeconfig": "/nowhere"}, "wait_tmeout"),
    ("fleet_report", {"source": "/nowhere", "stale_after": "2m"}, "'stale_after'"),
    ("fleet_report", {"source": "/nowhere", "stale_aftr": 1}, "stale_aftr"),
    ("fleet_report", {}, "source"),
    ("host_summary", {"sentense": "done"}, "sentense"),
    ("role_variables", {"strict": "maybe"}, "'strict'"),
    ("role_variables", {"facts": {"a": 1}}, "'facts'"),
)


def test_a_wrong_option_of_a_module_on_the_controller_is_named(tmp_path: Path) -> None:
    tasks = [
        {"name": f"case {number}", f"kubenode.proxy.{name}": options, "ignore_errors": True}
        for number, (name, options, _named) in enumerate(CASES)
    ]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    argv = [*ansible_playbook(), "-i", "localhost,", "-e", f"ansible_python_interpreter={sys.executable}"]
    done = subprocess.run(
        [*argv, str(tmp_path / "play.yml")],
        env=ansible_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.findall(r'fatal: .*"msg": "(.*)"', done.stdout)
    assert len(said) == len(CASES), done.stdout + done.stderr
    assert [found for found, (_name, _options, named) in zip(said, CASES) if named not in found] == []
