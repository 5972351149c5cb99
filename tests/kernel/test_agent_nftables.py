# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent in nftables mode: whatever is deleted from its table by hand is back within two seconds."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_ip, endpoint_slice, service, wait_for

TABLE = ("ip", "kube-proxy")


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    found = AgentNode(tmp_path, "nftables")
    affinity = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
    found.store.put(service(1))
    found.store.put(endpoint_slice(1))
    found.store.put(service(2, **affinity))
    found.store.put(endpoint_slice(2))
    found.store.put(service(3))
    yield found
    found.close()


def objects() -> List[Dict[str, Any]]:
    """Everything in the table, as nft tells it."""
    done = subprocess.run(["nft", "-j", "-a", "list", "table", *TABLE], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout)["nftables"])


def content() -> List[str]:
    """The table as text, its objects in an order of their own."""
    done = subprocess.run(["nft", "list", "table", *TABLE], capture_output=True, text=True, check=False)
    blocks = re.split(r"\n(?=\t(?:chain|map|set) )", done.stdout)
    return sorted(
        "\n".join(sorted(filter(None, (line.strip(" \t,}") for line in part.splitlines())))) for part in blocks
    )


def deletions() -> Iterator[Tuple[str, ...]]:
    """Commands of nft; each takes away one object, or what is in it."""
    for item in objects():
        ((kind, value),) = item.items()
        if kind == "chain":
            yield "flush", "chain", *TABLE, value["name"]
            if "hook" in value:
                yield "delete", "chain", *TABLE, value["name"]
        elif kind in ("map", "set") and value.get("elem"):
            yield "flush", kind, *TABLE, value["name"]
    yield "flush", "table", *TABLE
    yield "delete", "table", *TABLE
    yield "flush", "ruleset"


def test_every_deleted_object_is_back_within_two_seconds(node) -> None:
    node.start()
    wait_for(lambda: node.differences()["changed"] is False)
    before = content()
    tried = 0
    for command in list(deletions()):
        done = subprocess.run(["nft", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        assert wait_for(lambda: content() == before, 5.0) < 2.0, command
        tried += 1
    assert tried >= 25
    assert node.differences()["changed"] is False


def test_every_deleted_rule_is_back_within_two_seconds(node) -> None:
    node.start()
    wait_for(lambda: node.differences()["changed"] is False)
    before = content()
    rules = [item["rule"] for item in objects() if "rule" in item]
    assert len(rules) >= 20
    for number in range(len(rules)):
        # A repaired chain has rules with other handles.
        rule = [item["rule"] for item in objects() if "rule" in item][number]
        handle = str(rule["handle"])
        subprocess.run(["nft", "delete", "rule", *TABLE, rule["chain"], "handle", handle], check=True)
        assert wait_for(lambda: content() == before, 5.0) < 2.0, rule


def test_explain_and_diff(node) -> None:
    node.start()
    configured = ("--config", str(node.scratch / "config.yaml"), "--kubeconfig", str(node.kubeconfig))
    done = node.run("explain", f"{cluster_ip(1)}:80", *configured)
    assert done.returncode == 0, done.stderr
    assert (
        endpoint_ip(1, 0) in done.stdout
        and "default/svc-1" in done.stdout
        and "element ip kube-proxy service-frontends" in done.stdout
    )
    assert node.stop() == 0
    subprocess.run(["nft", "flush", "chain", *TABLE, "services"], check=True)
    found = node.differences()
    assert found["changed"] is True and "vmap" in json.dumps(found)
