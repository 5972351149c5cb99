# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that the agents' account gets the rights that any host of the play needs, not only the first one."""

from __future__ import annotations

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

import yaml

from tests.unit.roles.rendering import ROLES, rendered

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
