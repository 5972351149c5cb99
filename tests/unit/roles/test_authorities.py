# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that the role agent names files that checks of endpoints need and that a host does not have."""

from __future__ import annotations

import json

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")
import yaml

from tests.unit.roles.rendering import ROLES, local_hosts, play_on, played


def test_a_missing_file_is_named(tmp_path):
    tasks = yaml.safe_load((ROLES / "agent" / "tasks" / "authorities.yml").read_text(encoding="utf-8"))
    own = tmp_path / "own.crt"
    static = {"kind": "Service", "metadata": {"annotations": {"kubenode.proxy/check-ca": str(own)}}}
    variables = {
        "agent_static": [static, {"kind": "EndpointSlice", "metadata": {"name": "web"}}],
        "service_proxy_api_servers": ["192.0.2.1"],
        "service_proxy_api_check": {"ca": "/nowhere/ca.crt"},
    }

    def shown() -> str:
        play = play_on("all", ["agent"], tasks)
        return played(tmp_path, play, local_hosts({"node": {}}), "-e", json.dumps(variables))

    assert f"node: {own}, /nowhere/ca.crt: does not exist, so the checks" in shown()
    own.touch()
    assert "node: /nowhere/ca.crt: does not exist, so the checks" in shown()
