# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Within one plan a resource is read once, however many stages use it; which servers are ours; what comes last."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages import chains as chain_stages
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.ipvs import (
    IpvsResources,
    OnlyOurServers,
    after_servers,
    observed_once,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import KUBE_FIREWALL
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    SetElementKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.nftables_layout import SETTLING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import ElementKey, ObjectKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import (
    Change,
    ObservedOnce,
    Resource,
    Stage,
    apply_plan,
    plan,
)


class Counted(Resource[Any, Any]):
    """A table that counts how often it is read."""

    def __init__(self, name: str, table: dict[Any, Any], atomic: bool = False) -> None:
        self.kind = name
        self.atomic = atomic
        self.table = table
        self.reads = 0

    def observe(self) -> dict[Any, Any]:
        self.reads += 1
        return dict(self.table)

    def apply(self, change: Change[Any, Any]) -> None:
        self.table.update(change.added)
        self.table.update({key: new for key, (_old, new) in change.replaced.items()})
        for key in change.removed:
            del self.table[key]

    def describe(self, key: Any, value: Any) -> list[str]:
        return [f"{self.kind}: {key}"]


def test_a_table_is_read_again_only_after_it_was_changed() -> None:
    resource = Counted("table", {"a": 1}, atomic=True)
    once = ObservedOnce(resource)
    assert (once.kind, once.atomic, once.describe("a", 1)) == ("table", True, ["table: a"])
    once.observe()["b"] = 2
    assert once.observe() == {"a": 1} and resource.reads == 1
    once.apply(Change(added={"b": 2}))
    assert once.observe() == {"a": 1, "b": 2} and resource.reads == 2


SERVICE, NODE_PORT = VirtualServerKey("tcp", "10.96.0.10", 80), VirtualServerKey("udp", "192.0.2.1", 30080)
OTHER, SAVED = VirtualServerKey("tcp", "192.0.2.1", 8080), VirtualServerKey("tcp", "192.0.2.1", 8081)


def resources() -> IpvsResources:
    servers = {key: VirtualServer("rr", 0, 0, 32) for key in (SERVICE, NODE_PORT, OTHER, SAVED)}
    real = {RealServerKey(key, "10.1.0.1", 80): RealServer(1) for key in servers}
    return IpvsResources(
        servers=Counted("virtual servers", dict(servers)),
        real_servers=Counted("real servers", dict(real)),
        addresses=Counted("addresses", {SERVICE.address: True}),
        connections=dict,
        used=dict,
    )


# What identifies node ports: an element of an ipset, or of the table beside IPVS (protocol and port as in registers).
RECORDS = {
    "iptables": {SetElementKey("KUBE-NODE-PORT-UDP", "30080"): True},
    "nftables": {
        ElementKey("element", "node-ports", b"\x11\0\0\0" + (30080).to_bytes(2, "big") + b"\0\0"): True,
        ElementKey("element", "local-node-ports", b"\x06\0\0\0" + (8080).to_bytes(2, "big") + b"\0\0"): True,
        ObjectKey("set", "node-ports"): None,
    },
}


@pytest.mark.parametrize("filter_backend", RECORDS)
def test_service_servers_are_identified_by_address_or_node_port(filter_backend: str) -> None:
    found = resources()
    record = Counted("set elements", RECORDS[filter_backend])
    ours = OnlyOurServers(found.servers, found.addresses, record)
    assert list(ours.observe()) == [SERVICE, NODE_PORT]
    restored = OnlyOurServers(found.real_servers, found.addresses, record, {SAVED: None})
    assert [key.server for key in restored.observe()] == [SERVICE, NODE_PORT, SAVED]


def test_one_plan_reads_each_ipvs_table_once() -> None:
    read = resources()
    once = observed_once(read)
    elements = Counted("set elements", dict(RECORDS["iptables"]))
    record = ObservedOnce(elements)
    owned = once.addresses, record
    stages = [
        Stage(record, {}),
        Stage(OnlyOurServers(once.servers, *owned), {}),
        Stage(OnlyOurServers(once.real_servers, *owned), {}),
        Stage(once.addresses, {}),
    ]
    apply_plan(plan(stages))
    assert [each.reads for each in (elements, *read[:3])] == [1, 1, 1, 1]
    assert list(read.servers.table) == [OTHER, SAVED] and not read.addresses.table and not elements.table


def test_loopback_routing_depends_on_the_chains_to_be_removed(monkeypatch) -> None:
    chains = Counted("chains", {KUBE_FIREWALL: ("-j DROP",)}, atomic=True)
    once = ObservedOnce(chains)
    stage = chain_stages.localnet_stage(once)
    monkeypatch.setattr(stage.resource._resource, "observe", lambda: {chain_stages.ROUTE_LOCALNET: "1"})
    monkeypatch.setattr(chain_stages, "boot_values", lambda keys: {})
    monkeypatch.setattr(chain_stages, "unchangeable", lambda keys: {})
    planned = plan([stage, Stage(once, {})])
    assert planned[0].change.replaced == {chain_stages.ROUTE_LOCALNET: ("1", "0")}
    assert list(planned[1].change.removed) == [KUBE_FIREWALL]
    assert chains.reads == 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_table_that_leads_to_ipvs_comes_after_the_servers_behind_addresses_that_were_kept(kept):
    addresses = Counted("addresses", {"10.96.2.1": True} if kept else {})
    table, servers = Counted("table", {}, atomic=True), Counted("servers", {})
    late = after_servers(addresses)

    def kinds(desired: dict[Any, Any]) -> list[str]:
        planned = plan([Stage(table, desired, postponed=late), Stage(servers, {"server": True})])
        return [item.resource.kind for item in planned]

    assert kinds({SETTLING: True}) == (["servers", "table"] if kept else ["table", "servers"])
    # Where the chain exists, IPVS serves: what masquerades its connections comes first.
    table.table[SETTLING] = True
    element = ElementKey("element", "cluster-ip-frontends", b"")
    assert kinds({SETTLING: True, element: True}) == ["table", "servers"]
