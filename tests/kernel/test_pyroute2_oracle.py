# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""pyroute2 as the oracle of the netlink encoders: it reads what our code writes, and our code reads what it writes.

IPVS and ipset need a kernel that supports them; see ``test_pyroute2_ipvs.py``.
"""

from __future__ import annotations

import errno
import socket

import pytest
from pyroute2 import IPRoute
from pyroute2.conntrack import Conntrack, NFCTAttrTuple
from pyroute2.netlink import NETLINK_NETFILTER, NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink import nftsocket

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.messages import identity
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.socket import ConntrackSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.facts import interface_addresses
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.listing import nft_chains, nft_tables
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink import links
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink.address_monitor import (
    AddressEvent,
    AddressMonitor,
    LinkRemoved,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink.routes import Way, way_to
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference
from tests.unit.rendering.nftables.samples import sample_routes, sample_settings
from tests.waiting import wait_for

FAMILIES = ("IPv4", "IPv6")
NUMBERS = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}
DEVICE = "oracle0"
#: IPS_CONFIRMED of linux/netfilter/nf_conntrack_common.h.
_CONFIRMED = 0x8
#: RTN_LOCAL of linux/rtnetlink.h and IFA_F_NODAD of linux/if_addr.h.
_LOCAL, _NODAD = 2, 0x2
ADDRESSES = {
    "IPv4": {"10.96.0.1", "10.96.0.10", "192.0.2.255"},
    "IPv6": {"fd00:96::1", "2001:db8::ffff", "fd00:96::10"},
}


@pytest.fixture
def route():
    with IPRoute() as oracle:
        yield oracle


@pytest.fixture
def rtnetlink():
    sock = NetlinkSocket(socket.NETLINK_ROUTE)
    yield sock
    sock.close()


def test_pyroute2_reads_a_link_that_we_create(route, rtnetlink):
    assert links.find_link(rtnetlink, DEVICE) is None
    links.make_device(rtnetlink, DEVICE, "bridge")
    links.set_device_up(rtnetlink, DEVICE)
    (found,) = route.link("get", ifname=DEVICE)
    assert found.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") == "bridge" and found["flags"] & 1
    assert links.find_link(rtnetlink, DEVICE) == links.Link(found["index"], "bridge")
    links.remove_device(rtnetlink, DEVICE)
    assert list(route.link_lookup(ifname=DEVICE)) == []


def test_we_read_a_link_that_pyroute2_creates(route, rtnetlink):
    route.link("add", ifname=DEVICE, kind="veth", peer="oracle1")
    (index,) = route.link_lookup(ifname=DEVICE)
    assert links.find_link(rtnetlink, DEVICE) == links.Link(index, "veth")
    links.remove_device(rtnetlink, DEVICE)
    assert list(route.link_lookup(ifname="oracle1")) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_addresses_in_both_directions(route, rtnetlink, family):
    links.make_device(rtnetlink, DEVICE, "bridge")
    (index,) = route.link_lookup(ifname=DEVICE)
    resource = links.AddressesResource(rtnetlink, family, DEVICE)
    bits = 32 if family == "IPv4" else 128

    def oracle():
        dumped = route.get_addr(family=NUMBERS[family], index=index)
        return {(message.get_attr("IFA_ADDRESS"), message["prefixlen"]) for message in dumped}

    resource.apply(Change(added=dict.fromkeys(ADDRESSES[family], True)))
    assert oracle() == {(address, bits) for address in ADDRESSES[family]}
    assert set(resource.observe()) == ADDRESSES[family]
    ours, theirs = sorted(ADDRESSES[family])[0], "198.51.100.7" if family == "IPv4" else "2001:db8:7::7"
    resource.apply(Change(removed={ours: True}))
    route.addr("add", index=index, address=theirs, prefixlen=bits)
    assert set(resource.observe()) == ADDRESSES[family] - {ours} | {theirs}
    assert {address for address, _length in oracle()} == set(resource.observe())


@pytest.mark.parametrize("family", FAMILIES)
def test_we_read_and_hear_of_addresses_that_pyroute2_adds_and_removes(route, rtnetlink, family):
    """The second address has a peer, whose address is in the attribute where other messages have the own one."""
    links.make_device(rtnetlink, DEVICE, "bridge")
    (index,) = route.link_lookup(ifname=DEVICE)
    first, second, peer = sorted(ADDRESSES[family])
    settings = {first: {"prefixlen": 28 if family == "IPv4" else 64}, second: {"local": second, "address": peer}}
    bits = 32 if family == "IPv4" else 128
    monitor = AddressMonitor()
    given = [{"address": address, "prefixlen": bits, **options} for address, options in settings.items()]
    for options in given:
        route.addr("add", index=index, **options)
    found = {(entry.address, entry.prefix_length) for entry in interface_addresses() if entry.interface == DEVICE}
    assert found == {(first, settings[first]["prefixlen"]), (second, bits)}
    dumped = route.get_addr(family=NUMBERS[family], index=index)
    theirs = {message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS") for message in dumped}
    assert {address for address, _length in found} == theirs
    for options in given:
        route.addr("delete", index=index, **options)
    heard = [event for event in monitor.events() if isinstance(event, AddressEvent) and event.interface == index]
    expected = [(added, address) for added in (True, False) for address in (first, second)]
    assert sorted((event.added, event.address) for event in heard) == sorted(expected)
    links.remove_device(rtnetlink, DEVICE)
    assert LinkRemoved(DEVICE) in monitor.events()
    monitor.close()


def oracle_way(route, address, family):
    """Return the way as pyroute2 reads it: whether it is local, through which interface, the gateway and the source."""
    try:
        (found,) = route.route("get", dst=address, family=NUMBERS[family])
    except NetlinkError as error:
        return error.code
    (link,) = route.get_links(found.get_attr("RTA_OIF"))
    local = found["type"] == _LOCAL
    return local, link.get_attr("IFLA_IFNAME"), found.get_attr("RTA_GATEWAY"), found.get_attr("RTA_PREFSRC")


@pytest.mark.parametrize("family", FAMILIES)
def test_we_follow_routes_that_pyroute2_adds(route, rtnetlink, family):
    """The way is the oracle's on each type of route; the oracle's answer also has the gateway and the source."""
    if family == "IPv4":
        own, second, gateway, network, host = "192.0.2.1", "192.0.2.9", "192.0.2.2", "10.{}.0.0/16", "10.{}.0.7"
        prefix, bits = 24, 32
    else:
        own, second, gateway = "2001:db8::1", "2001:db8::9", "2001:db8::2"
        network, host, prefix, bits = "2001:db8:{}::/48", "2001:db8:{}::7", 64, 128
    links.make_device(rtnetlink, DEVICE, "bridge")
    links.set_device_up(rtnetlink, DEVICE)
    (index,) = route.link_lookup(ifname=DEVICE)
    # Without the time that IPv6 takes to find duplicates, during which an address is no source.
    flags = {} if family == "IPv4" else {"flags": _NODAD}
    route.addr("add", index=index, address=own, prefixlen=prefix, **flags)

    def add(number, **options):
        route.route("add", dst=network.format(number), family=NUMBERS[family], **options)
        address = host.format(number)
        return way_to(rtnetlink, address), oracle_way(route, address, family)

    through = Way(False, DEVICE)
    assert add(1, gateway=gateway) == (through, (False, DEVICE, gateway, own))
    assert add(2, oif=index) == (through, (False, DEVICE, None, own))
    route.addr("add", index=index, address=second, prefixlen=bits, **flags)
    assert add(3, oif=index, gateway=gateway, prefsrc=second) == (through, (False, DEVICE, gateway, second))
    nowhere = Way(False, "")
    assert add(4, type="unreachable") == (nowhere, errno.EHOSTUNREACH)
    assert add(5, type="prohibit") == (nowhere, errno.EACCES)
    assert add(6, type="blackhole") == (nowhere, errno.EINVAL)
    missing = host.format(7)
    assert (way_to(rtnetlink, missing), oracle_way(route, missing, family)) == (nowhere, errno.ENETUNREACH)
    for address in (own, second):
        # A work queue of the kernel adds the local route of an IPv6 address, some time after the address.
        wait_for(lambda address=address: oracle_way(route, address, family)[0])
        local, interface, _gateway, _source = oracle_way(route, address, family)
        assert way_to(rtnetlink, address) == Way(local, interface) == Way(True, "lo")


def flow(family, number):
    client, service = ("192.0.2.1", "10.96.0.10") if family == "IPv4" else ("2001:db8::1", "fd00:96::10")
    endpoint = "10.244.1.5" if family == "IPv4" else "fd00:244::5"
    common = {"family": NUMBERS[family], "proto": socket.IPPROTO_UDP}
    original = NFCTAttrTuple(saddr=client, daddr=service, sport=number, dport=53, **common)
    reply = NFCTAttrTuple(saddr=endpoint, daddr=client, sport=5353, dport=number, **common)
    return original, reply


@pytest.mark.parametrize("family", FAMILIES)
def test_conntrack_entries_in_both_directions(family):
    """pyroute2 inserts entries, our code reads and deletes some of them, and pyroute2 sees the others."""

    def place(address, port):
        return socket.inet_pton(NUMBERS[family], address) + port.to_bytes(2, "big")

    with Conntrack(nfgen_family=NUMBERS[family]) as oracle, ConntrackSocket() as ours:
        udp = {number: flow(family, number) for number in range(40000, 40005)}
        for original, reply in udp.values():
            oracle.entry("add", timeout=600, tuple_orig=original, tuple_reply=reply, status=_CONFIRMED)
        entries = list(ours.entries(family, "UDP"))
        original, reply = udp[40000]
        wanted = (place(original.daddr, 53), place(reply.saddr, 5353))
        assert [(entry[0], entry[1]) for entry in entries] == [wanted] * len(udp)
        assert ours.delete(family, [identity(entry) for entry in entries[:2]]) == 2
        left = {entry.tuple_orig.sport for entry in oracle.dump_entries()}
        assert len(left) == len(udp) - 2 and left < set(udp)
        remaining = [identity(entry) for entry in ours.entries(family, "UDP")]
        assert ours.delete(family, remaining) == len(left) and list(oracle.dump_entries()) == []


def nft_dump(oracle, message_class, kind, **attributes):
    request = message_class()
    request["attrs"] = list(attributes.items())
    return oracle.request_get(request, kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_pyroute2_reads_our_nftables_table(family):
    """Compare sets with their flags and numbers of elements, chains with their hooks, rules with their expressions."""
    desired = RENDERING.desired_tables(sample_routes(family), sample_settings(family))["table objects"]
    with NftablesResource(family) as ours, nftsocket.NFTSocket(nfgen_family=NUMBERS[family]) as oracle:
        ours.apply(difference(ours.observe(), desired))
        (table,) = nft_dump(oracle, nftsocket.nft_table_msg, nftsocket.NFT_MSG_GETTABLE)
        assert table.get_attr("NFTA_TABLE_NAME") == "kube-proxy"
        kinds: dict[str, set[str]] = {"set": set(), "chain": set()}
        elements: dict[str, int] = {}
        for key in desired:
            if key[0] in kinds:
                kinds[key[0]].add(key[1])
            elif key[0] == "element":
                elements[key[1]] = elements.get(key[1], 0) + 1
        # The desired table groups the elements behind frontends.
        grouped = {key[1] for key in desired if key[0] == "list"}
        sets = nft_dump(oracle, nftsocket.nft_set_msg, nftsocket.NFT_MSG_GETSET)
        assert {message.get_attr("NFTA_SET_NAME") for message in sets} == kinds["set"]
        for message in sets:
            name = message.get_attr("NFTA_SET_NAME")
            table_name = ("NFTA_SET_ELEM_LIST_TABLE", "kube-proxy")
            request = nftsocket.nft_set_elem_list_msg()
            request["attrs"] = [table_name, ("NFTA_SET_ELEM_LIST_SET", name)]
            parts = oracle.request_get(request, nftsocket.NFT_MSG_GETSETELEM)
            found = sum(len(part.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS") or ()) for part in parts)
            if name in grouped:
                assert found
                continue
            wanted = elements.get(name, 0)
            # The kernel stores an interval as two elements.
            interval = "NFT_SET_INTERVAL" in (message.get_attr("NFTA_SET_FLAGS") or ())
            assert found == wanted or (interval and wanted < found <= 2 * wanted + 1), (name, found, wanted)
        chains = nft_dump(oracle, nftsocket.nft_chain_msg, nftsocket.NFT_MSG_GETCHAIN)
        assert {message.get_attr("NFTA_CHAIN_NAME") for message in chains} == kinds["chain"]
        hooks = {value.base is not None for key, value in desired.items() if key[0] == "chain"}
        assert {message.get_attr("NFTA_CHAIN_HOOK") is not None for message in chains} == hooks
        rules = nft_dump(oracle, nftsocket.nft_rule_msg, nftsocket.NFT_MSG_GETRULE)
        per_chain: dict[str, int] = {}
        for message in rules:
            name = message.get_attr("NFTA_RULE_CHAIN")
            per_chain[name] = per_chain.get(name, 0) + 1
        expected = {key[1]: len(value.rules) for key, value in desired.items() if key[0] == "chain" and value.rules}
        assert per_chain == expected


def nft_put(oracle, message_class, kind, attributes, flags=NLM_F_CREATE):
    message = message_class()
    message["attrs"] = attributes
    oracle.begin()
    oracle.request_put(message, kind, NLM_F_REQUEST | NLM_F_ACK | flags)
    oracle.commit()


@pytest.mark.parametrize("family", FAMILIES)
def test_we_read_a_table_that_pyroute2_creates(family):
    sock = NetlinkSocket(NETLINK_NETFILTER)
    with nftsocket.NFTSocket(nfgen_family=NUMBERS[family]) as oracle:
        nft_put(oracle, nftsocket.nft_table_msg, nftsocket.NFT_MSG_NEWTABLE, [("NFTA_TABLE_NAME", "oracle")])
        chain = [("NFTA_CHAIN_TABLE", "oracle"), ("NFTA_CHAIN_NAME", "their-chain")]
        nft_put(oracle, nftsocket.nft_chain_msg, nftsocket.NFT_MSG_NEWCHAIN, chain)
        assert [(table.name, table.uses) for table in nft_tables(sock, family)] == [("oracle", 1)]
        assert [tuple(found) for found in nft_chains(sock, family)] == [("oracle", "their-chain", None)]
        nft_put(oracle, nftsocket.nft_table_msg, nftsocket.NFT_MSG_DELTABLE, [("NFTA_TABLE_NAME", "oracle")], 0)
        assert nft_tables(sock, family) == []
    sock.close()
