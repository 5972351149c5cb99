# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connections that policies no longer allow: which are cut, and what that costs while the table is large."""

from __future__ import annotations

import subprocess
from typing import Iterable

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.connections import cutting_connections
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.flows import tracked_flows
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.socket import finished
from tests.kernel.policy_node import elements, granted, isolated, pod, policy_node
from tests.lab.pausing import end_connections
from tests.waiting import wait_for

ENTRIES = 40_000
DATABASE, WEB, ALSO_WEB = "10.244.0.5", "10.244.1.7", "10.244.1.8"


def entry(source: str, destination: str, port: int, protocol: str = "udp") -> str:
    state = "--state ESTABLISHED -u SEEN_REPLY,ASSURED " if protocol == "tcp" else ""
    return (
        f"-I -p {protocol} -t 600 {state}-s {source} -d {destination} --sport {port} --dport 80 "
        f"-r {destination} -q {source} --reply-port-src 80 --reply-port-dst {port}"
    )


def load(lines: Iterable[str]) -> None:
    done = subprocess.run(["conntrack", "-R", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def many() -> Iterable[str]:
    return (entry(f"198.18.{number // 250}.{number % 250 + 1}", "203.0.113.1", 1024) for number in range(ENTRIES))


def connections_to(destination: str) -> set[str]:
    """Return the clients with an entry to an address."""
    family = "ipv6" if ":" in destination else "ipv4"
    command = ["conntrack", "-L", "-f", family, "-d", destination]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split("src=")[1].split()[0] for line in listed.splitlines()}


@pytest.mark.parametrize("prefix", ["10.244.0.", "fd00:244::"])
def test_connections_are_found_by_address_in_both_families(prefix):
    own, other, client = f"{prefix}5", f"{prefix}6", f"{prefix}20"
    load(entry(client, target, 1024, "tcp") for target in (own, other))
    family = "IPv6" if ":" in prefix else "IPv4"
    assert [flow.destination for flow in tracked_flows(family, "TCP", (client, 0), (own, 80))] == [(own, 80)]
    assert end_connections(family, (own, 80), (own, 80)).connections == 1
    assert connections_to(own) == set() and connections_to(other) == {client}


@pytest.mark.parametrize("several", [False, True], ids=["selected by the kernel", "selected here"])
@pytest.mark.parametrize("prefix", ["10.244.0.", "fd00:244::"])
def test_only_unwanted_connections_of_the_addresses_are_deleted(prefix, several):
    own, other, clients = f"{prefix}5", f"{prefix}6", [f"{prefix}{number}" for number in range(20, 30)]
    load(entry(client, target, 1024) for client in clients for target in (own, other))
    load([entry(own, clients[0], 2048)])
    addresses = {own, *(f"{prefix}{number}" for number in (range(100, 110) if several else ()))}
    kept = packed(clients[3])
    chosen = {raw for raw in map(packed, addresses) if raw is not None}
    family = "IPv6" if ":" in prefix else "IPv4"
    steps = cutting_connections(family, chosen, lambda each: kept not in each[:2])
    assert finished(steps) == 10
    assert connections_to(own) == {clients[3]} and connections_to(other) == set(clients)
    assert connections_to(clients[0]) == set()


def test_a_large_table_is_read_in_steps():
    load(many())
    taken = sum(1 for _step in cutting_connections("IPv4", {bytes(4), *map(bytes, zip(range(9)))}, lambda _each: True))
    assert taken >= ENTRIES // 1000


def test_changes_of_labels_do_not_read_the_whole_table_each_time(tmp_path):
    node = policy_node(tmp_path, networkPolicy={"enabled": True, "establishedConnections": "cut"})
    load([*many(), entry(WEB, DATABASE, 1024, "tcp"), entry(ALSO_WEB, DATABASE, 1024, "tcp")])
    node.store.put(pod("also", ALSO_WEB, {"app": "web"}, "node2"))
    try:
        node.start()
        wait_for(lambda: isolated() and granted(), 30)
        assert connections_to(DATABASE) == {WEB, ALSO_WEB}, "both are allowed"
        before = node.processor_seconds()
        for _round in range(10):
            for app in ("other", "web"):
                node.store.put(pod("web", WEB, {"app": app}, "node2"))
                wait_for(lambda app=app: (WEB in elements("pods4")) is (app == "web"), 30)
        assert node.processor_seconds() - before < 1.5, "a read of the table takes 0.4 s"
        node.store.put(pod("web", WEB, {"app": "other"}, "node2"))
        wait_for(lambda: connections_to(DATABASE) == {ALSO_WEB}, 30)
    finally:
        node.close()
