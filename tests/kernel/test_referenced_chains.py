# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rule of another program that jumps to the chain of a Service does not stop syncs when the Service is deleted."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip
from tests.waiting import wait_for


@pytest.fixture(params=["nft", "legacy"])
def node(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentNode]:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    agent_node = AgentNode(tmp_path, "iptables", request.param)
    agent_node.put_service(1)
    agent_node.put_service(2)
    yield agent_node
    agent_node.close()


def delete(node: AgentNode, number: int) -> None:
    node.store.delete("Service", "default", f"svc-{number}")
    node.store.delete("EndpointSlice", "default", f"svc-{number}-a")


def nat(node: AgentNode, *words: str) -> str:
    command = ["iptables", "-w", "5", "-t", "nat", *words]
    return subprocess.run(command, env=node.environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def refer_to(node: AgentNode, number: int) -> str:
    """Add a rule that jumps to the chain of a Service, and return the name of the chain."""
    rule = next(line for line in nat(node, "-S", "KUBE-SERVICES").splitlines() if f"{cluster_ip(number)}/32" in line)
    nat(node, "-A", "OTHERS", "-j", rule.split()[-1])
    return rule.split()[-1]


def test_the_agent_and_convergences_keep_a_referenced_chain_empty(node: AgentNode) -> None:
    node.start()
    nat(node, "-N", "OTHERS")
    chain = refer_to(node, 1)
    delete(node, 1)
    node.put_service(3)
    wait_for(lambda: cluster_ip(3) in nat(node, "-S") and cluster_ip(1) not in nat(node, "-S"), 30)
    assert nat(node, "-S", chain) == f"-N {chain}\n"
    wait_for(lambda: f'chain="nat {chain}"' in node.log, 30)
    assert node.log.count("sync failed") == 0 and node.status()["lastError"] == ""
    node.put_service(1)
    wait_for(lambda: cluster_ip(1) in nat(node, "-S"), 30)
    node.stop()

    other = refer_to(node, 2)
    delete(node, 1)
    delete(node, 2)
    for changed in (True, False):
        done = node.converge()
        assert done.returncode == 0, done.stderr
        assert ("no differences" not in done.stdout) == changed, done.stdout
    assert cluster_ip(3) in nat(node, "-S") and cluster_ip(2) not in nat(node, "-S")
    assert nat(node, "-S", chain) + nat(node, "-S", other) == f"-N {chain}\n-N {other}\n"
    nat(node, "-F", "OTHERS")
    assert node.converge().returncode == 0
    assert chain not in nat(node, "-S") and other not in nat(node, "-S")
