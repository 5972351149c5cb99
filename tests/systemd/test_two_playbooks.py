# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two playbooks that change one node at the same time: it ends in the state of one, which the other one says.

The first playbook is stopped in the middle by a signal, until the second one has ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any, Mapping, NamedTuple

import pytest

from tests.waiting import wait_for

from .agent import UNIT, dataplane, wait_until_converged
from .cluster import service
from .node import Node, Recap, begin_playbook, recap, run_playbook

REFUSED = re.compile(r'"msg": "(/run/kubenode-run: another run of Ansible changes this node: [^"]*)"')
FILES = "/etc/kubenode-proxy", "/etc/systemd/system", "/etc/sysctl.d", "/etc/modules-load.d", "/var/lib/kubenode-proxy"
#: The agent writes it from time to time.
COPY = "/var/lib/kubenode-proxy/agent/cluster.json.gz"


class Run(NamedTuple):
    """A playbook with variables, and a shell command that succeeds when it is in the middle."""

    playbook: str
    variables: Mapping[str, Any] = {}
    middle: str = ""


AGENT = Run(
    "agent",
    {"agent_configuration": {"mode": "iptables"}, "agent_watchdog_seconds": 41},
    "grep -q 'mode: iptables' /etc/kubenode-proxy/config.yaml",
)
OTHER_AGENT = Run("agent", {"agent_configuration": {"mode": "nftables"}, "agent_watchdog_seconds": 42})
CONVERGE = Run("converge", {"service_proxy_mode": "iptables"}, "test -e /var/lib/kubenode-proxy/snapshot.json.gz")
OTHER_CONVERGE = Run("converge", {"service_proxy_mode": "nftables"})
CLEANUP = Run("cleanup", {}, "! test -e /etc/systemd/system/kubenode-proxy.service")


@pytest.fixture(scope="module")
def node(start):
    return start("two")


@pytest.fixture
def common(cluster) -> dict[str, Any]:
    kubeconfig = str(cluster.kubeconfig)
    return {
        "agent_kubeconfig": kubeconfig,
        "service_proxy_kubeconfig": kubeconfig,
        "kernel_install_packages": False,
        "kernel_unchangeable": "warn",
    }


def whole(node: Node, run: Run, common: Mapping[str, Any], *options: str, failing: bool = False) -> Recap:
    """Run a playbook to its end."""
    variables = {**common, **run.variables}
    return run_playbook([node], f"kubenode.proxy.{run.playbook}", variables, {}, *options, failing=failing)[node.name]


def beside(node: Node, first: Run, second: Run, common: Mapping[str, Any]) -> None:
    """Stop the first run in the middle, have the second one refused, and let the first one end as if it were alone."""
    begun = begin_playbook([node], f"kubenode.proxy.{first.playbook}", {**common, **first.variables}, {})
    wait_for(lambda: not node.run("sh", "-c", first.middle, check=False).returncode, 300, what=first.middle)
    os.killpg(begun.pid, signal.SIGSTOP)
    try:
        before = files(node)
        refused = whole(node, second, common, failing=True)
        assert len(REFUSED.findall(refused.output)) == 1 and refused.changed == 0, refused.output
        assert files(node) == before
    finally:
        os.killpg(begun.pid, signal.SIGCONT)
    output, errors = begun.communicate()
    assert begun.returncode == 0, output + errors
    assert recap(node.name, output).failed == 0
    assert whole(node, first, common).changed_tasks == []


def files(node: Node) -> str:
    """Return the digests of all files of the roles."""
    find = f"find {' '.join(FILES)} -type f -not -path {COPY} -exec sha256sum {{}} +"
    return node.output("sh", "-c", f"{find} 2>/dev/null | sort")


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CONVERGE, OTHER_CONVERGE),
        (CONVERGE, CLEANUP),
        (AGENT, OTHER_AGENT),
        (AGENT, CLEANUP),
        (CLEANUP, AGENT),
        (CLEANUP, OTHER_CONVERGE),
    ],
    ids=lambda run: run.playbook,
)
def test_one_of_two_playbooks_is_refused(node, common, first, second):
    if first is CLEANUP:
        whole(node, AGENT, common)
    else:
        whole(node, CLEANUP, common)
    beside(node, first, second, common)


@pytest.mark.full
def test_a_convergence_is_refused_by_a_running_agent_before_it_changes_anything(node, common):
    static = {"agent_static": [service("local", "198.18.0.7")]}
    whole(node, AGENT._replace(variables={**AGENT.variables, **static}), common)
    wait_until_converged(node)
    before = dataplane(node), files(node)
    refused = whole(node, OTHER_CONVERGE, common, failing=True)
    (said,) = re.findall(r"FAILED! => (.*)", refused.output)
    assert "held by process" in json.loads(said)["msg"] and refused.changed == 0
    assert (dataplane(node), files(node)) == before
    assert node.unit(UNIT, "ActiveState")["ActiveState"] == "active"
