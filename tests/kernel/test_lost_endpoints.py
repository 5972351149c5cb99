# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rollback names the endpoints of a saved state, by kube-proxy or this project, that no longer exist."""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import HistoryError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import write_cache
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model as ipvs
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.form import StateRecord
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.lost_endpoints import (
    Sources,
    endpoints_of,
    judge_state,
    known_addresses,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.state import NodeState
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.store import History
from tests.conformance.wirelab.cases import load_case
from tests.kernel.agent_node import AgentNode, endpoint_ip, endpoint_slice, service
from tests.kernel.rollback_node import CASE, ROOT, Node
from tests.lab import recorded
from tests.lab.system import run
from tests.waiting import wait_for

#: A case whose kube-proxy has endpoints in nftables mode too.
AFFINITY = load_case(str(ROOT / "tests" / "conformance" / "cases" / "affinity"))


def slices() -> list[Any]:
    """Return the EndpointSlices of the cases."""
    found = [*CASE.snapshots()[0], *AFFINITY.snapshots()[0]]
    return [copy.deepcopy(item) for item in found if item["kind"] == "EndpointSlice"]


def addresses(found: list[Any]) -> set[str]:
    return {address for item in found for each in item["endpoints"] for address in each["addresses"]}


def cached(directory: Path, kept: list[Any]) -> Sources:
    """Return the files of a node whose agent knows these EndpointSlices; an older snapshot has all others."""
    sources = Sources(str(directory / "cache"), str(directory / "snapshot.json"), str(directory / "services.d"))
    Path(sources.snapshot).write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": slices()}))
    time.sleep(0.02)
    write_cache(sources.cache, [json.dumps(item).encode() for item in kept], {"EndpointSlice"})
    return sources


@pytest.mark.parametrize(("start", "mode"), [("iptables", "nftables"), ("nftables", "iptables")])
def test_endpoints_of_states_of_kube_proxy_and_of_our_own_modes(tmp_path, start, mode) -> None:
    node = Node(tmp_path)
    path = Path(AFFINITY.file(f"state-{start}.txt"))
    recorded.load(path, lambda command, text: run([*command], stdin=text))
    cluster = ClusterState.from_objects(AFFINITY.snapshots()[0])
    node.converge(mode, cluster=cluster)
    node.converge(start, cluster=cluster)
    history = History(node.history)
    all_of_them = addresses(slices())
    for number in (1, 2):
        found = endpoints_of(history.load(number).state)
        assert found and {item.rpartition(":")[0].strip("[]") for item in found} <= all_of_them
    both = [endpoints_of(history.load(number).state) for number in (1, 2)]
    assert both[0] == both[1] and len(both[0]) > 1

    kept = slices()
    record = history.load(1)
    assert judge_state(record, False, cached(tmp_path, kept)) == ()
    one = next(iter(sorted(endpoints_of(record.state)))).rpartition(":")[0].strip("[]")
    for item in kept:
        item["endpoints"] = [each for each in item["endpoints"] if one not in each["addresses"]]
    lost = {item for item in endpoints_of(record.state) if item.rpartition(":")[0].strip("[]") == one}
    text = f"{len(lost)} of its {len(endpoints_of(record.state))} endpoints"
    sources = cached(tmp_path, kept)
    if 2 * len(lost) <= len(endpoints_of(record.state)):
        (warning,) = judge_state(record, False, sources)
        assert re.match(r"state 1 is \d+ seconds old; ", warning) and text in warning

    sources = cached(tmp_path, [])
    with pytest.raises(HistoryError, match=r"do not exist any more: if that is what you want, set accept_loss"):
        node.roll_back(1, judge=lambda found: judge_state(found, False, sources))
    report = node.roll_back(1, judge=lambda found: judge_state(found, True, sources))
    assert any("endpoints do not exist any more" in warning for warning in report.warnings)


def record_of(state: NodeState) -> StateRecord:
    return StateRecord(3, "2026-01-01T00:00:00Z", "", "", "", "", state)


def test_real_servers_of_ipvs_count_and_a_state_of_nothing_is_refused(tmp_path) -> None:
    server = ipvs.VirtualServerKey("tcp", "10.96.0.1", 443)
    keys = [ipvs.RealServerKey(server, "10.0.0.1", 6443), ipvs.RealServerKey(server, "fd00::1", 6443)]
    state = NodeState(real_servers=dict.fromkeys(keys))  # type: ignore[arg-type]
    assert endpoints_of(state) == {"10.0.0.1:6443", "[fd00::1]:6443"}
    with pytest.raises(HistoryError, match=r"state 3 is .* days old: nothing was programmed in it"):
        judge_state(record_of(NodeState()), False, Sources("", "", str(tmp_path)))
    assert len(judge_state(record_of(NodeState()), True, Sources("", "", str(tmp_path)))) == 1
    assert judge_state(record_of(NodeState(policies_standalone=True)), False) == ()


def test_the_running_agent_knows_better_than_the_files(tmp_path) -> None:
    """Its file may be half a minute old, in which a drain moves every pod. A pod that terminates is as good as gone."""
    node = AgentNode(tmp_path, "nftables")
    node.store.put(service(1))
    node.store.put(endpoint_slice(1, count=2))
    try:
        node.start()
        cache, control = str(node.scratch / "cache.gz"), str(node.scratch / "agent.sock")
        sources = cached(tmp_path, [])._replace(cache=cache, control=control)
        # Earlier than the agent writes its file for the first time.
        wait_for(lambda: known_addresses(sources) == {endpoint_ip(1, 0), endpoint_ip(1, 1)}, 15, what="both endpoints")
        moved = endpoint_slice(1, count=3)
        for index, conditions in ((0, {"ready": False, "serving": True, "terminating": True}), (1, {"ready": True})):
            moved["endpoints"][index]["conditions"] = conditions
        node.store.put(moved)
        wait_for(lambda: known_addresses(sources) == {endpoint_ip(1, 1), endpoint_ip(1, 2)}, 10, what="the moved pod")
        assert node.stop() == 0
        # The agent has written the file, with the same answer.
        assert known_addresses(sources) == {endpoint_ip(1, 1), endpoint_ip(1, 2)}
    finally:
        node.close()
