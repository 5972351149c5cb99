# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent in a control group with a memory limit: it refuses a cluster that is too large, and is not killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from tests.benchmarks.hostile_services import MAGLEV, changed, made, several
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_slice, service
from tests.lab import manifests
from tests.lab.manifests import Object
from tests.lab.memory_group import MemoryGroup
from tests.waiting import wait_for

MIB = 1 << 20
#: Sets of Services that would make a million elements of each kind.
HOSTILE = {
    "weights": several(2, 50, 40, weights=(255, 1)),
    "slots": [*several(60, 1, 0, annotations=MAGLEV), made(100, 16, 15, annotations=MAGLEV)],
    "rules of affinity": several(6, 20, 1, 30, weights=(97, 89), sessionAffinity="ClientIP"),
}
FEW, MANY = 100, 3000
PATIENCE = 180


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with MemoryGroup.made() as made:
        if made is None:
            pytest.skip("this machine permits no control group with a memory limit")
        yield made


@pytest.fixture
def node(group: MemoryGroup, tmp_path: Path) -> Iterator[AgentNode]:
    group.limit(72 * MIB)
    made = AgentNode(tmp_path, "nftables")
    made.before_exec = group.enter
    try:
        put(made, 1, FEW)
        yield made
    finally:
        made.close()


def put(node: AgentNode, first: int, last: int) -> None:
    """Write Services with five endpoints each."""
    for number in range(first, last + 1):
        node.put_service(number, 5)


def memory(node: AgentNode) -> dict:
    """Return what the agent's status says about its memory."""
    return dict(node.status().get("memory", {}))


def posted(node: AgentNode) -> set:
    """Return the reasons of the Events that the agent has posted."""
    assert node.api is not None
    return {event["reason"] for event in node.api.posted}


def test_a_cluster_that_grows_too_large_is_not_followed_and_what_is_served_stays(
    node: AgentNode, group: MemoryGroup
) -> None:
    node.start()
    limit = memory(node)
    assert 71 * MIB <= limit["limit"] <= 72 * MIB and 0 < limit["cluster"] < limit["capacity"]
    put(node, FEW + 1, MANY)
    wait_for(lambda: memory(node)["heldBack"] > 0, PATIENCE)
    wait_for(lambda: {"MemoryLow", "MemoryLimit"} <= posted(node), PATIENCE, 0.2)
    assert memory(node)["cluster"] <= limit["capacity"]
    # Others are served as before: an endpoint that disappears needs no room.
    node.store.put(endpoint_slice(1, 4))
    wait_for(lambda: sum(item["endpoints"] for item in node.status()["families"].values()) % 5 == 4, PATIENCE)
    assert cluster_ip(FEW) in node.kernel_text("")
    assert node.metric("kubenode_proxy_objects_held_back") > 0
    assert node.stop() == 0 and group.kills() == 0
    # A list of the next agent, the one that arrives second, is refused as a whole; nothing is removed from the kernel.
    served = node.kernel_text("")
    node.start(wait=False)
    wait_for(lambda: memory(node).get("refusedLists"), PATIENCE, 0.1)
    wait_for(lambda: node.log.count("programmed rules are kept but not updated") >= 1, PATIENCE)
    assert node.kernel_text("") == served
    assert "MemoryLimit" in posted(node) and "too large to be listed" in shown(node)
    assert node.stop() == 0 and group.kills() == 0
    # With a higher limit everything is served.
    group.limit(512 * MIB)
    node.start()
    assert node.status()["families"]["IPv4"]["services"] == MANY and not memory(node)["refusedLists"]


def test_a_small_object_that_makes_a_million_entries_does_not_exhaust_the_limit(
    node: AgentNode, group: MemoryGroup
) -> None:
    group.limit(200 * MIB)
    node.start()
    ports = [manifests.port(1 + number, name=f"p{number}") for number in range(1000)]
    addresses = [f"198.18.{number >> 8}.{number & 255}" for number in range(1, 1001)]
    node.store.put(manifests.service("large", "10.97.0.1", ports, externalIPs=addresses))
    wait_for(lambda: any("Service default/large: spec.externalIPs" in line for line in node.status()["refused"]))
    node.store.put(service(FEW + 1))
    wait_for(lambda: cluster_ip(FEW + 1) in node.kernel_text(""), PATIENCE)
    wait_for(lambda: "198.18.0.48" in node.kernel_text(""), PATIENCE)
    assert "198.18.0.49" not in node.kernel_text("")
    assert node.stop() == 0 and group.kills() == 0


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=list(HOSTILE))
def test_what_annotations_multiply_does_not_exhaust_the_limit_and_others_do_not_wait_for_it(
    node: AgentNode, group: MemoryGroup, hostile: list[list[Object]]
) -> None:
    """``python -m tests.benchmarks.hostile_services`` measures more and larger sets under the default limit."""
    group.limit(110 * MIB)
    node.start()
    for raw in (item for objects in hostile for item in objects):
        node.store.put(raw)
    node.store.put(service(FEW + 1))
    node.store.put(endpoint_slice(FEW + 1))
    wait_for(lambda: is_programmed(FEW + 1), 20.0, 0.05)
    wait_for(
        lambda: node.status()["refused"] or node.metric("kubenode_proxy_service_annotations_ignored"), PATIENCE, 0.5
    )
    for raw in changed(hostile):
        node.store.put(raw)
    node.store.put(service(FEW + 2))
    node.store.put(endpoint_slice(FEW + 2))
    wait_for(lambda: is_programmed(FEW + 2), 20.0, 0.05)
    before = frontends()
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    node.store.put(service(FEW + 3))
    node.store.put(endpoint_slice(FEW + 3))
    wait_for(lambda: is_programmed(FEW + 3), 20.0, 0.05)
    wait_for(lambda: frontends() > before, 60.0, 0.2)
    assert "tenant" in node.log and node.stop() == 0 and group.kills() == 0


def is_programmed(number: int) -> bool:
    """Return whether the cluster IP of a numbered Service has a verdict."""
    element = f"{{ {cluster_ip(number)} . tcp . 80 }}"
    command = ["nft", "get", "element", "ip", "kube-proxy", "service-frontends", element]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def frontends() -> int:
    """Return the number of IPv4 frontends that have a verdict."""
    command = ["nft", "list", "map", "ip", "kube-proxy", "service-frontends"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.count(" : goto ")


def shown(node: AgentNode) -> str:
    """Return what ``kubenode-proxy status`` shows."""
    return node.run("status", "--control", str(node.scratch / "agent.sock")).stdout


@pytest.mark.full
def test_an_agent_that_is_killed_has_said_why_in_its_first_sync(node: AgentNode, group: MemoryGroup) -> None:
    """Another process of the group has memory that the agent cannot account, so that its first sync has too little.

    The warning is written in the middle of the sync. Without that, no line would name the reason.
    """
    put(node, FEW + 1, 7000)
    group.limit(120 * MIB)

    def enter_as_the_one_to_kill() -> None:
        group.enter()
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")

    node.before_exec = enter_as_the_one_to_kill
    with occupied(group, 46 * MIB):
        node.start(wait=False)
        assert node.process is not None
        assert node.process.wait(60) == -signal.SIGKILL, node.log
        assert group.kills() == 1
    node.process = None
    assert node.log.count("the agent is close to its memory limit: raise agent_memory_max") == 1, node.log


@contextlib.contextmanager
def occupied(group: MemoryGroup, size: int) -> Iterator[None]:
    """Hold memory of the group in another process."""
    script = f"import sys; held = b'x' * {size}; print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=group.enter) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.kill()
