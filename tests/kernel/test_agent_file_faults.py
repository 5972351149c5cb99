# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A disk that is read-only, full or broken under the kept cluster state of a running agent: it follows the cluster."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip
from tests.lab.faulty_disk import CALLS, REASONS, mount_script, tracer
from tests.waiting import wait_for

#: The agent saves the cluster state after half a minute.
SOON = """
import sys
from module_utils.agent import agent
agent.CACHE_SECONDS = 0.3
from module_utils.command.cli import main
sys.exit(main())
"""
#: Attempts to save the state during a fault.
ATTEMPTS = 3


class SavingNode(AgentNode):
    """An agent that saves the cluster state soon."""

    def _command(self, *words: str) -> List[str]:
        return [*self.prefix, sys.executable, "-c", SOON, *words]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[AgentNode]:
    """Provide an agent with file systems of its own and one Service."""
    agent_node = SavingNode(tmp_path, "nftables")
    agent_node.prefix = ["unshare", "--mount", "--propagation", "private"]
    agent_node.put_service(1)
    agent_node.start()
    yield agent_node
    agent_node.close()


def serve(node: AgentNode, number: int) -> None:
    """Add a Service and wait until the kernel has it."""
    node.put_service(number)
    wait_for(lambda: cluster_ip(number) in node.kernel_text(""), 60.0)


def written(node: AgentNode) -> Dict[str, Tuple[int, int]]:
    """Return inode and time of change of the files in the agent's directories."""
    found = [*(node.scratch / "run").iterdir(), *node.scratch.glob("*cache.gz*"), *node.scratch.glob(".*")]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found if path.is_file()}


@contextlib.contextmanager
def fault(node: AgentNode, kind: str) -> Iterator[None]:
    """Make the agent's directory faulty for a time; mounts end with the agent."""
    assert node.process is not None
    process = node.process.pid
    if kind in CALLS:
        command = tracer(kind, f"{node.scratch}.calls", ["-p", str(process)], ":error=EIO")
        with subprocess.Popen(command) as strace:
            wait_for(lambda: f"TracerPid:\t{strace.pid}\n" in Path(f"/proc/{process}/status").read_text(), 30.0)
            try:
                yield
            finally:
                strace.terminate()
        return

    def inside(script: str) -> None:
        subprocess.run(["nsenter", "-m", "-t", str(process), "sh", "-ec", script], check=True)

    inside(mount_script(kind, node.scratch, f"{node.scratch}.kept"))
    try:
        yield
    finally:
        if node.process is not None:
            inside(f"umount -l {shlex.quote(str(node.scratch))}")


@pytest.mark.parametrize(
    "kind", [kind if kind == "rename" else pytest.param(kind, marks=pytest.mark.full) for kind in REASONS]
)
def test_services_are_programmed_and_the_state_is_saved_once_the_fault_ends(node: AgentNode, kind: str) -> None:
    wait_for(lambda: "cache.gz" in written(node), 60.0)
    with fault(node, kind):
        for number in range(2, 5):
            serve(node, number)
        wait_for(lambda: REASONS[kind] in node.log, 60.0)
        if kind in CALLS:
            calls = Path(f"{node.scratch}.calls")
            wait_for(lambda: calls.read_text().count("(INJECTED)") >= ATTEMPTS, 60.0)
        kept = written(node)["cache.gz"]
    wait_for(lambda: "the cluster state is saved again" in node.log, 60.0)
    assert written(node)["cache.gz"] != kept
    assert node.log.count(REASONS[kind]) == 1, node.log
    assert "Traceback" not in node.log
    assert [name for name in written(node) if name.startswith(".")] == []
    assert node.stop() == 0


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.full) for kind in REASONS])
def test_an_agent_killed_during_the_fault_starts_from_the_last_state_that_was_saved(node: AgentNode, kind: str) -> None:
    wait_for(lambda: "cache.gz" in written(node), 60.0)
    with fault(node, kind):
        serve(node, 2)
        wait_for(lambda: REASONS[kind] in node.log, 60.0)
        node.stop(signal.SIGKILL)
    node.stop_api()
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    node.start(wait=False)
    wait_for(lambda: cluster_ip(1) in node.kernel_text(""), 60.0)
    assert "Traceback" not in node.log
