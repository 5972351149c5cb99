# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The safety net of all kernel tests: they do not run in the host's network namespace."""

from __future__ import annotations

import subprocess

import pytest


def test_only_the_loopback_device_is_there() -> None:
    devices = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    names = [line.split(": ")[1].split("@")[0] for line in devices.splitlines()]
    assert "lo" in names
    assert "eth0" not in names


@pytest.mark.uml
def test_the_guest_kernel_has_ipvs() -> None:
    subprocess.run(["ipvsadm", "-A", "-t", "10.0.0.1:80", "-s", "rr"], check=True)
    shown = subprocess.run(["ipvsadm", "-Sn"], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["-A -t 10.0.0.1:80 -s rr"]
