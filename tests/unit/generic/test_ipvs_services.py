# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User-declared virtual servers: desired entries, entries of other programs, invalid lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import ipvs_services as listed
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.facts import kernel_release
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    VirtualServer,
    VirtualServerKey,
)

WEB = VirtualServerKey("tcp", "192.0.2.1", 80)
OTHER = VirtualServerKey("tcp", "192.0.2.1", 8080)
FAR = VirtualServerKey("udp", "192.0.2.9", 53)
PLAIN = VirtualServer("rr", 0, 0, 32)


def tables(real_servers: tuple[listed.ListedReal, ...] | None = ()) -> listed.ListedTables:
    return listed.listed_tables([listed.ListedServer("192.0.2.1", 80, scheduler="rr", real_servers=real_servers)])


def test_settings_are_converted_to_the_kernels_values() -> None:
    found = listed.listed_tables(
        [
            listed.ListedServer(
                "2001:DB8::1",
                53,
                "udp",
                "mh",
                persistence=300,
                persistence_prefix=64,
                one_packet=True,
                flags=("mh-port",),
                real_servers=(
                    listed.ListedReal("2001:db8::0:2", forwarding="dr", weight=0),
                    listed.ListedReal("10.0.0.1", forwarding="tunnel"),
                ),
            )
        ]
    )
    key = VirtualServerKey("udp", "2001:db8::1", 53)
    assert found.servers == {key: VirtualServer("mh", 0x1 | 0x4 | 0x10, 300, 64)}
    assert found.real_servers == {
        RealServerKey(key, "2001:db8::2", 53): RealServer(0, "route"),
        RealServerKey(key, "10.0.0.1", 53): RealServer(1, "tunnel"),
    }


def test_other_servers_are_kept_unless_purged() -> None:
    observed = {WEB: VirtualServer("lc", 0, 0, 32), OTHER: PLAIN, FAR: PLAIN}
    assert listed.desired_servers(observed, tables(), (), True) == {WEB: PLAIN, OTHER: PLAIN, FAR: PLAIN}
    assert listed.desired_servers(observed, tables(), ("192.0.2.1",), True) == {WEB: PLAIN, FAR: PLAIN}
    assert listed.desired_servers(observed, tables(), (), False) == {OTHER: PLAIN, FAR: PLAIN}
    assert listed.desired_servers(observed, tables(), ("192.0.2.1",), False) == {FAR: PLAIN}


def test_real_servers_are_exact_only_if_declared() -> None:
    mine, other = RealServerKey(WEB, "10.0.0.1", 80), RealServerKey(OTHER, "10.0.0.2", 80)
    observed = {mine: RealServer(1), other: RealServer(2)}
    assert listed.desired_real_servers(observed, tables(()), (), True) == {other: RealServer(2)}
    assert listed.desired_real_servers(observed, tables(None), (), True) == observed
    assert listed.desired_real_servers(observed, tables(None), ("192.0.2.1",), True) == {mine: RealServer(1)}
    assert listed.desired_real_servers(observed, tables(None), (), False) == {other: RealServer(2)}
    new = (listed.ListedReal("10.0.0.3", 8080, 5),)
    assert listed.desired_real_servers(observed, tables(new), (), True) == {
        other: RealServer(2),
        RealServerKey(WEB, "10.0.0.3", 8080): RealServer(5),
    }


GOOD = listed.ListedServer("192.0.2.1", 80)
MARKED = listed.ListedServer(firewall_mark=5)


def test_real_servers_in_separate_tasks() -> None:
    """A task that is not exclusive changes the listed real servers, and settings only if it declares any."""
    one, other = RealServerKey(WEB, "10.0.0.1", 80), RealServerKey(WEB, "10.0.0.2", 80)
    servers, real_servers = {WEB: VirtualServer("sh", 1, 60, 24)}, {one: RealServer(1), other: RealServer(2)}
    task = listed.ListedServer("192.0.2.1", 80, exclusive=False)
    for real, wanted in (
        (listed.ListedReal("10.0.0.1", weight=7), {one: RealServer(7), other: RealServer(2)}),
        (listed.ListedReal("10.0.0.1", present=False), {other: RealServer(2)}),
        (listed.ListedReal("10.0.0.9", present=False), real_servers),
    ):
        found = listed.listed_tables([task._replace(real_servers=(real,))])
        assert listed.desired_real_servers(real_servers, found, (), True) == wanted
        assert listed.desired_servers(servers, found, (), True) == servers
        created = {WEB: VirtualServer("wlc", 0, 0, 32)} if real.present else {}
        assert listed.desired_servers({}, found, (), True) == created
    given = listed.listed_tables([task._replace(scheduler="rr")])
    assert listed.desired_servers(servers, given, (), True) == {WEB: PLAIN}


def test_a_task_that_only_removes_real_servers_creates_no_virtual_server(tmp_path: Path) -> None:
    """Only one that declares nothing else: neither settings, nor all real servers, nor a present one."""
    gone, kept = listed.ListedReal("10.0.0.1", present=False), listed.ListedReal("10.0.0.2")
    task = listed.ListedServer("192.0.2.1", 80, exclusive=False, real_servers=(gone,))
    for server, created in (
        (task, False),
        (task._replace(real_servers=(gone, kept)), True),
        (task._replace(real_servers=()), True),
        (task._replace(real_servers=None), True),
        (task._replace(scheduler="rr"), True),
        (task._replace(exclusive=True), True),
    ):
        found = listed.listed_tables([server])
        assert (WEB in listed.desired_servers({FAR: PLAIN}, found, (), True)) is created, server
        assert WEB in listed.desired_servers({WEB: PLAIN}, found, (), True)
    release = tmp_path / f"lib/modules/{kernel_release()}"
    release.mkdir(parents=True)
    for name, text in (("modules.dep", "kernel/ip_vs_rr.ko:\n"), ("modules.builtin", "")):
        (release / name).write_text(text)
    assert listed.unavailable_schedulers(listed.listed_tables([task]), str(tmp_path)) == ""


def test_firewall_marks() -> None:
    real = listed.ListedReal("10.0.0.1")
    found = listed.listed_tables(
        [
            MARKED._replace(scheduler="rr", one_packet=True, real_servers=(real, real._replace(port=8080))),
            MARKED._replace(family="ipv6", real_servers=(listed.ListedReal("fd00::1", forwarding="dr"),)),
        ]
    )
    ipv4, ipv6 = VirtualServerKey("fwmark", "0.0.0.0", 5), VirtualServerKey("fwmark", "::", 5)
    assert found.servers == {ipv4: VirtualServer("rr", 4, 0, 32), ipv6: VirtualServer("wlc", 0, 0, 128)}
    assert [str(key) for key in found.servers] == ["firewall mark 5 (IPv4)", "firewall mark 5 (IPv6)"]
    assert list(found.real_servers) == [
        RealServerKey(ipv4, "10.0.0.1", 0),
        RealServerKey(ipv4, "10.0.0.1", 8080),
        RealServerKey(ipv6, "fd00::1", 0),
    ]
    # The unspecified address is not one that a purge could cover.
    empty = listed.listed_tables([])
    assert listed.desired_servers(found.servers, empty, ("0.0.0.0", "::"), True) == found.servers
    assert listed.desired_real_servers(found.real_servers, empty, ("0.0.0.0", "::"), True) == found.real_servers


def test_all_ports_of_an_address() -> None:
    real = listed.ListedReal("10.0.0.1")
    server = listed.ListedServer("192.0.2.1", 0, persistence=300, real_servers=(real, real._replace(port=8080)))
    found = listed.listed_tables([server])
    key = VirtualServerKey("tcp", "192.0.2.1", 0)
    assert found.servers == {key: VirtualServer("wlc", 1, 300, 32)}
    assert list(found.real_servers) == [RealServerKey(key, "10.0.0.1", 0), RealServerKey(key, "10.0.0.1", 8080)]
    # A task of a real server keeps the settings of the virtual server, so that it need not repeat the persistence.
    task = server._replace(persistence=None, exclusive=False)
    assert list(listed.listed_tables([task]).real_servers) == list(found.real_servers)


def test_timeouts() -> None:
    assert listed.listed_timeouts({"tcp": 900, "tcp_fin": None, "udp": 1}) == {"tcp": 900, "udp": 1}
    with pytest.raises(ConfigurationError, match=r"timeouts\.udp: 0 is not between 1 and 2147483"):
        listed.listed_timeouts({"udp": 0})


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (GOOD._replace(address="192.0.2.300"), "services[0].address: '192.0.2.300' is not an IP address"),
        (GOOD._replace(port=0), "services[0].port: 0, all ports, only with persistence"),
        (GOOD._replace(port=-1), "services[0].port: -1 is not between 0 and 65535"),
        (GOOD._replace(scheduler="rr;x"), "services[0].scheduler: IPVS scheduler 'rr;x'"),
        (GOOD._replace(persistence=-1), "services[0].persistence: -1"),
        (GOOD._replace(persistence_prefix=24), "persistence_prefix: only with persistence"),
        (GOOD._replace(persistence=1, persistence_prefix=64), "persistence_prefix: 64 is not between 1 and 32"),
        (GOOD._replace(one_packet=True), "one_packet: only for protocol udp and firewall marks"),
        (GOOD._replace(address=None), "services[0]: needs address and port, or firewall_mark"),
        (GOOD._replace(port=None), "services[0]: needs address and port, or firewall_mark"),
        (GOOD._replace(firewall_mark=1), "services[0].address: not together with firewall_mark"),
        (listed.ListedServer(protocol="tcp", firewall_mark=1), "services[0].protocol: not together with firewall_mark"),
        (listed.ListedServer(firewall_mark=0), "services[0].firewall_mark: 0 is not between 1 and 4294967295"),
        (GOOD._replace(family="ipv6"), "services[0].family: only with firewall_mark"),
        (
            MARKED._replace(real_servers=(listed.ListedReal("10.0.0.1", 80, forwarding="dr"),)),
            "real_servers[0].port: 80 is given, which only forwarding nat can do",
        ),
        (MARKED._replace(real_servers=(listed.ListedReal("::1"),)), "::1 is of another family than 0.0.0.0"),
        (
            GOOD._replace(real_servers=(listed.ListedReal("10.0.0.1"), listed.ListedReal("10.0.0.1", present=False))),
            "real_servers[1]: real server 192.0.2.1:80/TCP/10.0.0.1:80 is given twice",
        ),
        (GOOD._replace(flags=("mh-port",)), "flags: mh-port belongs to scheduler mh, not wlc"),
        (GOOD._replace(real_servers=(listed.ListedReal("x"),)), "services[0].real_servers[0].address: 'x'"),
        (GOOD._replace(real_servers=(listed.ListedReal("::1"),)), "::1 is of another family"),
        (GOOD._replace(real_servers=(listed.ListedReal("10.0.0.1", 81, forwarding="dr"),)), "only forwarding nat"),
        (GOOD._replace(real_servers=(listed.ListedReal("10.0.0.1", weight=-1),)), "weight: -1 is not between"),
        (GOOD._replace(real_servers=(listed.ListedReal("10.0.0.1"),) * 2), "real_servers[1]: real server"),
    ],
)
def test_invalid_fields_are_refused_by_name(server: listed.ListedServer, words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        listed.listed_tables([server])
    assert words in str(raised.value)


def test_duplicates_and_bad_purge_addresses() -> None:
    with pytest.raises(ConfigurationError, match=r"services\[1\]: virtual server 192.0.2.1:80/TCP is given twice"):
        listed.listed_tables([GOOD, GOOD])
    with pytest.raises(ConfigurationError, match=r"purge\[0\].address: 'all'"):
        listed.purged_addresses(["all"])


def test_schedulers_that_the_kernel_does_not_have_are_named(tmp_path: Path) -> None:
    release = kernel_release()
    assert listed.unavailable_schedulers(tables(), str(tmp_path)) == ""  # nothing is known about this kernel
    (tmp_path / f"lib/modules/{release}").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/modules").write_text("")
    (tmp_path / f"lib/modules/{release}/modules.dep").write_text("kernel/ip_vs_rr.ko:\n")
    (tmp_path / f"lib/modules/{release}/modules.builtin").write_text("")
    assert listed.unavailable_schedulers(tables(), str(tmp_path)) == ""
    wrong = listed.listed_tables([listed.ListedServer("192.0.2.1", 80, scheduler="nosuch")])
    text = listed.unavailable_schedulers(wrong, str(tmp_path))
    assert text.startswith(f"IPVS scheduler nosuch: module ip_vs_nosuch not available for kernel {release}; ")
