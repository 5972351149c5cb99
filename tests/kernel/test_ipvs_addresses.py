# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The dummy device and its addresses on a real kernel, verified with ip."""

from __future__ import annotations

import json
import subprocess
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import NETLINK_ROUTE
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink.links import (
    AddressesResource,
    DummyDeviceResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import DEVICE
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Stage, apply_plan, plan

pytestmark = pytest.mark.uml

V4 = {f"10.96.{number >> 8}.{number & 255}" for number in range(1000)}
V6 = {f"fd00:96::{number + 1:x}" for number in range(300)}


@pytest.fixture
def netlink() -> Iterator[NetlinkSocket]:
    with NetlinkSocket(NETLINK_ROUTE) as sock:
        yield sock


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def bound() -> set[str]:
    shown = json.loads(ip("-json", "address", "show", "dev", DEVICE))
    return {f"{entry['local']}/{entry['prefixlen']}" for entry in shown[0]["addr_info"]}


def converge(sock: NetlinkSocket, device: bool, v4: set[str], v6: set[str]) -> int:
    devices: dict[str, str] = {DEVICE: "dummy"} if device else {}
    planned = plan(
        [
            Stage(DummyDeviceResource(sock), devices),
            Stage(AddressesResource(sock, "IPv4"), dict.fromkeys(v4, True)),
            Stage(AddressesResource(sock, "IPv6"), dict.fromkeys(v6, True)),
        ]
    )
    apply_plan(planned)
    return sum(len(one.change) for one in planned)


def test_addresses_and_the_device_are_added_and_removed(netlink):
    assert converge(netlink, True, V4, V6) == 1301
    assert bound() == {f"{address}/32" for address in V4} | {f"{address}/128" for address in V6}
    assert "state DOWN" in ip("link", "show", DEVICE)
    assert converge(netlink, True, V4, V6) == 0
    some = set(sorted(V4)[:3])
    assert converge(netlink, True, some, set()) == 997 + 300
    assert bound() == {f"{address}/32" for address in some}
    assert converge(netlink, False, set(), set()) == 4
    assert DEVICE not in ip("link")
    assert converge(netlink, False, set(), set()) == 0


def test_other_devices_and_link_local_addresses_are_left_alone(netlink):
    ip("link", "add", "other", "type", "dummy")
    ip("link", "add", DEVICE, "type", "dummy")
    ip("link", "set", DEVICE, "up")
    ip("address", "add", "10.96.9.9/32", "dev", "other")
    ip("address", "add", "10.96.0.1/32", "dev", DEVICE)
    assert converge(netlink, True, {"10.96.0.2"}, {"fd00::1"}) == 3
    assert {text for text in bound() if not text.startswith("fe80")} == {"10.96.0.2/32", "fd00::1/128"}
    assert any(text.startswith("fe80") for text in bound())
    assert "10.96.9.9/32" in ip("address", "show", "dev", "other")
    assert converge(netlink, True, {"10.96.0.2"}, {"fd00::1"}) == 0


def test_adding_existing_and_deleting_missing_addresses_succeeds(netlink):
    device, addresses = DummyDeviceResource(netlink), AddressesResource(netlink, "IPv4")
    for _repeat in range(2):
        device.apply(Change(added={DEVICE: "dummy"}))
        addresses.apply(Change(added={"10.96.0.1": True}))
    for _repeat in range(2):
        addresses.apply(Change(removed={"10.96.0.1": True}))
    for _repeat in range(2):
        device.apply(Change(removed={DEVICE: "dummy"}))
    addresses.apply(Change(removed={"10.96.0.1": True}))


def test_a_device_of_another_kind_is_not_touched(netlink):
    ip("link", "add", DEVICE, "type", "bridge")
    for wanted in (True, False):
        with pytest.raises(KernelError, match="device kube-ipvs0: it is not a dummy device but bridge"):
            converge(netlink, wanted, set(), set())
    assert DEVICE in ip("link", "show", "type", "bridge")


def test_errors_name_the_address(netlink):
    with pytest.raises(KernelError, match="device kube-ipvs0: it does not exist"):
        AddressesResource(netlink, "IPv4").apply(Change(added={"10.96.0.1": True}))
    converge(netlink, True, set(), set())
    with pytest.raises(KernelError, match=r"address 'fd00::1' cannot be bound: it is not an IPv4 address"):
        AddressesResource(netlink, "IPv4").apply(Change(added={"fd00::1": True}))
