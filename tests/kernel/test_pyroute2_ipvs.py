# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""pyroute2 as the oracle of the encoders of IPVS and ipset, on a kernel that supports both.

``test_pyroute2_oracle.py`` covers the encoders that every kernel supports.
"""

from __future__ import annotations

import socket
import sys

import pytest
from pyroute2 import IPVS, IPVSDest, IPVSService
from pyroute2.ipset import IPSet, PortEntry

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipset.sets import (
    IpsetSocket,
    SetElementsResource,
    SetsResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import (
    IpvsSocket,
    RealServersResource,
    VirtualServersResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    FIREWALL_MARK,
    RealServer,
    RealServerKey,
    SetDefinition,
    SetElementKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.sets import definitions
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Stage, apply_plan, plan

pytestmark = pytest.mark.uml

FAMILIES = ("IPv4", "IPv6")
NUMBERS = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}
PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132}
FORWARDING = {"masquerade": 0, "tunnel": 2, "route": 3}


def tables(family):
    """Return virtual servers of every protocol, scheduler flag and kind of real server, one with a firewall mark."""
    service, pod = ("10.96.0.", "10.244.1.") if family == "IPv4" else ("fd00:96::", "fd00:244::")
    bits = 32 if family == "IPv4" else 128
    keys = [VirtualServerKey(protocol, f"{service}{port}", port) for port, protocol in enumerate(PROTOCOLS, 80)]
    keys.append(VirtualServerKey(FIREWALL_MARK, "0.0.0.0" if family == "IPv4" else "::", 77))
    values = [
        VirtualServer("rr", 0, 0, bits),
        VirtualServer("mh", 0x11, 300, bits),
        VirtualServer("sh", 0x1, 10800, 24 if family == "IPv4" else 64),
        VirtualServer("wrr", 0, 0, bits),
    ]
    servers = dict(zip(keys, values))
    real_servers = {}
    for key in keys:
        for number, forwarding in enumerate(FORWARDING, 1):
            marked = key.protocol == FIREWALL_MARK
            port = (0 if marked else key.port) if forwarding != "masquerade" else 8080
            real_servers[RealServerKey(key, f"{pod}{number}", port)] = RealServer(number - 1, forwarding)
    return servers, real_servers


def attributes(message, name):
    return dict(message.get_attr(name)["attrs"])


def oracle_key(found):
    """Return the identity of a virtual server as pyroute2 reads it: mark or protocol, address and port."""
    if found.get("IPVS_SVC_ATTR_FWMARK"):
        return (FIREWALL_MARK, "", int(found["IPVS_SVC_ATTR_FWMARK"]))
    protocol = {number: name for name, number in PROTOCOLS.items()}[found["IPVS_SVC_ATTR_PROTOCOL"]]
    return (protocol, str(found["IPVS_SVC_ATTR_ADDR"]), int(found["IPVS_SVC_ATTR_PORT"]))


def our_key(key):
    return (key.protocol, "" if key.protocol == FIREWALL_MARK else key.address, key.port)


def in_oracle(key):
    """Return our key of a virtual server in pyroute2's form."""
    number = NUMBERS["IPv6" if ":" in key.address else "IPv4"]
    if key.protocol == FIREWALL_MARK:
        return IPVSService(af=number, fwmark=key.port)
    return IPVSService(af=number, addr=key.address, port=key.port, protocol=PROTOCOLS[key.protocol])


@pytest.mark.parametrize("family", FAMILIES)
def test_pyroute2_reads_what_we_write(family):
    servers, real_servers = tables(family)
    with IpvsSocket() as ours, IPVS() as oracle:
        resources = VirtualServersResource(ours, family, marks=True), RealServersResource(ours, family, marks=True)
        apply_plan(plan([Stage(resources[0], servers), Stage(resources[1], real_servers)]))
        assert (resources[0].observe(), resources[1].observe()) == (servers, real_servers)
        found = [attributes(message, "IPVS_CMD_ATTR_SERVICE") for message in oracle.service("dump")]
        seen = {
            oracle_key(item): (
                item["IPVS_SVC_ATTR_SCHED_NAME"],
                # Without the flag that the kernel sets on a virtual server in its hash table.
                item["IPVS_SVC_ATTR_FLAGS"]["flags"] & ~0x2,
                item["IPVS_SVC_ATTR_TIMEOUT"],
            )
            for item in found
        }
        assert seen == {our_key(key): (value.scheduler, value.flags, value.timeout) for key, value in servers.items()}
        for key in servers:
            reals = [attributes(message, "IPVS_CMD_ATTR_DEST") for message in oracle.dest("dump", in_oracle(key))]
            assert {
                (str(item["IPVS_DEST_ATTR_ADDR"]), item["IPVS_DEST_ATTR_PORT"]): (
                    item["IPVS_DEST_ATTR_WEIGHT"],
                    item["IPVS_DEST_ATTR_FWD_METHOD"],
                )
                for item in reals
            } == {
                (real.ip, real.port): (value.weight, FORWARDING[value.forwarding])
                for real, value in real_servers.items()
                if real.server == key
            }


@pytest.mark.parametrize("family", FAMILIES)
def test_we_read_what_pyroute2_writes(family):
    service, pod = ("10.96.0.9", "10.244.1.9") if family == "IPv4" else ("fd00:96::9", "fd00:244::9")
    number = NUMBERS[family]
    # IPv6 prefix lengths are numbers in the machine's byte order, which pyroute2 accepts only as an address.
    netmask = "255.255.255.255" if family == "IPv4" else socket.inet_ntoa((128).to_bytes(4, sys.byteorder))
    bits = 32 if family == "IPv4" else 128
    with IpvsSocket() as ours, IPVS() as oracle:
        served = IPVSService(
            af=number, addr=service, port=443, protocol=socket.IPPROTO_TCP, sched_name="wrr", netmask=netmask
        )
        oracle.service("add", served)
        oracle.dest("add", served, IPVSDest(addr_family=number, addr=pod, port=8443, weight=3, fwd_method=0))
        key = VirtualServerKey("tcp", service, 443)
        servers, real_servers = VirtualServersResource(ours, family), RealServersResource(ours, family)
        assert servers.observe() == {key: VirtualServer("wrr", 0, 0, bits)}
        real = RealServerKey(key, pod, 8443)
        assert real_servers.observe() == {real: RealServer(3)}
        real_servers.apply(Change(removed={real: RealServer(3)}))
        servers.apply(Change(removed={key: VirtualServer("wrr", 0, 0, bits)}))
        assert list(oracle.service("dump")) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_ipsets_in_both_directions(family):
    known = definitions(family)
    by_type = {definition.type: name for name, definition in known.items()}
    address, network = ("10.96.0.1", "192.0.2.128/25") if family == "IPv4" else ("fd00:96::1", "2001:db8::/33")
    written = {
        by_type["hash:ip"]: address,
        by_type["hash:ip,port"]: f"{address},tcp:80",
        by_type["hash:ip,port,ip"]: f"{address},udp:53,{address}",
        by_type["hash:ip,port,net"]: f"{address},sctp:65535,{network}",
    }
    if "bitmap:port" in by_type:
        written[by_type["bitmap:port"]] = "30080"
    with IpsetSocket() as ours, IPSet() as oracle:
        sets, elements = SetsResource(ours, known, family), SetElementsResource(ours, known, family)
        sets.apply(Change(added=dict(known)))
        elements.apply(Change(added={SetElementKey(name, text): True for name, text in written.items()}))
        listed = {message.get_attr("IPSET_ATTR_SETNAME"): message for message in oracle.list()}
        assert set(listed) == set(known)
        for name, definition in known.items():
            message = listed[name]
            assert message.get_attr("IPSET_ATTR_TYPENAME") == definition.type
            found = message.get_attr("IPSET_ATTR_ADT").get_attrs("IPSET_ATTR_DATA")
            assert len(found) == (name in written), name
        # An element added by pyroute2 is observed and removed.
        number, other = NUMBERS[family], "10.96.0.2" if family == "IPv4" else "fd00:96::2"
        place = (other, PortEntry(8080, protocol=socket.IPPROTO_TCP))
        oracle.add(by_type["hash:ip,port"], place, family=number, etype="ip,port")
        added = SetElementKey(by_type["hash:ip,port"], f"{other},tcp:8080")
        assert added in elements.observe()
        elements.apply(Change(removed={added: True}))
        assert not oracle.test(by_type["hash:ip,port"], place, family=number, etype="ip,port")
        # A set created by pyroute2 is read with its definition.
        sets.apply(Change(removed=dict(known)))
        assert list(oracle.list()) == []
        name = by_type["hash:ip"]
        oracle.create(name, stype="hash:ip", family=number, maxelem=65536, hashsize=1024)
        assert sets.observe() == {name: SetDefinition("hash:ip", known[name].family, 65536)}
