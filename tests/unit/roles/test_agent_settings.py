# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that an agent has the settings with which the role service_proxy compares its node: only then it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.settings_digest import settings_digest

ROLES = Path(__file__).resolve().parents[3] / "roles"
CASES = [
    {},
    {"service_proxy_mode": "nftables"},
    {
        "service_proxy_mode": "ipvs",
        "service_proxy_ipvs_glue": "nftables",
        "service_proxy_configuration": {
            "mode": "iptables",
            "clusterCIDR": "10.244.0.0/16",
            "ipvs": {"scheduler": "lc"},
        },
        "service_proxy_behaviour": "corrected",
        "service_proxy_node_port_sources": ["192.0.2.0/24"],
        "service_proxy_network_policy": True,
        "service_proxy_api_servers": ["192.0.2.11", "192.0.2.12"],
    },
    {"service_proxy_mode": "nftables", "service_proxy_outside_host": True},
]


def digest(configuration, mode, node_configuration):
    """Return the digest of the settings in a configuration, and the mode in an option."""
    loaded, _warnings = load(configuration, mode, node_configuration)
    return settings_digest(loaded, "", "node1", ("IPv4",), ClusterState())


def test_both_roles_give_the_same_settings(tmp_path):
    files = [ROLES / role / place / "main.yml" for role in ("service_proxy", "agent") for place in ("defaults", "vars")]
    shown = "{{ [[service_proxy_configuration, service_proxy_mode, __service_proxy_node_configuration],"
    shown += " [__agent_given_configuration, '', __agent_full_node_configuration]] | to_json }}"
    tasks = [
        {"name": f"Case {number}", "ansible.builtin.debug": {"msg": shown}, "vars": variables}
        for number, variables in enumerate(CASES)
    ]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    play["vars_files"] = list(map(str, files))
    play["vars"] = {"ansible_python_interpreter": sys.executable}
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    environment = {**os.environ, "ANSIBLE_HOME": str(tmp_path / "home"), "LC_ALL": "C.UTF-8"}
    environment["ANSIBLE_STDOUT_CALLBACK"] = "ansible.builtin.default"
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", str(tmp_path / "play.yml")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if '"msg": ' in line]
    found = [json.loads(json.loads("{" + line + "}")["msg"]) for line in lines]
    digests = [[digest(*settings) for settings in pair] for pair in found]
    assert all(of_role == of_agent for of_role, of_agent in digests) and len(digests) == len(CASES)
    assert len({of_agent for _of_role, of_agent in digests}) == len(CASES)
