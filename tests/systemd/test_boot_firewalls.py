# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Boots of a node beside Debian's firewalls, which flush or restore rules, and before the services that run kubelet."""

from __future__ import annotations

import functools

import pytest

from tests.waiting import wait_for

from .node import Node
from .test_boot import KUBELET, LATE, NETWORK, REMOTE, UNIT, converge, programmed

pytestmark = pytest.mark.full
# Debian does not install iptables-persistent beside ufw.
PACKAGES = (("docker.io", "ufw"), ("iptables-persistent",))
# The units of k3s and RKE2 have the same order as that of kubelet: after the network is up.
STARTERS = ("kubelet", "k3s", "rke2-agent")
# How to begin, the unit that it starts at boot, and how to end.
FIREWALLS = {
    "netfilter-persistent": (
        "iptables-save >/etc/iptables/rules.v4; ip6tables-save >/etc/iptables/rules.v6; "
        "systemctl enable netfilter-persistent",
        "netfilter-persistent.service",
        "systemctl disable netfilter-persistent",
    ),
    "firewalld": (
        "systemctl unmask firewalld; systemctl enable firewalld",
        "firewalld.service",
        "systemctl disable --now firewalld; systemctl mask firewalld",
    ),
    "ufw": ("ufw --force enable", "ufw.service", "ufw --force disable"),
    "docker": (
        "systemctl enable docker.socket docker",
        "docker.service",
        "systemctl disable --now docker.socket docker",
    ),
}


CASES = [
    pytest.param(release, packages, name, id=f"{release}-{name}")
    for release in ("12", "13")
    for packages in PACKAGES
    for name in FIREWALLS
    if (name == "netfilter-persistent") is ("ufw" not in packages)
]


@pytest.fixture(scope="module")
def node_of(start):
    """Provide a function that returns the node with a release and packages, which is started once."""

    @functools.cache
    def node_of(release: str, packages: tuple[str, ...]) -> Node:
        found = start(f"firewalls{release}-{packages[0]}", release=release, packages=packages)
        for name in STARTERS:
            found.write(f"/etc/systemd/system/{name}.service", KUBELET.replace("seen-by-kubelet", f"seen-by-{name}"))
        # ipvsadm's script waits for the network, and the boot must not wait for it in turn.
        found.write("/etc/systemd/system/ipvsadm.service", LATE)
        found.run("systemctl", "enable", *(f"{name}.service" for name in (*STARTERS, "ipvsadm")))
        for _begin, _unit, end in FIREWALLS.values():
            # Those that are not installed here cannot be disabled.
            found.run("sh", "-c", end, check=False)
        return found

    return node_of


def serves(text: str) -> bool:
    """Return whether rules have the Service with its remote endpoint."""
    return "10.96.0.10" in text and REMOTE in text


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
@pytest.mark.parametrize(("release", "packages", "name"), CASES)
def test_a_node_that_boots_beside_a_firewall_serves_before_kubelet(node_of, release, packages, name, mode) -> None:
    node, (begin, unit, end) = node_of(release, packages), FIREWALLS[name]
    converge(node, mode, "web")
    node.run("sh", "-c", begin)
    node.output("journalctl", "--rotate", "--vacuum-time=1s")
    # A container may keep its network namespace, but a machine that boots has no rules.
    node.run("nft", "flush", "ruleset")
    node.reboot()
    try:
        wait_for(lambda: node.unit(unit, "ActiveState")["ActiveState"] == "active", 60, what=f"{unit} has started")
        assert {one: node.unit(one, "ActiveState")["ActiveState"] for one in NETWORK} == dict.fromkeys(
            NETWORK, "active"
        )
        log = node.log(UNIT)
        assert f"is restored in {mode} mode: 2 Services" in log, log
        for starter in STARTERS:
            assert serves(node.output("cat", f"/run/seen-by-{starter}")), (starter, log)
        assert serves(programmed(node)), log
        assert converge(node, mode, "web").failed == 0 and serves(programmed(node))
    finally:
        node.run("sh", "-c", end, check=False)
        node.run("nft", "flush", "ruleset")
        node.role("service_proxy", {"service_proxy_state": "absent", "service_proxy_leave_unserved": True})
