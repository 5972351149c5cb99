# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel parameters at boot: which file sets each of them, and what our own file has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules import boot_directories
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters import sysctl_files, sysctls
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctls import AtLeast

FORWARD = "net.ipv4.ip_forward"
MAXIMUM = "net.netfilter.nf_conntrack_max"

OWN = "/etc/sysctl.d/99-kubenode-proxy.conf"


def put(root: Path, path: str, text: str) -> Path:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


def test_later_file_with_precedence_is_named(tmp_path: Path) -> None:
    put(tmp_path, "/usr/lib/sysctl.d/50-default.conf", f"{FORWARD} = 0\n")
    put(tmp_path, "/etc/sysctl.d/99-zz.conf", f"# comment\n-net/ipv4/ip_forward=0\n{MAXIMUM} = 7\n")
    warnings = sysctl_files.boot_conflicts(OWN, f"{FORWARD} = 1\n{MAXIMUM} = 7\n", str(tmp_path))
    assert warnings == [
        f"sysctl {FORWARD}: /etc/sysctl.d/99-zz.conf is read after {OWN} and sets 0 instead of 1 at boot"
    ]


def test_sysctl_conf_comes_last_without_systemd_and_etc_masks_usr_lib(tmp_path: Path) -> None:
    put(tmp_path, "/usr/lib/sysctl.d/99-zz.conf", f"{FORWARD} = 0\n")
    put(tmp_path, "/etc/sysctl.d/99-zz.conf", "")
    assert sysctl_files.boot_conflicts(OWN, f"{FORWARD} = 1\n", str(tmp_path)) == []
    put(tmp_path, "/etc/sysctl.conf", f"{FORWARD}=0\n")
    assert "/etc/sysctl.conf" in sysctl_files.boot_conflicts(OWN, f"{FORWARD} = 1\n", str(tmp_path))[0]


@pytest.mark.parametrize(
    ("key", "own", "other", "same"),
    [
        ("net.ipv4.tcp_fastopen", "3", "0x3", True),
        ("net.ipv4.tcp_fastopen", "0x3", "3", True),
        ("net.ipv4.tcp_fastopen", "3", "0x2", False),
        (sysctls.RESERVED_PORTS, "8080-8081", "8080,8081", True),
        (sysctls.RESERVED_PORTS, "8080-8081", "8080", False),
        (sysctls.RESERVED_PORTS, "8080-8081", "x", False),
        (sysctls.RESERVED_PORTS, "8080-8081", "", False),
    ],
)
def test_files_that_write_one_value_in_two_ways_do_not_conflict(
    tmp_path: Path, key: str, own: str, other: str, same: bool
) -> None:
    put(tmp_path, "/etc/sysctl.d/99-zz.conf", f"{key} = {other}\n")
    assert (sysctl_files.boot_conflicts(OWN, f"{key} = {own}\n", str(tmp_path)) == []) is same


def test_a_named_key_beats_a_pattern(tmp_path: Path) -> None:
    put(tmp_path, "/etc/sysctl.d/99-zz.conf", "net.ipv4.conf.*.arp_ignore = 0\n")
    assert sysctl_files.boot_conflicts(OWN, "net.ipv4.conf.all.arp_ignore = 1\n", str(tmp_path)) == []
    values = sysctl_files.boot_values(["net.ipv4.conf.all.arp_ignore"], str(tmp_path))
    assert values["net.ipv4.conf.all.arp_ignore"] == sysctl_files.BootValue("0", "/etc/sysctl.d/99-zz.conf")


def test_persistent_value_of_at_least_is_stable_and_never_shrinks() -> None:
    key = sysctls.HASH_SIZE
    assert sysctl_files.persistent_values({key: AtLeast(100)}, {key: "50"}, "") == {key: "100"}
    assert sysctl_files.persistent_values({key: AtLeast(100)}, {key: "512"}, f"{key} = 100\n") == {key: "100"}
    assert sysctl_files.persistent_values({key: AtLeast(100)}, {key: "512"}, "") == {key: "512"}


def test_file_has_reasons_and_can_be_read_back() -> None:
    text = sysctl_files.sysctl_file({FORWARD: "1"}, {FORWARD: "because\nof this"})
    assert "# because of this\nnet.ipv4.ip_forward = 1\n" in text
    assert sysctl_files.parse_settings(text) == {FORWARD: "1"}


@pytest.mark.parametrize(
    ("values", "order"),
    [
        ({"net.ipv4.conf.lo.forwarding": "0", "net.ipv4.conf.all.forwarding": "1"}, [1, 0]),
        ({"net.ipv4.conf.all.accept_redirects": "1", FORWARD: "1"}, [1, 0]),
        ({"net.ipv4.conf.eth0.rp_filter": "1", "net.ipv4.conf.default.rp_filter": "2", FORWARD: "1"}, [2, 1, 0]),
        ({"net.ipv6.conf.default.forwarding": "0", "net.ipv6.conf.all.forwarding": "1"}, [1, 0]),
        ({"net.ipv6.conf.eth0.disable_ipv6": "0", "net.ipv6.conf.all.disable_ipv6": "1"}, [1, 0]),
        ({"net.ipv6.conf.eth0.addr_gen_mode": "1", "net.ipv6.conf.eth0.stable_secret": "::1"}, [1, 0]),
        ({"net.ipv4.neigh.eth0.ucast_solicit": "5", "net.ipv4.neigh.default.ucast_solicit": "3"}, [1, 0]),
        ({"vm.overcommit_kbytes": "1000", "vm.overcommit_ratio": "0"}, [1, 0]),
        ({"vm.overcommit_ratio": "50", "vm.overcommit_kbytes": "0"}, [1, 0]),
        ({"vm.swappiness": "1", "kernel.panic": "2", "net.core.somaxconn": "3"}, [0, 1, 2]),
    ],
)
def test_keys_that_reset_others_come_first_in_the_file(values: dict[str, str], order: list[int]) -> None:
    lines = sysctl_files.sysctl_file(values).splitlines()[1:]
    assert lines == [f"{key} = {values[key]}" for key in (list(values)[place] for place in order)]


FILTER = "net.ipv4.conf.all.rp_filter"
OTHER_FILTER = "net.ipv4.conf.eth0.rp_filter"
DEFAULTS = f"net.ipv4.conf.*.rp_filter = 2\n-{FILTER}\n"


def test_a_key_without_a_value_is_excluded_from_patterns(tmp_path: Path) -> None:
    """The file that systemd installs excludes conf.all from a pattern in this way."""
    file = "/usr/lib/sysctl.d/50-default.conf"
    put(tmp_path, file, DEFAULTS)
    found = sysctl_files.boot_values([FILTER, OTHER_FILTER], str(tmp_path))
    assert found == {OTHER_FILTER: sysctl_files.BootValue("2", file)}
    put(tmp_path, "/etc/sysctl.d/60-a.conf", f"{FILTER} = 1\n")
    assert sysctl_files.boot_values([FILTER], str(tmp_path))[FILTER].value == "1"
    put(tmp_path, "/etc/sysctl.d/70-b.conf", "net.ipv4.conf.all.rp_filter\n# no value, no exclusion\n")
    assert sysctl_files.boot_values([FILTER], str(tmp_path))[FILTER].value == "1"


def test_a_later_exclusion_replaces_the_value_of_a_key(tmp_path: Path) -> None:
    put(tmp_path, "/etc/sysctl.d/99-zz.conf", f"-{FORWARD}\n")
    put(tmp_path, OWN, f"{FORWARD} = 1\n")
    assert sysctl_files.boot_values([FORWARD], str(tmp_path)) == {}
    assert sysctl_files.boot_conflicts(OWN, f"{FORWARD} = 1\n", str(tmp_path)) == [
        f"sysctl {FORWARD}: /etc/sysctl.d/99-zz.conf is read after {OWN} and has -{FORWARD}: not set at boot"
    ]
    assert sysctl_files.parse_settings(f"{FORWARD} = 1\n-{FORWARD}\n") == {}


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        ("net.ipv4.conf.*.rp_filter", OTHER_FILTER, True),
        ("net.*.rp_filter", OTHER_FILTER, False),
        ("net/ipv4/conf/eth*/rp_filter", "net.ipv4.conf.eth0/5.rp_filter", True),
        ("net.ipv4.conf.eth[1-9].rp_filter", OTHER_FILTER, False),
    ],
)
def test_wildcards_match_within_one_part_of_a_key(tmp_path: Path, pattern: str, key: str, matches: bool) -> None:
    put(tmp_path, "/etc/sysctl.d/60-a.conf", f"{pattern} = 2\n")
    assert (key in sysctl_files.boot_values([key], str(tmp_path))) is matches


@pytest.mark.parametrize("evidence", ["run/systemd/system/x", "usr/lib/systemd/systemd-sysctl"])
def test_systemd_reads_sysctl_conf_only_through_a_link(tmp_path: Path, evidence: str) -> None:
    put(tmp_path, evidence, "")
    put(tmp_path, "/etc/sysctl.conf", f"{FORWARD} = 0\n")
    own = "/etc/sysctl.d/99-zz.conf"
    assert sysctl_files.boot_values([FORWARD], str(tmp_path)) == {}
    assert sysctl_files.unread("/etc/sysctl.conf", str(tmp_path)) != ""
    link = tmp_path / "etc/sysctl.d/99-sysctl.conf"
    link.parent.mkdir()
    link.symlink_to("../sysctl.conf")
    linked = {FORWARD: sysctl_files.BootValue("0", "/etc/sysctl.d/99-sysctl.conf")}
    assert sysctl_files.boot_values([FORWARD], str(tmp_path)) == linked
    assert sysctl_files.unread("/etc/sysctl.conf", str(tmp_path)) == ""
    assert sysctl_files.boot_conflicts(own, f"{FORWARD} = 1\n", str(tmp_path)) == []


def test_without_systemd_sysctl_conf_is_read_last(tmp_path: Path) -> None:
    put(tmp_path, "/etc/sysctl.conf", f"{FORWARD} = 0\n")
    put(tmp_path, "/etc/sysctl.d/99-zz.conf", f"{FORWARD} = 1\n")
    found = sysctl_files.boot_values([FORWARD], str(tmp_path))
    assert found == {FORWARD: sysctl_files.BootValue("0", "/etc/sysctl.conf")}
    assert sysctl_files.unread("/etc/sysctl.conf", str(tmp_path)) == ""


def test_our_file_masks_those_of_its_name_and_may_be_masked(tmp_path: Path) -> None:
    """Even before it exists, and its removal makes them count."""
    vendor, own = "/usr/lib/sysctl.d/60-web.conf", "/etc/sysctl.d/60-web.conf"
    put(tmp_path, vendor, f"{FORWARD} = 0\n{MAXIMUM} = 7\n")
    ours = {FORWARD: sysctl_files.BootValue("1", own)}
    assert sysctl_files.boot_conflicts(own, f"{FORWARD} = 1\n", str(tmp_path)) == []
    put(tmp_path, own, f"{FORWARD} = 1\n")
    assert sysctl_files.boot_values([FORWARD, MAXIMUM], str(tmp_path)) == ours
    assert sysctl_files.unread(vendor, str(tmp_path)) == f"{own} takes its place"
    assert sysctl_files.boot_conflicts(vendor, f"{FORWARD} = 0\n", str(tmp_path)) == []
    (tmp_path / own.lstrip("/")).unlink()
    assert sysctl_files.boot_values([FORWARD], str(tmp_path))[FORWARD].file == vendor


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/etc/sysctl.d/60-web.conf", ""),
        ("/lib/sysctl.d/60-web.conf", ""),
        ("/etc/sysctl.d/../sysctl.d/60-web.conf", ""),
        ("/etc/sysctl.d/60-web", "its name does not end in .conf"),
        ("/etc/sysctl.d/.60-web.conf", "its name begins with a dot"),
        ("/srv/60-web.conf", "only files in /etc/sysctl.d, /run/sysctl.d, "),
        ("/etc/sysctl.d/web/60-web.conf", "only files in /etc/sysctl.d, /run/sysctl.d, "),
    ],
)
def test_files_that_are_not_read_at_boot_are_known(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "usr/lib/sysctl.d").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    reason = boot_directories.unread(path, boot_directories.SYSCTL, str(tmp_path))
    assert reason.startswith(words) and bool(reason) is bool(words)
