# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A socket to IPVS whose family of generic netlink has ended is not confused with a server that does not exist."""

from __future__ import annotations

import errno
import struct

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs import servers
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import (
    attribute,
    parse_attributes,
    text_attribute,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.outcomes import (
    MessageError,
    NetlinkRefusal,
    Outcome,
    Reply,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change

SERVER = VirtualServerKey("tcp", "10.96.0.1", 80)
REAL = RealServerKey(SERVER, "10.0.0.1", 8080)
_CONTROL, _NUMBER, _NAME = 16, 1, 2


class Kernel:
    """The families of generic netlink, by number."""

    def __init__(self):
        self.families = {30: "IPVS"}
        self.closed = 0

    def load_again(self):
        self.families = {31: "IPVS"}


class Netlink:
    """A socket to that kernel, which has IPVS without any server."""

    kernel: Kernel

    def __init__(self, _protocol):
        self.progress = None

    def close(self):
        self.kernel.closed += 1

    def _refuse(self, number):
        raise NetlinkRefusal(MessageError(0, number, "", b""))

    def request(self, kind, payload, flags=0):
        families = self.kernel.families
        if kind != _CONTROL:
            return self._refuse(errno.ENOENT) if kind not in families else []
        asked = parse_attributes(memoryview(payload), 4, len(payload))
        for number, name in families.items():
            packed = struct.pack("=H", number)
            if bytes(asked.get(_NUMBER, b"")) == packed or bytes(asked.get(_NAME, b"")) == name.encode() + b"\0":
                return [Reply(0, _CONTROL, bytes(4) + attribute(_NUMBER, packed) + text_attribute(_NAME, name))]
        return self._refuse(errno.ENOENT)

    def dump(self, kind, payload, flags=0):
        if kind not in self.kernel.families:
            self._refuse(errno.ENOENT)
        # IPVS answers so for a virtual server that does not exist.
        return self._refuse(errno.ESRCH) if len(payload) > 4 else []

    def transact_ready(self, batch):
        # ENOENT: also a real server that does not exist, or a scheduler.
        return Outcome([MessageError(position, errno.ENOENT, "", b"") for position, _message in enumerate(batch)], [])


@pytest.fixture
def kernel(monkeypatch):
    found = Kernel()
    monkeypatch.setattr(Netlink, "kernel", found, raising=False)
    monkeypatch.setattr(servers, "NetlinkSocket", Netlink)
    return found


#: Requests that succeed where there is no server.
REQUESTS = {
    "virtual servers": lambda sock: sock.virtual_servers("IPv4"),
    "real servers": lambda sock: sock.real_servers_of([SERVER]),
    "timeouts": lambda sock: sock.timeouts(),
    "new timeouts": lambda sock: sock.set_timeouts({"tcp": 900}),
    "removed virtual server": lambda sock: servers.VirtualServersResource(sock).apply(Change(removed={SERVER: None})),
    "removed real server": lambda sock: servers.RealServersResource(sock).apply(Change(removed={REAL: None})),
}


@pytest.mark.parametrize("loaded_again", [False, True])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_a_request_to_a_family_that_has_ended_fails(kernel, request_, loaded_again):
    sock = servers.IpvsSocket()
    request_(sock)
    assert not sock.lost, "a server that does not exist is no loss"
    kernel.families.clear()
    if loaded_again:
        kernel.load_again()
    for _attempt in range(2):
        with pytest.raises(KernelError, match="ip_vs was unloaded"):
            request_(sock)
        assert sock.lost


def test_another_family_with_the_same_number_is_not_ipvs(kernel):
    sock = servers.IpvsSocket()
    kernel.families[30] = "TASKSTATS"
    with pytest.raises(KernelError, match="ip_vs was unloaded"):
        servers.RealServersResource(sock).apply(Change(removed={REAL: None}))


def test_a_refusal_is_reported_as_before(kernel):
    sock = servers.IpvsSocket()
    with pytest.raises(KernelError, match=r"real server .* cannot be added: .*ENOENT"):
        servers.RealServersResource(sock).apply(Change(added={REAL: RealServer(1)}))
    assert not sock.lost


def test_handles_open_another_socket_after_a_loss(kernel):
    with KernelHandles() as handles:
        first = handles.ipvs
        assert not handles.forget_lost() and handles.ipvs is first
        kernel.load_again()
        with pytest.raises(KernelError):
            first.timeouts()
        assert handles.forget_lost() and kernel.closed == 1
        assert not handles.forget_lost()
        assert handles.ipvs.family_id == 31
        assert handles.ipvs.timeouts() == {}
    assert kernel.closed == 2


def test_handles_without_the_module_fail_until_it_is_loaded(kernel):
    handles = KernelHandles()
    with pytest.raises(KernelError, match="unloaded"):
        sock = handles.ipvs
        kernel.families.clear()
        sock.timeouts()
    assert handles.forget_lost()
    for _attempt in range(2):
        with pytest.raises(KernelError, match="not loaded"):
            assert handles.ipvs
    kernel.load_again()
    assert handles.ipvs.family_id == 31
