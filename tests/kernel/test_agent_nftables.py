# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent in nftables mode: anything deleted from or added to its tables by another program is repaired."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.nodes import read_nodes
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.agent_state import served_state, state_of
from tests.kernel.agent_node import AgentNode, Object, cluster_ip, endpoint_ip, endpoint_slice, node_object, service
from tests.waiting import seconds_until, wait_for

FAMILIES = ("ip", "ip6")
# Many objects, each deleted or added one after another.
LONG = ("ip", pytest.param("ip6", marks=pytest.mark.full))
# A loaded machine may be slow. Half of the repairs must come long before the next full check, which is due each hour.
PATIENCE_SECONDS = 120.0
USUAL_SECONDS = 10.0


def dual(item: Object) -> Object:
    """Return a Service with an IPv6 address beside its IPv4 address."""
    spec = item["spec"]
    six = "fd00:10:96::" + spec["clusterIP"].rpartition(".")[2]
    spec.update(clusterIPs=[spec["clusterIP"], six], ipFamilies=["IPv4", "IPv6"], ipFamilyPolicy="RequireDualStack")
    return item


def slices(number: int) -> Iterator[Object]:
    """Yield a Service's endpoints in both families."""
    yield endpoint_slice(number)
    other = endpoint_slice(number)
    other["metadata"]["name"] += "6"
    other["addressType"] = "IPv6"
    for index, endpoint in enumerate(other["endpoints"]):
        endpoint["addresses"] = [f"fd00:10:244::{number * 8 + index + 1:x}"]
    yield other


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    agent_node = AgentNode(tmp_path, "nftables")
    addresses = [{"type": "InternalIP", "address": address} for address in ("192.0.2.1", "fd00:192::1")]
    agent_node.store.put(node_object(status={"addresses": addresses}))
    agent_node.write_configuration(clusterCIDR="10.244.0.0/16,fd00:10:244::/56")
    affinity = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
    outside = {"type": "NodePort", "externalTrafficPolicy": "Local", "healthCheckNodePort": 0}
    ranges = {"type": "LoadBalancer", "loadBalancerSourceRanges": ["198.51.100.0/24", "2001:db8::/32"]}
    for number, spec in enumerate((outside, affinity, ranges), 1):
        item = dual(service(number, **spec))
        for port in item["spec"]["ports"] if spec.get("type") else ():
            port["nodePort"] = 30000 + number
        if spec is ranges:
            ingress = [{"ip": f"203.0.113.{number}"}, {"ip": f"2001:db8:113::{number}"}]
            item["status"] = {"loadBalancer": {"ingress": ingress}}
        agent_node.store.put(item)
        for part in slices(number):
            agent_node.store.put(part)
    agent_node.store.put(dual(service(4)))
    yield agent_node
    agent_node.close()


def nft(*words: str) -> None:
    """Run an nft command that must succeed."""
    done = subprocess.run(["nft", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)


def objects(family: str) -> list[dict[str, Any]]:
    """Return everything in the table of a family, as nft prints it."""
    words = ["nft", "-j", "-a", "list", "table", family, "kube-proxy"]
    return list(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["nftables"])


def content() -> list[str]:
    """Return both tables as text with their objects sorted."""
    lines: list[str] = []
    for family in FAMILIES:
        words = ["nft", "list", "table", family, "kube-proxy"]
        text = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        blocks = re.split(r"\n(?=\t(?:chain|map|set) )", text)
        lines += sorted(
            "\n".join(sorted(filter(None, (line.strip(" \t,}") for line in part.splitlines())))) for part in blocks
        )
    return lines


def written(value: Any) -> str:
    """Return an element's value in nft's own syntax, from its JSON."""
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind == "concat":
            return " . ".join(map(written, inner))
        if kind == "prefix":
            return f"{inner['addr']}/{inner['len']}"
        if kind == "elem":
            return written(inner["val"])
    return str(value)


def holders(family: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the kind, name and keys of every map and set that has elements."""
    for item in objects(family):
        ((kind, value),) = item.items()
        if kind in ("map", "set") and value.get("elem"):
            yield kind, value["name"], [written(each[0] if kind == "map" else each) for each in value["elem"]]


def deletions(family: str) -> Iterator[tuple[str, ...]]:
    """Yield nft commands that each delete one object, the content of one, or one element."""
    table = (family, "kube-proxy")
    for item in objects(family):
        ((kind, value),) = item.items()
        if kind == "chain":
            yield "flush", "chain", *table, value["name"]
            if "hook" in value:
                yield "delete", "chain", *table, value["name"]
    for kind, name, keys in holders(family):
        yield "flush", kind, *table, name
        yield "delete", "element", *table, name, "{", keys[0], "}"
        yield "delete", "element", *table, name, "{", keys[-1], "}"
    yield "flush", "table", *table
    yield "delete", "table", *table
    yield ("flush", "ruleset")


def additions(family: str) -> Iterator[tuple[str, ...]]:
    """Yield nft commands that each add an unexpected object, rule or element to the table."""
    table = (family, "kube-proxy")
    address, network = ("203.0.113.9", "ipv4_addr") if family == "ip" else ("2001:db8::9", "ipv6_addr")
    yield "add", "chain", *table, "external"
    yield "add", "chain", *table, "hooked", "{ type filter hook input priority 5 ; }"
    yield "add", "set", *table, "external", f"{{ type {network} ; }}"
    yield "add", "map", *table, "short", f"{{ typeof {family} version : verdict ; elements = {{ 4 : accept }} ; }}"
    yield "add", "set", *table, "several", f"{{ typeof {family} version . tcp dport . meta length ; }}"
    yield "add", "rule", *table, "services", "counter"
    yield "insert", "rule", *table, "services", family, "daddr", address, "drop"
    yield "add", "element", *table, "nodeport-ips", "{", address, "}"


class Repairs:
    """Apply changes to the tables one by one, and wait each time until the tables are restored."""

    def __init__(self, node: AgentNode) -> None:
        self.node = node
        node.start()
        wait_for(lambda: node.differences()["changed"] is False)
        self.before = content()
        self.seconds: list[float] = []

    def after(self, *words: str) -> None:
        """Run a command and wait until its effect is repaired."""
        nft(*words)
        try:
            self.seconds.append(seconds_until(lambda: content() == self.before, PATIENCE_SECONDS))
        except AssertionError:
            raise AssertionError(f"not repaired: {' '.join(words)}") from None

    def check(self, least: int) -> None:
        """Check that at least ``least`` repairs were made and counted in time, and that nothing differs."""
        assert len(self.seconds) >= least
        assert sorted(self.seconds)[len(self.seconds) // 2] < USUAL_SECONDS
        assert self.node.metric("kubenode_proxy_drift_repaired_total") > 0
        assert self.node.differences()["changed"] is False


@pytest.mark.parametrize("family", LONG)
def test_every_deleted_object_is_restored(node: AgentNode, family: str) -> None:
    repairs = Repairs(node)
    for command in list(deletions(family)):
        repairs.after(*command)
    repairs.check(45)


@pytest.mark.parametrize("family", FAMILIES)
def test_unexpected_objects_are_removed(node: AgentNode, family: str) -> None:
    repairs = Repairs(node)
    for command in additions(family):
        repairs.after(*command)
    repairs.check(8)


@pytest.mark.parametrize("family", LONG)
def test_every_deleted_rule_is_restored(node: AgentNode, family: str) -> None:
    repairs = Repairs(node)
    rules = [item["rule"] for item in objects(family) if "rule" in item]
    for number in range(len(rules)):
        # A repaired chain has rules with new handles.
        rule = [item["rule"] for item in objects(family) if "rule" in item][number]
        repairs.after("delete", "rule", family, "kube-proxy", rule["chain"], "handle", str(rule["handle"]))
    repairs.check(20)


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
    nft("flush", "chain", "ip", "kube-proxy", "services")
    report = node.differences()
    assert report["changed"] is True and "vmap" in json.dumps(report)


def test_node_ports_follow_addresses_that_the_node_gets_later(node: AgentNode) -> None:
    """As with an external cloud provider, which reports the addresses of a Node some time after kubelet created it."""
    node.store.put(node_object(status={"addresses": []}))
    node.start()
    restriction = "ip daddr @nodeport-ips"
    assert not any(restriction in line for line in content())
    node.store.put(node_object())
    wait_for(lambda: any(restriction in line for line in content()), PATIENCE_SECONDS)
    wait_for(lambda: node.differences()["changed"] is False, PATIENCE_SECONDS)
    assert "restart" not in node.log


def test_a_repair_and_a_refused_object_are_posted_as_events(node: AgentNode) -> None:
    node.start()
    assert node.api is not None
    posted = node.api.posted
    nft("flush", "chain", "ip", "kube-proxy", "services")
    wait_for(lambda: any(event["reason"] == "DriftRepaired" for event in posted), PATIENCE_SECONDS)
    repaired = next(event for event in posted if event["reason"] == "DriftRepaired")
    assert repaired["regarding"]["kind"] == "Node" and "services" in repaired["note"]
    # It changes nothing that is programmed, so no sync follows.
    node.store.put(service(99, clusterIP="nonsense", clusterIPs=["nonsense"]))
    wait_for(lambda: any(event["reason"] == "ObjectRefused" for event in posted), PATIENCE_SECONDS)
    refused = next(event for event in posted if event["reason"] == "ObjectRefused")
    assert (refused["regarding"]["name"], refused["related"]["name"]) == ("svc-99", "node1")


def test_a_live_report_has_what_the_agent_serves(node: AgentNode) -> None:
    node.store.put(service(99, clusterIP="nonsense", clusterIPs=["nonsense"]))
    node.start()
    answer = node.status()
    result = {"agent": state_of(answer), **served_state(answer)}
    (found,) = read_nodes([{"name": "node1", "results": [result]}])
    assert (found.failure, found.node_name, found.mode, found.families) == ("", "node1", "nftables", ("IPv4", "IPv6"))
    assert found.agent is not None and found.agent.running and found.agent.healthy
    assert found.services == 4 and found.endpoints and sum(found.programmed.values()) > 20
    assert [item.object for item in found.refused] == ["Service default/svc-99"]
    assert found.refused[0].reason.startswith("spec.clusterIP: ")
