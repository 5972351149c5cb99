# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel parameters: keys, values, policies, and the profile of a mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError, KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters import (
    sysctl_files,
    sysctl_profile,
    sysctls,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctls import AtLeast
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference

FORWARD = "net.ipv4.ip_forward"
MAXIMUM = "net.netfilter.nf_conntrack_max"


def put(root: Path, path: str, text: str) -> Path:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, "proc/sys/net/ipv4/ip_forward", "0\n")
    put(tmp_path, "proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")
    put(tmp_path, "proc/sys/net/netfilter/nf_conntrack_max", "262144\n")
    put(tmp_path, "proc/sys/net/netfilter/nf_conntrack_buckets", "65536\n")
    return tmp_path


def test_keys_in_both_styles_name_one_file() -> None:
    assert sysctls.canonical_key("net/ipv4/conf/eth0.5/rp_filter") == "net.ipv4.conf.eth0/5.rp_filter"
    assert sysctls.canonical_key("net.ipv4.conf.eth0/5.rp_filter") == "net.ipv4.conf.eth0/5.rp_filter"
    assert sysctls.key_path("net.ipv4.conf.eth0/5.rp_filter") == "/proc/sys/net/ipv4/conf/eth0.5/rp_filter"


@pytest.mark.parametrize(
    "key", ["", "ip_forward", "net..x", "../../etc/passwd", "net.ipv4.a b", "net.ipv4.\n", "a.$(x)"]
)
def test_hostile_keys_are_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="not a key"):
        sysctls.canonical_key(key)


@pytest.mark.parametrize("value", ["", "  ", "1\n2", "a\x00b"])
def test_values_are_one_line(value: str) -> None:
    with pytest.raises(ConfigurationError, match="not one line"):
        sysctls.canonical_value(FORWARD, value)


def test_values_are_compared_word_by_word(root: Path) -> None:
    resource = sysctls.SysctlsResource(["net.ipv4.tcp_rmem", FORWARD], str(root))
    observed = resource.observe()
    desired = sysctls.resolve({"net.ipv4.tcp_rmem": " 4096 131072\t6291456", FORWARD: True}, observed)
    change = difference(observed, desired)
    assert change == Change(replaced={FORWARD: ("0", "1")})
    resource.apply(change)
    assert not difference(resource.observe(), desired)


RMEM = "net.ipv4.tcp_rmem"
FASTOPEN = "net.ipv4.tcp_fastopen"


@pytest.mark.parametrize(
    ("key", "wanted", "current", "desired"),
    [
        (sysctls.RESERVED_PORTS, "8080,8081, 9000", "", "8080-8081,9000"),
        (sysctls.RESERVED_PORTS, "9000", "8080", "9000"),
        ("kernel.watchdog_cpumask", "3,0-2", "0-1", "0-3"),
        (FASTOPEN, "0x3", "1", "3"),
        (FASTOPEN, "0X0f", "1", "15"),
        (FASTOPEN, "010", "1", "8"),
        (FASTOPEN, "00", "1", "0"),
        (FASTOPEN, "-0", "1", "0"),
        (FASTOPEN, "-0x10", "-1", "-16"),
        (FASTOPEN, "08", "1", "08"),
        (FASTOPEN, "+1", "0", "+1"),
        (FASTOPEN, "1 2", "0", "1 2"),
        (RMEM, "0x1000 131072", "1 2 6291456", "4096 131072 6291456"),
        ("kernel.hostname", "0x3", "7", "0x3"),
        ("net.core.rps_default_mask", "010", "8", "010"),
        ("net.ipv4.tcp_congestion_control", "010", "cubic", "010"),
    ],
)
def test_values_are_desired_as_the_kernel_prints_them(key: str, wanted: str, current: str, desired: str) -> None:
    assert sysctls.resolve({key: wanted}, {key: current}) == {key: desired}


@pytest.mark.parametrize("value", ["a", "1-", ",", "5-4", "1;2"])
def test_values_that_are_no_lists_are_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^sysctl {sysctls.RESERVED_PORTS}: .* is not a list of numbers and"):
        sysctls.canonical_value(sysctls.RESERVED_PORTS, value)


class Rounding(sysctls.SysctlsResource):
    """A kernel that makes multiples of 4 of the values of one key; /proc/sys is replaced by files."""

    rounded = RMEM
    refused: tuple[str, ...] = ()

    def _write(self, key: str, value: str) -> str:
        if value in self.refused:
            return "Invalid argument"
        return super()._write(key, str(-(-int(value) // 4) * 4) if key == self.rounded else value)


def test_a_value_that_the_kernel_changes_is_put_back_and_named(root: Path) -> None:
    """And the keys that were set before it are known."""
    put(root, "proc/sys/net/ipv4/tcp_rmem", "1000\n")
    resource = Rounding([FORWARD, RMEM, MAXIMUM], str(root))
    wanted = {FORWARD: "1", RMEM: "1001", MAXIMUM: "7"}
    failure = rf"^sysctl {RMEM}: wanted 1001, but the kernel made it 1004; it is 1000 again$"
    for _run in range(2):
        with pytest.raises(KernelError, match=failure):
            resource.apply(difference(resource.observe(), wanted))
        assert resource.observe() == {FORWARD: "1", RMEM: "1000", MAXIMUM: "262144"}
        assert resource.written == [FORWARD]
    resource.apply(difference(resource.observe(), {**wanted, RMEM: "1004"}))
    assert resource.written == [FORWARD, RMEM, MAXIMUM]
    resource.refused = ("1004",)
    with pytest.raises(KernelError, match=r"the kernel made it 1008; it cannot be made 1004 again: Invalid argument$"):
        resource.apply(difference(resource.observe(), {**wanted, RMEM: "1005"}))


def test_a_value_that_the_kernel_ignores_is_named(root: Path) -> None:
    put(root, "proc/sys/net/ipv4/tcp_rmem", "1004\n")
    resource = Rounding([RMEM], str(root))
    with pytest.raises(KernelError, match=rf"^sysctl {RMEM}: wanted 1003, but the kernel made it 1004$"):
        resource.apply(difference(resource.observe(), {RMEM: "1003"}))


def test_at_least_keeps_larger_values() -> None:
    assert sysctls.resolve({"k.a": AtLeast(10)}, {"k.a": "12"}) == {"k.a": "12"}
    assert sysctls.resolve({"k.a": AtLeast(10)}, {"k.a": "9"}) == {"k.a": "10"}
    assert sysctls.resolve({"k.a": AtLeast(10)}, {}) == {"k.a": "10"}


@pytest.mark.parametrize(
    ("observed", "desired"),
    [
        ("", "30000-32767"),
        ("30000-32767", "30000-32767"),
        ("8080,31000-33000", "8080,30000-33000"),
        ("1,29999", "1,29999-32767"),
        ("0-65535", "0-65535"),
    ],
)
def test_reserved_ports_are_added_to_existing_ones(observed: str, desired: str) -> None:
    key, wanted = sysctls.RESERVED_PORTS, sysctls.Including("30000-32767")
    assert sysctls.resolve({key: wanted}, {key: observed}) == {key: desired}
    assert sysctl_files.persistent_values({key: wanted}, {key: observed}, "") == {key: desired}
    assert sysctl_files.persistent_values({key: wanted}, {key: observed}, f"{key} = 5\n") == {key: "5,30000-32767"}


@pytest.mark.parametrize("ports", ["x", "1-", "70000", "5-4", "1;2", "-1"])
def test_invalid_lists_of_ports_are_refused(ports: str) -> None:
    settings = sysctl_profile.ProfileSettings("iptables", (6, 1, 0), reserved_node_ports=ports)
    with pytest.raises(ConfigurationError, match=r"profile\.reserved_node_ports: .* is not a port or a range"):
        sysctl_profile.profile(settings)


def test_parameters_that_kube_proxy_does_not_set_are_opt_in() -> None:
    settings = sysctl_profile.ProfileSettings("nftables", (6, 1, 0))
    assert sysctl_profile.profile(settings) == {}
    asked = settings._replace(netdev_max_backlog=16384, reserved_node_ports="30000-32767")
    rows = {row["key"]: row["value"] for row in sysctl_profile.explanations(sysctl_profile.profile(asked))}
    assert rows == {"net.core.netdev_max_backlog": ">= 16384", sysctls.RESERVED_PORTS: "with 30000-32767"}
    with pytest.raises(ConfigurationError, match=r"profile\.netdev_max_backlog: 0 is not"):
        sysctl_profile.profile(settings._replace(netdev_max_backlog=0))


def test_missing_key_names_the_module_that_provides_it(root: Path) -> None:
    resource = sysctls.SysctlsResource(["net.ipv4.vs.conntrack"], str(root))
    with pytest.raises(KernelError, match=r"net.ipv4.vs.conntrack: .*module ip_vs provides it"):
        resource.apply(difference(resource.observe(), {"net.ipv4.vs.conntrack": "1"}))


def test_no_module_is_named_for_a_key_that_its_module_lacks(root: Path) -> None:
    """As of net.ipv4.vs.timeout_tcp, which old advice names."""
    (root / "sys/module/ip_vs").mkdir(parents=True)
    resource = sysctls.SysctlsResource(["net.ipv4.vs.timeout_tcp"], str(root))
    with pytest.raises(KernelError, match=r"net.ipv4.vs.timeout_tcp: this kernel has no such key \(wanted 7200\)$"):
        resource.apply(difference(resource.observe(), {"net.ipv4.vs.timeout_tcp": "7200"}))


def test_read_only_key_changes_nothing_at_all(root: Path) -> None:
    (root / "proc/sys/net/netfilter/nf_conntrack_max").chmod(0o444)
    resource = sysctls.SysctlsResource([FORWARD, MAXIMUM], str(root))
    with pytest.raises(KernelError, match=r"nf_conntrack_max: is 262144, wanted 5: cannot be .* on the host"):
        resource.apply(difference(resource.observe(), {FORWARD: "1", MAXIMUM: "5"}))
    assert resource.observe()[FORWARD] == "0"


# -- profile -----------------------------------------------------------------------------------------------------------


def ipvs_profile(version: tuple[int, int, int], **more: object) -> dict[str, sysctl_profile.Setting]:
    return sysctl_profile.profile(sysctl_profile.ProfileSettings("ipvs", version, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "value"),
    [((3, 10, 0), None), ((4, 0, 9), None), ((4, 1, 0), 0), ((5, 8, 18), 0), ((5, 9, 0), None), ((6, 1, 0), None)],
)
def test_connection_reuse_by_kernel_version(version: tuple[int, int, int], value: int | None) -> None:
    setting = ipvs_profile(version)["net.ipv4.vs.conn_reuse_mode"]
    assert setting.value == value
    assert f"{version[0]}.{version[1]}" in setting.why


def test_ipvs_values_of_kube_proxy() -> None:
    chosen = sysctl_profile.wanted_values(ipvs_profile((6, 1, 0), strict_arp=True))
    assert chosen == {
        "net.ipv4.vs.conntrack": 1,
        "net.ipv4.vs.expire_nodest_conn": 1,
        "net.ipv4.vs.expire_quiescent_template": 1,
        "net.ipv4.ip_forward": 1,
        "net.ipv4.conf.all.arp_ignore": 1,
        "net.ipv4.conf.all.arp_announce": 2,
    }
    assert "net.ipv4.conf.all.arp_ignore" not in ipvs_profile((6, 1, 0))


def test_estimation_only_if_the_kernel_supports_it() -> None:
    key = "net.ipv4.vs.run_estimation"
    assert key not in ipvs_profile((5, 10, 0))
    assert ipvs_profile((5, 10, 0), estimation=False)[key].value is None
    assert ipvs_profile((5, 16, 0), estimation=False)[key].value == 0
    assert "kernel threads" in ipvs_profile((6, 2, 0))[key].why


def test_iptables_mode_sets_only_required_parameters() -> None:
    settings = sysctl_profile.ProfileSettings("iptables", (6, 1, 0), route_localnet=True)
    assert sysctl_profile.wanted_values(sysctl_profile.profile(settings)) == {"net.ipv4.conf.all.route_localnet": 1}


def test_conntrack_values_and_hash_size() -> None:
    conntrack = sysctl_profile.ConntrackProfile(
        262144, {"tcp_established_timeout": 86400, "tcp_close_wait_timeout": 3600}, be_liberal=True
    )
    chosen = sysctl_profile.profile(sysctl_profile.ProfileSettings("nftables", (6, 1, 0), conntrack=conntrack))
    assert sysctl_profile.wanted_values(chosen) == {
        MAXIMUM: 262144,
        sysctls.HASH_SIZE: 65536,
        "net.netfilter.nf_conntrack_tcp_timeout_established": 86400,
        "net.netfilter.nf_conntrack_tcp_timeout_close_wait": 3600,
        "net.netfilter.nf_conntrack_tcp_be_liberal": 1,
    }
    rows = {row["key"]: row["value"] for row in sysctl_profile.explanations(chosen)}
    assert (rows[MAXIMUM], rows[sysctls.HASH_SIZE]) == (">= 262144", ">= 65536"), "larger values are kept"
