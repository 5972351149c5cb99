# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The safety check of all kernel tests: they never run in the host's network namespace."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lab.namespaces import Namespaces
from tests.lab.system import NETWORK_DEFAULTS


def test_only_the_loopback_device_exists() -> None:
    devices = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    names = [line.split(": ")[1].split("@")[0] for line in devices.splitlines()]
    assert "lo" in names
    assert "eth0" not in names


def test_the_hosts_settings_are_not_inherited(tmp_path: Path) -> None:
    """Forwarding in particular: on a forwarding host, the test's namespace and those that hold a node inherited it."""
    assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "0\n"
    node = Namespaces()
    try:
        for name, value in NETWORK_DEFAULTS.items():
            path = Path("/proc/sys/net", name)
            if path.exists():
                assert path.read_text() == f"{value}\n", path
                assert node.execute(["cat", str(path)], tmp_path).stdout == f"{value}\n", path
    finally:
        node.close()


@pytest.mark.uml
def test_the_guest_kernel_has_ipvs() -> None:
    subprocess.run(["ipvsadm", "-A", "-t", "10.0.0.1:80", "-s", "rr"], check=True)
    shown = subprocess.run(["ipvsadm", "-Sn"], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["-A -t 10.0.0.1:80 -s rr"]
