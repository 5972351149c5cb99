# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stable hashing with real packets: the kernel sends each client to the endpoint that the plan says, on every node."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import SLOTS
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import ServicePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.features import can_hash
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.hashing import JHASH, endpoint_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING, NftablesRendering
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.slot_limit import within_limit
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import (
    Endpoint,
    ServicePortInfo,
    ServicePortName,
)
from tests.kernel.packet_network import (
    CLUSTER_IPS,
    FAMILIES,
    NAMES,
    PORTS,
    VIPS,
    Network,
    network,
    program,
    route,
    settings,
)
from tests.lab.system import ip_batch

__all__ = ["network"]  # a fixture
Client = tuple[str, int]
CLIENTS = 60
NODE_PORT = 3001

CLIENT = """
import json, socket, sys
family, target, port, clients = json.load(sys.stdin)
found = []
for client in clients:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        sock.bind(tuple(client))
        sock.connect((target, port))
        sock.send(b"x")
        found.append(sock.recv(100).decode().split()[0])
print(json.dumps(found))
"""


@pytest.fixture
def clients(network: Network) -> dict[str, list[Client]]:
    """Return clients outside, each with a different address and port."""
    space = f"{network.prefix}-x"
    forms = {"IPv4": "203.0.113.{}", "IPv6": "2001:db8:113::{:x}"}
    made = {family: [(forms[family].format(5 + each), 20000 + each) for each in range(CLIENTS)] for family in FAMILIES}
    ip_batch([f"address add {address}/32 dev eth0" for address, _port in made["IPv4"]], space)
    ip_batch([f"address add {address}/128 dev eth0 nodad" for address, _port in made["IPv6"]], space)
    return made


def answered(network: Network, family: str, target: str, port: int, clients: list[Client]) -> list[str]:
    """Return which endpoint answers each client, as ``l:80``."""
    done = subprocess.run(
        ["ip", "netns", "exec", f"{network.prefix}-x", sys.executable, "-c", CLIENT],
        input=json.dumps([10 if family == "IPv6" else 2, target, port, clients]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))


def hashed(family: str, *flags: str) -> ServicePortInfo:
    """Return a ServicePort with six endpoints, three on each of two nodes."""
    endpoints = tuple(Endpoint(NAMES[family][place], port, is_local=place == "L") for place in "LR" for port in PORTS)
    return route(
        family,
        1,
        "",
        key=ServicePortName("ns", "svc1", "dns", "UDP"),
        node_port=NODE_PORT,
        load_balancer_ips=(VIPS[family].format(1),),
        cluster=endpoints,
        reachable=endpoints,
        has_any=True,
        policy=ServicePolicy(scheduler="mh", scheduler_flags=flags),
    )


def planned(family: str, info: ServicePortInfo, clients: list[Client]) -> list[str]:
    """Return which endpoint should answer each client."""
    places = {NAMES[family]["L"]: "l", NAMES[family]["R"]: "r"}
    chosen = [endpoint_of(info, info.cluster, *client) for client in clients]
    return [f"{places[endpoint.ip]}:{endpoint.port}" for endpoint in chosen]


@pytest.mark.parametrize("family", FAMILIES)
def test_clients_reach_the_endpoint_of_their_slot(
    network: Network, family: str, clients: dict[str, list[Client]]
) -> None:
    """On a node, on another one that knows the endpoints in another order, and after one endpoint was removed."""
    own, chosen = clients[family], settings(family, schedulers=frozenset((JHASH,)))
    assert can_hash(family)
    info = hashed(family)
    expected = planned(family, info, own)
    assert len(set(expected)) == 6
    program([info], chosen)
    frontends = [
        (CLUSTER_IPS[family].format(1), 80), (VIPS[family].format(1), 80), (NAMES[family]["N"], NODE_PORT),
    ]  # fmt: skip
    for frontend in frontends:
        assert answered(network, family, *frontend, own) == expected
    # Other ports than before, so that no connection is known.
    again = [(address, port + 1000) for address, port in own]
    backwards = info.cluster[::-1]
    program([], chosen)
    program([info._replace(cluster=backwards, reachable=backwards)], chosen)
    assert answered(network, family, *frontends[0], again) == expected
    fewer = info._replace(cluster=info.cluster[:2] + info.cluster[3:])
    program([fewer], chosen)
    later = answered(network, family, *frontends[0], [(address, port + 2000) for address, port in own])
    assert later == planned(family, fewer, own)
    gone = f"l:{PORTS[2]}"
    assert gone not in later
    assert [now for now, before in zip(later, expected) if before != gone] == [
        before for before in expected if before != gone
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_port_of_a_client_may_count(network: Network, family: str, clients: dict[str, list[Client]]) -> None:
    info = hashed(family, "mh-port")
    program([info], settings(family, schedulers=frozenset((JHASH,))))
    (address, _port), *_others = clients[family]
    same = [(address, 30000 + each) for each in range(CLIENTS)]
    expected = planned(family, info, same)
    assert len(set(expected)) == 6
    assert answered(network, family, CLUSTER_IPS[family].format(1), 80, same) == expected
    assert answered(network, family, NAMES[family]["N"], NODE_PORT, same) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_repair_of_slots_that_another_program_removed(family: str) -> None:
    info = hashed(family)
    desired = RENDERING.desired_tables({info.key: info}, settings(family, schedulers=frozenset((JHASH,))))
    table = desired["table objects"]
    with NftablesResource(family) as resource:
        resource.apply(difference(resource.observe(), table))
        (name,) = {key[1] for key in table if key[0] == "list" and key[1].startswith("service-slots")}
        where = ["ip6" if family == "IPv6" else "ip", "kube-proxy", name]
        subprocess.run(["nft", "flush", "map", *where], check=True, capture_output=True)
        found = difference(resource.observe(), table)
        assert {key.name for key in found.added} == {name}
        resource.apply(found)
        assert not difference(resource.observe(), table)


def numbered(family: str, number: int, minute: int) -> ServicePortInfo:
    """Return a ServicePort with a different cluster IP and three endpoints, created in a minute."""
    form = "fd00:10:96::{:x}:{:x}" if family == "IPv6" else "10.96.{}.{}"
    info = hashed(family)
    return info._replace(
        key=ServicePortName("ns", f"svc{number}", "dns", "UDP"),
        cluster_ip=form.format(number >> 8, number & 255),
        node_port=0,
        load_balancer_ips=(),
        cluster=info.cluster[:3],
        reachable=info.cluster[:3],
        created=f"2026-01-{1 + minute // 1440:02}T{minute // 60 % 24:02}:{minute % 60:02}:00Z",
    )


@pytest.mark.parametrize(
    ("family", "limit"),
    [("IPv4", 12), ("IPv6", 12), pytest.param("IPv4", RENDERING.most_lists // 2, marks=pytest.mark.full)],
)
def test_the_kernel_holds_no_more_slots_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, family: str, limit: int
) -> None:
    """That of one namespace, half of all. Other Services are served, too, and one more changes no slot of another."""
    monkeypatch.setattr(NftablesRendering, "most_lists", 2 * limit)
    chosen = settings(family, schedulers=frozenset((JHASH,)))
    infos = [numbered(family, number, limit + 10 - number) for number in range(limit + 5)]

    def tables(chosen_infos: list[ServicePortInfo]) -> dict[Any, Any]:
        ports = within_limit(RENDERING, {info.key: info for info in chosen_infos})
        return dict(RENDERING.desired_tables(ports, chosen)["table objects"])

    with NftablesResource(family) as resource:
        resource.apply(difference(resource.observe(), tables(infos)))
        held = resource.observe()
        assert not difference(held, tables(infos))
        lists = {key: value for key, value in held.items() if key[0] == "list" and "slots" in key[1]}
        assert len(lists) == limit and sum(map(len, lists.values())) == limit * SLOTS
        random = [value for key, value in held.items() if key[:2] == ("list", "service-endpoints")]
        assert [len(value) for value in random] == [3] * 5
        # The newest, and one that is older than all others.
        more = difference(held, tables([*infos, numbered(family, limit + 5, limit + 20)]))
        assert not more.removed and not [key for key in more.added if "slots" in key[1]]
        more = difference(held, tables([*infos, numbered(family, limit + 5, 0)]))
        resource.apply(more)
        changed = [key for key in (*more.added, *more.removed) if key[0] == "list" and "slots" in key[1]]
        assert len(changed) == 2
        assert not difference(resource.observe(), tables([*infos, numbered(family, limit + 5, 0)]))
