# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Virtual and real servers on a real kernel, verified with ipvsadm; test_pyroute2_ipvs.py compares with pyroute2."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import threading
import time
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import parse_network
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs import servers as ipvs_module
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.messages import parse_proc
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import (
    IpvsSocket,
    RealServersResource,
    TimeoutsResource,
    VirtualServersResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.draining import with_draining, with_excluded
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.text import ipvsadm_text
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Stage, apply_plan, plan
from tests.lab.background import Background

pytestmark = pytest.mark.uml

Servers = dict[VirtualServerKey, VirtualServer]
RealServers = dict[RealServerKey, RealServer]
FAMILIES = ("IPv4", "IPv6")


@pytest.fixture
def ipvs() -> Iterator[IpvsSocket]:
    with IpvsSocket() as sock:
        yield sock


def ipvsadm(*arguments: str) -> str:
    return subprocess.run(["ipvsadm", *arguments], check=True, capture_output=True, text=True).stdout


def saved() -> set[str]:
    return set(ipvsadm("-Sn").splitlines())


def lines_of(servers: Servers, real_servers: RealServers) -> set[str]:
    return set(ipvsadm_text(servers, real_servers).splitlines())


def converge(sock: IpvsSocket, servers: Servers, real_servers: RealServers, family: str = "IPv4") -> int:
    """Converge the kernel to this state and return the number of changes."""
    planned = plan(
        [
            Stage(VirtualServersResource(sock, family), servers),
            Stage(RealServersResource(sock, family), real_servers),
        ]
    )
    apply_plan(planned)
    return sum(len(one.change) for one in planned)


def random_state(seed: int, family: str) -> tuple[Servers, RealServers]:
    chance = random.Random(seed)
    prefix = "10.96.0." if family == "IPv4" else "fd00:96::"
    pods = "10.244.1." if family == "IPv4" else "fd00:244::"
    servers: Servers = {}
    real_servers: RealServers = {}
    for _number in range(40):
        key = VirtualServerKey(
            chance.choice(("tcp", "udp", "sctp")), f"{prefix}{chance.randint(1, 9)}", chance.choice((1, 53, 80, 65535))
        )
        affinity = chance.choice((0, 0, 60, 10800))
        scheduler = chance.choice(("rr", "wrr", "lc", "sh", "mh"))
        flags = (1 if affinity else 0) | (0x10 if scheduler == "mh" else 0)
        servers[key] = VirtualServer(scheduler, flags, affinity, 32 if family == "IPv4" else 128)
        for _real in range(chance.randint(0, 5)):
            real_key = RealServerKey(key, f"{pods}{chance.randint(1, 20)}", chance.choice((80, 8080)))
            real_servers[real_key] = RealServer(chance.choice((0, 1, 1, 65535)), chance.choice(("masquerade", "route")))
    return servers, real_servers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_any_state_is_reached_from_any_other(ipvs, family, seed):
    first, second = random_state(seed, family), random_state(seed + 100, family)
    other = random_state(seed, "IPv6" if family == "IPv4" else "IPv4")
    converge(ipvs, *other, "IPv6" if family == "IPv4" else "IPv4")
    for state in (first, second, first):
        assert converge(ipvs, *state, family) > 0
        assert saved() == lines_of(*state) | lines_of(*other)
        assert converge(ipvs, *state, family) == 0
    converge(ipvs, {}, {}, family)
    assert saved() == lines_of(*other)


def test_a_changed_server_is_edited_in_place(ipvs):
    key = VirtualServerKey("tcp", "10.96.0.1", 80)
    real = {RealServerKey(key, "10.244.1.1", 80): RealServer(1)}
    converge(ipvs, {key: VirtualServer("rr", 0, 0, 32)}, real)
    planned = plan([Stage(VirtualServersResource(ipvs), {key: VirtualServer("wrr", 1, 60, 32)})])
    assert list(planned[0].change.replaced) == [key]
    apply_plan(planned)
    assert saved() == {"-A -t 10.96.0.1:80 -s wrr -p 60", "-a -t 10.96.0.1:80 -r 10.244.1.1:80 -m -w 1"}


def test_the_order_in_the_kernel_does_not_depend_on_that_of_the_change(ipvs):
    """The schedulers mh and sh depend on it; the agent's changes have their keys in no particular order."""
    key = VirtualServerKey("tcp", "10.96.0.1", 80)
    converge(ipvs, {key: VirtualServer("mh", 0, 0, 32)}, {})
    wanted = {RealServerKey(key, f"10.244.0.{number}", 8080): RealServer(1) for number in range(1, 21)}
    listed = []
    for seed in range(3):
        shuffled = random.Random(seed).sample(sorted(wanted), len(wanted))
        RealServersResource(ipvs).apply(Change(added={one: wanted[one] for one in shuffled}))
        listed.append([line for line in ipvsadm("-Sn").splitlines() if line.startswith("-a")])
        RealServersResource(ipvs).apply(Change(removed=wanted))
    assert len(listed[0]) == 20 and listed[0] == listed[1] == listed[2]


def test_adding_existing_and_deleting_missing_servers_succeeds(ipvs):
    key = VirtualServerKey("tcp", "10.96.0.1", 80)
    real = RealServerKey(key, "10.244.1.1", 80)
    servers, reals = VirtualServersResource(ipvs), RealServersResource(ipvs)
    for _repeat in range(2):
        servers.apply(Change(added={key: VirtualServer("rr", 0, 0, 32)}))
        reals.apply(Change(added={real: RealServer(1)}))
    for _repeat in range(2):
        reals.apply(Change(removed={real: RealServer(1)}))
    for _repeat in range(2):
        servers.apply(Change(removed={key: VirtualServer("rr", 0, 0, 32)}))
    reals.apply(Change(removed={real: RealServer(1)}))
    assert saved() == set()


def test_errors_name_the_object_and_do_not_stop_the_others(ipvs):
    good, bad = VirtualServerKey("tcp", "10.96.0.1", 80), VirtualServerKey("tcp", "10.96.0.2", 80)
    change: Change[VirtualServerKey, VirtualServer] = Change(
        added={bad: VirtualServer("nonesuch", 0, 0, 32), good: VirtualServer("rr", 0, 0, 32)}
    )
    with pytest.raises(KernelError, match=r"10\.96\.0\.2:80/TCP with scheduler nonesuch cannot be created.*ENOENT"):
        VirtualServersResource(ipvs).apply(change)
    missing = RealServerKey(VirtualServerKey("udp", "10.96.0.9", 53), "10.244.1.1", 53)
    expected = r"real server 10\.96\.0\.9:53/UDP/10\.244\.1\.1:53 cannot be added.*virtual server does not exist"
    with pytest.raises(KernelError, match=expected):
        RealServersResource(ipvs).apply(
            Change(added={missing: RealServer(1), RealServerKey(good, "10.244.1.1", 80): RealServer(1)})
        )
    assert saved() == {"-A -t 10.96.0.1:80 -s rr", "-a -t 10.96.0.1:80 -r 10.244.1.1:80 -m -w 1"}


def test_external_servers_are_kept_only_inside_excluded_ranges(ipvs):
    """Firewall-mark services are never touched; other external servers are kept unchanged inside excludeCIDRs."""
    for arguments in (
        ("-A", "-f", "7", "-s", "rr"),
        ("-A", "-t", "10.250.0.1:80", "-s", "wlc"),
        ("-a", "-t", "10.250.0.1:80", "-r", "10.244.2.11:8080", "-m", "-w", "5"),
        ("-A", "-t", "10.251.0.1:80", "-s", "rr"),
    ):
        ipvsadm(*arguments)
    before = saved()
    excluded = [network for network in [parse_network("10.250.0.0/24")] if network]
    key = VirtualServerKey("tcp", "10.96.0.1", 80)
    wanted = {key: VirtualServer("rr", 0, 0, 32)}
    real = {RealServerKey(key, "10.244.1.1", 80): RealServer(1)}
    for expected_changes in (True, False):
        planned = plan(
            [
                Stage(VirtualServersResource(ipvs), lambda seen: with_excluded(wanted, seen, wanted, excluded)),
                Stage(RealServersResource(ipvs), lambda seen: with_excluded(real, seen, wanted, excluded)),
            ]
        )
        assert any(one.change for one in planned) is expected_changes
        apply_plan(planned)
    assert saved() == (before - {"-A -t 10.251.0.1:80 -s rr"}) | lines_of(wanted, real)


def test_timeouts(ipvs):
    before = ipvs.timeouts()
    desired = {"tcp": 1234, "udp": 77}
    planned = plan([Stage(TimeoutsResource(ipvs, desired), desired)])
    apply_plan(planned)
    assert ipvs.timeouts() == {**before, **desired}
    assert not plan([Stage(TimeoutsResource(ipvs, desired), desired)])[0].change
    assert ipvsadm("-L", "--timeout").split(":")[1].split() == ["1234", str(before["tcp_fin"]), "77"]


class Echo(threading.Thread):
    """A server on loopback that keeps its connections open until the client closes them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.socket.getsockname()[1])
        self.accepted: list[socket.socket] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                self.accepted.append(self.socket.accept()[0])
            except OSError:
                return


def test_a_real_server_with_a_connection_drains(ipvs):
    subprocess.run(["ip", "address", "add", "10.96.0.1/32", "dev", "lo"], check=True)
    echo = Echo()
    key = VirtualServerKey("tcp", "10.96.0.1", 80)
    servers = {key: VirtualServer("rr", 0, 0, 32)}
    real = RealServerKey(key, "127.0.0.1", echo.port)
    converge(ipvs, servers, {real: RealServer(1)})
    client = socket.create_connection(("10.96.0.1", 80), timeout=5)

    def rounds() -> tuple[int, dict[RealServerKey, RealServer]]:
        reals = RealServersResource(ipvs)
        planned = plan([Stage(reals, lambda seen: with_draining({}, seen, reals.connections, servers))])
        apply_plan(planned)
        return len(planned[0].change), reals.observe()

    assert rounds() == (1, {real: RealServer(0)})
    assert rounds() == (0, {real: RealServer(0)})
    # A reset instead of a FIN: the kernel forgets the connection after ten seconds instead of two minutes.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and rounds()[1]:
        time.sleep(0.5)
    assert rounds() == (0, {})
    echo.socket.close()


def test_virtual_servers_in_other_namespaces_hide_none_of_ours(ipvs, monkeypatch):
    """Read past the gaps of /proc/net/ip_vs, which then skips entries at the ends of its pages, with netlink dumps."""
    servers, real_servers = many_servers(800)
    script = "for n in $(seq 50); do ipvsadm -A -t 10.99.0.$n:80 -s rr; done; echo ready; exec sleep infinity"
    command = ["unshare", "-n", "sh", "-c", script]
    with Background(command):
        converge(ipvs, servers, real_servers)
        with open(ipvs_module.PROC_IPVS, encoding="ascii") as table:
            assert len(parse_proc(table, "IPv4").seen) < len(servers)
        assert RealServersResource(ipvs).observe() == real_servers
    monkeypatch.setattr(ipvs_module, "PROC_IPVS", "/proc/nothing")
    assert RealServersResource(ipvs).observe() == real_servers


def many_servers(count: int) -> tuple[Servers, RealServers]:
    servers: Servers = {}
    real_servers: RealServers = {}
    for number in range(count):
        key = VirtualServerKey("tcp", f"10.96.{number >> 8}.{number & 255}", 80)
        servers[key] = VirtualServer("rr", 0, 0, 32)
        for real in range(5):
            real_servers[RealServerKey(key, f"10.244.{number % 250}.{real + 1}", 8080)] = RealServer(1)
    return servers, real_servers


def test_five_thousand_services_are_programmed_with_progress_and_read_with_few_requests(ipvs, monkeypatch):
    servers, real_servers = many_servers(5000)
    sends = []
    ipvs.netlink.progress = lambda: sends.append(time.perf_counter())
    converge(ipvs, servers, real_servers)
    # The service manager's watchdog is fed during one change.
    assert len(sends) > 20
    dumps = []
    dump = ipvs.netlink.dump
    monkeypatch.setattr(ipvs.netlink, "dump", lambda *arguments: dumps.append(1) or dump(*arguments))
    assert VirtualServersResource(ipvs).observe() == servers
    assert RealServersResource(ipvs).observe() == real_servers
    # A request for each virtual server would take a minute.
    assert len(dumps) < 50
