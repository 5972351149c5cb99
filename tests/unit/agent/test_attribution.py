# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log fields that describe external changes."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift.repairs import (
    attributed,
    kind_and_name,
    written,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.monitor import author
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey, JumpKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServerKey,
    SetElementKey,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    TABLE_KEY,
    ChainValue,
    ElementKey,
    Expression,
    ObjectKey,
    Rule,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Kind, PlannedChange, Resource

SERVER = VirtualServerKey("tcp", "10.96.0.1", 80)


def chain(name):
    return ChainKey("nat", name)


def repaired(kind, change):
    resource = Resource()
    resource.kind = kind
    return PlannedChange(resource, change)


def test_no_change_gives_no_log_fields():
    assert attributed([]) == {}
    assert attributed([repaired(Kind.CHAINS, Change())]) == {}


def test_only_entries_with_something_more_were_written_by_another_program():
    rule = Rule((Expression("counter", ()),))
    flushed, external = ChainValue(rules=()), ChainValue(rules=(rule,))
    services, table = ObjectKey("chain", "services"), repaired(Kind.TABLE_OBJECTS, Change())
    less = {services: (flushed, external), chain("A"): (("-j B",), ("-j B", "-j C")), TABLE_KEY: (1, 0)}
    assert written([table._replace(change=Change(added={chain("X"): ()}, replaced=less))]) == frozenset()
    more = {services: (external, flushed), chain("A"): (("-j B", "-j D"), ("-j B", "-j C")), SERVER: (1, 2)}
    found = written([table._replace(change=Change(replaced=more, removed={chain("KUBE-SVC-EXTERNAL"): ()}))])
    assert {key for _label, key in found} == {services, chain("A"), SERVER, chain("KUBE-SVC-EXTERNAL")}


def test_kinds_counts_and_some_names():
    endpoints = {chain(f"KUBE-SEP{number}"): ("-j DNAT",) for number in range(9)}
    change = Change(
        added={**endpoints, chain("KUBE-SERVICES"): (), JumpKey("nat", "OUTPUT", "-j KUBE-SERVICES"): 1},
        replaced={
            chain("KUBE-POSTROUTING"): ((), ("-j RETURN",)),
            chain("KUBE-MARK-MASQ"): (("-j DROP",), ("-j MARK",)),
        },
        removed={chain("KUBE-SVC-EXTERNAL"): ("-j DROP",)},
    )
    assert attributed([repaired(Kind.CHAINS, change)]) == {
        "removed": "10 nat chains (KUBE-SERVICES, KUBE-SEP0, KUBE-SEP1, KUBE-SEP2 and 6 more), 1 nat jump (OUTPUT)",
        "flushed": "1 nat chain (KUBE-POSTROUTING)",
        "modified": "1 nat chain (KUBE-MARK-MASQ)",
        "added": "1 nat chain (KUBE-SVC-EXTERNAL)",
    }


def test_every_kind_of_entry_has_a_name():
    for resource, key, expected in (
        (Kind.TABLE_OBJECTS, TABLE_KEY, ("table", "kube-proxy")),
        (Kind.TABLE_OBJECTS, ObjectKey("chain", "services"), ("chain", "services")),
        (Kind.TABLE_OBJECTS, ObjectKey("set", "cluster-ips"), ("set or map", "cluster-ips")),
        (Kind.TABLE_OBJECTS, ElementKey("element", "cluster-ips", b"\x0a\x60\x00\x01"), ("element of", "cluster-ips")),
        (Kind.TABLE_OBJECTS, ElementKey("list", "service-endpoints", b"\x00"), ("element of", "service-endpoints")),
        (Kind.VIRTUAL_SERVERS, SERVER, ("virtual server", "10.96.0.1:80/TCP")),
        (
            Kind.REAL_SERVERS,
            RealServerKey(SERVER, "10.1.1.1", 8080),
            ("real server", "10.96.0.1:80/TCP/10.1.1.1:8080"),
        ),
        (
            Kind.SET_ELEMENTS,
            SetElementKey("KUBE-CLUSTER-IP", "10.96.0.1,tcp:80"),
            ("ipset element of", "KUBE-CLUSTER-IP"),
        ),
        (Kind.SETS, "KUBE-CLUSTER-IP", ("ipset", "KUBE-CLUSTER-IP")),
        (Kind.DEVICES, "kube-ipvs0", ("device", "kube-ipvs0")),
        (Kind.ADDRESSES, "10.96.0.1", ("address", "10.96.0.1")),
        (Kind.TIMEOUTS, "tcp", ("IPVS timeout", "tcp")),
    ):
        assert kind_and_name(resource, key) == expected


def test_every_kind_has_a_word():
    for kind in [value for name, value in vars(Kind).items() if not name.startswith("_")]:
        assert kind_and_name(kind, "a name")[1] == "a name"
    assert kind_and_name(Kind.LISTENERS, "10.96.0.1") == ("listener", "10.96.0.1")


def test_plurals():
    servers = {VirtualServerKey("tcp", "10.96.0.1", port): None for port in (80, 81)}
    elements = {ElementKey("element", "cluster-ips", bytes([number])): True for number in range(3)}
    fields = attributed(
        [repaired(Kind.VIRTUAL_SERVERS, Change(added=servers)), repaired(Kind.TABLE_OBJECTS, Change(added=elements))]
    )
    assert fields["removed"] == ("2 virtual servers (10.96.0.1:80/TCP, 10.96.0.1:81/TCP), 3 elements of (cluster-ips)")
    addresses = {"10.96.0.1": True, "10.96.0.2": True}
    assert attributed([repaired(Kind.ADDRESSES, Change(added=addresses))])["removed"].startswith("2 addresses (")


def test_the_author_of_a_transaction():
    number = memoryview((258).to_bytes(4, "big"))
    assert author({2: number, 3: memoryview(b"nft\0")}) == "nft, process 258"
    assert author({2: number}) == "process 258"
    assert author({}) == ""
