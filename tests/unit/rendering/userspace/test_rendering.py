# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rendering of userspace mode: ServicePorts to listeners and addresses."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.listeners import (
    listeners_document,
    parse_listeners,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.served import served_cluster_ips
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import (
    ADDRESSES,
    DEVICE,
    DEVICES,
    LISTENERS,
    Listener,
    ListenerKey,
)
from tests.unit.rendering.iptables.routes import by_key, endpoint, route

REMOTE, LOCAL = endpoint("10.180.2.1"), endpoint("10.180.0.1", local=True)
SETTINGS = DataplaneSettings(
    family="IPv4",
    node_ip="192.168.0.2",
    node_addresses=(("lo", "127.0.0.1"), ("eth0", "192.168.0.2"), ("eth1", "192.168.1.2")),
    node_port_addresses=("127.0.0.1", "192.168.0.2", "192.168.1.2"),
)


def listeners(*routes: Any, settings: DataplaneSettings = SETTINGS) -> dict[str, Listener]:
    tables = RENDERING.desired_tables(by_key(*routes), settings)
    return {str(key): value for key, value in tables[LISTENERS].items()}


def addresses(*routes: Any, settings: DataplaneSettings = SETTINGS) -> list[str]:
    return list(RENDERING.desired_tables(by_key(*routes), settings)[ADDRESSES])


def test_the_name_of_the_device_fits() -> None:
    assert len(DEVICE) <= 15
    assert RENDERING.desired_tables({}, SETTINGS) == {DEVICES: {DEVICE: "dummy"}, ADDRESSES: {}, LISTENERS: {}}


def test_every_address_of_a_service_listens() -> None:
    item = route(
        cluster_ip="10.96.0.1",
        endpoints=(LOCAL, REMOTE),
        node_port=30080,
        external_ips=("192.168.1.2", "198.51.100.1"),
        load_balancer_ips=("203.0.113.1",),
    )
    found = listeners(item)
    port = item.port
    assert set(found) == {
        *(f"{address}:{port}/TCP" for address in ("10.96.0.1", "192.168.1.2", "198.51.100.1", "203.0.113.1")),
        *(f"{address}:30080/TCP" for address in ("127.0.0.1", "192.168.0.2", "192.168.1.2")),
    }
    assert {value.endpoints for value in found.values()} == {(("10.180.0.1", 80), ("10.180.2.1", 80))}
    assert {value.owner for value in found.values()} == {str(item.key)}
    # An external IP that the node itself has is not bound to the device.
    assert addresses(item) == ["10.96.0.1", "198.51.100.1", "203.0.113.1"]


def test_traffic_policies() -> None:
    fields = {"cluster_ip": "10.96.0.1", "endpoints": (LOCAL, REMOTE), "external_ips": ("198.51.100.1",)}
    found = listeners(route(external_local=True, **fields))
    assert [len(value.endpoints) for value in found.values()] == [2, 1]
    found = listeners(route(internal_local=True, **fields))
    assert [len(value.endpoints) for value in found.values()] == [1, 2]
    # Without local endpoints, clients are refused; other modes would drop their packets.
    item = route(external_local=True, **{**fields, "endpoints": (REMOTE,)})
    assert listeners(item)[f"198.51.100.1:{item.port}/TCP"].endpoints == ()


@pytest.mark.parametrize(
    ("ranges", "sources"),
    [
        ((), ()),
        (("10.0.0.0/8",), ("10.0.0.0/8",)),
        # The node's own connections to an address that it holds come from that address.
        (("192.168.0.0/16",), ("192.168.0.0/16", "203.0.113.1/32")),
    ],
)
def test_source_ranges_restrict_load_balancer_addresses_only(ranges: Any, sources: Any) -> None:
    item = route(cluster_ip="10.96.0.1", load_balancer_ips=("203.0.113.1",), source_ranges=ranges)
    found = listeners(item)
    assert found[f"10.96.0.1:{item.port}/TCP"].sources == ()
    assert found[f"203.0.113.1:{item.port}/TCP"].sources == sources


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1"])
def test_the_agent_never_connects_to_addresses_only_the_node_may_reach(address: str) -> None:
    """In the other modes the kernel forwards no packet to such an endpoint."""
    item = route(cluster_ip="10.96.0.1", endpoints=(REMOTE, endpoint(address)))
    assert [value.endpoints for value in listeners(item).values()] == [(("10.180.2.1", 80),)]
    assert [found.ip for found in RENDERING.endpoints(item, False, DataplaneSettings("IPv4"))] == ["10.180.2.1"]


def test_sctp_is_refused_by_name() -> None:
    item = route(cluster_ip="10.96.0.1", protocol="SCTP", endpoints=(REMOTE,))
    assert listeners(item) == {}
    assert RENDERING.refusal(item) == "userspace mode forwards TCP and UDP only, not SCTP"


def test_text_and_served_addresses() -> None:
    item = route(cluster_ip="10.96.0.1", endpoints=(REMOTE,), affinity_seconds=60)
    empty = route(name="empty", cluster_ip="10.96.0.2")
    tables = RENDERING.desired_tables(by_key(item, empty), SETTINGS)
    texts = RENDERING.texts("IPv4", tables)
    assert f"address add 10.96.0.1/32 dev {DEVICE}\n" in texts["ip IPv4"]
    assert texts["listeners IPv4"].splitlines() == [
        f"listen tcp 10.96.0.1:{item.port} affinity 60s forward 10.180.2.1:80 # {item.key}",
        f"listen tcp 10.96.0.2:{empty.port} refuse # {empty.key}",
    ]
    assert served_cluster_ips(tables.values()) == {"10.96.0.1"}


def test_listeners_survive_the_control_socket() -> None:
    item = route(
        cluster_ip="10.96.0.1", endpoints=(REMOTE,), load_balancer_ips=("203.0.113.1",), source_ranges=("10.0.0.0/8",)
    )
    table = RENDERING.desired_tables(by_key(item), SETTINGS)[LISTENERS]
    assert parse_listeners(listeners_document(table)) == table


@pytest.mark.parametrize(
    "document",
    [
        None,
        3,
        [1],
        [["tcp"]],
        [["tcp", "x", 1, "", [], 0, []]],
        [["tcp", "192.0.2.1", float("inf"), "", [], 0, []]],
        [["tcp", "192.0.2.1", 1, "", [["192.0.2.2", 10**400, 3]], 0, []]],
    ],
)
def test_an_answer_that_holds_no_listeners_is_refused(document: Any) -> None:
    with pytest.raises(KernelError, match="the agent's answer about its listeners is not valid"):
        parse_listeners(document)


def test_a_key_names_address_and_port() -> None:
    assert str(ListenerKey("udp", "fd00::1", 53)) == "[fd00::1]:53/UDP"
