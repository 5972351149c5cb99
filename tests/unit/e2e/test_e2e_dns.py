# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster's DNS server answers for Services of each kind as Kubernetes' specification says."""

from __future__ import annotations

import ipaddress
import struct
from typing import Any, Optional

import pytest

from tests.e2e.dns import AAAA, CNAME, SRV, A, Services, answer

SERVICES: dict[str, dict[str, Any]] = {
    "web": {
        "clusterIP": "10.96.0.5",
        "clusterIPs": ["10.96.0.5", "fd00:10:96::5"],
        "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
    },
    "outside": {"type": "ExternalName", "externalName": "web.default.svc.cluster.local."},
    "peers": {"clusterIP": "None"},
}
SLICES = [
    {
        "ports": [{"name": "peer", "port": 7000, "protocol": "UDP"}],
        "endpoints": [
            {"addresses": ["10.244.1.2"], "hostname": "first", "conditions": {"ready": True}},
            {"addresses": ["10.244.2.2"], "conditions": {}},
            {"addresses": ["10.244.2.3"], "conditions": {"ready": False}},
        ],
    }
]


def get(path: str) -> Optional[dict[str, Any]]:
    """Answer as the API server of a cluster with these Services does."""
    if "/endpointslices?" in path:
        return {"items": SLICES if path.endswith("%3Dpeers") else []}
    namespace, name = path.split("/")[4:7:2]
    return {"spec": SERVICES[name]} if namespace == "default" and name in SERVICES else None


def query(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 77, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def _name(data: bytes, place: int) -> tuple[str, int]:
    labels = []
    while data[place]:
        labels.append(data[place + 1 : place + 1 + data[place]].decode())
        place += 1 + data[place]
    return ".".join(labels), place + 1


def ask(name: str, kind: int = A) -> tuple[int, list[tuple[int, str]]]:
    """Return the response code and the records."""
    data = answer(query(name, kind), Services(get, "cluster.local").find)
    number, flags, questions, records, _, _ = struct.unpack_from("!6H", data)
    assert (number, questions, flags & 0x8100) == (77, 1, 0x8100)
    _, place = _name(data, 12)
    place += 4
    found = []
    for _ in range(records):
        _, place = _name(data, place)
        of, _, _, length = struct.unpack_from("!HHIH", data, place)
        content = data[place + 10 : place + 10 + length]
        place += 10 + length
        if of == CNAME:
            found.append((of, _name(content, 0)[0]))
        elif of == SRV:
            found.append((of, f"{_name(content, 6)[0]}:{int.from_bytes(content[4:6], 'big')}"))
        else:
            found.append((of, str(ipaddress.ip_address(content))))
    assert place == len(data)
    return flags & 0xF, found


@pytest.mark.parametrize(
    ("name", "kind", "records"),
    [
        ("web.default.svc.cluster.local", A, [(A, "10.96.0.5")]),
        ("WEB.default.svc.Cluster.Local", AAAA, [(AAAA, "fd00:10:96::5")]),
        ("_http._tcp.web.default.svc.cluster.local", SRV, [(SRV, "web.default.svc.cluster.local:80")]),
        ("outside.default.svc.cluster.local", A, [(CNAME, "web.default.svc.cluster.local"), (A, "10.96.0.5")]),
        ("peers.default.svc.cluster.local", A, [(A, "10.244.1.2"), (A, "10.244.2.2")]),
        ("peers.default.svc.cluster.local", AAAA, []),
        ("first.peers.default.svc.cluster.local", A, [(A, "10.244.1.2")]),
        ("10-244-2-2.peers.default.svc.cluster.local", A, [(A, "10.244.2.2")]),
        (
            "_peer._udp.peers.default.svc.cluster.local",
            SRV,
            [
                (SRV, "first.peers.default.svc.cluster.local:7000"),
                (SRV, "10-244-2-2.peers.default.svc.cluster.local:7000"),
            ],
        ),
    ],
)
def test_names_of_services(name: str, kind: int, records: list[tuple[int, str]]) -> None:
    assert ask(name, kind) == (0, records)


@pytest.mark.parametrize(
    "name",
    [
        "web.other.svc.cluster.local",
        "none.default.svc.cluster.local",
        "_https._tcp.web.default.svc.cluster.local",
        "second.peers.default.svc.cluster.local",
        "10-244-2-3.peers.default.svc.cluster.local",
        "web.default.svc.cluster.local.default.svc.cluster.local",
        "a%2fb.default.svc.cluster.local",
        "example.com",
    ],
)
def test_other_names_do_not_exist(name: str) -> None:
    assert ask(name) == (3, [])


def test_queries_that_are_not_well_formed_are_refused() -> None:
    whole = query("web.default.svc.cluster.local", A)
    find = Services(get, "cluster.local").find
    for end in range(12, len(whole)):
        assert answer(whole[:end], find)[:4] == struct.pack("!HH", 77, 0x8581)
    with pytest.raises(ValueError, match="shorter than a header"):
        answer(whole[:11], find)


def test_a_long_answer_is_cut_off_for_a_datagram() -> None:
    whole = query("web.default.svc.cluster.local", A)
    find = Services(get, "cluster.local").find
    full = answer(whole, find)
    assert answer(whole, find, len(full)) == full
    short = answer(whole, find, len(full) - 1)
    assert struct.unpack_from("!4H", short) == (77, 0x8780, 1, 0)
