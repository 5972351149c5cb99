# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's health ports under load and while pods come and go: no probe is refused or delayed."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode, Object, endpoint_ip, endpoint_slice, node_object, service
from tests.lab.idle import hold_idle
from tests.waiting import seconds_until, wait_for

FOUR, SIX = "192.0.2.1", "fd00:192::1"
OTHER_FOUR, OTHER_SIX = "192.0.2.2", "fd00:192::2"
PORT = 31000
PATIENCE = 60.0
ATTACKER = "127.0.0.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def balanced(number: int, port: int) -> Object:
    """Return a dual-stack LoadBalancer Service with a health check node port, and the slice of its local endpoint."""
    item = service(
        number,
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        healthCheckNodePort=port,
        ipFamilies=["IPv4", "IPv6"],
        ipFamilyPolicy="RequireDualStack",
    )
    item["spec"]["clusterIPs"].append(f"fd00:10:96::{number:x}")
    # Above the ports of the tests' agents: a node port of the loopback interface is rejected, also that of /healthz.
    item["spec"]["ports"][0]["nodePort"] = 35000 + number
    return item


def local_slices(number: int) -> Iterator[Object]:
    for family, address in (("IPv4", endpoint_ip(number, 0)), ("IPv6", f"fd00:10:244::{number:x}")):
        item = endpoint_slice(number, count=1)
        item["metadata"]["name"] += family.lower()
        item["addressType"] = family
        item["endpoints"] = [{"addresses": [address], "conditions": {"ready": True}, "nodeName": "node1"}]
        yield item


def make_node(tmp_path, mode: str, variant: str, services: dict[int, int], **settings: object) -> AgentNode:
    ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0p")
    for address in (f"{FOUR}/24", f"{SIX}/64"):
        ip("addr", "add", address, "dev", "eth0", *(("nodad",) if ":" in address else ()))
    for end in ("eth0", "eth0p"):
        ip("link", "set", end, "up")
    node = AgentNode(tmp_path, mode, variant)
    node.store.put(node_object(status={"addresses": [{"type": "InternalIP", "address": a} for a in (FOUR, SIX)]}))
    node.write_configuration(clusterCIDR="10.244.0.0/16,fd00:10:244::/56", **settings)
    for number, port in services.items():
        node.store.put(balanced(number, port))
        for item in local_slices(number):
            node.store.put(item)
    return node


def status_of(address: str, port: int, path: str = "/", timeout: float = PATIENCE) -> int:
    """Return the HTTP status of a GET; 0 if the connection is refused or reset."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


class Prober:
    """A client that probes health check node ports continuously and counts the answers by address and status."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.answered: dict[tuple[str, int], int] = {}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(address,)) for address in addresses]

    def _run(self, address: str) -> None:
        while not self._stop.is_set():
            key = (address, status_of(address, PORT))
            self.answered[key] = self.answered.get(key, 0) + 1
            self._stop.wait(0.005)

    def __enter__(self) -> Prober:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def answers(self, address: str) -> int:
        return self.answered.get((address, 200), 0)


def full_syncs(node: AgentNode) -> int:
    return len(re.findall(r"msg=synced .*kind=full", node.log))


def pod(number: int, bridged: bool) -> Iterator[None]:
    """Yield a pod's host end: on a bridge, or with the gateway's address on itself as the plugin ptp does."""
    name = f"pod{number}"
    ip("link", "add", name, "type", "veth", "peer", "name", f"{name}p")
    if bridged:
        ip("link", "set", name, "master", "cni0")
    else:
        for address in ("10.244.1.1/32", "fd00:10:244::1/128"):
            ip("addr", "add", address, "dev", name, *(("nodad",) if ":" in address else ()))
    for end in (name, f"{name}p"):
        ip("link", "set", end, "up")
    yield
    ip("link", "del", name)


@pytest.fixture(
    params=[
        pytest.param(("nftables", ""), id="nftables"),
        pytest.param(("iptables", "nft"), marks=pytest.mark.full, id="iptables"),
    ]
)
def node(request, tmp_path) -> Iterator[AgentNode]:
    agent_node = make_node(tmp_path, *request.param, services={1: PORT})
    yield agent_node
    agent_node.close()


def test_pod_churn_refuses_no_probe_and_causes_no_full_sync(node):
    ip("link", "add", "cni0", "type", "bridge")
    ip("addr", "add", "10.244.1.1/24", "dev", "cni0")
    ip("link", "set", "cni0", "up")
    node.start()
    wait_for(lambda: status_of(FOUR, PORT) == status_of(SIX, PORT) == 200, PATIENCE)
    syncs, full = node.status()["syncs"], full_syncs(node)
    with Prober((FOUR, SIX)) as prober:
        for number in range(24):
            here = pod(number, bridged=bool(number % 2))
            next(here)
            # Longer than the agent waits for a burst of address changes to settle.
            before = prober.answers(FOUR)
            wait_for(lambda before=before: prober.answers(FOUR) >= before + 20, PATIENCE)
            time.sleep(0.25)
            next(here, None)
    assert {status for _address, status in prober.answered} == {200}, prober.answered
    assert min(prober.answers(FOUR), prober.answers(SIX)) >= 480
    assert full_syncs(node) == full and node.status()["syncs"] == syncs, node.log
    assert node.differences()["changed"] is False


def test_a_changed_address_affects_only_listeners_on_that_address(tmp_path):
    ranges = ["192.0.2.0/24", "fd00:192::/64"]
    node = make_node(tmp_path, "nftables", "", {1: PORT}, nodePortAddresses=ranges)
    try:
        node.start()
        wait_for(lambda: status_of(FOUR, PORT) == status_of(SIX, PORT) == 200, PATIENCE)
        full = full_syncs(node)
        with Prober((FOUR, SIX)) as prober:
            for _round in range(2):
                for address in (f"{OTHER_FOUR}/24", f"{OTHER_SIX}/64"):
                    ip("addr", "add", address, "dev", "eth0", *(("nodad",) if ":" in address else ()))
                wait_for(lambda: status_of(OTHER_FOUR, PORT) == status_of(OTHER_SIX, PORT) == 200, PATIENCE)
                wait_for(lambda: OTHER_FOUR in node.kernel_text("") and OTHER_SIX in node.kernel_text(""), PATIENCE)
                assert node.differences()["changed"] is False
                for address in (f"{OTHER_FOUR}/24", f"{OTHER_SIX}/64"):
                    ip("addr", "del", address, "dev", "eth0")
                wait_for(
                    lambda: OTHER_FOUR not in node.kernel_text("") and OTHER_SIX not in node.kernel_text(""), PATIENCE
                )
        assert {status for _address, status in prober.answered} == {200}, prober.answered
        assert full_syncs(node) == full, node.log
        assert node.differences()["changed"] is False
    finally:
        node.close()


def test_a_port_in_use_by_another_program_is_served_once_it_is_free(tmp_path):
    node = make_node(tmp_path, "nftables", "", {1: PORT, 2: PORT + 1})
    try:
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", PORT))
            taken.listen()
            node.start()
            assert status_of(FOUR, PORT + 1) == 200 and status_of(SIX, PORT) == 200
            for number in range(20):
                node.store.put(endpoint_slice(100 + number))
                node.store.put(service(100 + number))
            wait_for(lambda: node.status()["families"]["IPv4"]["services"] == 22, PATIENCE)
        wait_for(lambda: status_of(FOUR, PORT) == 200, PATIENCE)
        wait_for(lambda: "health check node port is served now" in node.log, PATIENCE)
        assert len(re.findall(r"health check node port cannot be served", node.log)) == 1, node.log
    finally:
        node.close()


def test_thousands_of_health_check_node_ports_on_two_addresses_of_each_family(tmp_path):
    ports = {number: 30000 + number for number in range(2000)}
    node = make_node(tmp_path, "nftables", "", ports, nodePortAddresses=["192.0.2.0/24", "fd00:192::/64"])
    ip("addr", "add", f"{OTHER_FOUR}/24", "dev", "eth0")
    try:
        node.start()
        places = [(address, port) for address in (FOUR, OTHER_FOUR, SIX) for port in ports.values()]
        started = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda place: status_of(*place), places))
        print(f"{len(places)} ports answered in {time.monotonic() - started:.1f} s")
        assert set(answers) == {200}
        assert node.process is not None
        assert len(os.listdir(f"/proc/{node.process.pid}/task")) < 16
        assert node.fetch("/healthz", node.health_port)
    finally:
        node.close()


def programmed_within(node: AgentNode, number: int) -> float:
    """Write a slice and return the seconds until the kernel has its endpoint."""
    node.store.put(endpoint_slice(2, count=1, first=number))
    address = endpoint_ip(2, number)
    return seconds_until(lambda: address in node.kernel_text(""), PATIENCE, 0.02)


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.full)])
def test_thousands_of_idle_connections_of_one_client_delay_no_other_client(tmp_path, seconds):
    node = make_node(tmp_path, "nftables", "", {1: PORT})
    node.store.put(service(2))
    node.store.put(endpoint_slice(2))
    usual: list[float] = []
    changes: list[float] = []
    answers: list[tuple[int, float]] = []
    stop = threading.Event()
    began_idle = 0.0

    def served_meanwhile() -> bool:
        """Return whether enough probes and changes succeeded during these connections, however slow this machine is."""
        held = time.monotonic() - began_idle
        enough = len(answers) >= 30 and len(changes) >= 5
        assert enough or held < PATIENCE, f"{len(answers)} probes and {len(changes)} changes in {held:.0f} s"
        return enough and held >= seconds

    def probe() -> None:
        while not stop.is_set():
            began = time.monotonic()
            answers.append((status_of("127.0.0.1", node.health_port, "/livez"), time.monotonic() - began))
            stop.wait(0.05)

    def change() -> None:
        number = 100
        while not stop.is_set():
            number += 1
            changes.append(programmed_within(node, number))

    try:
        node.start()
        usual += [programmed_within(node, number) for number in range(10, 20)]
        threads = [threading.Thread(target=work) for work in (probe, change)]
        for thread in threads:
            thread.start()
        began_idle = time.monotonic()
        try:
            opened = hold_idle(("127.0.0.1", node.health_port), ATTACKER, 5000, served_meanwhile)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        usual.sort()
        changes.sort()
        waits = sorted(wait for _status, wait in answers)
        print(
            f"{opened} connections; {len(changes)} changes: {changes[len(changes) // 2]:.3f} s "
            f"(usually {usual[len(usual) // 2]:.3f}), at most {changes[-1]:.3f} s; {len(answers)} probes of /livez: "
            f"{waits[len(waits) // 2]:.3f} s, at most {waits[-1]:.3f} s"
        )
        assert {status for status, _wait in answers} == {200}
        # Compared with what this machine needs without the connections, however slow it is.
        assert waits[len(waits) // 2] < 1.0 and waits[-1] < 10.0
        assert changes[len(changes) // 2] < 5 * usual[len(usual) // 2] + 3.0
        assert node.process is not None and node.process.poll() is None
        assert len(node.log.splitlines()) < 400 + 4 * len(changes)
        assert "Traceback" not in node.log
    finally:
        node.close()
