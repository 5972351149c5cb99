# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host that serves what the cluster is now is not verified if its agent would not follow the next change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.agent_state import state_of
from tests.unit.roles.rendering import ROLES, local_hosts, play_once

FOUND = {
    "drift": False,
    "summary": "no difference",
    "other_proxies": [],
    "schedule_failure": "",
    "mode": "nftables",
    "counts": {"services": 1, "without_endpoints": 0, "endpoints": 1, "service_ports": 1},
}
UNAWARE = "n1 does not follow the cluster: "
LOST = "the agent has lost the API server: API server https://192.0.2.1:6443: list services: not allowed (403)"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, ""),
    "stopped": ({"running": False, "error": "no answer"}, f"{UNAWARE}the agent does not answer: no answer"),
    "serves": ({"running": True, "mode": "nftables", "obstacle": ""}, ""),
    "does not follow": ({"running": True, "mode": "nftables", "obstacle": LOST}, f"{UNAWARE}{LOST}"),
}


def test_verify_needs_the_agent_that_is_installed() -> None:
    """Where migrate adopts a host, an earlier agent that was stopped is none."""
    tasks = {
        name: (ROLES / "service_proxy" / "tasks" / f"{name}.yml").read_text() for name in ("verify", "compare_applied")
    }
    assert [name for name, text in tasks.items() if "__service_proxy_needs_agent: true" in text] == ["verify"]


@pytest.mark.parametrize("case", CASES)
def test_an_agent_that_does_not_know_the_cluster_fails_the_comparison(case: str, tmp_path: Path) -> None:
    state, said = CASES[case]
    role = {"name": "kubenode.proxy.service_proxy", "tasks_from": "judge"}
    variables = {"__service_proxy_found": {**FOUND, "agent": state}, "service_proxy_node_name": "n1"}
    variables["__service_proxy_needs_agent"] = True
    task = {"ansible.builtin.include_role": role, "vars": variables}
    done = play_once(tmp_path, {"hosts": "all", "gather_facts": False, "tasks": [task]}, local_hosts({"n1": {}}))
    assert done.returncode == (2 if said else 0), done.stdout + done.stderr
    assert not said or f'"msg": "{said}"' in done.stdout, done.stdout


REFUSED = "API server https://192.0.2.1:6443: list services: not allowed (403): no"
WATCHING = {"services": "watching", "nodes": "watching"}
REJECTED = {"services": REFUSED, "nodes": "watching"}
CONNECTING = {"services": REFUSED, "nodes": "connecting"}


@pytest.mark.parametrize(
    ("mode", "watches", "lost", "obstacle"),
    [
        ("nftables", WATCHING, (0.0, 0.0), ""),
        ("nftables", {}, (), ""),
        ("nftables", REJECTED, (40.0, 0.0), f"the agent has lost the API server: {REFUSED}"),
        ("nftables", CONNECTING, (2.0, 2.0), ""),
        ("nftables", dict.fromkeys(WATCHING, "connecting"), (31.0, 31.0), "the agent has lost the API server"),
        ("", CONNECTING, (2.0, 2.0), f"the agent has not programmed anything yet: {REFUSED}"),
        ("", WATCHING, (0.0, 0.0), "the agent has not programmed anything yet"),
    ],
)
def test_an_agent_follows_the_cluster_only_if_it_watches_everything(
    mode: str, watches: dict[str, str], lost: tuple[float, ...], obstacle: str
) -> None:
    answer: Any = {"mode": mode, "apiServer": watches, "apiServerLostSeconds": dict(zip(watches, lost))}
    assert state_of(answer)["obstacle"] == obstacle
