# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No documented play prepares the kernel for the default mode of the role kernel instead of the one that follows."""

from __future__ import annotations

import re
from typing import Any, Iterator

import pytest
import yaml

from tests.conftest import ROOT

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("roles/*/README.md")])
SERVING = {"kubenode.proxy.agent", "kubenode.proxy.schedule", "kubenode.proxy.service_proxy"}


def plays(text: str) -> Iterator[dict[str, Any]]:
    """Yield the plays in indented blocks of a page."""
    for block in re.findall(r"(?:^(?:    .*)?\n)+", text, re.MULTILINE):
        if "- hosts:" in block:
            yield from yaml.safe_load(block)


def unprepared(play: dict[str, Any]) -> bool:
    """Return whether the role kernel runs for iptables in a play of roles that choose the mode themselves."""
    roles = {role["role"]: role.get("vars", {}) for role in play.get("roles", [])}
    given = {**play.get("vars", {}), **roles.get("kubenode.proxy.kernel", {})}
    return "kubenode.proxy.kernel" in roles and not SERVING.isdisjoint(roles) and "kernel_mode" not in given


def test_a_play_without_the_mode_is_noticed():
    block = "text\n\n    - hosts: workers\n      roles:\n        - role: kubenode.proxy.kernel\n"
    (play,) = plays(f"{block}        - role: kubenode.proxy.agent\n\nmore\n")
    assert unprepared(play)
    assert not unprepared({**play, "vars": {"kernel_mode": "nftables"}})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_plays_name_the_mode(page):
    assert [play for play in plays(page.read_text(encoding="utf-8")) if unprepared(play)] == []
