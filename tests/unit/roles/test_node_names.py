# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The name of a host's Node: either variable gives it to both roles, also where the variables of both are known."""

from __future__ import annotations

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from tests.unit.roles.rendering import rendered

CASES = [
    ({}, "h", "h"),
    ({"agent_node_name": "a"}, "a", "a"),
    ({"service_proxy_node_name": "s"}, "s", "s"),
    ({"agent_node_name": "a", "service_proxy_node_name": "s"}, "a", "s"),
    # What a host has said is data, and stays that.
    ({"agent_node_name": {"__ansible_unsafe": "{{ 40 + 2 }}"}}, "{{ 40 + 2 }}", "{{ 40 + 2 }}"),
]


@pytest.mark.parametrize("roles", [("agent",), ("service_proxy",), ("agent", "service_proxy")])
def test_one_of_the_variables_names_the_node_for_both_roles(tmp_path, roles):
    names = {"agent": "__agent_node_name", "service_proxy": "service_proxy_node_name"}
    expression = f"[{', '.join(names[role] for role in roles)}]"
    found = rendered(tmp_path, roles, expression, [case for case, *_names in CASES], hosts={"h": {}})
    expected = [[of[role] for role in roles] for of in ({"agent": a, "service_proxy": s} for _case, a, s in CASES)]
    assert found == expected
