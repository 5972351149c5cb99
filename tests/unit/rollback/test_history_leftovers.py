# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rollback to a state that was saved while connections through IPVS were ending: what it restores, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages import ipvs as ipvs_stages
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.ipvs import IpvsResources
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.ipvs_filter_backend import (
    FilterBackendResources,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import attribute, nested
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.attributes import (
    NFTA_DATA_VALUE,
    NFTA_SET_ELEM_KEY,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.raw.reading import RawChain, RawSet
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import CHAIN, SavedChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model as ipvs
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.nftables_layout import (
    IPVS_TABLE,
    NODE_PORTS,
    SETTLING,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.keys import transport_key
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    TABLE_KEY,
    ElementKey,
    ObjectKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Kind, Resource, apply_plan, plan
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import stages
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.restore import without_leftovers
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.state import ChainsState, NodeState

CLUSTER_IP = ipvs.VirtualServerKey("tcp", "10.96.0.1", 80)
BY_TABLE = ipvs.VirtualServerKey("tcp", "192.0.2.1", 30001)
BY_SET = ipvs.VirtualServerKey("udp", "192.0.2.1", 30002)
OTHER_PROGRAM = ipvs.VirtualServerKey("tcp", "192.0.2.1", 443)
SERVERS = (CLUSTER_IP, BY_TABLE, BY_SET, OTHER_PROGRAM)
REAL = {key: ipvs.RealServerKey(key, "10.1.0.1", 80) for key in SERVERS}
ELEMENT = ipvs.SetElementKey("KUBE-NODE-PORT-UDP", "30002")
RECORD = {
    IPVS_TABLE.key: b"",
    ObjectKey("set", NODE_PORTS): RawSet(
        b"", (nested(NFTA_SET_ELEM_KEY, attribute(NFTA_DATA_VALUE, transport_key("tcp", 30001))),)
    ),
}
LEFTOVERS = NodeState(
    nftables={"IPv4": {TABLE_KEY: b""}},
    ipvs_tables={"IPv4": RECORD},
    sets={"KUBE-NODE-PORT-UDP": ipvs.SetDefinition("bitmap:port", "", 0)},
    set_elements={ELEMENT: True},
    virtual_servers={key: ipvs.VirtualServer("rr", 0, 0, 32) for key in SERVERS},
    real_servers={key: ipvs.RealServer(1) for key in REAL.values()},
    devices={ipvs.DEVICE: "dummy"},
    addresses={"10.96.0.1": True},
)


def chains(*names: str) -> Any:
    return (ChainsState("IPv4", "nft", ("nat",), {SavedChainKey(CHAIN, "nat", name): () for name in names}),)


@pytest.mark.parametrize(
    ("nftables", "table", "names", "mode"),
    [
        (True, RECORD, (), "nftables"),
        (False, {}, ("KUBE-SERVICES", "KUBE-NODEPORTS"), "iptables"),
        (False, {}, ("KUBE-SERVICES", "KUBE-LOAD-BALANCER"), "ipvs"),
        # kube-proxy leaves the chains of iptables mode when it changes to ipvs mode.
        (False, {}, ("KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-LOAD-BALANCER"), "ipvs"),
        (False, {**RECORD, SETTLING: RawChain(b"", ())}, (), "ipvs"),
        # A change to ipvs mode failed half way.
        (True, {**RECORD, SETTLING: RawChain(b"", ())}, (), "ipvs"),
        (False, {}, (), "ipvs"),
    ],
)
def test_virtual_servers_that_are_left_make_no_ipvs_mode(nftables, table, names, mode):
    state = LEFTOVERS._replace(ipvs_tables={"IPv4": table}, chains=chains(*names))
    state = state if nftables else state._replace(nftables={})
    assert state.mode() == mode and state.uses_ipvs is (mode == "ipvs")
    assert (without_leftovers(state) == state) is (mode == "ipvs")


def test_what_was_ending_is_omitted():
    found = without_leftovers(LEFTOVERS)
    assert list(found.virtual_servers) == [OTHER_PROGRAM] and list(found.real_servers) == [REAL[OTHER_PROGRAM]]
    assert not any((found.ipvs_tables, found.sets, found.set_elements, found.devices, found.addresses))
    assert found.nftables == LEFTOVERS.nftables


def test_sets_that_saved_chains_refer_to_are_restored():
    rules = {SavedChainKey(CHAIN, "nat", "KUBE-NODE-PORT"): ("-m set --match-set KUBE-NODE-PORT-UDP dst -j RETURN",)}
    found = without_leftovers(LEFTOVERS._replace(chains=(ChainsState("IPv4", "nft", ("nat",), rules),)))
    assert (found.sets, found.set_elements) == (LEFTOVERS.sets, LEFTOVERS.set_elements)


class Held(Resource):
    """A table in memory; changes are recorded in ``log``."""

    def __init__(self, log, kind, family, table=None, atomic=False):
        self.kind, self.family, self.atomic = kind, family, atomic
        self.table: dict[Any, Any] = dict(table or {})
        self.log = log

    def observe(self):
        return dict(self.table)

    def apply(self, change: Change):
        if change:
            self.log.append(self.kind)
        for key in change.removed:
            del self.table[key]
        self.table.update({**{key: new for key, (_old, new) in change.replaced.items()}, **change.added})


@pytest.fixture
def node(monkeypatch) -> Any:
    """Provide a node that ipvs mode serves without iptables, with connections to one of two virtual servers in use."""
    log: list[str] = []
    port = ElementKey("element", NODE_PORTS, transport_key("tcp", 30001))
    idle = ElementKey("element", NODE_PORTS, transport_key("udp", 30002))
    table = {IPVS_TABLE.key: True, SETTLING: "rules", ObjectKey("set", NODE_PORTS): "set", port: True, idle: True}
    held = SimpleNamespace(
        ipvs=Held(log, Kind.IPVS_OBJECTS, "IPv4", table, atomic=True),
        nftables=Held(log, Kind.TABLE_OBJECTS, "IPv4", atomic=True),
        servers=Held(log, Kind.VIRTUAL_SERVERS, "IPv4", {BY_TABLE: 1, BY_SET: 1}),
        real_servers=Held(log, Kind.REAL_SERVERS, "IPv4", {REAL[BY_TABLE]: 1, REAL[BY_SET]: 1}),
        addresses=Held(log, Kind.ADDRESSES, "IPv4", {"10.96.0.7": True}),
    )
    resources = IpvsResources(held.servers, held.real_servers, held.addresses, dict, dict)
    monkeypatch.setattr(stages, "FAMILIES", ("IPv4",))
    monkeypatch.setattr(stages.ipvs, "ipvs_resources", lambda _handles, _family: resources)
    monkeypatch.setattr(
        stages, "filter_backend_resources", lambda _handles, _family: FilterBackendResources(None, held.ipvs)
    )
    monkeypatch.setattr(ipvs_stages, "used_connections", lambda _family: {REAL[BY_TABLE]: 1})
    monkeypatch.setattr(stages, "RawTableResource", lambda _family: held.nftables)
    monkeypatch.setattr(stages, "RawIpvsTableResource", lambda _family: held.ipvs)
    monkeypatch.setattr(stages, "DummyDeviceResource", lambda _route: Held(log, Kind.DEVICES, "", {"kube-ipvs0": 1}))
    monkeypatch.setattr(stages, "chains_resources", lambda _states: [])
    monkeypatch.setattr(stages, "userspace_removal_stages", lambda _handles: [])
    held.log, held.port = log, port
    held.handles = SimpleNamespace(has_ipvs=lambda: True, has_nftables=lambda: True, route=None, ipvs=None)
    return held


def test_the_table_beside_ipvs_masquerades_until_nftables_mode_serves(node):
    ours = {key: value for key, value in LEFTOVERS.virtual_servers.items() if key != OTHER_PROGRAM}
    real_servers = {REAL[key]: ipvs.RealServer(1) for key in ours}
    saved = without_leftovers(LEFTOVERS._replace(virtual_servers=ours, real_servers=real_servers))
    apply_plan(plan(stages.restore_stages(saved, node.handles, False, to_end=False)[0]), removals=False)
    assert node.log == [Kind.TABLE_OBJECTS, Kind.IPVS_OBJECTS]
    assert SETTLING not in node.ipvs.table and len(node.servers.table) == 2
    apply_plan(plan(stages.restore_stages(saved, node.handles, False)[0]))
    # Only what has connections now is kept, whatever had some when the state was saved.
    assert list(node.servers.table) == [BY_TABLE] and list(node.real_servers.table) == [REAL[BY_TABLE]]
    assert [key for key in node.ipvs.table if isinstance(key, ElementKey)] == [node.port]
