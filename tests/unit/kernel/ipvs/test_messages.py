# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Encoding and decoding of netlink messages and tool text, without a kernel."""

from __future__ import annotations

import socket
import struct
from typing import Optional

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.messages import read_entry
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.stale import frontends
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipset import messages as ipset_messages
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs import messages as ipvs_messages
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import (
    attribute,
    attribute_text,
    nested,
    parse_attributes,
    text_attribute,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.encoding import encode_ready
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import (
    HEADER,
    NETLINK_ROUTE,
    NLM_F_REQUEST,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    SetDefinition,
    SetElementKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.text import (
    ip_batch_text,
    ipset_text,
    ipvsadm_text,
)
from tests.unit.rendering.iptables.routes import endpoint, route

PROC = """IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
FWM  00000007 rr
  -> 0AF40101:1F90      Masq    1      4          0
TCP  0A600001:01BB rr  persistent 1080000 FFFFFFFF
  -> 0AF4010B:1F90      Masq    1      0          0
  -> 0AF4010C:1F90      Route   0      2          3
UDP  [fd00:0010:0096:0000:0000:0000:0000:0001]:0035 mh
  -> [fd00:0010:0244:0000:0000:0000:0000:0001]:0035      Masq    1      0          7
SCTP 0A600002:0009 rr ops
"""


def test_proc_table():
    table = ipvs_messages.parse_proc(PROC.splitlines(), "IPv4")
    server = VirtualServerKey("tcp", "10.96.0.1", 443)
    assert table.servers == {
        RealServerKey(server, "10.244.1.11", 8080): RealServer(1),
        RealServerKey(server, "10.244.1.12", 8080): RealServer(0, "route"),
    }
    assert table.connections == {RealServerKey(server, "10.244.1.12", 8080): 5}
    assert table.used == table.connections
    assert table.seen == {server, VirtualServerKey("sctp", "10.96.0.2", 9)}
    table = ipvs_messages.parse_proc(PROC.splitlines(), "IPv6")
    key = RealServerKey(VirtualServerKey("udp", "fd00:10:96::1", 53), "fd00:10:244::1", 53)
    # All of UDP count as used although they are inactive; of TCP only the established ones.
    assert table == ({key: RealServer(1)}, {key: 7}, {key: 7}, {key.server})


def test_proc_table_has_real_servers_of_the_other_family():
    lines = """TCP  C000020A:01BB rr
  -> [2001:0db8:0000:0000:0000:0000:0000:0021]:01BB      Tunnel  3      1          2
  -> C0000215:01BB      Tunnel  1      0          0
TCP  [2001:0db8:0000:0000:0000:0000:0000:000a]:01BB rr
  -> C0000216:01BB      Tunnel  1      4          0
""".splitlines()
    table = ipvs_messages.parse_proc(lines, "IPv4")
    server = VirtualServerKey("tcp", "192.0.2.10", 443)
    key = RealServerKey(server, "2001:db8::21", 443)
    assert table.servers == {
        key: RealServer(3, "tunnel"),
        RealServerKey(server, "192.0.2.21", 443): RealServer(1, "tunnel"),
    }
    assert (table.connections, table.seen) == ({key: 3}, {server})
    table = ipvs_messages.parse_proc(lines, "IPv6")
    server = VirtualServerKey("tcp", "2001:db8::a", 443)
    assert table.servers == {RealServerKey(server, "192.0.2.22", 443): RealServer(1, "tunnel")}
    assert table.seen == {server}


@pytest.mark.parametrize("line", ["TCP", "TCP 0A60:X rr", "TCP 0A600001:01BB rr\n  -> 0AF4010B:1F90 Masq x 0 0"])
def test_invalid_proc_table(line):
    with pytest.raises(KernelError, match="/proc/net/ip_vs: cannot parse line"):
        ipvs_messages.parse_proc(line.splitlines(), "IPv4")


def decoded_service(message: bytes, start: int = 0):
    return ipvs_messages.decode_service(ipvs_messages.service_attributes(memoryview(message), start, len(message)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (VirtualServerKey("tcp", "10.96.0.1", 80), VirtualServer("rr", 0, 0, 32)),
        (VirtualServerKey("udp", "10.96.0.1", 65535), VirtualServer("wlc", 1, 10800, 24)),
        (VirtualServerKey("sctp", "fd00::1", 9), VirtualServer("mh", 0x11, 5, 128)),
    ],
)
def test_virtual_server_survives_encoding(key, value):
    message = ipvs_messages.ServiceEncoder(30).message(ipvs_messages.NEW_SERVICE, key, value)
    assert HEADER.unpack_from(message) == (len(message), 30, NLM_F_REQUEST, 0, 0)
    assert decoded_service(message, 16) == (key, value)


def test_unsupported_virtual_servers_are_not_decoded():
    key = VirtualServerKey("tcp", "10.96.0.1", 80)
    marked = nested(1, attribute(1, struct.pack("=H", socket.AF_INET)), attribute(5, bytes(4)))
    assert decoded_service(bytes(4) + marked) is None
    assert decoded_service(bytes(4)) is None
    for bad in (key._replace(protocol="icmp"), key._replace(address="nonsense")):
        with pytest.raises(KernelError):
            ipvs_messages.service_identity(bad)


def test_cached_real_server_messages_are_not_mixed_up():
    first, second = VirtualServerKey("tcp", "10.96.0.1", 80), VirtualServerKey("udp", "10.96.0.2", 53)
    six = VirtualServerKey("sctp", "fd00::1", 9)
    entries = [
        (RealServerKey(first, "10.244.1.1", 80), RealServer(1)),
        (RealServerKey(second, "10.244.1.1", 5353), RealServer(2, "route")),
        (RealServerKey(first, "10.244.1.2", 80), RealServer(1)),
        (RealServerKey(six, "fd00::7", 5353), RealServer(2, "route")),
    ]
    together = ipvs_messages.RealServerEncoder(30)
    command = ipvs_messages.NEW_DEST

    def alone(key: RealServerKey, value: Optional[RealServer]) -> bytes:
        return next(ipvs_messages.RealServerEncoder(30).messages(command, [(key, value)]))

    assert list(together.messages(command, entries)) == [alone(key, value) for key, value in entries]
    names: list[tuple[RealServerKey, Optional[RealServer]]] = [(key, None) for key, _value in entries]
    assert list(together.messages(command, names)) == [alone(key, None) for key, _value in entries]
    for (key, value), message in zip(entries, together.messages(command, entries)):
        assert HEADER.unpack_from(message) == (len(message), 30, NLM_F_REQUEST, 0, 0)
        table = ipvs_messages.empty_table()
        ipvs_messages.decode_dest(memoryview(message), 16, len(message), key.server, table)
        assert table.servers == {key: value}
    with pytest.raises(KernelError, match="forwarding must be one of"):
        list(together.messages(command, [(entries[0][0], RealServer(1, "teleport"))]))
    with pytest.raises(KernelError, match="is not an IP address"):
        list(together.messages(command, [(RealServerKey(first, "10.244.1", 80), None)]))


def decoded(batch: ipset_messages.ElementBatch) -> list[str]:
    payload = memoryview(batch.message[2])
    return ipset_messages.decode_elements(payload, 0, len(payload))


@pytest.mark.parametrize(
    ("set_type", "elements"),
    [
        ("hash:ip", ["10.96.0.1", "fd00::1"]),
        ("hash:ip,port", ["10.96.0.1,tcp:80", "10.96.0.1,udp:53", "fd00::1,sctp:65535"]),
        ("hash:ip,port,ip", ["10.244.1.1,tcp:80,10.244.1.1", "fd00::1,udp:1,fd00::1"]),
        ("hash:ip,port,net", ["1.2.3.4,tcp:80,10.0.0.0/8", "1.2.3.4,tcp:80,10.0.0.1", "fd00::1,tcp:80,fd00::/16"]),
        ("bitmap:port", ["1", "30080", "65535"]),
    ],
)
def test_elements_survive_encoding(set_type, elements):
    (batch,) = ipset_messages.element_batches(7, ipset_messages.ADD, "KUBE-X", set_type, elements)
    assert batch.elements == elements
    assert decoded(batch) == elements


def test_many_elements_need_several_messages():
    elements = [f"10.{number >> 8}.{number & 255}.1,tcp:80,10.0.0.1" for number in range(5000)]
    batches = list(ipset_messages.element_batches(7, ipset_messages.ADD, "KUBE-X", "hash:ip,port,ip", elements))
    assert len(batches) > 1 and all(len(batch.message[2]) < 65536 for batch in batches)
    assert [element for batch in batches for element in batch.elements] == elements
    assert [element for batch in batches for element in decoded(batch)] == elements


@pytest.mark.parametrize(
    ("set_type", "element"),
    [
        ("hash:ip", "10.0.0.x"),
        ("hash:ip,port", "10.0.0.1,ipx:4"),
        ("hash:ip,port", "10.0.0.1,tcp:70000"),
        ("hash:ip,port", "10.0.0.1,tcp:"),
        ("bitmap:port", "-1"),
        ("hash:ip,port,net", "10.0.0.1,tcp:80,10.0.0.0/300"),
    ],
)
def test_invalid_elements(set_type, element):
    with pytest.raises(KernelError, match=r"set KUBE-X: .* is not an element of a set of type"):
        list(ipset_messages.element_batches(7, ipset_messages.ADD, "KUBE-X", set_type, [element]))


def test_messages_are_numbered_and_split_and_only_the_last_of_a_send_requests_an_answer():
    with NetlinkSocket(NETLINK_ROUTE) as sock:
        sends = sock.encode([(16, 0x400, b"abcde")] * 3, first=7)
        assert [(first, last) for _data, first, last in sends] == [(7, 9)]
        data = sends[0][0]
        assert len(data) == 3 * 24
        headers = [HEADER.unpack_from(data, offset) for offset in (0, 24, 48)]
        assert headers == [(21, 16, 0x401, 7, sock.port), (21, 16, 0x401, 8, 0), (21, 16, 0x405, 9, 0)]
        many = sock.encode([(16, 0, bytes(1000))] * 20_000, first=1)
        assert len(many) > 1 and many[-1][2] == 20_000
        assert [first for _data, first, _last in many[1:]] == [last + 1 for _data, _first, last in many[:-1]]
        assert len(sock.encode([(16, 0, bytes(1000))] * 20_000, first=1, single_send=True)) == 1


@pytest.mark.parametrize("payloads", [[b"abcd"] * 5000, [b"abcd", b"abcdefgh"] * 2500, [bytes(100_000)] * 90])
def test_whole_messages_decode_like_their_parts(payloads):
    with NetlinkSocket(NETLINK_ROUTE) as sock:
        ready = [HEADER.pack(16 + len(data), 20, NLM_F_REQUEST, 0, 0) + data for data in payloads]
        chunks = list(sock.chunks(ready))
        assert len(chunks) > 1 and [message for chunk in chunks for message in chunk] == ready
        for chunk in chunks:
            data = encode_ready(chunk, first=3, origin=sock.port)
            parts = sock.encode([(20, 0, message[16:]) for message in chunk], first=3, single_send=True)
            assert data == parts[0][0]
        assert list(sock.chunks([])) == []


def test_attributes():
    data = attribute(1, b"abc") + nested(2, text_attribute(3, "x")) + b"\x03\x00"
    found = parse_attributes(memoryview(data), 0, len(data))
    assert bytes(found[1]) == b"abc" and set(found) == {1, 2}
    assert attribute_text(parse_attributes(found[2], 0, len(found[2]))[3]) == "x"


def test_text_in_the_format_of_the_usual_tools():
    server = VirtualServerKey("tcp", "10.96.0.1", 80)
    six = VirtualServerKey("sctp", "fd00::1", 9)
    text = ipvsadm_text(
        {six: VirtualServer("mh", 0x11, 60, 64), server: VirtualServer("rr", 1, 10800, 24)},
        {
            RealServerKey(server, "10.244.1.1", 8080): RealServer(1),
            RealServerKey(six, "fd01::1", 9): RealServer(2, "route"),
        },
    )
    assert text.splitlines() == [
        "-A --sctp-service [fd00::1]:9 -s mh -p 60 -M 64 -b mh-port",
        "-a --sctp-service [fd00::1]:9 -r [fd01::1]:9 -g -w 2",
        "-A -t 10.96.0.1:80 -s rr -p 10800 -M 255.255.255.0",
        "-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 1",
    ]
    sets = {"B": SetDefinition("bitmap:port", ""), "A": SetDefinition("hash:ip", "IPv6")}
    assert ipset_text(sets, [SetElementKey("A", "fd00::1")]).splitlines() == [
        "create A hash:ip family inet6 hashsize 1024 maxelem 65536",
        "add A fd00::1",
        "create B bitmap:port range 0-65535",
    ]
    assert ip_batch_text(["fd00::1", "10.96.0.1"]).splitlines() == [
        "link add kube-ipvs0 type dummy",
        "address add 10.96.0.1/32 dev kube-ipvs0",
        "address add fd00::1/128 dev kube-ipvs0",
    ]


def conntrack_tuple(kind: int, source: bytes, to: bytes, ports: bytes, protocol: int, turned: bool) -> bytes:
    addresses = [attribute(1, source), attribute(2, to)]
    numbers = [attribute(1, bytes((protocol,)))]
    numbers += [attribute(2, ports[:2]), attribute(3, ports[2:])]
    if turned:
        addresses.reverse()
        numbers.reverse()
    return nested(kind, nested(1, *addresses), nested(2, *numbers))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("protocol", [socket.IPPROTO_UDP, socket.IPPROTO_TCP])
def test_conntrack_entries_are_read_whatever_the_order_of_attributes(protocol, turned):
    client, service, pod = bytes((192, 0, 2, 1)), bytes((10, 96, 0, 10)), bytes((10, 244, 1, 5))
    parts = [
        conntrack_tuple(1, client, service, b"\x9c\x40\x00\x35", protocol, turned),
        conntrack_tuple(2, pod, client, b"\x14\xe9\x9c\x40", protocol, turned),
    ]
    payload = memoryview(bytes(4) + b"".join(reversed(parts) if turned else parts))
    entry = read_entry(payload, 0, len(payload), ipv6=False)
    if protocol == socket.IPPROTO_TCP:
        assert entry is None
        return
    assert entry is not None
    assert (entry.destination, entry.reply_source) == (service + b"\x00\x35", pod + b"\x14\xe9")


def test_udp_frontends_share_addresses():
    one = route(protocol="UDP", external_ips=("50.60.70.81",), node_port=3001, endpoints=[endpoint("10.0.0.1")])
    two = route(name="b", protocol="UDP", cluster_ip="172.30.0.42", external_ips=("50.60.70.81",),
                endpoints=[endpoint("10.0.0.2", state="T"), endpoint("10.0.0.3", state="ST")])  # fmt: skip
    known = frontends(["UDP"], [one, two, route(name="c", endpoints=[endpoint("10.0.0.4")])])["UDP"]
    external = bytes((50, 60, 70, 81, 0, 80))
    assert not known.is_stale(external, bytes((10, 0, 0, 1, 0, 80)))
    assert not known.is_stale(external, bytes((10, 0, 0, 3, 0, 80)))
    assert known.is_stale(external, bytes((10, 0, 0, 2, 0, 80)))
    assert known.is_stale(bytes((9, 9, 9, 9)) + (3001).to_bytes(2, "big"), bytes((10, 0, 0, 3, 0, 80)))
    assert not known.is_stale(bytes((9, 9, 9, 9, 0, 80)), bytes((10, 0, 0, 2, 0, 80)))
