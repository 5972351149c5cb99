# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test what variables of the role service_proxy mean for the agent and the timer: fallback and ignored findings."""

from __future__ import annotations

import shlex

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from ansible_collections.kubenode.proxy.plugins.module_utils.command.cli import make_parser
from tests.unit.roles.rendering import ROLES, rendered

CASES = [
    {},
    {"service_proxy_fallback": ""},
    {"service_proxy_fallback": "iptables", "service_proxy_ignore_findings": ["modules", "firewalld"]},
]
EXPECTED = [("", []), ("", []), ("iptables", ["modules", "firewalld"])]


def parsed(command: str):
    """Return the options of the node command in a line of a unit."""
    words = shlex.split(command)
    (archive,) = (number for number, word in enumerate(words) if word.endswith(".pyz"))
    return make_parser().parse_args(words[archive + 1 :])


def started(unit: str) -> str:
    """Return the command line that a unit starts."""
    return unit.split("\nExecStart=", 1)[1].replace("\\\n", " ").split("\n", 1)[0]


@pytest.mark.parametrize(("role", "unit"), [("agent", "kubenode-proxy"), ("schedule", "kubenode-proxy-schedule")])
def test_the_unit_has_the_fallback_and_the_findings_to_ignore(tmp_path, role, unit):
    template = ROLES / role / "templates" / f"{unit}.service.j2"
    expression = f"lookup('ansible.builtin.template', '{template}')"
    # Where the template looks for the other one that it contains.
    (tmp_path / "templates").symlink_to(ROLES / "agent" / "templates")
    units = rendered(tmp_path, [role, "agent"], expression, CASES)
    options = [parsed(started(text)) for text in units]
    assert [(option.fallback, option.ignore) for option in options] == EXPECTED
    assert all("\nTimeoutStartSec=" in text and "\n\n\n" not in text for text in units)
