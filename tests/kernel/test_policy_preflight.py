# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings of preflight about network policies: bridges that hide packets, and other implementations."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.check import forward_policies
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.policies import (
    bridge_findings,
    other_implementations,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.processes import Process
from tests.lab import system
from tests.lab.system import run

PODS = ["10.244.7.5", "fd00:10:244:7::5"]


def call(name: str, value: int) -> None:
    Path(f"/proc/sys/net/bridge/{name}").write_text(str(value))


@pytest.fixture
def root(tmp_path):
    """A root whose /sys shows the bridges of this network namespace: the mounted one shows those of the host."""
    (tmp_path / "proc").symlink_to("/proc")
    for name in ("cni0", "docker0"):
        (tmp_path / "sys" / "class" / "net" / name / "bridge").mkdir(parents=True)
    return str(tmp_path)


def test_pods_on_a_bridge_need_br_netfilter(root):
    if not Path("/proc/sys/net/bridge").is_dir():
        pytest.skip("br_netfilter is not loaded, and a test must not load it")
    system.ip_batch(["link add cni0 type bridge", "addr add 10.244.7.1/24 dev cni0", "link set cni0 up"])
    system.ip_batch(["addr add fd00:10:244:7::1/64 dev cni0 nodad"])
    call("bridge-nf-call-iptables", 0)
    call("bridge-nf-call-ip6tables", 1)
    (found,) = bridge_findings(PODS, root)
    assert "share the bridge cni0, and net.bridge.bridge-nf-call-iptables is 0" in str(found)
    call("bridge-nf-call-iptables", 1)
    call("bridge-nf-call-ip6tables", 0)
    (found,) = bridge_findings(PODS, root)
    assert "bridge-nf-call-ip6tables is 0" in str(found) and "IPv6" in str(found)
    call("bridge-nf-call-ip6tables", 1)
    assert bridge_findings(PODS, root) == []
    (found,) = bridge_findings(PODS, root, lambda: False)
    assert found.name == "bridge-ports" and "cni0" in found.what and "CONFIG_NF_TABLES_BRIDGE" in found.remedy


def test_routed_pods_and_bridges_of_others_need_nothing(root):
    system.ip_batch(["link add docker0 type bridge", "addr add 172.30.0.1/16 dev docker0", "link set docker0 up"])
    system.ip_batch(["link add veth7 type veth peer veth8", "link set veth7 up", "link set veth8 up"])
    system.ip_batch(["route add 10.244.7.5/32 dev veth7"])
    assert bridge_findings(PODS, root) == []


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("table inet kube-network-policies { }", "kube-network-policies"),
        ("table ip filter { chain KUBE-NWPLCY-ABCD { }; }", "kube-router"),
        ("table ip6 filter { chain cali-FORWARD { }; }", "Calico"),
        ("table ip filter { chain CILIUM_FORWARD { }; }", "Cilium"),
    ],
)
def test_what_another_implementation_programmed_is_found(script, name):
    assert other_implementations([]) == []
    subprocess.run(["nft", script], check=True)
    (found,) = other_implementations([])
    assert str(found).startswith(f"{name} enforces network policies on this node too (")


@pytest.mark.parametrize("variant", ("legacy", "nft"))
@pytest.mark.parametrize("program", ("iptables", "ip6tables"))
def test_chains_of_both_variants_of_iptables_are_found(variant, program):
    run([f"{program}-{variant}", "-N", "KUBE-POD-FW-AAAAAAAAAAAAAAAA"])
    run([f"{program}-{variant}", "-N", "NOT-KUBE-POD-FW-B"])
    (found,) = other_implementations([])
    assert "kube-router" in str(found) and "chain KUBE-POD-FW-AAAAAAAAAAAAAAAA" in str(found)


@pytest.mark.parametrize("dropping", ("legacy", "nft"))
def test_a_policy_of_the_other_variant_drops_what_ours_accepts(dropping):
    run([f"iptables-{dropping}", "-P", "FORWARD", "DROP"])
    for used in ("legacy", "nft"):
        assert forward_policies({"IPv4": detect_variant("IPv4", used)}) == {"IPv4": "DROP"}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("/usr/bin/cilium-agent",), 1),
        (("kube-router", "--run-firewall=true"), 1),
        (("kube-router", "--run-firewall=false"), 0),
        (("/bin/kube-network-policies",), 1),
        (("nginx",), 0),
    ],
)
def test_programs_that_enforce_policies_are_found(words, count):
    found = other_implementations([Process(7, words[0].rpartition("/")[2][:15], words)])
    assert len(found) == count and all("process 7" in str(item) for item in found)
