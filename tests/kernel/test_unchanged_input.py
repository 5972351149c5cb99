# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run of service_proxy ends early only if its input is as it was in the last complete run."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.unchanged import decision, inputs
from tests.kernel.convergence_node import endpoint_slices, service
from tests.kernel.unchanged_node import OBJECTS, Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


#: Fields of a result that may differ between two complete runs, or say which of them was one.
VARIABLE = ("durations", "observed")


def test_the_result_is_that_of_a_complete_run(node: Node) -> None:
    node.write([*OBJECTS, service("broken", 3, "Nonsense")])
    early = node.settle()
    complete = node.run(always_observe=True)
    assert complete["observed"] and complete["warnings"] and complete["refused_count"] == 1
    assert set(early) == set(complete)
    for name in set(complete).difference(VARIABLE):
        assert early[name] == complete[name], name
    assert list(early["durations"]) == ["unchanged"]
    # A run that observes in any case leaves no record.
    assert not node.record.exists()


def test_an_engine_that_was_replaced(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    monkeypatch.setattr(decision, "engine_digest", lambda: "another")
    node.must_observe("another engine")


def test_other_input(node: Node) -> None:
    node.settle()
    for options in (
        {"max_unserved_percent": 49.0},
        {"configuration": {"nodePortAddresses": ["primary"], "clusterCIDR": "10.244.0.0/16"}},
        {"node_name": "node-1", "outside_host": True},
        {"mode": "auto"},
        {"always_observe": True},
    ):
        node.must_observe(str(options), **options)
    node.settle()
    node.write([*OBJECTS, service("new", 9), *endpoint_slices("new", 9, 1)])
    assert node.must_observe("another snapshot")["changed"]
    node.settle()
    manifest = [service("static", 12), *endpoint_slices("static", 12, 1)]
    (node.static / "own.json").write_text(json.dumps({"kind": "List", "items": manifest}))
    time.sleep(0.06)
    assert node.must_observe("a static Service")["changed"]
    node.settle()
    (node.static / "own.json").unlink()
    time.sleep(0.06)
    assert node.must_observe("a static Service that was removed")["changed"]


def test_the_configuration_in_a_file(node: Node) -> None:
    path = node.snapshot.with_name("config.json")
    text = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    path.write_text(json.dumps(text))
    time.sleep(0.06)
    options = {"config": str(path), "configuration": None}
    node.settle(**options)
    path.write_text(json.dumps({**text, "nodePortAddresses": ["primary"]}))
    node.must_observe("another configuration", **options)


def test_the_snapshot_as_a_fifo_is_read_once(node: Node) -> None:
    node.settle()
    content = node.snapshot.read_bytes()
    node.snapshot.unlink()
    os.mkfifo(node.snapshot)
    for _run in range(2):
        writer = subprocess.Popen(["sh", "-c", f"cat > {node.snapshot}"], stdin=subprocess.PIPE)
        assert writer.stdin is not None
        writer.stdin.write(content)
        writer.stdin.close()
        assert node.run()["observed"]
        assert writer.wait() == 0


def test_modes_without_a_generation(node: Node) -> None:
    node.settle()
    for _run in range(3):
        node.must_observe("iptables mode", mode="iptables")
    assert not node.record.exists()


def test_network_policies_are_observed(node: Node) -> None:
    policies = {**node.options["node_configuration"], "networkPolicy": {"enabled": True}}
    for _run in range(3):
        node.must_observe("network policies", node_configuration=policies)


def test_static_services_with_health_checks(node: Node) -> None:
    """A one-shot run checks no endpoint, so its result does not depend on the checks."""
    checked = service("checked", 12)
    checked["metadata"]["annotations"] = {"service-proxy.kubenode.io/health-check": "tcp"}
    (node.static / "own.json").write_text(json.dumps([checked, *endpoint_slices("checked", 12, 1)]))
    time.sleep(0.06)
    node.settle()
    complete = node.run(always_observe=True)
    assert not complete["changed"]


def test_digests_of_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(inputs.Unusable):
        inputs.read_files([str(tmp_path / "fifo")], "")
    with pytest.raises(OSError, match="not a regular file"):
        inputs.read_files([], str(tmp_path))
