# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An agent beside a program that never releases a lock: it says so, keeps trying, and can be stopped."""

from __future__ import annotations

import time

import pytest

from tests.kernel.agent_node import AgentNode, endpoint_ip
from tests.lab.background import lock_holder
from tests.waiting import wait_for

#: TimeoutStopSec of the agent's unit.
STOP_SECONDS = 30.0


@pytest.mark.full
def test_an_agent_that_never_gets_the_xtables_lock_says_so_and_stops_in_time(tmp_path):
    lock = tmp_path / "xtables.lock"
    node = AgentNode(tmp_path, "iptables", "legacy")
    node.environment["XTABLES_LOCKFILE"] = str(lock)
    node.put_service(1)
    try:
        node.start()
        with lock_holder(lock) as holder:
            node.put_service(2)
            held = f"{lock} is held by process {holder.pid} (sleep)"
            wait_for(lambda: held in node.log, 60.0)
            # What was programmed still serves, and the agent answers.
            assert endpoint_ip(1, 0) in node.kernel_text("legacy")
            wait_for(lambda: held in str(node.status().get("lastError")), 60.0)
            began = time.monotonic()
            assert node.stop() == 0
            seconds = time.monotonic() - began
            assert seconds < STOP_SECONDS / 2, seconds
        assert "Traceback" not in node.log
        node.start()
        wait_for(lambda: endpoint_ip(2, 0) in node.kernel_text("legacy"), 60.0)
    finally:
        node.close()


@pytest.mark.full
def test_an_agent_beside_a_held_lock_of_its_own_ends_and_names_the_holder(tmp_path):
    node = AgentNode(tmp_path, "nftables")
    (tmp_path / "run").mkdir()
    try:
        with lock_holder(tmp_path / "run" / "lock") as holder:
            node.start(wait=False)
            assert node.process is not None
            assert node.process.wait(60) == 1
            held = f"held by process {holder.pid} (sleep), and did not end within 30 seconds; wait longer, or end it"
            assert [held in line for line in node.log.splitlines()] == [False, True]
        node.start()
    finally:
        node.close()
