# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run of service_proxy ends early only if the node is as it was after the last complete run.

Each test makes a change that such a run must not miss. The field ``observed`` of the result shows which runs were
complete; that a complete run finds a change is verified by other tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.unchanged import decision, surroundings
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.generation import Generation
from tests.kernel.unchanged_node import ETH0, TIMEOUT, Node, ask, nft, set_timeout, write
from tests.lab import system


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


#: What other programs do to the tables; ours have the family ip and ip6.
TABLES = [
    "add rule ip kube-proxy services counter",
    "flush chain ip kube-proxy services",
    "add chain ip kube-proxy others",
    "add set ip6 kube-proxy others { type ipv6_addr; }",
    "delete element ip kube-proxy service-endpoints-of-nobody { 1 }",
    "add table ip kube-proxy { flags dormant; }",
    "delete table ip6 kube-proxy",
    "add table ip kubenode-ipvs",
    "add table inet other { chain kept { type filter hook input priority 10; tcp dport 9 drop; }; }",
    "add rule inet other kept udp dport 9 drop",
    "delete table inet other",
]


def test_changes_of_tables(node: Node) -> None:
    node.settle()
    for line in TABLES:
        if "of-nobody" in line:
            listed = json.loads(subprocess.check_output(["nft", "-j", "list", "table", "ip", "kube-proxy"]))
            maps = [item["map"] for item in listed["nftables"] if "map" in item and item["map"].get("elem")]
            nft(f"flush map ip kube-proxy {maps[0]['name']}")
        else:
            nft(line)
        node.must_observe(line)
        assert not node.run()["observed"], line


def test_a_refused_transaction_is_no_change(node: Node) -> None:
    node.settle()
    done = subprocess.run(
        ["nft", "add", "rule", "ip", "kube-proxy", "nowhere", "drop"], capture_output=True, check=False
    )
    assert done.returncode and not node.run()["observed"]


def test_iptables_of_both_variants(node: Node) -> None:
    node.settle()
    subprocess.run(["iptables-nft", "-t", "nat", "-N", "KUBE-SERVICES"], check=True)
    assert node.must_observe("a chain of iptables-nft")["counts"]["removed"]
    node.settle()
    subprocess.run(["iptables-legacy", "-t", "nat", "-N", "KUBE-SERVICES"], check=True)
    assert node.must_observe("a chain of iptables-legacy")["counts"]["removed"]
    for _run in range(3):
        node.must_observe("legacy tables, which have no generation")


def test_devices_addresses_and_ipsets(node: Node) -> None:
    node.settle()
    for line in ("address add 192.0.2.2/24 dev eth0", "address del 192.0.2.2/24 dev eth0"):
        system.ip_batch([line])
        node.must_observe(line)
    system.ip_batch(["link add kube-ipvs0 type veth peer name others"])
    with pytest.raises(KernelError, match="kube-ipvs0"):
        node.run()
    system.ip_batch(["link del kube-ipvs0"])
    node.settle()
    subprocess.run(["ipset", "create", "OTHERS", "hash:ip"], check=True)
    assert not node.run()["observed"], "an ipset that no mode makes"
    subprocess.run(["ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port"], check=True)
    assert node.must_observe("an ipset of ipvs mode")["changed"]


def test_kernel_parameters(node: Node) -> None:
    node.settle()
    keys = json.loads(node.record.read_text().partition("\n")[2])["state"]["sysctls"]
    changeable = [key for key, value in keys.items() if value[1:] == [True]]
    assert TIMEOUT in changeable
    set_timeout(17)
    assert node.must_observe("a parameter")["changed"]
    node.settle()
    write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
    node.must_observe("a parameter that decides about the families")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_modules", ["nf_tables"]),
        ("_parameters", {"hashsize": "1"}),
        ("_programs", []),
        ("_namespace", [4, 4026531833, 99]),
        ("capabilities", 0x3000),
        ("read_generation", Generation(0, "")),
    ],
)
def test_what_a_test_cannot_change(node: Node, monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    node.settle()
    monkeypatch.setattr(surroundings, name, lambda: value)
    node.must_observe(name)


def test_generation_that_wraps_around_or_starts_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    real = surroundings.read_generation()
    for number in (1, real.number - 1, 0xFFFFFFFF):
        with monkeypatch.context() as patch:
            patch.setattr(surroundings, "read_generation", lambda number=number: Generation(number, real.tables))
            assert isinstance(ask(node), decision.Changed)
    # The same number of other tables, for example after all 2^32 numbers; and a record older than that could take.
    with monkeypatch.context() as patch:
        patch.setattr(surroundings, "read_generation", lambda: Generation(real.number, "0"))
        assert isinstance(ask(node), decision.Changed)
    with monkeypatch.context() as patch:
        patch.setattr(decision, "boot_seconds", lambda: surroundings.boot_seconds() + decision.LONGEST_SECONDS)
        assert isinstance(ask(node), decision.Changed)
    with monkeypatch.context() as patch:
        patch.setattr(decision, "boot_seconds", lambda: 0.0)
        assert isinstance(ask(node), decision.Changed)
    assert isinstance(ask(node), decision.Unchanged)


def test_another_boot(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    real = surroundings._required
    monkeypatch.setattr(surroundings, "_required", lambda path: "another" if "boot_id" in path else real(path))
    node.must_observe("another boot")


def test_another_network_namespace(node: Node) -> None:
    node.settle()
    with another_namespace():
        result = node.must_observe("an empty namespace")
        assert result["changed"]
    node.must_observe("the first namespace again")


@contextlib.contextmanager
def another_namespace() -> Iterator[None]:
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    system.unshare(system.CLONE_NEWNET)
    try:
        system.ip_batch(["link set lo up", *ETH0])
        yield
    finally:
        system.enter(f"/proc/self/fd/{descriptor}", system.CLONE_NEWNET)
        os.close(descriptor)


def test_kube_proxy_is_noticed(node: Node) -> None:
    node.settle()
    program, script = "kube-proxy", "import sys; print(flush=True); sys.stdin.read()"
    running = subprocess.Popen(
        [program, "-c", script],
        executable="/usr/bin/python3",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert running.stdout is not None
        running.stdout.readline()
        with pytest.raises(ProxyError, match="kube-proxy runs on this node"):
            node.run()
    finally:
        running.kill()
        running.communicate()
    node.must_observe("after a run that failed")
