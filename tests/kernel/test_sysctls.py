# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel parameters whose values depend on each other, that have no value yet, or that can only be written."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctl_files import sysctl_file
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctls import (
    SysctlsResource,
    key_path,
    read_value,
    resolve,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference

FORWARD = "net.ipv4.ip_forward"
FORWARDING = "net.ipv4.conf.all.forwarding"
REDIRECTS = "net.ipv4.conf.all.accept_redirects"
SECRET = "net.ipv6.conf.default.stable_secret"


def write(key: str, value: str) -> None:
    with open(key_path(key), "w", encoding="utf-8") as stream:
        stream.write(value)


def make(wanted: dict[str, str]) -> dict[str, str]:
    resource = SysctlsResource(wanted)
    resource.apply(difference(resource.observe(), resolve(wanted, resource.observe())))
    return resource.observe()


def test_a_key_that_another_one_resets_keeps_its_value() -> None:
    write(FORWARD, "1")
    write(REDIRECTS, "0")
    wanted = {FORWARD: "0", REDIRECTS: "0"}
    assert make(wanted) == wanted


def test_keys_that_contradict_each_other_are_an_error() -> None:
    write(FORWARD, "0")
    with pytest.raises(KernelError, match=rf"^sysctl {FORWARD}: is 1, wanted 0: the kernel resets it"):
        make({FORWARD: "0", FORWARDING: "1"})


@pytest.mark.parametrize(
    "wanted",
    [
        {"net.ipv4.conf.lo.forwarding": "0", FORWARDING: "1"},
        {REDIRECTS: "1", FORWARD: "1"},
        {"net.ipv4.conf.default.forwarding": "0", "net.ipv4.conf.lo.forwarding": "1", FORWARD: "0", REDIRECTS: "0"},
        {"net.ipv6.conf.lo.forwarding": "0", "net.ipv6.conf.all.forwarding": "1"},
        {"net.ipv6.conf.lo.disable_ipv6": "0", "net.ipv6.conf.all.disable_ipv6": "1"},
    ],
    ids=lambda wanted: " ".join(wanted),
)
def test_the_file_for_the_next_boot_gives_the_values_of_the_run(wanted: dict[str, str], tmp_path: Path) -> None:
    """Whatever the values were before: all of them 0, or all of them 1."""
    path = tmp_path / "own.conf"
    path.write_text(sysctl_file(wanted))
    for before, order in itertools.product("01", (list(wanted), list(reversed(wanted)))):
        assert make(wanted) == wanted
        for key in order:
            write(key, before)
        subprocess.run(["sysctl", "-q", "-p", str(path)], check=True)
        assert SysctlsResource(wanted).observe() == wanted


def test_a_key_without_a_value_is_set() -> None:
    assert read_value(SECRET) == ""
    assert make({SECRET: "2001:db8::1"}) == {SECRET: "2001:0db8:0000:0000:0000:0000:0000:0001"}


def test_a_key_that_can_only_be_written_is_not_a_setting() -> None:
    with pytest.raises(KernelError, match=r"^sysctl net.ipv4.route.flush: is an action, not a setting"):
        read_value("net.ipv4.route.flush")
