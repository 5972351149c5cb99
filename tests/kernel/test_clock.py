# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's clock is set a day forward or back while the agent runs: it serves, and reports true durations."""

from __future__ import annotations

import calendar
import subprocess
import time
from functools import partial

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.timestamps import TIMESTAMP, timestamp
from ansible_collections.kubenode.proxy.plugins.module_utils.command.top_command import rated
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import ask_agent
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.agent_state import state_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.pending import Pending
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_slice, service
from tests.lab.clock import guest_clock_set
from tests.waiting import wait_for

pytestmark = pytest.mark.uml

DAY = 86_400.0
#: More than the node has run, and less than the clock jumps.
SHORT = 600.0


@pytest.fixture
def node(tmp_path):
    found = AgentNode(tmp_path, "ipvs", "legacy")
    for item in (service(1), endpoint_slice(1)):
        found.store.put(item)
    found.start()
    yield found
    found.close()


def traffic(node):
    """Return the agent's totals, read now."""
    return ask_agent(str(node.scratch / "agent.sock"), {"command": "traffic"})


def serves(number):
    done = subprocess.run(["ipvsadm", "-Ln", "-t", f"{cluster_ip(number)}:80"], capture_output=True, check=False)
    return done.returncode == 0


def durations(node):
    """Return all durations that the agent reports."""
    status = node.status()
    pages = dict(line.split(": ", 1) for line in node.fetch("/statusz").splitlines() if line.startswith("Up: "))
    hours = float(pages["Up"].split()[0])
    return {
        "uptime": status["uptimeSeconds"],
        "last sync": state_of(status)["last_sync_age"],
        "copy on disk": node.metric("kubenode_proxy_cluster_cache_age_seconds"),
        "statusz": hours * 3600.0,
    }


def test_a_pending_change_is_reverted_at_the_time_that_it_names():
    waiting = Pending(1, time.monotonic(), SHORT, timestamp(time.time() + SHORT), "", "")
    for jump in (DAY, -DAY):
        with guest_clock_set(jump):
            named = str(waiting).rpartition(" until ")[2]
            left = calendar.timegm(time.strptime(named, TIMESTAMP)) - time.time()
            assert SHORT - 60.0 < left <= waiting.remaining <= SHORT


def test_the_clock_is_set_while_the_agent_runs(node):
    wait_for((node.scratch / "cache.gz").exists, what="the copy on disk")
    before = traffic(node)
    for number, jump in enumerate((DAY, -DAY), start=2):
        with guest_clock_set(jump):
            found = durations(node)
            assert all(0.0 <= seconds < SHORT for seconds in found.values()), found
            # Changes, repairs and timers do not wait for the clock.
            for item in (service(number), endpoint_slice(number)):
                node.store.put(item)
            wait_for(partial(serves, number), what="the new Service")
            subprocess.run(["ipvsadm", "-C"], check=True)
            wait_for(lambda: serves(1) and serves(2), what="the repair")
            assert node.status()["healthy"]
            after = traffic(node)
            assert 0.0 < rated(after, before)["seconds"] < SHORT
            before = after
