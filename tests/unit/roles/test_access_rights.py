# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that the agents' account is that of all hosts of the play, with the rights that any of them needs."""

from __future__ import annotations

import re
import sys

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

import yaml

from tests.unit.roles.rendering import ROLES, local_hosts, play_once, rendered

NEITHER = {"service_proxy_network_policy": False, "agent_node_configuration": {"networkPolicy": None}}


@pytest.mark.parametrize(
    ("of_the_second_host", "arguments", "expected"),
    [
        (NEITHER, (), False),
        (NEITHER, ("--limit", "n1"), False),
        ({"service_proxy_network_policy": True}, (), True),
        ({"agent_node_configuration": {"networkPolicy": {"enabled": True}}}, ("--limit", "n1"), True),
    ],
)
def test_one_host_that_needs_them_is_enough(tmp_path, of_the_second_host, arguments, expected):
    (task, *_others) = yaml.safe_load((ROLES / "agent/tasks/account.yml").read_text(encoding="utf-8"))
    expression = task["kubenode.proxy.agent_access"]["network_policy"].strip().removeprefix("{{").removesuffix("}}")
    hosts = {"n1": {"service_proxy_network_policy": False}, "n2": of_the_second_host}
    assert rendered(tmp_path, ["agent"], expression, [{}], *arguments, hosts=hosts) == [expected]


@pytest.mark.parametrize(
    ("of_the_second_host", "refused"),
    [
        ({}, False),
        ({"agent_access_token": "node"}, False),
        ({"agent_admin_context": "b"}, True),
        ({"agent_access_name": "b"}, True),
        ({"agent_access_token": "shared"}, True),
    ],
)
def test_hosts_that_need_different_accounts_are_refused(tmp_path, of_the_second_host, refused):
    """The account is created with the variables of the first host; the others would get the address of its cluster."""
    (tmp_path / "own").write_text("")
    given = {
        "agent_create_access": True,
        "agent_admin_kubeconfig": str(tmp_path / "own"),
        "ansible_python_interpreter": sys.executable,
    }
    role = {"name": "kubenode.proxy.agent", "tasks_from": "require_access"}
    play = {"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.include_role": role}]}
    done = play_once(tmp_path, play, local_hosts({"n1": given, "n2": {**given, **of_the_second_host}}))
    reason = "The hosts of this play need different accounts" if refused else "agent_create_access, with"
    assert done.returncode != 0 and reason in done.stdout, done.stdout + done.stderr


def test_what_is_read_of_other_hosts_is_no_template(tmp_path):
    (task, *_others) = yaml.safe_load((ROLES / "agent/tasks/try_account.yml").read_text(encoding="utf-8"))
    needs = task["ansible.builtin.set_fact"]["__agent_needs"]
    said = {"__ansible_unsafe": "{{ 40 + 2 }}"}
    cases = [{name: said} for name in ("agent_admin_context", "agent_access_name", "agent_api_server")]
    expression = f"[{needs['account'].strip()[2:-2]}, {needs['server'][2:-2]}]"
    for account, server in rendered(tmp_path, ["agent"], expression, cases):
        assert re.fullmatch("[0-9a-f]{64}", account) and isinstance(server, bool)


def test_the_tokens_of_each_account_are_revoked_once(tmp_path):
    (task, *_others) = yaml.safe_load((ROLES / "agent/tasks/account.yml").read_text(encoding="utf-8"))
    expression = task["kubenode.proxy.agent_access"]["rotate"].strip().removeprefix("{{").removesuffix("}}")
    facts = yaml.safe_load((ROLES / "agent/tasks/access.yml").read_text(encoding="utf-8"))
    (after,) = (item["ansible.builtin.set_fact"]["__agent_rotated"] for item in facts if "rotated" in str(item))
    cases = [
        {"agent_controller": "n1", "agent_rotate_access": True, "__agent_needs": {"account": account}}
        for account in ("a", "b")
    ]
    hosts = {"n1": {"__agent_rotated": ["a"]}}
    found = rendered(tmp_path, ["agent"], f"[{expression}, {after[2:-2]}]", cases, hosts=hosts)
    assert found == [[False, ["a", "a"]], [True, ["a", "b"]]]


def test_both_roles_use_the_same_cluster_unless_a_variable_names_another(tmp_path):
    cases = [
        {},
        {"service_proxy_kubeconfig": "k", "service_proxy_context": "c"},
        {"service_proxy_kubeconfig": "k", "service_proxy_context": "c", "agent_admin_kubeconfig": "admin"},
        {"service_proxy_context": "c", "agent_admin_context": "admin"},
    ]
    found = rendered(tmp_path, ["agent"], "[agent_admin_kubeconfig, agent_admin_context]", cases)
    assert found == [["", ""], ["k", "c"], ["admin", ""], ["", "admin"]]
