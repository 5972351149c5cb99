# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of Services that hosts reach is shown whatever one of them answers."""

from __future__ import annotations

from pathlib import Path

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from tests.unit.roles.rendering import ROLES, local_hosts, played

TEMPLATE = str(ROLES / "service_proxy" / "templates" / "traffic.j2")
HOSTILE = (7, "text", None, [1, None], [{"service": ["x"]}], [{"service": "a/b"}], [{"service": "a/b", "reached": [1]}])


def test_an_answer_of_another_form_hides_no_other(tmp_path: Path) -> None:
    def host(traffic: object) -> dict[str, object]:
        return {"__service_proxy_found": {"drift": False, "traffic": traffic, "traffic_summary": ""}}

    hosts = {f"h{number}": host(traffic) for number, traffic in enumerate(HOSTILE)}
    hosts["good"] = host([{"service": "a/b", "reached": True}, {"service": "a/c", "reached": False}])
    show = {"msg": "{{ lookup('ansible.builtin.template', '" + TEMPLATE + "') | split('\n') }}"}
    tasks = [{"ansible.builtin.debug": show, "run_once": True}]
    text = played(tmp_path, {"hosts": "all", "gather_facts": False, "tasks": tasks}, local_hosts(hosts))
    lines = {line.strip(' ",') for line in text.splitlines()}
    assert "8 of 8 hosts reach a/b, a/c" in lines and "good  reached      NOT REACHED" in lines, text
