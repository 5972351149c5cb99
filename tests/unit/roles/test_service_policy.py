# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the NodeProxyConfiguration that variables of the policy of Services give, in both roles that write one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

ROLES = Path(__file__).resolve().parents[3] / "roles"
NOT_A_LIST = "shop"
CASES = [
    ({}, None),
    ({"service_proxy_policy_annotations": True}, None),
    ({"service_proxy_policy_annotations": "yes"}, None),
    ({"service_proxy_policy_annotations": None}, None),
    ({"service_proxy_policy_annotations": ""}, None),
    ({"service_proxy_policy_annotations": False}, {"annotations": False}),
    ({"service_proxy_policy_annotations": "false"}, {"annotations": False}),
    ({"service_proxy_policy_annotations": []}, {"annotations": False}),
    ({"service_proxy_policy_annotations": ["shop"]}, {"namespaces": ["shop"]}),
    ({"service_proxy_policy_annotations": NOT_A_LIST}, {"namespaces": NOT_A_LIST}),
    ({"service_proxy_node_port_sources": ["192.0.2.0/24"]}, {"nodePortSources": ["192.0.2.0/24"]}),
    ({"service_proxy_local_services": ["kube-system/dns"]}, {"localServices": ["kube-system/dns"]}),
    (
        {
            "service_proxy_local_services": ["kube-system/dns"],
            "service_proxy_node_configuration": {"servicePolicy": {"localServices": ["shop/web"], "nodeWeights": True}},
        },
        {"localServices": ["kube-system/dns"], "nodeWeights": True},
    ),
    (
        {
            "service_proxy_policy_annotations": ["shop"],
            "service_proxy_node_configuration": {"servicePolicy": {"aliases": True, "namespaces": ["other"]}},
        },
        {"aliases": True, "namespaces": ["shop"]},
    ),
]


def test_variables_become_fields_of_the_configuration(tmp_path):
    """One run for all cases: a task for each prints the section as both roles compute it."""
    files = [ROLES / role / place / "main.yml" for role in ("service_proxy", "agent") for place in ("defaults", "vars")]
    shown = "{{ [__service_proxy_node_configuration.servicePolicy | default(none),"
    shown += " __agent_given_node_configuration.servicePolicy | default(none)] | to_json }}"
    tasks = [
        {"name": f"Case {number}", "ansible.builtin.debug": {"msg": shown}, "vars": variables}
        for number, (variables, _expected) in enumerate(CASES)
    ]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    play["vars_files"] = list(map(str, files))
    # As defaults of a role, so that the variables of a task win.
    play["vars"] = {"ansible_python_interpreter": sys.executable, "role_path": str(ROLES / "service_proxy")}
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    environment = {**os.environ, "ANSIBLE_HOME": str(tmp_path / "home"), "LC_ALL": "C.UTF-8"}
    environment["ANSIBLE_STDOUT_CALLBACK"] = "ansible.builtin.default"
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", str(tmp_path / "play.yml")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if '"msg": ' in line]
    found = [json.loads(json.loads("{" + line + "}")["msg"]) for line in lines]
    assert found == [[expected, expected] for _variables, expected in CASES]
