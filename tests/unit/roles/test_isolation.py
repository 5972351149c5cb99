# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that the role agent says how many pods are not isolated any more when it switches network policies off."""

from __future__ import annotations

import contextlib
import io

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.control import ControlServer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.state_directory import control_socket
from tests.unit.roles.rendering import ROLES, local_hosts, play_on, played

ANSWER = {"networkPolicy": {"pods": 3, "unselectedPods": ["shop/open"]}}


def test_the_pods_that_the_agent_isolates_are_counted(tmp_path):
    tasks = yaml.safe_load((ROLES / "agent" / "tasks" / "unisolated.yml").read_text(encoding="utf-8"))
    play = play_on("all", ["agent"], tasks)
    play["module_defaults"] = {"group/kubenode.proxy.state": {"state_directory": str(tmp_path / "run")}}

    def shown(*options: str) -> str:
        return played(tmp_path, play, local_hosts({"node": {}}), *options)

    assert "isolation" not in shown()
    server = ControlServer(control_socket(str(tmp_path / "run")), lambda request: request.reply(ANSWER))
    Supervisor(Log(io.StringIO())).start("control", server.run)
    with contextlib.closing(server):
        assert "node: ends the isolation of 2 pods: network policies are not enabled" in shown()
        assert "node: would end the isolation of 2 pods" in shown("--check")
