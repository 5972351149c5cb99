# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run has to say is printed with the settings of the examples, which hide tasks that change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from tests.unit.roles.rendering import ROLES, local_hosts, played

ROOT = ROLES.parent
CONFIGURATIONS = sorted((ROOT / "examples").glob("*/ansible.cfg"))
#: An unknown variable in the inventory is a warning of a task that changes nothing.
TASK = {"kubenode.proxy.role_variables": {"strict": True}}
PLAY = {
    "hosts": "all",
    "gather_facts": False,
    "tasks": [
        TASK,
        {**TASK, "loop": [1, 2]},
        {"kubenode.proxy.host_summary": {"sentence": "ends the isolation", "lines": ["n1 (1 of 2): refused"]}},
        {"kubenode.proxy.host_summary": {"lines": ["2 of 2 hosts reach a/b"]}},
    ],
}


def test_no_text_for_people_is_the_result_of_a_task() -> None:
    files = [*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/**/*.yml")]
    hidden = [path.name for path in files if "debug:" in path.read_text(encoding="utf-8")]
    assert files and hidden == [], "kubenode.proxy.host_summary prints also where display_ok_hosts hides results"


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.parent.name)
def test_texts_and_warnings_are_printed_once(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSIBLE_CONFIG", str(path))
    text = played(tmp_path, PLAY, local_hosts({"node": {"service_proxy_colour": "red"}}), errors=True)
    for line in ("node: ends the isolation", "n1 (1 of 2): refused", "2 of 2 hosts reach a/b"):
        assert text.splitlines().count(line) == 1, text
    assert " ".join(text.split()).count("[WARNING]: service_proxy_colour is not") == 1, text
