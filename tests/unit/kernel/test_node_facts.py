# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts about the node, read from a scratch directory and from the running kernel."""

from __future__ import annotations

import socket
import struct
import subprocess
from pathlib import Path

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import facts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink import addresses


def write(root: Path, path: str, text: str) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_interface_addresses_agree_with_ip_address() -> None:
    printed = subprocess.run(["ip", "-o", "address", "show"], capture_output=True, text=True, check=True).stdout
    expected = set()
    for line in printed.splitlines():
        words = line.split()
        expected.add((words[1].partition("@")[0], words[3].partition("/")[0]))
    found = facts.interface_addresses()
    assert {(item.interface, item.address) for item in found} == expected
    loopback = next(item for item in found if item.address == "127.0.0.1")
    assert (loopback.prefix_length, loopback.scope, loopback.family) == (8, "host", "IPv4")


def test_local_address_is_used_on_point_to_point_interfaces() -> None:
    payload = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 7)
    payload += struct.pack("=HH4s", 8, 1, socket.inet_aton("192.0.2.2"))  # IFA_ADDRESS: the peer
    payload += struct.pack("=HH4s", 8, 2, socket.inet_aton("192.0.2.1"))  # IFA_LOCAL
    expected = addresses.AddressMessage("IPv4", 32, 0, 7, socket.inet_aton("192.0.2.1"), b"")
    assert addresses.parse_address(memoryview(payload)) == expected


def test_kernel_versions() -> None:
    assert facts.kernel_version("6.1.0-13-amd64") == (6, 1, 0)
    assert facts.kernel_version("4.18.0-553.el8_10.x86_64") == (4, 18, 0)
    assert facts.kernel_version("6.18-rc1") == (6, 18, 0)


def test_cores_without_numa_nodes_counts_listed_processors(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"sys/devices/system/cpu/cpu{number}").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/cpufreq").mkdir()
    assert facts.cores(str(tmp_path)) == 3


def test_cores_with_numa_nodes_counts_online_processors(tmp_path: Path) -> None:
    for node, cpu, online in ((0, 0, None), (0, 1, "1\n"), (1, 2, "0\n"), (1, 3, "1\n")):
        base = f"sys/devices/system/node/node{node}/cpu{cpu}"
        write(tmp_path, f"{base}/topology/core_id", "0\n")
        if online is not None:
            write(tmp_path, f"{base}/online", online)
    assert facts.cores(str(tmp_path)) == 3


def test_cores_fall_back_to_the_interpreter(tmp_path: Path) -> None:
    assert facts.cores(str(tmp_path)) >= 1


def test_ipv6_support_follows_the_kernel_and_the_switch(tmp_path: Path) -> None:
    assert facts.supported_families(str(tmp_path)) == ("IPv4",)
    write(tmp_path, "/proc/net/if_inet6", "")
    assert facts.supported_families(str(tmp_path)) == ("IPv4", "IPv6")
    write(tmp_path, "/proc/sys/net/ipv6/conf/all/disable_ipv6", "1\n")
    assert facts.supported_families(str(tmp_path)) == ("IPv4",)


def test_machine_files(tmp_path: Path) -> None:
    write(tmp_path, "/proc/meminfo", "MemTotal:        2048 kB\nMemFree: 1 kB\n")
    write(tmp_path, "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal", "1\n")
    release = 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\nPRETTY_NAME="Rocky Linux 9.4"\n'
    write(tmp_path, "/etc/os-release", release)
    assert facts.memory_bytes(str(tmp_path)) == 2048 * 1024
    assert facts.conntrack_liberal(str(tmp_path)) is True
    found = facts.distribution(str(tmp_path))
    assert found == facts.Distribution("rocky", ("rhel", "centos", "fedora"), "9.4", "Rocky Linux 9.4")
    assert found.is_like("rhel") and not found.is_like("debian")


def test_container_marks(tmp_path: Path) -> None:
    assert not facts.in_container(str(tmp_path))
    write(tmp_path, "/proc/1/environ", "HOME=/\0container=podman\0")
    assert facts.in_container(str(tmp_path))


def test_read_only_keys_are_recognised_by_their_mode(tmp_path: Path) -> None:
    write(tmp_path, "/proc/sys/net/netfilter/nf_conntrack_max", "1\n")
    path = tmp_path / "proc/sys/net/netfilter/nf_conntrack_max"
    assert not facts.read_only_file(str(path))
    path.chmod(0o444)
    assert facts.read_only_file(str(path))


def test_node_facts_of_this_machine() -> None:
    found = facts.node_facts()
    assert found.kernel_version >= (3, 10, 0)
    assert found.cores >= 1 and facts.memory_bytes() > 0 and "IPv4" in found.families
